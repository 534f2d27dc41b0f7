"""Prompt lookup against a plain search, and the edges where lookups have gone wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

import decoding_jax as dj
from decoding_jax.decoders.prompt_lookup import rank_matches
from decoding_jax.prepare import prepare

SIZE = 16
rank = jax.jit(rank_matches, static_argnums=(2, 3))


def plain_search(row: list[int], max_ngram: int, min_ngram: int) -> int:
    """Behind the longest, then latest, earlier occurrence of the last tokens; len(row) where there is none."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(row) - 1, n - 1, -1):
            if n <= len(row) and row[start - n : start] == row[len(row) - n :]:
                return start
    return len(row)


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 1), (3, 2), (5, 3)])
def test_lookup_finds_what_a_search_finds(max_ngram: int, min_ngram: int) -> None:
    """Law 9: rows of every length; what stands behind the end of a row is never matched or copied from."""
    rng = np.random.default_rng(max_ngram)
    for _ in range(200):
        buffer = rng.integers(0, 3, size=SIZE)
        length = int(rng.integers(1, SIZE + 1))
        best = int(rank(jnp.asarray(buffer), jnp.asarray(length), max_ngram, min_ngram).max())
        start, matched = (best % SIZE, best // SIZE) if best >= 0 else (length, 0)
        row = buffer[:length].tolist()
        assert start == plain_search(row, max_ngram, min_ngram)
        assert row[start - matched : start] == row[length - matched :] and (matched > 0) == (start < length)


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([5], []),
        ([5, 6], []),
        ([5, 5], [5, 5]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([7, 1, 2, 3, 4, 7], [1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),
        ([3, 1, 2, 9, 8, 1, 2, 3, 1, 2], [9, 8, 1, 2]),
        ([0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=["short", "none", "overlap", "period", "weak", "latest", "longest", "zeros"],
)
def test_what_is_proposed(row: list[int], want: list[int]) -> None:
    """A row shorter than the n-gram, no match, a match at the tail and a continuation shorter than K."""
    decoder = dj.PromptLookup(num_draft=4)
    ctx = prepare(zoo.bigram(10).model, [row], 8, dj.Sampling(), dj.Stop(), 0, None, None).ctx
    draft, _ = decoder.propose(ctx, decoder.init(ctx))
    assert draft.tokens[0][draft.verifiable[0]].tolist() == want


def test_several_matches_are_one_tree() -> None:
    """The two latest matches of [1, 2] go on with 4 and with 3; what they share is proposed once."""
    decoder = dj.PromptLookup(num_draft=3, num_matches=2, min_ngram=2)
    row = [1, 2, 3, 5, 1, 2, 3, 6, 1, 2]
    ctx = prepare(zoo.bigram(10).model, [row], 8, dj.Sampling(), dj.Stop(), 0, None, None).ctx
    draft, _ = decoder.propose(ctx, decoder.init(ctx))
    assert draft.tokens[0].tolist() == [3, 6, 1, 3, 5, 1]
    assert draft.verifiable[0].tolist() == [True, True, True, False, True, True]
    assert draft.parents is not None and draft.parents[0].tolist() == [0, 1, 2, 0, 1, 5]


def test_a_match_without_any_end_of_sequence_runs() -> None:
    """No EOS is configured and the prompt repeats itself; a cycle is drafted whole and accepted whole."""
    cycle = np.eye(4, k=1, dtype=np.float32) * 9
    cycle[3, 0] = 9
    model = zoo.table_model(cycle).model
    out = dj.decode(model, [[0, 1, 2, 3, 0]], dj.PromptLookup(num_draft=4), max_new_tokens=10)
    assert zoo.outputs(out) == [[1, 2, 3, 0, 1, 2, 3, 0, 1, 2]]
    assert out.stats.model_calls.tolist() == [3] and out.stats.acceptance_rate == 1.0


def test_calls_share_nothing() -> None:
    """What one call has copied does not change the next one."""
    model, decoder = zoo.bigram(4, seed=1).model, dj.PromptLookup(num_draft=4)
    first = dj.decode(model, [[0, 1, 0, 1]], decoder, max_new_tokens=6)
    dj.decode(model, [[2, 3, 2, 2]], decoder, max_new_tokens=6)
    again = dj.decode(model, [[0, 1, 0, 1]], decoder, max_new_tokens=6)
    assert zoo.outputs(first) == zoo.outputs(again)
    assert first.stats.drafted.tolist() == again.stats.drafted.tolist()


@pytest.mark.parametrize("fields", [{"num_draft": 0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}])
def test_impossible_lookups_are_refused(fields: dict[str, int]) -> None:
    """A ValueError names the field, at construction."""
    with pytest.raises(ValueError, match=next(iter(fields))):
        dj.PromptLookup(**fields)
