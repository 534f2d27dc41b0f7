"""N-gram models against interpolated Kneser-Ney written with dictionaries."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoding_jax.ngram import NGram

BEGIN, V, END = -1, 5, 4
CORPUS = [[0, 1, 2, END], [0, 1, 0, 1, END], [2, END], [], [0, 0, 0, 0, 0], [1, 2, 0, 1, 2, END]]


def windows(size: int) -> Counter[tuple[int, ...]]:
    rows = [[BEGIN, *row] for row in CORPUS]
    return Counter(tuple(row[i : i + size]) for row in rows for i in range(len(row) - size + 1))


def plain_law(context: tuple[int, ...], size: int, order: int) -> np.ndarray:
    """p(. | context), where n-grams of `size` tokens are looked at first; the context may hold the begin marker."""
    if size == 0:
        return np.full(V, 1 / V)
    counts: dict[tuple[int, ...], int] = {}
    for gram, count in windows(size).items():
        if gram[-1] != BEGIN:
            places = {longer[0] for longer in windows(size + 1) if longer[1:] == gram}
            counts[gram] = count if size == order or gram[0] == BEGIN else len(places)
    once, twice = (sum(c == n for c in counts.values()) for n in (1, 2))
    discount = once / (once + 2 * twice) if once and twice else 0.75
    shorter = plain_law(context, size - 1, order)
    own = {gram[-1]: c for gram, c in counts.items() if gram[:-1] == context[len(context) - size + 1 :]}
    if len(context) < size - 1 or not own:
        return shorter
    gain = np.array([max(own.get(t, 0) - discount, 0) for t in range(V)])
    return (gain + discount * len(own) * shorter) / sum(own.values())


def law_of(model: NGram, contexts: list[tuple[int, ...]]) -> np.ndarray:
    """p f32[N, V] behind each context, from one call; what stands past a context is filled with garbage."""
    rows = jnp.asarray([[*context, *[3] * (4 - len(context))] for context in contexts], jnp.int32)
    lengths = jnp.asarray([len(context) for context in contexts], jnp.int32)
    tokens = jnp.broadcast_to(jnp.arange(V), (len(contexts), V))
    return np.exp(jax.jit(lambda m, *given: m.log_prob(*given))(model, rows, lengths, tokens))


@pytest.mark.parametrize("order", [1, 2, 4])
def test_every_context_has_the_law_of_kneser_ney(order: int) -> None:
    """At the beginning, behind contexts that were seen and that were not; each law sums to 1 and leaves nothing out."""
    model = NGram.train(CORPUS, order, V)
    some = itertools.product(range(V), repeat=4)
    contexts = [c for n in range(4) for c in itertools.product(range(V), repeat=n)] + list(some)[::7]
    laws = law_of(model, contexts)
    np.testing.assert_allclose(laws.sum(axis=1), 1.0, atol=1e-6)
    assert laws.min() > 0
    for context, law in list(zip(contexts, laws, strict=True))[::3]:
        np.testing.assert_allclose(law, plain_law((BEGIN, *context), order, order), atol=1e-6)


@pytest.mark.parametrize("corpus", [[], [[], [3]]])
def test_next_to_no_text(corpus: list[list[int]]) -> None:
    """Without counts every token is equally probable; one token is enough for the law to be one."""
    laws = law_of(NGram.train(corpus, 3, V), [(), (3,), (0, 3, 3)])
    np.testing.assert_allclose(laws.sum(axis=1), 1.0, atol=1e-6)
    if corpus:
        assert laws[0].argmax() == 3
    else:
        np.testing.assert_allclose(laws, 1 / V, atol=1e-6)


def test_shapes_lead_anywhere_and_ids_may_be_many() -> None:
    """Any leading axes; keys of five tokens of a large vocabulary are exact, which 32 or 64 bits could not hold."""
    size = 60_000
    rows = np.random.default_rng(0).integers(0, size, (40, 30))
    model = NGram.train(rows, 5, size)
    context = jnp.asarray(rows[:, :20].reshape(4, 10, 20), jnp.int32)
    right = jnp.asarray(rows[:, 20].reshape(4, 10, 1), jnp.int32)
    tokens = jnp.concatenate([right, (right + 1) % size], axis=2)
    log_p = jax.jit(model.log_prob)(context, jnp.full((4, 10), 20), tokens)
    assert log_p.shape == (4, 10, 2)
    assert (log_p[..., 0] > math.log(0.1)).all() and (log_p[..., 1] < math.log(0.01)).all()


@pytest.mark.parametrize("bad", [-1, V])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    """Also the id that the begin marker has inside."""
    with pytest.raises(ValueError, match=f"sequences: id {bad} is outside the vocabulary 0..{V - 1}"):
        NGram.train([[0, bad]], 2, V)
    with pytest.raises(ValueError, match="order=0: must be at least 1"):
        NGram.train([[0]], 0, V)
