"""Beam search against every sequence there is, and against a plain beam search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

import decoding_jax as dj
from decoding_jax.loop import run, start
from decoding_jax.prepare import prepare

# ---------------------------------------------------------------------- every sequence
# Three words and two ends out of 32 ids: 27 beams hold every prefix of three words, so a search over four
# tokens leaves nothing out and its 27 best must be the 27 best of all.
WORDS, ENDS, VOCAB, HORIZON, WIDE = (2, 9, 17), (5, 30), 32, 4, 27
PIECES = [b"x"] * VOCAB
PIECES[2], PIECES[9], PIECES[17], PIECES[5], PIECES[30] = b"a", b"b", b"ab", b"", b""
TOY = zoo.history_cached(VOCAB, seed=6, tokenizer=zoo.ByteTokenizer(PIECES))
PROMPTS = [[2, 9, 2], [17]]
FORBIDDEN = tuple(i for i in range(VOCAB) if i not in WORDS + ENDS)

SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]] = {
    "plain": ({}, (5,), ("zz",)),
    "several ends": ({}, ENDS, ("zz",)),
    "processors": (
        {
            "repetition_penalty": 1.6,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.5,
            "min_new_tokens": 2,
            "logit_bias": {2: 0.8},
        },
        ENDS,
        ("zz",),
    ),
    "stop strings": ({}, (5,), ("aa", "bab")),
}


def text_of(tokens: Sequence[int], strings: Sequence[str]) -> tuple[str, bool]:
    """The text of an output, cut before a stop string, and whether there was one."""
    text = b"".join(PIECES[t] for t in tokens).decode()
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in strings if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def hypotheses(
    prompt: list[int], settings: dict[str, Any], eos: tuple[int, ...], strings: tuple[str, ...], horizon: int
) -> dict[tuple[int, ...], float]:
    """Every output of at most `horizon` tokens and the sum of its processed log-probabilities."""
    found: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], total: float) -> None:
        if output and (len(output) == horizon or output[-1] in eos or text_of(output, strings)[1]):
            found[output] = total
            return
        p = zoo.law_of_next(TOY.logits_of([*prompt, *output]), prompt, output, settings, eos)
        for token in np.flatnonzero(p):
            grow((*output, int(token)), total + float(np.log(p[token])))

    grow((), 0.0)
    return found


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5, 2.0])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_wide_beam_finds_the_best_of_all(name: str, length_penalty: float) -> None:
    """Law 9: the n best of every sequence, in order, with the score, reason and text of each."""
    settings, eos, strings = SETTINGS[name]
    settings = {**settings, "forbidden": FORBIDDEN}
    out = dj.decode(
        TOY.with_eos(*eos),
        PROMPTS,
        dj.Beam(num_beams=WIDE, n_best=WIDE, length_penalty=length_penalty),
        max_new_tokens=HORIZON,
        sampling=dj.Sampling(**settings),
        stop=dj.Stop(strings=strings),
    )
    best = out.candidates
    assert best is not None and best.text is not None and out.text is not None and not out.lossless
    for row, prompt in enumerate(PROMPTS):
        every = hypotheses(prompt, {**settings, "temperature": 1.0}, eos, strings, HORIZON)
        scores = {o: total / len(o) ** length_penalty for o, total in every.items()}
        want = sorted(scores, key=lambda o: -scores[o])[:WIDE]
        got = [tuple(t[:n].tolist()) for t, n in zip(best.tokens[row], best.lengths[row], strict=True)]
        assert got == want
        np.testing.assert_allclose(best.scores[row], [scores[o] for o in want], atol=1e-4)
        for n, output in enumerate(want):
            own = zoo.log_prob(TOY.logits_of, prompt, output)
            np.testing.assert_allclose(best.log_probs[row, n, : len(output)], own, atol=1e-4)
            assert not best.log_probs[row, n, len(output) :].any() and not best.tokens[row, n, len(output) :].any()
            assert best.text[row][n] == text_of(output, strings)[0]
        assert tuple(zoo.outputs(out)[row]) == want[0] and out.text[row] == best.text[row][0]
        assert (out.log_probs[row] == best.log_probs[row, 0]).all()
        stopped = text_of(want[0], strings)[1]
        assert out.finish_reason[row] == ("eos" if want[0][-1] in eos else "stop" if stopped else "length")


@pytest.mark.parametrize("budget", [0, 1])
def test_places_that_hold_no_hypothesis_are_empty(budget: int) -> None:
    """With fewer hypotheses than beams the rest has length 0 and score -inf; without a budget all do."""
    out = dj.decode(
        TOY.with_eos(5),
        PROMPTS,
        dj.Beam(num_beams=WIDE, n_best=WIDE),
        max_new_tokens=budget,
        sampling=dj.Sampling(forbidden=(*FORBIDDEN, 30)),
        stop=dj.Stop(strings=["zz"]),
    )
    best = out.candidates
    assert best is not None
    assert best.lengths.tolist() == [[budget] * 4 + [0] * (WIDE - 4)] * 2
    assert (np.isneginf(best.scores) == (best.lengths == 0)).all()
    assert out.tokens.shape == (2, budget) and out.lengths.tolist() == [budget] * 2


# ---------------------------------------------------------------------- a plain beam search
NARROW = zoo.history_cached(6, seed=8, scale=2.0)
NARROW_PROMPTS = [[1, 2, 1], [3], [0, 4, 2, 1, 0, 3], [2, 2]]
BUDGET, BEAMS = 9, 3


def plain_beam(
    logits_of: Callable[[Sequence[int]], np.ndarray],
    prompt: list[int],
    budget: int,
    eos: tuple[int, ...],
    length_penalty: float,
    early_stopping: bool = False,
) -> tuple[list[tuple[float, tuple[int, ...]]], int]:
    """The finished hypotheses, best first, and the number of steps; one row alone, in lists."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for step in range(1, budget + 1):
        longer = []
        for total, output in live:
            p = zoo.law_of_next(logits_of([*prompt, *output]), prompt, output, {"temperature": 1.0})
            longer += [(total + float(np.log(p[t])), (*output, t)) for t in range(len(p))]
        longer.sort(reverse=True)
        live = [x for x in longer if x[1][-1] not in eos][:BEAMS]
        ends = longer[:BEAMS] if early_stopping else longer
        ended = [x for x in ends if x[1][-1] in eos] + (live if step == budget else [])
        finished += [(total / step**length_penalty, output) for total, output in ended]
        finished = sorted(finished, reverse=True)[:BEAMS]
        reach = budget if length_penalty > 0 else step + 1
        hope = max(total for total, _ in live) / reach**length_penalty
        if step == budget or (len(finished) == BEAMS and (early_stopping or finished[-1][0] >= hope)):
            return finished, step
    return finished, 0


@pytest.mark.parametrize("eos", [(), (1,), (1, 4), (0, 1, 4, 5)])
@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"), [(0.0, False), (0.7, False), (1.0, False), (-0.5, False), (1.0, True)]
)
def test_rows_stop_one_by_one(length_penalty: float, early_stopping: bool, eos: tuple[int, ...]) -> None:
    """Each row of a batch is searched as if alone, and stops when it alone cannot improve, or has enough."""
    out = dj.decode(
        NARROW.with_eos(*eos),
        NARROW_PROMPTS,
        dj.Beam(num_beams=BEAMS, n_best=BEAMS, length_penalty=length_penalty, early_stopping=early_stopping),
        max_new_tokens=BUDGET,
    )
    best = out.candidates
    assert best is not None
    for row, prompt in enumerate(NARROW_PROMPTS):
        finished, steps = plain_beam(NARROW.logits_of, prompt, BUDGET, eos, length_penalty, early_stopping)
        got = [tuple(t[:n].tolist()) for t, n in zip(best.tokens[row], best.lengths[row], strict=True)]
        assert got == [output for _, output in finished]
        np.testing.assert_allclose(best.scores[row], [score for score, _ in finished], atol=1e-4)
        assert out.stats.model_calls[row] == steps


def test_early_stopping_waits_for_likely_ends() -> None:
    """Ends that hardly anyone would write do not fill the W places; the search goes on as if there were none."""
    search = dj.Beam(num_beams=BEAMS, early_stopping=True)
    unlikely = dj.Sampling(logit_bias={1: -50.0})
    out, without = (
        dj.decode(NARROW.with_eos(*eos), NARROW_PROMPTS, search, max_new_tokens=BUDGET, sampling=unlikely)
        for eos in ((1,), ())
    )
    assert zoo.outputs(out) == zoo.outputs(without)
    assert out.finish_reason == ["length"] * len(NARROW_PROMPTS)


def test_rows_do_stop_at_different_steps() -> None:
    """The test above is not vacuous, some rows are settled while others go on."""
    steps = {plain_beam(NARROW.logits_of, p, BUDGET, (1, 4), 0.0)[1] for p in NARROW_PROMPTS}
    assert len(steps) > 1 and max(steps) > min(steps) + 1


def test_one_beam_without_ends_is_greedy() -> None:
    """Law 8: one beam that nothing ends takes the best token each time."""
    out = dj.decode(NARROW.model, NARROW_PROMPTS, dj.Beam(num_beams=1), max_new_tokens=BUDGET)
    assert zoo.outputs(out) == [zoo.greedy(NARROW.logits_of, p, BUDGET) for p in NARROW_PROMPTS]
    assert out.candidates is not None and out.candidates.tokens.shape == (4, 1, BUDGET)


SEARCH = dj.Beam(num_beams=BEAMS, n_best=BEAMS, length_penalty=0.7)


def test_steps_may_be_cut_and_values_changed() -> None:
    """Law 6, law 10: one step per call gives the same search, and another penalty or other ends compile nothing."""
    call = functools.partial(dj.decode, prompts=NARROW_PROMPTS, max_new_tokens=BUDGET)
    model = NARROW.with_eos(1)
    whole = call(model, decoder=SEARCH)
    with dj.compile_clock() as clock:
        cut = call(model, decoder=SEARCH, steps_per_call=1)
        call(NARROW.with_eos(2, 3), decoder=dataclasses.replace(SEARCH, length_penalty=-0.5))
    assert clock.programs == 0
    assert whole.candidates is not None and cut.candidates is not None
    assert (whole.candidates.tokens == cut.candidates.tokens).all()
    assert (whole.candidates.scores == cut.candidates.scores).all()


def test_beams_stay_on_their_devices() -> None:
    """Law 5: on eight devices the search is the same, and reordering beams moves nothing between devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model, prompts = NARROW.with_eos(1, 4), (NARROW_PROMPTS * 2)[:7]
    whole = dj.decode(model, NARROW_PROMPTS, SEARCH, max_new_tokens=BUDGET)
    split = dj.decode(model, prompts, SEARCH, max_new_tokens=BUDGET, mesh=mesh)
    assert zoo.outputs(split) == (zoo.outputs(whole) * 2)[:7]
    call = prepare(model, prompts, BUDGET, dj.Sampling(), dj.Stop(), 0, None, mesh)
    lowered = run.lower(SEARCH, call.ctx, start(SEARCH, call.ctx), jnp.int32(1))
    assert "all-gather" not in lowered.compile().as_text()


@pytest.mark.parametrize(
    ("decoder", "sampling", "name"),
    [
        (dj.Beam(num_beams=0), dj.Sampling(), "num_beams"),
        (dj.Beam(num_beams=2, n_best=3), dj.Sampling(), "n_best"),
        (dj.Beam(num_beams=2, n_best=0), dj.Sampling(), "n_best"),
        (dj.Beam(num_beams=6), dj.Sampling(), "num_beams"),
        (dj.Beam(num_beams=2, length_penalty=float("nan")), dj.Sampling(), "length_penalty"),
        (dj.Beam(num_beams=2), dj.Sampling(temperature=0.5), "temperature"),
        (dj.Beam(num_beams=2, early_stopping=2), dj.Sampling(), "early_stopping"),  # type: ignore[arg-type]
    ],
)
def test_impossible_searches_are_refused(decoder: dj.Beam, sampling: dj.Sampling, name: str) -> None:
    """A ValueError names the field before anything is compiled."""
    with pytest.raises(ValueError, match=name), dj.compile_clock() as clock:
        dj.decode(NARROW.model, [[1]], decoder, max_new_tokens=2, sampling=sampling)
    assert clock.programs == 0


def test_a_search_cannot_be_streamed_or_traced() -> None:
    """Beams are revised until the end: `stream` and `trace` say so instead of showing what may be taken back."""
    with pytest.raises(ValueError, match="Beam"):
        dj.stream(NARROW.model, [[1]], SEARCH, max_new_tokens=2)
    with pytest.raises(ValueError, match="trace"):
        dj.decode(NARROW.model, NARROW_PROMPTS, SEARCH, max_new_tokens=BUDGET, trace=True)
