"""What a loss is: the textbook's number and gradient, document by document, pair by pair, and a teacher's share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decoding_jax as dj
from decoding_jax.models.functional import init_transformer, transformer_spec
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.types import Model
from train.objectives import CausalLM, Seq2Seq, Teacher
from train.objectives.losses import cross_entropy, token_loss

VOCABULARY = 12
NO_SMOOTHING = jnp.float32(0.0)


# Compiled once for each shape, which is much quicker than running operation by operation.
evaluate = jax.jit(lambda objective, params, batch, key=None: objective.loss(params, batch, key))
gradient_of = jax.jit(jax.value_and_grad(lambda params, objective, batch: objective.loss(params, batch, None)[0]))


def random_logits(seed: int, rows: int = 6) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(seed), (rows, VOCABULARY))


@pytest.fixture(scope="module")
def causal() -> Model:
    return init_transformer(TransformerConfig(VOCABULARY, 2, 16, 32, 2, 1, 8, max_length=64), seed=1)


@pytest.fixture(scope="module")
def translator() -> Model:
    config = TransformerConfig(VOCABULARY, 1, 16, 32, 2, 2, 8, max_length=64, encoder_layers=1, start_id=1)
    return init_transformer(config, seed=2, eos_ids=(0,))


# --- Losses of logits


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_is_that_of_the_smoothed_target(smoothing: float) -> None:
    """Value and gradient of both results equal what JAX derives from - sum(q log p) with q = (1 - s) onehot + s / V."""
    logits, targets, s = random_logits(0), jnp.array([0, 3, 3, 11, 5, 7]), jnp.float32(smoothing)

    def textbook(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        onehot = jax.nn.one_hot(targets, VOCABULARY)
        log_p = jax.nn.log_softmax(logits)
        return -(((1 - s) * onehot + s / VOCABULARY) * log_p).sum(axis=1), -(onehot * log_p).sum(axis=1)

    ours, back = jax.vjp(lambda x: cross_entropy(x, targets, s), logits)
    wanted, back_wanted = jax.vjp(textbook, logits)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    weights = jax.random.normal(jax.random.key(1), (2, 6))
    nothing = jnp.zeros(6)
    for pair in ((weights[0], nothing), (nothing, weights[1]), (weights[0], weights[1])):
        np.testing.assert_allclose(back(pair)[0], back_wanted(pair)[0], atol=1e-6)


def test_tokens_count_by_their_weight() -> None:
    """The loss is the mean over tokens with weight; the rest changes nothing, whatever stands there."""
    logits, targets = random_logits(0), jnp.array([[0, 3, 3], [11, 5, 7]])
    weights = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    each = cross_entropy(logits, targets.reshape(-1), NO_SMOOTHING)[0]

    @jax.jit
    def loss(logits: jax.Array) -> Any:
        return token_loss(logits, None, {"targets": targets, "weights": weights}, NO_SMOOTHING, None)

    value, metrics = loss(logits)
    np.testing.assert_allclose(value, (each[0] + each[1] + each[3]) / 3, rtol=1e-6)
    assert metrics["loss"][1] == 3 and metrics["nats_per_token"][1] == 3
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], value, rtol=1e-6)
    assert loss(logits.at[2].set(100.0).at[4:].set(-7.0))[0] == value
    gradient = np.asarray(jax.grad(lambda x: loss(x)[0])(logits))
    assert not gradient[[2, 4, 5]].any() and gradient[[0, 1, 3]].any(axis=1).all()


def test_nats_per_token_and_accuracy_ignore_smoothing_and_teacher() -> None:
    """nats_per_token is -log p(target) and accuracy how often the target is the likeliest, whatever is trained on."""
    logits, targets, ones = random_logits(0), jnp.array([[0, 3, 3, 11, 5, 7]]), jnp.ones((1, 6))
    teacher = Teacher((), jnp.float32(0.5), jnp.float32(2.0), None)
    batch = {"targets": targets, "weights": ones}
    value, metrics = jax.jit(token_loss)(logits, random_logits(1), batch, jnp.float32(0.2), teacher)
    plain = -np.asarray(jax.nn.log_softmax(logits))[np.arange(6), targets[0]]
    np.testing.assert_allclose(metrics["nats_per_token"][0], plain.sum(), rtol=1e-5)
    assert float(metrics["accuracy"][0]) == (np.asarray(logits).argmax(1) == np.asarray(targets[0])).sum()
    assert abs(value - plain.mean()) > 0.01


def test_a_batch_without_any_token_has_loss_0() -> None:
    """Padding rows alone make a loss of 0 and no gradient, not 0 / 0."""
    batch = {"targets": jnp.zeros((2, 3), jnp.int32), "weights": jnp.zeros((2, 3))}
    value, gradient = jax.value_and_grad(lambda x: token_loss(x, None, batch, NO_SMOOTHING, None)[0])(random_logits(0))
    assert value == 0 and not gradient.any()


# --- Causal language models


def packed(documents: list[list[int]], length: int) -> dict[str, jax.Array]:
    """One row of documents side by side, written down from the definition of packing."""
    row: dict[str, list[float]] = {name: [] for name in ("tokens", "targets", "weights", "positions", "segments")}
    for number, ids in enumerate(documents, start=1):
        row["tokens"] += ids
        row["targets"] += [*ids[1:], 0]
        row["weights"] += [1.0] * (len(ids) - 1) + [0.0]
        row["positions"] += range(len(ids))
        row["segments"] += [number] * len(ids)
    return {
        name: jnp.array([values + [0] * (length - len(values))], jnp.float32 if name == "weights" else jnp.int32)
        for name, values in row.items()
    }


def test_a_packed_row_is_the_sum_of_its_documents(causal: Model) -> None:
    """Documents side by side have the loss that each has alone."""
    objective = CausalLM(causal.spec, NO_SMOOTHING)
    documents = [[3, 5, 7, 2, 0], [4, 4, 9, 0], [8, 1, 0]]
    together = evaluate(objective, causal.params, packed(documents, 16))[1]
    alone = [evaluate(objective, causal.params, packed([ids], 16))[1] for ids in documents]
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(together[name][0], sum(m[name][0] for m in alone), rtol=1e-5)
        assert together[name][1] == sum(m[name][1] for m in alone) == 9


def test_documents_of_a_row_do_not_see_each_other(causal: Model) -> None:
    """Another token in the first document changes its own loss and not a bit of the second's."""
    objective = CausalLM(causal.spec, NO_SMOOTHING)
    rows = [packed([[3, token, 7, 2, 0], [4, 4, 9, 0]], 16) for token in (5, 6)]

    def losses(first: bool) -> list[float]:
        chosen = [
            row | {"weights": jnp.where(row["segments"] == (1 if first else 2), row["weights"], 0)} for row in rows
        ]
        return [float(evaluate(objective, causal.params, row)[0]) for row in chosen]

    assert losses(first=False)[0] == losses(first=False)[1] and losses(first=True)[0] != losses(first=True)[1]


def test_causal_loss_is_the_score_of_decoding(causal: Model) -> None:
    """The loss is minus the mean of the log-probabilities that `score` gives the same model."""
    documents = [[3, 5, 7, 2, 0], [4, 4, 9, 0], [8, 1, 0]]
    value, _ = evaluate(CausalLM(causal.spec, NO_SMOOTHING), causal.params, packed(documents, 16))
    found = dj.score(causal, [ids[:1] for ids in documents], [ids[1:] for ids in documents])
    np.testing.assert_allclose(value, -found.totals.sum() / 9, rtol=1e-5)


# --- Pairs


def batch_of_pairs(pairs: list[tuple[list[int], list[int]]], start_id: int, garbage: int = 0) -> dict[str, jax.Array]:
    """Sources of 6 and targets of 8 tokens with `garbage` where nothing is real."""
    fill = lambda ids, size: ids + [garbage] * (size - len(ids))
    return {
        "source": jnp.array([fill(source, 6) for source, _ in pairs]),
        "source_lengths": jnp.array([len(source) for source, _ in pairs]),
        "tokens": jnp.array([fill([start_id, *target[:-1]], 8) for _, target in pairs]),
        "targets": jnp.array([fill(target, 8) for _, target in pairs]),
        "weights": jnp.array([[1.0] * len(target) + [0.0] * (8 - len(target)) for _, target in pairs]),
    }


PAIRS = [([4, 5, 0], [7, 8, 9, 0]), ([6, 0], [10, 0]), ([2, 3, 4, 5, 6, 0], [3, 3, 3, 3, 3, 3, 3, 0])]


def test_seq2seq_loss_is_the_score_of_decoding(translator: Model) -> None:
    """The loss is minus the mean of the log-probabilities that `score` gives the same pairs, <eos> included."""
    value, metrics = evaluate(Seq2Seq(translator.spec, NO_SMOOTHING), translator.params, batch_of_pairs(PAIRS, 1))
    found = dj.score(translator, [source for source, _ in PAIRS], [target for _, target in PAIRS])
    assert int(metrics["loss"][1]) == found.lengths.sum() == 14
    np.testing.assert_allclose(value, -found.totals.sum() / 14, rtol=1e-5)


def test_padding_of_pairs_is_never_seen(translator: Model) -> None:
    """What stands behind a source or a target changes no bit of loss or gradient."""
    objective = Seq2Seq(translator.spec, jnp.float32(0.1))
    results = [gradient_of(translator.params, objective, batch_of_pairs(PAIRS, 1, garbage)) for garbage in (0, 11)]
    assert results[0][0] == results[1][0]
    jax.tree.map(np.testing.assert_array_equal, *(gradient for _, gradient in results))


def test_dropout_is_drawn_from_the_key_alone(translator: Model) -> None:
    """Equal keys, equal losses; other keys, other losses, and none is that of the model without dropout."""
    spec = transformer_spec(dataclasses.replace(translator.config, dropout=0.5))
    batch, keys = batch_of_pairs(PAIRS, 1), [jax.random.key(0), jax.random.key(0), jax.random.key(1)]
    values = [float(evaluate(Seq2Seq(spec, NO_SMOOTHING), translator.params, batch, key)[0]) for key in keys]
    values.append(float(evaluate(Seq2Seq(translator.spec, NO_SMOOTHING), translator.params, batch)[0]))
    assert values[0] == values[1] and len(set(values)) == 3


# --- Teachers


def test_divergence_is_the_textbooks() -> None:
    """KL(teacher || student) at the temperature, times its square, computed in float64 with sums over words."""
    own, logits = random_logits(1), random_logits(2)
    found = Teacher((), jnp.float32(0.5), jnp.float32(3.0), None).divergence(own, logits)
    p, q = (np.exp(np.asarray(x, np.float64) / 3.0) for x in (own, logits))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    np.testing.assert_allclose(found, 9.0 * (p * np.log(p / q)).sum(1), rtol=1e-4)


def test_a_teacher_that_is_the_student_teaches_nothing(causal: Model) -> None:
    """Of weight 1 it gives loss 0 and no gradient, of weight 0 the plain loss; it is never trained itself."""
    batch = packed([[3, 5, 7, 2, 0], [4, 4, 9, 0]], 16)

    @jax.jit
    def loss(params: Any, teacher_params: Any, weight: jax.Array) -> jax.Array:
        teacher = Teacher(teacher_params, weight, jnp.float32(2.0), causal.spec)
        return CausalLM(causal.spec, NO_SMOOTHING, teacher).loss(params, batch, None)[0]

    value, (own, others) = jax.value_and_grad(loss, argnums=(0, 1))(causal.params, causal.params, jnp.float32(1))
    assert abs(value) < 1e-6
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(own)) < 1e-6
    assert not any(g.any() for g in jax.tree.leaves(others))
    plain = evaluate(CausalLM(causal.spec, NO_SMOOTHING), causal.params, batch)[0]
    other = jax.tree.map(lambda x: 2 * x, causal.params)
    none, half, whole = (loss(causal.params, other, jnp.float32(weight)) for weight in (0, 0.5, 1))
    np.testing.assert_allclose(none, plain, rtol=1e-6)
    np.testing.assert_allclose(half, (plain + whole) / 2, rtol=1e-5)
    assert abs(half - plain) > 0.01
