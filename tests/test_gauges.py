"""The gauges of what parallel decoding gets wrong, against numbers worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from decoding_jax.analysis.gauges import (
    length_error,
    ngram_consistency,
    repetition_rate,
    total_correlation,
    word_order_error,
)


def test_repeats_are_counted_over_all_words() -> None:
    """A word is repeated if it equals the one before it, in its own text."""
    assert repetition_rate([["a", "a", "a", "b"], ["b", "a"]]) == 2 / 6
    assert repetition_rate([[], []]) == 0


def test_ngrams_are_looked_up_in_the_corpus() -> None:
    """Across texts there are none; short texts have none."""
    corpus = [["a", "b", "c"], ["c", "a"]]
    assert ngram_consistency([["a", "b", "a"], ["c"]], corpus) == 0.5
    assert ngram_consistency([["a", "b", "a"]], corpus, n=1) == 1 and ngram_consistency([["c"]], corpus, n=3) == 1
    with pytest.raises(ValueError, match="n=0: must be at least 1"):
        ngram_consistency([["a"]], corpus, n=0)


def test_word_order_is_kendalls_distance() -> None:
    """0 in order, 1 turned round; what only one side has does not count; repeated words pair up in order."""
    assert word_order_error(["abcd"], ["abcd"]) == 0 and word_order_error(["dcba"], ["abcd"]) == 1
    assert word_order_error(["xbya"], ["azb"]) == 1 and word_order_error(["aba"], ["aab"]) == 1 / 3
    assert word_order_error(["a"], ["a"]) == word_order_error(["xy"], ["ab"]) == 0
    assert word_order_error(["a", "ba", "abc"], ["a", "ab", "abc"]) == 1 / 4  # pairs count, not texts


def test_length_error_is_a_mean_of_words() -> None:
    """Of the absolute difference."""
    assert length_error(["abc", "a"], ["a", "ab"]) == 1.5
    with pytest.raises(ValueError, match="1 texts and 2 references"):
        length_error(["a"], ["a", "b"])


@pytest.mark.parametrize("strength", [0.0, 0.3, 0.7, 1.0])
def test_total_correlation_grows_with_the_dependence(strength: float) -> None:
    """Tokens that copy the one before them with a chance s, else are drawn anew: (n - 1) mutual informations."""
    vocab, length = 3, 4
    law = {}
    for row in itertools.product(range(vocab), repeat=length):
        steps = [strength * (a == b) + (1 - strength) / vocab for a, b in itertools.pairwise(row)]
        law[row] = float(np.prod(steps)) / vocab
    same, other = strength + (1 - strength) / vocab, (1 - strength) / vocab
    information = np.log(vocab) + same * np.log(same) + ((vocab - 1) * other * np.log(other) if other else 0.0)
    assert total_correlation(law) == pytest.approx((length - 1) * information, abs=1e-9)
    with pytest.raises(ValueError, match="sum to 1"):
        total_correlation({(0,): 0.4})
