"""How near texts come to their references: corpus BLEU and chrF (sacrebleu), exact matches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import sacrebleu
from sacremoses import MosesPunctNormalizer, MosesTokenizer


@dataclasses.dataclass(frozen=True)
class TextScores:
    """How near hypotheses come to their references.

    Attributes:
      values: "bleu" and "chrf", 0 to 100, and "exact_match", the share (0 to 1) of hypotheses that equal
        their reference up to surrounding whitespace.
      signatures: of "bleu" and "chrf", as sacrebleu gives them: report a score with its signature.
    """

    values: dict[str, float]
    signatures: dict[str, str]


def text_scores(hypotheses: Sequence[str], references: Sequence[str], language: str) -> TextScores:
    """Corpus BLEU, chrF and the share of exact matches.

    Args:
      hypotheses: detokenised texts.
      references: one for each.
      language: of these texts, such as "de", "zh" or "pt-BR"; BLEU counts words in sacrebleu's "zh"
        tokenisation for Chinese, characters for Japanese, "13a" words for others.

    Raises:
      ValueError: the counts differ or are 0, or the language is no such code.
    """
    hypotheses, references = paired(hypotheses=hypotheses, references=references)
    words = {"zh": "zh", "ja": "char"}.get(base_language(language), "13a")
    values, signatures = {}, {}
    # force: texts that look tokenised to sacrebleu ("... .") are the caller's choice, not worth a warning.
    for name, metric in {"bleu": sacrebleu.BLEU(tokenize=words, force=True), "chrf": sacrebleu.CHRF()}.items():
        values[name] = float(metric.corpus_score(hypotheses, [references]).score)
        signatures[name] = str(metric.get_signature())
    same = [h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True)]
    return TextScores(values | {"exact_match": sum(same) / len(same)}, signatures)


def tokenised_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> float:
    """The BLEU of Multi30k papers, 0 to 100: of lower-cased, normalised, Moses-tokenised texts.

    Compare it with those papers only, not with the BLEU of `text_scores`.

    Args:
      hypotheses: detokenised texts.
      references: one for each.
      language: of these texts, such as "de".

    Raises:
      ValueError: as `text_scores`.
    """
    hypotheses, references = paired(hypotheses=hypotheses, references=references)
    base = base_language(language)
    normalizer, tokenizer = MosesPunctNormalizer(lang=base), MosesTokenizer(lang=base)

    def tokenised(text: str) -> str:
        # In the order of the data set's own script: lower case, punctuation, tokens.
        normal = normalizer.normalize(text.lower())
        return str(tokenizer.tokenize(normal, aggressive_dash_splits=False, return_str=True, escape=False))

    metric = sacrebleu.BLEU(tokenize="none", force=True)
    return float(metric.corpus_score([tokenised(h) for h in hypotheses], [[tokenised(r) for r in references]]).score)


def paired(**texts: Sequence[str]) -> list[list[str]]:
    """The lists of texts, checked to be equally long."""
    for name, given in texts.items():
        if isinstance(given, str):
            raise ValueError(f"{name}={given!r}: give a list of texts")
    counts = {name: len(given) for name, given in texts.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"{shown}: give equally many, and at least one")
    return [list(given) for given in texts.values()]


def base_language(language: str) -> str:
    """ "zh" of "zh-Hans". A pair such as "en-de" is refused: its first part is the wrong language."""
    if not re.fullmatch(r"[a-z]{2,3}([-_][A-Z][A-Za-z]+)*", language):
        raise ValueError(f"language={language!r}: give the code of the hypotheses' language, such as 'de' or 'zh-Hans'")
    return re.split("[-_]", language)[0]
