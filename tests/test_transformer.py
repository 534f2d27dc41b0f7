"""The Transformer: cached and uncached, padded and not, every variant, rotary scaling, masks and views."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import zoo

import decoding_jax as dj
from decoding_jax.checkpoints.huggingface import load_params
from decoding_jax.models.functional import init_transformer, transformer_model
from decoding_jax.models.transformer import RopeScaling, TransformerConfig, rope_frequencies

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "qkv_bias, one kv head": {"qkv_bias": True, "num_kv_heads": 1},
    "qk_norm, tied": {"qk_norm": True, "tie_embeddings": True},
    "window": {"sliding_window": 4},
    "linear": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16), "rope_theta": 500.0},
}
B, T = 2, 12
TOKENS = np.random.default_rng(0).integers(0, zoo.SMALL.vocab_size, size=(B, T)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
CAUSAL = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))


@functools.cache
def model_of(variant: str) -> dj.Model:
    model = init_transformer(dataclasses.replace(zoo.SMALL, **VARIANTS[variant]), seed=1)
    # Random biases and norm scales, since those of a new model are 0 and 1 and would hide their absence.
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) if x.ndim == 1 else x for x, k in zip(leaves, keys, strict=True)]
    return dataclasses.replace(model, params=jax.tree.unflatten(tree, moved))


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_of(apply: Any, readout: Any, params: Any, inputs: dj.Inputs, cache: Any = None) -> tuple[Any, Any]:
    out = apply(params, inputs, cache)
    return readout(params, out.hidden), out.cache


def full(model: dj.Model, tokens: Any, positions: Any, mask: Any) -> np.ndarray:
    """Logits f32[B, T, V] of a whole sequence, without a cache."""
    inputs = dj.Inputs(*map(jnp.asarray, (tokens, positions, mask)))
    return np.asarray(logits_of(model.apply, model.readout, model.params, inputs)[0])


def cached(model: dj.Model, tokens: np.ndarray, order: np.ndarray, chunk: int) -> np.ndarray:
    """The same logits, `chunk` positions a call, position p kept in slot order[p]."""
    capacity = tokens.shape[1]
    cache = model.init_cache(len(tokens), capacity)
    # Slots that nobody has written hold rubbish: only the mask may keep it out.
    cache = jax.tree.map(lambda x: jnp.full_like(x, 77), cache)
    parts = []
    for start in range(0, capacity, chunk):
        at = np.arange(start, start + chunk)
        seen = np.zeros((chunk, capacity), bool)
        for row, p in enumerate(at):
            seen[row, order[: p + 1]] = True
        wide = lambda x: jnp.asarray(np.broadcast_to(x, (len(tokens), *x.shape)))
        inputs = dj.Inputs(
            jnp.asarray(tokens[:, at]), wide(at.astype(np.int32)), wide(seen), wide(order[at].astype(np.int32))
        )
        logits, cache = logits_of(model.apply, model.readout, model.params, inputs, cache)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_steps_with_a_cache_equal_the_whole_sequence(variant: str) -> None:
    """One position a call over a cache gives the full causal logits, in every variant (a window included)."""
    model = model_of(variant)
    want = full(model, TOKENS, POSITIONS, CAUSAL)
    np.testing.assert_allclose(cached(model, TOKENS, np.arange(T), 1), want, atol=2e-4)
    differs = np.abs(want - full(model_of("grouped"), TOKENS, POSITIONS, CAUSAL)).max() > 1e-3
    assert want.shape == (B, T, 64) and differs == (variant != "grouped")


@pytest.mark.parametrize("variant", ["grouped", "window"])
def test_slots_and_chunks_do_not_matter(variant: str) -> None:
    """Positions may lie in any slots and come in any chunks; a window counts positions, not slots."""
    model = model_of(variant)
    order = np.random.default_rng(1).permutation(T)
    want = full(model, TOKENS, POSITIONS, CAUSAL)
    np.testing.assert_allclose(cached(model, TOKENS, order, 4), want, atol=2e-4)


def test_padding_changes_nothing() -> None:
    """Rows of 5 and 12 tokens: right-padded, left-padded and alone give the same logits."""
    model, short = model_of("grouped"), 5
    alone = full(model, TOKENS[:1, :short], POSITIONS[:1, :short], CAUSAL[:1, :short, :short])[0]
    right = full(model, TOKENS, POSITIONS, CAUSAL)[0, :short]  # what follows is padding, as far as row 0 goes
    pad = T - short
    tokens, positions, mask = TOKENS.copy(), POSITIONS.copy(), CAUSAL.copy()
    tokens[0], positions[0] = np.roll(tokens[0], pad), np.maximum(np.arange(T) - pad, 0)
    mask[0, :, :pad] &= np.eye(T, dtype=bool)[:, :pad]
    left = full(model, tokens, positions, mask)[0, pad:]
    np.testing.assert_allclose(right, alone, atol=1e-4)
    np.testing.assert_allclose(left, alone, atol=1e-4)


def test_a_window_is_a_mask() -> None:
    """A window of 4 shows the last 4 positions, itself included, and nothing else."""
    near = CAUSAL & (np.arange(T)[:, None] - np.arange(T)[None] < 4)
    want = full(model_of("grouped"), TOKENS, POSITIONS, near)
    np.testing.assert_allclose(full(model_of("window"), TOKENS, POSITIONS, CAUSAL), want, atol=1e-5)


def plain_tensors(config: TransformerConfig, params: Any) -> dict[str, np.ndarray]:
    """The params under Hugging Face's names and in its form, every part of a fused kernel cut out by hand."""
    leaf = lambda tree, *path: np.asarray(functools.reduce(lambda t, k: t[k], path, tree)[...])
    kv_heads, size = config.num_kv_heads, config.head_size
    group = config.num_heads // kv_heads
    embedding = leaf(params, "embed", "embedding")
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": leaf(params, "norm", "scale")}
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = leaf(params, "head", "kernel").T
    for i in range(config.num_layers):
        layer, name = params["layers"][i], f"model.layers.{i}"
        attention = layer["attention"]
        tensors |= {
            f"{name}.input_layernorm.weight": leaf(layer, "attention_norm", "scale"),
            f"{name}.post_attention_layernorm.weight": leaf(layer, "mlp_norm", "scale"),
            f"{name}.self_attn.o_proj.weight": leaf(attention, "out", "kernel").T,
            f"{name}.mlp.gate_proj.weight": leaf(layer, "gate_up", "kernel")[:, 0].T,
            f"{name}.mlp.up_proj.weight": leaf(layer, "gate_up", "kernel")[:, 1].T,
            f"{name}.mlp.down_proj.weight": leaf(layer, "down", "kernel").T,
        }
        for ours, theirs in [("kernel", "weight")] + [("bias", "bias")] * config.qkv_bias:
            # head by head: the queries of key head 0, its key, its value, the queries of key head 1, ...
            units = np.split(leaf(attention, "qkv", ours), kv_heads * (group + 2), axis=-1)
            queries = [units[kv * (group + 2) + g] for kv in range(kv_heads) for g in range(group)]
            for part, cut in (("q", queries), ("k", units[group :: group + 2]), ("v", units[group + 1 :: group + 2])):
                assert all(x.shape[-1] == size for x in cut)
                tensors[f"{name}.self_attn.{part}_proj.{theirs}"] = np.concatenate(cut, axis=-1).T
        if config.qk_norm:
            tensors[f"{name}.self_attn.q_norm.weight"] = leaf(attention, "q_norm", "scale")
            tensors[f"{name}.self_attn.k_norm.weight"] = leaf(attention, "k_norm", "scale")
    return tensors


def plain_forward(config: TransformerConfig, tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Causal logits f64[T, V] of one row, as the papers write it: one head and one position at a time."""
    weight = lambda name: np.asarray(tensors[f"{name}.weight"], np.float64)
    bias = lambda name: np.asarray(tensors[f"{name}.bias"], np.float64) if config.qkv_bias else 0.0
    norm = lambda x, scale: x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * scale
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        angle = position * config.rope_theta ** (-np.arange(0, size, 2) / size)
        one, two = x[: size // 2], x[size // 2 :]
        return np.concatenate([one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)])

    x = weight("model.embed_tokens")[tokens]
    for name in (f"model.layers.{i}" for i in range(config.num_layers)):
        inner = norm(x, weight(f"{name}.input_layernorm"))
        projected = (inner @ weight(n).T + bias(n) for n in (f"{name}.self_attn.{part}_proj" for part in "qkv"))
        q, k, v = (y.reshape(len(tokens), -1, size) for y in projected)
        if config.qk_norm:
            q, k = norm(q, weight(f"{name}.self_attn.q_norm")), norm(k, weight(f"{name}.self_attn.k_norm"))
        seen = np.zeros((len(tokens), heads, size))
        for t in range(len(tokens)):
            for head in range(heads):
                kv = head // (heads // kv_heads)
                keys = np.stack([turn(k[s, kv], s) for s in range(t + 1)])
                scores = keys @ turn(q[t, head], t) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                seen[t, head] = weights / weights.sum() @ v[: t + 1, kv]
        x = x + seen.reshape(len(tokens), -1) @ weight(f"{name}.self_attn.o_proj").T
        inner = norm(x, weight(f"{name}.post_attention_layernorm"))
        gate, up = inner @ weight(f"{name}.mlp.gate_proj").T, inner @ weight(f"{name}.mlp.up_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{name}.mlp.down_proj").T
    return norm(x, weight("model.norm")) @ weight("model.embed_tokens" if config.tie_embeddings else "lm_head").T


@pytest.mark.parametrize("variant", list(VARIANTS)[:3])
def test_the_layers_are_those_of_the_papers(variant: str) -> None:
    """Norms, grouped heads, rotary pairs, scale, gate and head, against loops over heads and positions."""
    model = model_of(variant)
    want = plain_forward(model.config, plain_tensors(model.config, model.params), TOKENS[0])
    np.testing.assert_allclose(full(model, TOKENS, POSITIONS, CAUSAL)[0], want, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"qkv_bias": True, "num_kv_heads": 1}, {"qkv_bias": True, "num_heads": 6}])
def test_hugging_face_tensors_mean_what_the_papers_say(fields: dict[str, Any], tmp_path: Path) -> None:
    """Tensors made under Hugging Face's names give the logits of the plain reference once they are loaded."""
    config = dataclasses.replace(zoo.SMALL, **fields)
    draw = np.random.default_rng(5).normal
    shapes = {n: x.shape for n, x in plain_tensors(config, init_transformer(config).params).items()}
    tensors = {n: draw(1.0 if "norm" in n else 0.0, 0.3, shape).astype(np.float32) for n, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    model = transformer_model(config, load_params(tmp_path, config, jnp.dtype(jnp.float32)))
    want = plain_forward(config, tensors, TOKENS[0])
    np.testing.assert_allclose(full(model, TOKENS, POSITIONS, CAUSAL)[0], want, atol=1e-3)
    back = plain_tensors(config, model.params)
    assert set(back) == set(tensors) and all((back[n] == tensors[n]).all() for n in tensors)


def test_masks_decide_who_sees_whom() -> None:
    """Bidirectional use is a mask: without slots every position may see a later token, causally none does."""
    model = model_of("grouped")
    changed = TOKENS.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 64
    everyone = np.ones_like(CAUSAL)
    differ = lambda mask: (
        np.abs(full(model, TOKENS, POSITIONS, mask) - full(model, changed, POSITIONS, mask)).max(axis=(0, 2)) > 1e-6
    )
    assert differ(CAUSAL).tolist() == [False] * (T - 1) + [True]
    assert differ(everyone).all()


def test_positions_are_relative() -> None:
    """Rotary positions: moving a whole row by 1,000 positions changes nothing but rounding."""
    model = model_of("grouped")
    want = full(model, TOKENS, POSITIONS, CAUSAL)
    np.testing.assert_allclose(full(model, TOKENS, POSITIONS + 1000, CAUSAL), want, atol=2e-3)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 8.0)])
def test_llama3_scaling_is_the_published_formula(low: float, high: float) -> None:
    """Long wavelengths divided, short ones kept, a linear passage between: by cases, as published."""
    scaling = RopeScaling("llama3", 8.0, low, high, 8192)
    config = dataclasses.replace(zoo.SMALL, head_size=64, rope_theta=500000.0, rope_scaling=scaling)
    want = []
    for i in range(32):
        frequency = 500000.0 ** (-2 * i / 64)
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - low) / (high - low)
        if wavelength < 8192 / high:
            want.append(frequency)
        elif wavelength > 8192 / low:
            want.append(frequency / 8.0)
        else:
            want.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    kept = np.array(want) / 500000.0 ** (-np.arange(32) / 32)
    assert (kept == 1).any() and (kept == 1 / 8).any() and ((kept > 0.13) & (kept < 0.99)).any()
    np.testing.assert_allclose(rope_frequencies(config), want, rtol=2e-5)


def test_linear_scaling_stretches_every_frequency() -> None:
    """Linear scaling by 4 is the same as positions divided by 4."""
    model = model_of("linear")
    plain = init_transformer(zoo.SMALL, seed=1)
    plain = dataclasses.replace(plain, params=model.params)
    want = full(plain, TOKENS, POSITIONS, CAUSAL)
    np.testing.assert_allclose(full(model, TOKENS, POSITIONS * 4, CAUSAL), want, atol=2e-4)


# ---------------------------------------------------------------------- views
FULL = dj.Inputs(*map(jnp.asarray, (TOKENS, POSITIONS, CAUSAL)), slots=jnp.asarray(POSITIONS))


def run_view(model: dj.Model, cache: Any, embeds: Any = None) -> dj.Features:
    return jax.jit(model.apply)(model.params, FULL._replace(embeds=embeds), cache)


def test_views_compose_to_the_whole() -> None:
    """The first layers, then the rest from their output, are the whole model, caches included."""
    model = model_of("grouped")
    whole = run_view(model, model.init_cache(B, T))
    below = run_view(model.view(stop=1), model.init_cache(B, T))
    above = run_view(model.view(start=1), below.cache, embeds=below.hidden)
    np.testing.assert_allclose(above.hidden, whole.hidden, atol=1e-5)
    for one, other in zip(jax.tree.leaves(above.cache), jax.tree.leaves(whole.cache), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_taps_are_the_outputs_of_layers() -> None:
    """Taps come in the order asked for and are what a view that stops there returns."""
    model = model_of("grouped")
    out = run_view(model.view(taps=(1, 0)), model.init_cache(B, T))
    first = run_view(model.view(stop=1), model.init_cache(B, T))
    np.testing.assert_allclose(out.taps[1], first.hidden, atol=1e-6)
    second = run_view(model.view(stop=2), model.init_cache(B, T))
    np.testing.assert_allclose(out.taps[0], second.hidden, atol=1e-6)
    assert np.abs(out.taps[0] - out.taps[1]).max() > 1e-2


def test_skipped_layers_do_nothing() -> None:
    """Leaving out layer 0 is running layer 1 on the embeddings, and its cache stays as it was."""
    model = model_of("grouped")
    skipped = run_view(model.view(skip=(0,)), model.init_cache(B, T))
    embeds = run_view(model.view(stop=0), model.init_cache(B, T)).hidden
    late = run_view(model.view(start=1), model.init_cache(B, T), embeds=embeds)
    np.testing.assert_allclose(skipped.hidden, late.hidden, atol=1e-6)
    assert not any(bool(leaf.any()) for leaf in jax.tree.leaves(skipped.cache.slots["layers"][0]))


def test_equal_views_are_one_program() -> None:
    """Specs are hashed by value: equal configs and equal views give equal specs, other ones differ."""
    one, other = init_transformer(zoo.SMALL, 0), init_transformer(zoo.SMALL, 9)
    assert one.spec == other.spec and hash(one.spec) == hash(other.spec)
    assert one.view(taps=(1,)).spec == other.view(taps=[1]).spec != one.spec


@pytest.mark.parametrize(
    "view", [{"stop": 3}, {"start": -1}, {"start": 2, "stop": 1}, {"taps": (2,)}, {"taps": (0,), "skip": (0,)}]
)
def test_impossible_views_are_refused(view: dict[str, Any]) -> None:
    """Layers that do not exist or are not run are ValueErrors that name the view."""
    model = model_of("grouped")
    with pytest.raises(ValueError, match="view"):
        run_view(model.view(**view), model.init_cache(B, T))


def test_models_without_layers_have_no_views() -> None:
    """A view of any other function is a ValueError."""
    with pytest.raises(ValueError, match="view"):
        zoo.bigram(4).model.view(stop=1)


@pytest.mark.parametrize("fields", [{"num_kv_heads": 3}, {"head_size": 7}])
def test_impossible_configs_are_refused(fields: dict[str, int]) -> None:
    """Heads that do not divide and odd heads are ValueErrors that name the field."""
    with pytest.raises(ValueError, match=next(iter(fields))):
        dataclasses.replace(zoo.SMALL, **fields)


def test_rows_longer_than_the_context_are_refused() -> None:
    """Capacity is checked before anything runs: prompt and budget together must fit the model's context."""
    model = zoo.small_transformer()
    limit = TransformerConfig(**dataclasses.asdict(zoo.SMALL)).max_length
    with pytest.raises(ValueError, match="max_new_tokens"), dj.compile_clock() as clock:
        dj.decode(model, [[1], [1] * 10], max_new_tokens=limit - 9)
    assert clock.programs == 0
