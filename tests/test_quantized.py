"""Models with their matrices in int8: what is stored, how close they come, and what they draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import zoo

import decoding_jax as dj
from decoding_jax.checkpoints.huggingface import path_of
from decoding_jax.masks import causal_mask
from decoding_jax.models.functional import init_transformer
from decoding_jax.models.quantized import dequantized
from decoding_jax.models.transformer import product
from decoding_jax.types import Array, Inputs

TIED = dataclasses.replace(zoo.SMALL, tie_embeddings=True, qkv_bias=True, qk_norm=True)
PROMPTS = [[5, 6, 7], [8, 9]]


def tied() -> dj.Model:
    """A random Transformer whose readout is its embedding, with biases and norms of heads."""
    return init_transformer(TIED, eos_ids=(3,))


def leaves(model: dj.Model) -> dict[str, Array]:
    """The arrays of a model by their paths."""
    return {path_of(path): x for path, x in jax.tree.flatten_with_path(model.params)[0]}


def logits(model: dj.Model) -> np.ndarray:
    """Logits f32[T, V] over a row."""
    tokens = jnp.arange(4, 16)[None]
    at = jnp.arange(tokens.shape[1])[None]
    hidden = model.apply(model.params, Inputs(tokens, at, causal_mask(at, tokens.shape[1])), None).hidden
    return np.asarray(model.readout(model.params, hidden))[0]


@pytest.mark.parametrize("make", [tied, zoo.small_transformer, zoo.small_translator])
def test_matrices_are_int8_and_the_rest_is_not(make: Callable[[], dj.Model]) -> None:
    """Each matrix has int8 values that use the whole range, one float32 scale an output; norms and biases stay."""
    model = make()
    before, after = leaves(model), leaves(dj.quantized(model))
    for path, x in before.items():
        if not path.endswith(("kernel", "embedding")):
            assert (after.pop(path) == x).all(), path
            continue
        values, scale = after.pop(f"{path}/qvalue"), after.pop(f"{path}/scale")
        inputs = 1 if path.endswith("embedding") else 0
        assert values.dtype == jnp.int8 and scale.dtype == jnp.float32, path
        assert (np.abs(np.asarray(values, np.int32)).max(axis=inputs) >= 127).all(), path
        assert (np.abs(np.asarray(values) * np.asarray(scale) - np.asarray(x)) < np.asarray(scale) * 0.501).all(), path
    assert not after


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_product_in_integers_is_that_of_the_rounded_weights(rows: int, axis: int) -> None:
    """Only the weights are rounded: features keep 15 bits, outliers and rows of zeros too."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 64)).astype(np.float32)
    x[0, :2] = 0, 300
    x[1:2] = 0
    kernel = qwix.quantize(
        jnp.asarray(random.normal(size=(64, 64)), jnp.float32), jnp.int8, channelwise_axes=(1 - axis,)
    )
    matrix = np.asarray(qwix.dequantize(kernel), np.float64)
    expected = x @ (matrix if axis == 0 else matrix.T)
    largest = np.abs(x).max(axis=1, keepdims=True)
    error = np.abs(product(jnp.asarray(x), kernel, axis) - expected)
    assert (error <= largest / 127**2 / 2 * np.abs(matrix).sum(axis=axis)[None] * 1.02 + 1e-6).all()


def test_logits_are_close() -> None:
    """Rounding changes tied logits by a few hundredths at the most, and it does change them."""
    model = tied()
    exact, rounded = logits(model), logits(dj.quantized(model))
    error = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.03, error


def test_half_precision_stays_what_the_model_computes_in() -> None:
    """A bfloat16 model keeps its cache and its features in bfloat16, though its first array is int8."""
    model = init_transformer(TIED, 0, jnp.bfloat16)
    rounded = dj.quantized(model)
    assert {x.dtype.name for x in leaves(rounded).values()} == {"int8", "bfloat16"}
    with jax.numpy_dtype_promotion("standard"):  # as Flax's norms need it
        exact = logits(model)
        assert np.linalg.norm(exact - logits(rounded)) / np.linalg.norm(exact) < 0.05


def test_views_leave_layers_out() -> None:
    """A view runs the same layers as in floats."""
    model = tied()
    parts = [logits(m.view(skip=(1,))) for m in (model, dj.quantized(model))]
    assert np.linalg.norm(parts[0] - parts[1]) / np.linalg.norm(parts[0]) < 0.03
    assert not np.allclose(parts[1], logits(dj.quantized(model)), atol=1e-2)


def test_a_quantized_copy_drafts_for_its_model() -> None:
    """Tokens are the target's own, nearly all drafts are kept, and a second pair of models compiles nothing."""
    for seed in (0, 1):
        model = init_transformer(dataclasses.replace(TIED, num_layers=1), seed)
        plain = dj.decode(model, PROMPTS, dj.Autoregressive(), max_new_tokens=12)
        with dj.compile_clock() as clock:
            out = dj.decode(
                model, PROMPTS, dj.SelfSpeculative(num_draft=2), drafter=dj.quantized(model), max_new_tokens=12
            )
        assert zoo.outputs(out) == zoo.outputs(plain)
        assert out.stats.acceptance_rate > 0.8
        assert (clock.programs == 0) == (seed == 1)
    assert dj.quantized(model).spec == model.spec


def test_a_quantized_translator_encodes() -> None:
    """An encoder-decoder's memory of a source comes close to that in floats."""
    model = zoo.small_translator()
    sources, lengths = jnp.arange(4, 16).reshape(2, 6), jnp.array([6, 4])
    exact, rounded = (
        m.encode(m.params, sources, lengths)["layers"][1]["v"] for m in (model, dj.quantized(model)) if m.encode
    )
    assert 1e-4 < jnp.linalg.norm(exact - rounded) / jnp.linalg.norm(exact) < 0.05


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_saved_quantized_model_loads_as_itself(dtype: str | None, tmp_path: Path) -> None:
    """The int8 values come back as they are; a dtype given to `load` is that of scales, norms and biases."""
    model = dj.quantized(tied())
    dj.save(model, tmp_path / "model")
    again = dj.load(tmp_path / "model", dtype=dtype)
    assert (again.config, again.eos_ids) == (model.config, model.eos_ids)
    assert jax.tree.structure(again.params) == jax.tree.structure(model.params)
    wanted = jnp.dtype(dtype or "float32")
    for path, x in leaves(model).items():
        there = leaves(again)[path]
        assert there.dtype == (jnp.int8 if x.dtype == jnp.int8 else wanted)
        assert (np.asarray(there) == np.asarray(x.astype(there.dtype))).all(), path
    assert dj.quantized(again) is again
    if dtype is None:
        assert again.spec == model.spec


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """Only Transformers are quantised, and Hugging Face folders hold floats."""
    with pytest.raises(ValueError, match="is no Transformer"):
        dj.quantized(zoo.bigram(4).model)
    with pytest.raises(ValueError, match="is in int8"):
        dj.save_huggingface(dj.quantized(tied()), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("make", [tied, zoo.small_translator])
def test_floats_come_back_as_int8_has_left_them(make: Callable[[], dj.Model]) -> None:
    """Values times scales, in float32; what is in floats already stays the same model."""
    model = make()
    rounded = dj.quantized(model)
    back, small = leaves(dequantized(rounded)), leaves(rounded)
    for path, x in leaves(model).items():
        wanted = np.asarray(x)
        if f"{path}/qvalue" in small:
            wanted = np.asarray(small[f"{path}/qvalue"]) * np.asarray(small[f"{path}/scale"])
        assert back[path].dtype == jnp.float32 and (np.asarray(back[path]) == wanted).all(), path
    assert dequantized(model) is model
