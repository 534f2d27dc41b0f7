"""BLEU, chrF and exact matches against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decoding_jax.analysis.scores import text_scores, tokenised_bleu


def test_equal_texts_score_full_marks_and_signatures_name_the_tokenisation() -> None:
    texts = ["Das ist ein kleiner Test.", "Und noch einer davon, bitte."]
    scores = text_scores(texts, texts, "de")
    assert scores.values["exact_match"] == 1.0
    assert scores.values["bleu"] == pytest.approx(100) and scores.values["chrf"] == pytest.approx(100)
    assert "tok:13a" in scores.signatures["bleu"] and "nc:6" in scores.signatures["chrf"]
    assert "tok:zh" in text_scores(texts, texts, "zh-Hans").signatures["bleu"]
    assert "tok:char" in text_scores(texts, texts, "ja").signatures["bleu"]


def test_bleu_is_the_geometric_mean_of_precisions_worked_out_by_hand() -> None:
    """5 of 6 words, 4 of 5 pairs, 3 of 4 triples, 2 of 3 quadruples; equal lengths, so no penalty."""
    scores = text_scores(["a b c d e x"], ["a b c d e f"], "en")
    assert scores.values["bleu"] == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert scores.values["exact_match"] == 0.0


def test_chinese_is_scored_by_characters() -> None:
    scores = text_scores(["我们今天去公园散步"], ["我们今天去公园跑步"], "zh")
    assert scores.values["bleu"] == pytest.approx(100 * (8 / 9 * 6 / 8 * 5 / 7 * 4 / 6) ** 0.25)


def test_empty_hypotheses_score_zero() -> None:
    scores = text_scores(["", ""], ["one two three four", "five"], "en")
    assert scores.values == {"bleu": 0.0, "chrf": 0.0, "exact_match": 0.0}


@pytest.mark.parametrize("score", [text_scores, tokenised_bleu])
@pytest.mark.parametrize(
    ("hypotheses", "references", "language", "message"),
    [
        (["a"], ["a", "b"], "de", "1 hypotheses, 2 references"),
        ([], [], "de", "at least one"),
        ("ab", ["a", "b"], "de", "give a list"),
        (["a"], ["a"], "en-de", "language='en-de'"),
        (["a"], ["a"], "German", "language='German'"),
    ],
)
def test_scores_refuse_what_cannot_be_paired(
    score: Callable[..., Any], hypotheses: list[str], references: list[str], language: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        score(hypotheses, references, language)


def test_tokenised_bleu_ignores_case_and_kinds_of_quotes_and_splits_punctuation() -> None:
    same = tokenised_bleu(['Der Mann sagt "ja".'], ["der mann sagt „ja“ ."], "de")
    assert same == pytest.approx(100)
    # A T-shirt is one token: der blaue t-shirt ist neu . / 5 of 6, 3 of 5, 2 of 4, 1 of 3
    other = tokenised_bleu(["Der blaue T-Shirt ist neu."], ["Der rote T-Shirt ist neu."], "de")
    assert other == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_scoring_prints_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    tokenised = ["das ist ein satz ."] * 120  # sacrebleu warns of such texts
    text_scores(tokenised, tokenised, "de")
    tokenised_bleu(tokenised, tokenised, "de")
    assert capfd.readouterr() == ("", "") and not caplog.records
