"""Encoder-decoders: the layers, memory and padding, dropout and remat, and all that decodes behind a source.

What every decoder owes an encoder-decoder is in test_laws.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from flax import nnx
from jax.extend.core import jaxpr_as_fun

import decoding_jax as dj
from decoding_jax.checkpoints.orbax import by_path
from decoding_jax.loop import run, start
from decoding_jax.models import transformer
from decoding_jax.models.functional import ModuleEncode, abstract_transformer, transformer_model, transformer_spec
from decoding_jax.models.transformer import Linear, TransformerConfig, dropout
from decoding_jax.prepare import prepare
from decoding_jax.types import Cache, Inputs, Model, ModelSpec
from train.objectives import Seq2Seq

# Prompts and budget of test_laws: equal shapes share their compiled programs.
SOURCES = [[1, 2, 1, 2, 1], [3], [60, 4, 2, 17, 0, 33, 3], [2, 2]]
BUDGET = 40
START = 1  # of zoo.small_translator


# ---------------------------------------------------------------------- the layers, as the papers write them
def attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """One head and one position at a time: queries [T, H, size], keys and values [M, KV, size], seen bool[T, M]."""
    count, heads, size = queries.shape
    out = np.zeros((count, heads, size))
    for t in range(count):
        for head in range(heads):
            kv = head // (heads // keys.shape[1])
            scores = keys[seen[t], kv] @ queries[t, head] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ values[seen[t], kv]
    return out.reshape(count, heads * size)


@dataclasses.dataclass(frozen=True)
class Plain:
    """An encoder-decoder of one row in numpy, f64, from the params by their paths."""

    config: TransformerConfig
    params: dict[str, np.ndarray]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = (x**2).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config.norm_eps) * self.params[f"{name}/scale"]

    def turn(self, x: np.ndarray) -> np.ndarray:
        """Rotates x [T, heads, size] by its positions 0, 1, ..., pair (i, i + size / 2) by its own frequency."""
        half = x.shape[2] // 2
        angle = np.arange(len(x))[:, None, None] * self.config.rope_theta ** (-np.arange(half) / half)
        one, two = x[..., :half], x[..., half:]
        return np.concatenate([one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)], 2)

    def to_itself(self, x: np.ndarray, name: str, seen: np.ndarray) -> np.ndarray:
        """Self-attention: the fused kernel has for each key head its queries, its key and its value."""
        kv_heads, size = self.config.num_kv_heads, self.config.head_size
        group = self.config.num_heads // kv_heads
        both = x @ self.params[f"{name}/qkv/kernel"] + self.params.get(f"{name}/qkv/bias", 0.0)
        parts = np.split(both, kv_heads * (group + 2), axis=1)
        take = lambda first, count: np.stack(
            [parts[kv * (group + 2) + first + i] for kv in range(kv_heads) for i in range(count)], axis=1
        )
        q, k, v = take(0, group), take(group, 1), take(group + 1, 1)
        if self.config.qk_norm:
            q, k = self.norm(q, f"{name}/q_norm"), self.norm(k, f"{name}/k_norm")
        assert q.shape[2] == size
        return attention(self.turn(q), self.turn(k), v, seen) @ self.params[f"{name}/out/kernel"]

    def to_source(self, x: np.ndarray, encoded: np.ndarray, name: str) -> np.ndarray:
        """Cross-attention, without positions: the fused kernel has for each key head its key and its value."""
        kv_heads, size = self.config.num_kv_heads, self.config.head_size
        q = (x @ self.params[f"{name}/q/kernel"]).reshape(len(x), -1, size)
        parts = np.split(encoded @ self.params[f"{name}/kv/kernel"], kv_heads * 2, axis=1)
        k, v = np.stack(parts[::2], axis=1), np.stack(parts[1::2], axis=1)
        return attention(q, k, v, np.ones((len(x), len(encoded)), bool)) @ self.params[f"{name}/out/kernel"]

    def layer(self, x: np.ndarray, name: str, seen: np.ndarray, encoded: np.ndarray | None = None) -> np.ndarray:
        x = x + self.to_itself(self.norm(x, f"{name}/attention_norm"), f"{name}/attention", seen)
        if encoded is not None:
            x = x + self.to_source(self.norm(x, f"{name}/cross_norm"), encoded, f"{name}/cross")
        inner = self.norm(x, f"{name}/mlp_norm")
        gate, up = (inner @ self.params[f"{name}/gate_up/kernel"][:, i] for i in range(2))
        return x + (gate / (1 + np.exp(-gate)) * up) @ self.params[f"{name}/down/kernel"]

    def logits(self, source: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """f64[T, V], after each token of an output behind a source of any length; nothing is padded."""
        embedding = self.params["embed/embedding"]
        x = embedding[list(source)]
        for i in range(self.config.encoder_layers):
            x = self.layer(x, f"encoder/{i}", np.ones((len(x), len(x)), bool))
        encoded = self.norm(x, "encoder_norm")
        x = embedding[list(tokens)]
        for i in range(self.config.num_layers):
            x = self.layer(x, f"layers/{i}", np.tril(np.ones((len(x), len(x)), bool)), encoded)
        head = embedding.T if self.config.tie_embeddings else self.params["head/kernel"]
        return self.norm(x, "norm") @ head


def plain(model: Model) -> Plain:
    leaves, _ = by_path(model.params)
    return Plain(model.config, {path: np.asarray(leaf, np.float64) for path, leaf in leaves.items()})


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(spec: ModelSpec, params: Any, sources: Any, lengths: Any, tokens: Any) -> Any:
    """Logits f32[B, T, V] of whole outputs behind sources, without a cache of slots."""
    assert spec.encode is not None
    memory = spec.encode(params, sources, lengths)
    return spec.readout(params, spec.apply(params, whole(tokens), Cache(slots=(), rows=memory)).hidden)


def whole(tokens: Any) -> Inputs:
    """All of an output i32[B, T] in one call that keeps nothing."""
    batch, size = tokens.shape
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    return Inputs(tokens, jnp.broadcast_to(jnp.arange(size), (batch, size)), causal)


def padded(rows: Sequence[Sequence[int]], rubbish: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows as i32[B, M], filled up with random ids that `rubbish` seeds, and their lengths."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.random.default_rng(rubbish).integers(0, 64, size=(len(rows), lengths.max())).astype(np.int32)
    for filled, row in zip(tokens, rows, strict=True):
        filled[: len(row)] = row
    return tokens, lengths


def logits_of(model: Model, sources: Sequence[Sequence[int]], outputs: np.ndarray, rubbish: int = 0) -> np.ndarray:
    return np.asarray(teacher_forced(model.spec, model.params, *padded(sources, rubbish), outputs))


# As long as the outputs of a decode, so that all passes share a program.
OUTPUTS = np.random.default_rng(1).integers(0, 64, size=(4, 1 + BUDGET)).astype(np.int32)
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one key head, biases, norms, tied": {
        "encoder_layers": 1,
        "num_layers": 1,
        "num_kv_heads": 1,
        "qkv_bias": True,
        "qk_norm": True,
        "tie_embeddings": True,
    },
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_layers_are_those_of_the_papers(variant: str) -> None:
    """Bidirectional encoder, causal decoder, cross-attention, in a padded batch, against loops over single rows."""
    model = zoo.small_translator(**VARIANTS[variant])
    reference = plain(model)
    got = logits_of(model, SOURCES, OUTPUTS)
    for row, source in enumerate(SOURCES):
        np.testing.assert_allclose(got[row], reference.logits(source, OUTPUTS[row]), atol=5e-4)
    # and every token of a source has a say in every logit's row
    for other in ([*SOURCES[0][:-1], 9], [9, *SOURCES[0][1:]]):
        assert np.abs(got[0] - reference.logits(other, OUTPUTS[0])).max(axis=1).min() > 0.02


def test_padding_and_batch_mates_change_nothing() -> None:
    """Bit for bit: what fills a source up, and what the other rows are."""
    model = zoo.small_translator()
    want = logits_of(model, SOURCES, OUTPUTS)
    assert (logits_of(model, SOURCES, OUTPUTS, rubbish=7) == want).all()
    assert (padded(SOURCES, 7)[0] != padded(SOURCES)[0]).any()
    mates = logits_of(model, [SOURCES[0], [9] * 7, [8, 7], [6]], np.concatenate([OUTPUTS[:1], OUTPUTS[:0:-1]]))
    assert (mates[0] == want[0]).all() and (mates[1] != want[1]).any()


def test_both_sides_compute_in_the_dtype_asked_for() -> None:
    """A bfloat16 encoder-decoder remembers and computes in bfloat16; its logits are float32."""
    config = zoo.small_translator().config
    spec, (_, params) = transformer_spec(config, jnp.bfloat16), abstract_transformer(config, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # inside flax's norms
        memory = jax.eval_shape(spec.encode, params, *padded(SOURCES))
        hidden = jax.eval_shape(spec.apply, params, whole(OUTPUTS), Cache(slots=(), rows=memory)).hidden
        logits = jax.eval_shape(teacher_forced, spec, params, *padded(SOURCES), OUTPUTS)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(memory["layers"])} == {"bfloat16"}
    assert (hidden.dtype.name, logits.dtype.name) == ("bfloat16", "float32")


# ---------------------------------------------------------------------- decoding
def test_steps_with_a_cache_equal_a_full_pass() -> None:
    """Greedy tokens are the best of a teacher-forced pass over the whole output, with the same log-probabilities."""
    model = zoo.small_translator()
    out = dj.decode(model, SOURCES, max_new_tokens=BUDGET)
    tokens = np.concatenate([np.full((4, 1), START, np.int32), out.tokens], axis=1)
    log_p = jax.nn.log_softmax(logits_of(model, SOURCES, tokens))[:, :-1]
    assert (log_p.argmax(axis=2) == out.tokens).all()
    np.testing.assert_allclose(np.take_along_axis(log_p, out.tokens[:, :, None], 2)[:, :, 0], out.log_probs, atol=1e-4)
    assert len({tuple(row) for row in zoo.outputs(out)}) == 4  # every source has its own output


# Three words and an end: nine beams hold every output of two words, so a search over three tokens leaves none out.
WORDS, END, WIDE, HORIZON = (7, 21, 47), 30, 9, 3


def hypotheses(logits: Callable[[Sequence[int]], np.ndarray], settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Every output and its score, the mean of its log-probabilities."""
    found: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], total: float) -> None:
        if len(output) == HORIZON or END in output:
            found[output] = total / len(output)
            return
        p = zoo.law_of_next(logits([START, *output]), [START], output, settings)
        for token in np.flatnonzero(p):
            grow((*output, int(token)), total + float(np.log(p[token])))

    grow((), 0.0)
    return found


def test_a_wide_beam_finds_the_best_of_all() -> None:
    """Law 9: each row's beams look at their own source, before and after they change places."""
    model = dataclasses.replace(zoo.small_translator(), eos_ids=(END,))
    settings = {"forbidden": tuple(i for i in range(64) if i not in (*WORDS, END)), "temperature": 1.0}
    sampling = dj.Sampling(forbidden=settings["forbidden"])
    out = dj.decode(model, SOURCES[:3], dj.Beam(WIDE, WIDE), max_new_tokens=HORIZON, sampling=sampling)
    reference, best, orders = plain(model), out.candidates, set()
    assert best is not None
    for row, source in enumerate(SOURCES[:3]):
        scores = hypotheses(lambda prefix, source=source: reference.logits(source, prefix)[-1], settings)
        want = sorted(scores, key=lambda output: -scores[output])[:WIDE]
        assert [tuple(t[:n].tolist()) for t, n in zip(best.tokens[row], best.lengths[row], strict=True)] == want
        np.testing.assert_allclose(best.scores[row], [scores[output] for output in want], atol=1e-4)
        assert tuple(zoo.outputs(out)[row]) == want[0]
        orders.add(tuple(want))
    assert len(orders) == 3


TOKENS_OF_BYTES = [b"a", b"b", b"ab", b"c", b""]


class WithFirst(zoo.ByteTokenizer):
    """Puts its special token in front of a text, unless asked not to."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [4] * add_special_tokens + super().encode(text)


TOY = zoo.history_translator(5, seed=4, start_id=3, tokenizer=WithFirst(TOKENS_OF_BYTES))
TOY_SOURCES = [[1, 2, 1, 2, 1], [3], [0, 4, 2, 1, 0, 3, 3], [2, 2]]


def test_beams_of_a_mesh_look_at_their_own_sources() -> None:
    """Law 5: on eight devices, one with a padding row alone, the model's law behind each source gives the scores."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sources = (TOY_SOURCES * 2)[:7]
    out = dj.decode(TOY.with_eos(4), sources, dj.Beam(3, n_best=3), max_new_tokens=6, mesh=mesh)
    best = out.candidates
    assert best is not None and zoo.outputs(out)[:3] == zoo.outputs(out)[4:]
    for row, source in enumerate(sources):
        for n in range(3):
            tokens = best.tokens[row, n, : best.lengths[row, n]].tolist()
            want = zoo.log_prob(*TOY.row(source), tokens)
            np.testing.assert_allclose(best.log_probs[row, n, : len(tokens)], want, atol=1e-5)
            np.testing.assert_allclose(best.scores[row, n], want.mean(), atol=1e-5)


def test_texts_are_sources_that_end_as_in_training() -> None:
    """A text gets the first end id, where there is one, and no other special token; ids stay as they are."""
    prompts = lambda model, given: np.asarray(
        prepare(model, given, 1, dj.Sampling(), dj.Stop(), 0, None, None).ctx.sources
    )
    model = TOY.with_eos(1, 2)
    assert prompts(model, ["abc", "b"])[:, :4].tolist() == [[2, 3, 1, 0], [1, 1, 0, 0]]
    assert prompts(model, [[2, 3], [1]])[:, :4].tolist() == [[2, 3, 0, 0], [1, 0, 0, 0]]
    assert prompts(TOY.model, "abc")[:, :4].tolist() == [[2, 3, 0, 0]]


def test_streams_and_traces_tell_the_same_as_decode() -> None:
    """Law 6: texts of chunks and steps behind sources add up to the output's."""
    model = TOY.with_eos(3)
    out = dj.decode(model, TOY_SOURCES, max_new_tokens=12, trace=True)
    assert out.text == [b"".join(TOKENS_OF_BYTES[t] for t in row).decode() for row in zoo.outputs(out)]
    texts, tokens = [""] * 4, [[] for _ in range(4)]
    for chunk in dj.stream(model, TOY_SOURCES, max_new_tokens=12):
        texts[chunk.row] += chunk.text
        tokens[chunk.row] += chunk.tokens
    assert texts == out.text and tokens == zoo.outputs(out) and {"eos", "length"} == set(out.finish_reason)
    for row in range(4):
        steps = [step for step in out.trace or () if step.row == row]
        assert [token for step in steps for token in step.emitted] == tokens[row]
        assert "".join(step.text or "" for step in steps) == texts[row]
    with pytest.raises(ValueError, match="Beam"):
        dj.stream(model, TOY_SOURCES, dj.Beam(num_beams=2))


def test_a_source_is_encoded_once() -> None:
    """Memory is made before the first step and kept: the loop's program does not encode."""
    traced = []

    def encode(params: Any, sources: Any, lengths: Any) -> Any:
        traced.append(sources.shape)
        return TOY.model.encode(params, sources, lengths)  # type: ignore[misc]

    model = dataclasses.replace(TOY.model, encode=encode)
    for decoder in (dj.Autoregressive(), dj.PromptLookup(num_draft=4), dj.Beam(num_beams=3)):
        call = prepare(model, TOY_SOURCES, 12, dj.Sampling(), dj.Stop(), 0, None, None)
        state = jax.eval_shape(start, decoder, call.ctx)
        jax.eval_shape(run, decoder, call.ctx, state, jnp.int32(1))
    assert traced == [(4, 16)] * 3


def test_a_saved_encoder_decoder_decodes_the_same(tmp_path: Path) -> None:
    """`save` and `load` keep the config, the start id, the ends and every bit, and so the program and its result."""
    model = dataclasses.replace(zoo.small_translator(), eos_ids=(30, 2))
    want = dj.decode(model, SOURCES, max_new_tokens=BUDGET)
    dj.save(model, tmp_path / "model")
    loaded = dj.load(tmp_path / "model")
    assert (loaded.config, loaded.start_id, loaded.eos_ids) == (model.config, START, (30, 2))
    assert loaded.spec == model.spec
    fresh = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), loaded.params)
    with dj.compile_clock() as clock:  # jit compiles anew for params that are bound to a device, as loaded ones are
        got = dj.decode(dataclasses.replace(loaded, params=fresh), SOURCES, max_new_tokens=BUDGET)
    assert clock.programs == 0
    assert zoo.outputs(got) == zoo.outputs(want) and (got.log_probs == want.log_probs).all()


# ---------------------------------------------------------------------- dropout
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.9, 0.999])
def test_dropout_zeroes_at_its_rate_and_keeps_the_mean(rate: float) -> None:
    """The rate is right to 1/256, what is kept is scaled up by as much, and each feature is decided for itself."""
    x = np.ones((4, 256, 256), np.float32)
    asked = min(round(rate * 256), 255) / 256
    assert abs(asked - rate) < 1 / 256
    y = np.asarray(dropout(jnp.asarray(x), jax.random.key(0), rate))
    noise = np.sqrt(asked * (1 - asked) / y.size)
    assert abs((y == 0).mean() - asked) < 5 * noise
    np.testing.assert_allclose(y[y != 0], 1 / (1 - asked), rtol=1e-6)
    assert abs(y.mean() - 1) < 5 * noise / (1 - asked)
    for axis in range(3):  # no axis shares its mask
        assert (np.diff(y, axis=axis) != 0).mean() == pytest.approx(2 * asked * (1 - asked), rel=0.1)


def test_dropout_needs_a_key_and_a_rate() -> None:
    """Without one of them features are as they were; equal keys drop the same, other keys other features."""
    x, one, other = jnp.ones((64, 64)), *jax.random.split(jax.random.key(1))
    assert dropout(x, None, 0.5) is x and dropout(x, one, 0.0) is x
    again, same = (np.asarray(dropout(x, key, 0.5)) for key in (one, one))
    assert (again == same).all() and (again != np.asarray(dropout(x, other, 0.5))).any()


def dropping(rate: float, **fields: Any) -> Model:
    """A small encoder-decoder that drops features at a rate."""
    model = zoo.small_translator(**fields)
    return transformer_model(dataclasses.replace(model.config, dropout=rate), model.params)


SMALLEST = {"encoder_layers": 1, "num_layers": 1}
SOURCE, SOURCE_LENGTHS = padded(SOURCES)
BATCH = {
    "source": SOURCE,
    "source_lengths": SOURCE_LENGTHS,
    "tokens": OUTPUTS[:, :6],
    "targets": OUTPUTS[:, 1:7],
    "weights": (OUTPUTS[:, 1:7] > 5).astype(np.float32),
}


def loss_of(model: Model) -> Callable[..., Any]:
    """(params, key) -> the loss of BATCH."""
    objective = Seq2Seq(model=model.spec, label_smoothing=jnp.float32(0.1))
    return lambda params, key=None: objective.loss(params, BATCH, key)[0]


def test_without_a_key_a_dropout_rate_is_nothing() -> None:
    """Without a key the program is that of a model without dropout; with a key it draws."""
    program = lambda model, *key: str(jax.make_jaxpr(loss_of(model))(model.params, *key))
    model, none = dropping(0.5, **SMALLEST), dropping(0.0, **SMALLEST)
    assert program(model) == program(none)
    assert "random_bits" in program(model, jax.random.key(0)) and "random_bits" not in program(model)


def test_every_place_drops_by_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, attention, cross-attention, inside and behind each MLP, on both sides: no two share a key."""
    model = dropping(0.5)

    def keys_of(key: Any) -> Any:
        keys: list[Any] = []

        def record(x: Any, key: Any, rate: float) -> Any:
            assert rate == 0.5
            keys.append(jax.random.key_data(key))
            return x

        with monkeypatch.context() as patch, jax.disable_jit():  # so that layers are traced here and nowhere else
            patch.setattr(transformer, "dropout", record)
            loss_of(model)(model.params, key)
        return jnp.stack(keys)

    key = jax.random.key(0)
    (keys,) = jax.jit(jaxpr_as_fun(jax.make_jaxpr(keys_of)(key)))(key)
    assert len(keys) == len(np.unique(keys, axis=0)) == (1 + 2 * 3) + (1 + 2 * 4)


def test_remat_changes_neither_loss_nor_gradient() -> None:
    """What a gradient computes again is what had been dropped, layer by layer; every param has a gradient."""
    model = dropping(0.5, **SMALLEST)
    remat = model.view(remat=True)
    count = lambda model: str(jax.make_jaxpr(loss_of(model))(model.params)).count("prevent_cse")
    assert (count(model), count(remat)) == (0, 2)
    keep, again = (jax.jit(jax.value_and_grad(loss_of(m))) for m in (model, remat))
    losses = []
    for key in (jax.random.key(0), jax.random.key(1), jax.random.key(0)):
        loss, gradient = keep(model.params, key)
        other_loss, other_gradient = again(model.params, key)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-4), other_gradient, gradient)
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
        losses.append(float(loss))
    assert losses[0] == losses[2] != losses[1]


# ---------------------------------------------------------------------- linear maps
@pytest.mark.parametrize(("outputs", "use_bias"), [((3,), True), ((2, 3), True), ((2, 3), False)])
def test_linear_maps_are_einsums(outputs: tuple[int, ...], use_bias: bool) -> None:
    """Several batch and output axes, with a bias on every output."""
    linear = Linear(5, *outputs, dtype=jnp.float32, rngs=nnx.Rngs(0), use_bias=use_bias)
    draw = lambda *shape: np.random.default_rng(2).normal(size=shape).astype(np.float32)
    x, want = draw(2, 4, 5), 0.0
    if use_bias:
        assert linear.bias is not None and not np.asarray(linear.bias[...]).any()
        linear.bias[...] = jnp.asarray(draw(*outputs))
        want = draw(*outputs)
    kernel = np.asarray(linear.kernel[...])
    want = np.einsum("btd,d...->bt...", x, kernel) + want
    assert kernel.shape == (5, *outputs)
    np.testing.assert_allclose(linear(jnp.asarray(x)), want, atol=1e-5)


# ---------------------------------------------------------------------- what cannot be meant
def test_memory_goes_where_an_encoder_is() -> None:
    """A Transformer without an encoder encodes nothing, and one with it does nothing without memory."""
    model, (graphdef, params) = zoo.small_translator(), abstract_transformer(zoo.SMALL)
    assert transformer_spec(zoo.SMALL).encode is None
    with pytest.raises(ValueError, match="encoder_layers=0"):
        jax.eval_shape(ModuleEncode(graphdef), params, *padded(SOURCES))
    for cache in (None, Cache(slots=())):
        with pytest.raises(ValueError, match=r"Cache\.rows"):
            jax.eval_shape(model.apply, model.params, whole(OUTPUTS), cache)


@pytest.mark.parametrize(
    "fields", [{"encode": None}, {"start_id": None}, {"start_id": 5}, {"start_id": -1}], ids=lambda f: str(f)
)
def test_encode_and_start_id_come_together(fields: dict[str, Any]) -> None:
    """One without the other, or a start that is no id, is a ValueError."""
    with pytest.raises(ValueError, match="start_id"):
        dataclasses.replace(TOY.model, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_layers": 0}, "start_id=1"),
        ({"start_id": None}, "start_id=None"),
        ({"start_id": 64}, "start_id=64"),
        ({"encoder_layers": -1}, "encoder_layers=-1"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"dropout": -0.1}, r"dropout=-0\.1"),
    ],
)
def test_impossible_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    """A ValueError names the field and its value."""
    model = zoo.small_translator()
    with pytest.raises(ValueError, match=message):
        transformer_model(dataclasses.replace(model.config, **fields), model.params)


@pytest.mark.parametrize(
    ("sources", "budget", "message"),
    [
        ([[1], [2] * 17], 4, r"prompts\[1\] has 17 tokens, more than the model's context of 16"),
        ([[1] * 16], 16, "max_new_tokens=16: together more than the model's context of 16"),
        ([[1], []], 4, r"prompts\[1\] is empty"),
        ("", 4, r"prompts\[0\] is empty"),
        ([[5]], 4, "5 is not a token id"),
    ],
    ids=["long source", "long output", "no token", "no text", "no id"],
)
def test_impossible_sources_are_refused(sources: Any, budget: int, message: str) -> None:
    """Source and output each have the model's context, and a source has a token; nothing is compiled."""
    model = dataclasses.replace(TOY.with_eos(4), max_length=16)
    with pytest.raises(ValueError, match=message), dj.compile_clock() as clock:
        dj.decode(model, sources, max_new_tokens=budget)
    assert clock.programs == 0
    prepare(model, [[1] * 16], 15, dj.Sampling(), dj.Stop(), 0, None, None)  # what fits just so is taken
