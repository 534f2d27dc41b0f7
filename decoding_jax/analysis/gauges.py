"""What goes wrong where tokens are written without knowing each other: repeats, odd n-grams, order, length, dependence.

All gauges but the last read lists of words, tokens or phrases, whatever made them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

Words = Sequence[Hashable]
T = TypeVar("T")


def repetition_rate(texts: Sequence[Words]) -> float:
    """The share of words, 0 to 1, that equal the word before them (Ghazvininejad et al. 2019); 0 without words.

    >>> repetition_rate([["the", "the", "tree"], ["a"]])
    0.25
    """
    total = sum(map(len, texts))
    return sum(a == b for text in texts for a, b in itertools.pairwise(text)) / max(total, 1)


def ngram_consistency(texts: Iterable[Words], corpus: Iterable[Words], n: int = 2) -> float:
    """The share of the texts' n-grams, 0 to 1, that occur in a corpus; 1 where there are no n-grams.

    Of one-shot outputs it shows mixtures of several good translations, which no one writes.

    >>> ngram_consistency([["the", "house", "tree"]], [["the", "house"], ["a", "tree"]])
    0.5

    Raises:
      ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: must be at least 1")
    known = {gram for text in corpus for gram in _ngrams(text, n)}
    found = [gram in known for text in texts for gram in _ngrams(text, n)]
    return sum(found) / len(found) if found else 1.0


def word_order_error(texts: Sequence[Words], references: Sequence[Words]) -> float:
    """The share of pairs of shared words, 0 to 1, that stand in the other order (Kendall's distance, as in Birch 2010).

    Of a word that occurs several times the k-th occurrences belong together. All texts' pairs count alike; without any
    it is 0. It says nothing of words that are not shared: look at BLEU too.

    >>> word_order_error([["b", "a", "c"]], [["a", "x", "b", "c"]])
    0.3333333333333333

    Raises:
      ValueError: the counts of texts differ or are 0.
    """
    swapped = pairs = 0
    for text, reference in _paired(texts, references):
        places = {word: at for at, word in enumerate(_numbered(reference))}
        order = [places[word] for word in _numbered(text) if word in places]
        pairs += len(order) * (len(order) - 1) // 2
        swapped += sum(order[i] > order[j] for j in range(len(order)) for i in range(j))
    return swapped / max(pairs, 1)


def length_error(texts: Sequence[Words], references: Sequence[Words]) -> float:
    """The mean of |length - the reference's length|, in words or tokens.

    Raises:
      ValueError: the counts of texts differ or are 0.
    """
    return float(np.mean([abs(len(a) - len(b)) for a, b in _paired(texts, references)]))


def set_f1(found: Sequence[Iterable[Hashable]], wanted: Sequence[Iterable[Hashable]]) -> float:
    """The mean F1, 0 to 1, of sets such as the key phrases of texts: 2 |both| / (|found| + |wanted|); order is nothing.

    >>> set_f1([["front door", "garage"]], [["garage", "battery", "front door"]])
    0.8

    Raises:
      ValueError: the counts of sets differ or are 0.
    """
    pairs = [(set(a), set(b)) for a, b in _paired(found, wanted)]
    return float(np.mean([2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0 for a, b in pairs]))


def total_correlation(law: Mapping[Words, float]) -> float:
    """What a row's tokens say of each other, in nats: sum p(y) log(p(y) / prod p(y_i)) >= 0 (Watanabe 1960).

    It is the least that a model loses which predicts all places independently (Huang et al. 2022), and 0 if and only if
    they are independent.

    Args:
      law: the probability of each row; all rows have one length.

    >>> round(total_correlation({(0, 0): 0.5, (1, 1): 0.5}), 4)  # one bit
    0.6931

    Raises:
      ValueError: rows differ in length, or probabilities do not sum to 1.
    """
    lengths = {len(row) for row in law}
    if len(lengths) != 1 or abs(sum(law.values()) - 1) > 1e-6 or min(law.values()) < 0:
        raise ValueError("law: give rows of one length with probabilities that sum to 1")
    marginals: list[dict[Hashable, float]] = [{} for _ in range(lengths.pop())]
    for row, probability in law.items():
        for marginal, token in zip(marginals, row, strict=True):
            marginal[token] = marginal.get(token, 0.0) + probability
    total = 0.0
    for row, probability in law.items():
        if probability > 0:
            alone = sum(np.log(marginal[token]) for marginal, token in zip(marginals, row, strict=True))
            total += probability * (np.log(probability) - alone)
    return float(total)


def _paired(texts: Sequence[T], references: Sequence[T]) -> list[tuple[T, T]]:
    if len(texts) != len(references) or not texts:
        raise ValueError(f"{len(texts)} texts and {len(references)} references: give equally many, and at least one")
    return list(zip(texts, references, strict=True))


def _ngrams(text: Words, n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]


def _numbered(text: Words) -> list[tuple[Hashable, int]]:
    """Each word with how often it has occurred before."""
    seen: dict[Hashable, int] = {}
    numbered = []
    for word in text:
        numbered.append((word, seen.get(word, 0)))
        seen[word] = seen.get(word, 0) + 1
    return numbered
