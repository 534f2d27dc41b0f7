"""Teacher-forced scores: the exact chain rule."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
import zoo

import decoding_jax as dj

TOY = zoo.history_cached(5, seed=2)
TRANSLATOR = zoo.history_translator(5, seed=2, start_id=1)


@pytest.mark.parametrize("toy", [TOY, TRANSLATOR], ids=["prompts", "sources"])
def test_scores_are_the_log_probs_of_a_decode(toy: zoo.Toy) -> None:
    """The score of what a decode wrote is its log_probs, rows ragged, whatever processors chose the tokens."""
    prompts = [[1, 2, 1], [3], [0, 4, 2, 1, 0, 3], [2, 2]]
    sampling = dj.Sampling(temperature=1.2, top_k=3, repetition_penalty=1.4)
    out = dj.decode(toy.with_eos(4), prompts, max_new_tokens=9, sampling=sampling)
    assert len(set(out.lengths.tolist())) > 1
    score = dj.score(toy.model, prompts, zoo.outputs(out))
    assert score.lengths.tolist() == out.lengths.tolist()
    longest = int(out.lengths.max())
    np.testing.assert_allclose(score.log_probs, out.log_probs[:, :longest], atol=1e-5)
    np.testing.assert_allclose(score.totals, out.log_probs.astype(np.float64).sum(axis=1), atol=1e-4)


def test_all_continuations_together_are_certain() -> None:
    """The chain rule: the probabilities of all continuations of one length add up to 1."""
    every = [list(tokens) for tokens in itertools.product(range(5), repeat=3)]
    score = dj.score(TOY.model, [[1, 2]] * len(every), every)
    assert np.exp(score.totals).sum() == pytest.approx(1.0, abs=1e-5)
    for tokens, row in zip(every[::17], score.log_probs[::17], strict=True):
        np.testing.assert_allclose(row, zoo.log_prob(TOY.logits_of, [1, 2], tokens), atol=1e-5)


def test_continuations_of_sources_stand_behind_the_start_id() -> None:
    """A source of several prefill chunks, continuations that cross a scoring chunk, and one that is empty."""
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 5, size=n).tolist() for n in (3, 70, 200, 5)]
    continuations = [rng.integers(0, 5, size=n).tolist() for n in (80, 2, 64, 0)]
    score = dj.score(TRANSLATOR.model, sources, continuations)
    assert score.lengths.tolist() == [80, 2, 64, 0]
    for row, (source, tokens) in enumerate(zip(sources, continuations, strict=True)):
        want = zoo.log_prob(*TRANSLATOR.row(source), tokens)
        np.testing.assert_allclose(score.log_probs[row, : len(tokens)], want, atol=1e-5)
        assert not score.log_probs[row, len(tokens) :].any()


def test_scores_of_a_transformer_are_its_full_sequence_log_softmax() -> None:
    """Rows longer than a chunk, prompts that end inside one, a single-token prompt and an empty continuation."""
    model = zoo.small_transformer()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, size=n).tolist() for n in (70, 1, 40, 5)]
    continuations = [rng.integers(0, 64, size=n).tolist() for n in (30, 80, 3, 0)]
    score = dj.score(model, prompts, continuations)
    assert score.lengths.tolist() == [30, 80, 3, 0] and score.log_probs.shape == (4, 80)
    size = 100
    tokens = np.zeros((4, size), np.int32)
    for row, (a, b) in enumerate(zip(prompts, continuations, strict=True)):
        tokens[row, : len(a) + len(b)] = a + b
    causal = np.broadcast_to(np.tril(np.ones((size, size), bool)), (4, size, size))
    inputs = jax.device_put(dj.Inputs(tokens, np.broadcast_to(np.arange(size), (4, size)), causal))
    full = jax.jit(lambda p, i: jax.nn.log_softmax(model.readout(p, model.apply(p, i, None).hidden)))
    log_p = np.asarray(full(model.params, inputs))
    for row in range(3):
        start, end = len(prompts[row]), len(prompts[row] + continuations[row])
        want = log_p[row, np.arange(start - 1, end - 1), tokens[row, start:end]]
        np.testing.assert_allclose(score.log_probs[row, : len(want)], want, atol=1e-4)
        assert not score.log_probs[row, len(want) :].any()
    assert score.totals[3] == 0.0


def test_texts_are_scored_as_their_tokens() -> None:
    """A text continuation is encoded on its own and equals its ids; one prompt needs no list."""
    tokenizer = zoo.ByteTokenizer([b"a", b"b", b"ab", b"c", b""])
    model = zoo.history_cached(5, seed=2, tokenizer=tokenizer).model
    text = dj.score(model, "abc", "cab")
    assert text.lengths.tolist() == [2]
    assert (text.log_probs == dj.score(model, [[2, 3]], [[3, 2]]).log_probs).all()
    assert (text.log_probs == dj.score(model, [2, 3], [3, 2]).log_probs).all()


@pytest.mark.parametrize(
    ("prompts", "continuations"),
    [([[1], [2]], [[1]]), ([[1]], [[9]]), ([[]], [[1]]), ([[1]], ["text"])],
)
@pytest.mark.parametrize("toy", [TOY, TRANSLATOR], ids=["prompts", "sources"])
def test_impossible_scores_are_refused(toy: zoo.Toy, prompts: list[list[int]], continuations: list[list[int]]) -> None:
    """Counts that differ, unknown ids, empty prompts and text without a tokenizer are ValueErrors."""
    with pytest.raises(ValueError, match=r"prompts|continuations"):
        dj.score(toy.model, prompts, continuations)
