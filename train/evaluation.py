"""How good and how fast: scores of texts, losses in readable units, and decoding a whole test set."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import sacrebleu
from jax.sharding import Mesh
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from decoding_jax.api import decode
from decoding_jax.loop import Decoder
from decoding_jax.prepare import Prompt, encode_prompts
from decoding_jax.types import Model

# --- Scores of texts


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
    hypotheses, references = _paired(hypotheses=hypotheses, references=references)
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
    hypotheses, references = _paired(hypotheses=hypotheses, references=references)
    base = base_language(language)
    normalizer, tokenizer = MosesPunctNormalizer(lang=base), MosesTokenizer(lang=base)

    def tokenised(text: str) -> str:
        # In the order of the data set's own script: lower case, punctuation, tokens.
        normal = normalizer.normalize(text.lower())
        return str(tokenizer.tokenize(normal, aggressive_dash_splits=False, return_str=True, escape=False))

    metric = sacrebleu.BLEU(tokenize="none", force=True)
    return float(metric.corpus_score([tokenised(h) for h in hypotheses], [[tokenised(r) for r in references]]).score)


def samples_of(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], count: int
) -> list[dict[str, str]]:
    """The first `count` examples for `Logs.samples`: {"source", "hypothesis", "reference"}.

    Raises:
      ValueError: the counts of the texts differ or are 0.
    """
    texts = _paired(sources=sources, hypotheses=hypotheses, references=references)
    names = ("source", "hypothesis", "reference")
    return [dict(zip(names, row, strict=True)) for row in list(zip(*texts, strict=True))[: max(count, 0)]]


def _paired(**texts: Sequence[str]) -> list[list[str]]:
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


# --- Losses


def bits_per_character(total_nats: float, characters: int) -> float:
    """A summed loss in bits for each character of the text: the same unit whatever the tokenizer.

    Raises:
      ValueError: there are no characters.
    """
    if characters < 1:
        raise ValueError(f"characters={characters}: count those of the text that the loss is about, at least 1")
    return total_nats / math.log(2) / characters


def perplexity(nats_per_token: float) -> float:
    """exp of the mean loss; inf where that is more than a float holds."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf


# --- Decoding a test set


@dataclasses.dataclass(frozen=True)
class DecodingReport:
    """What a decoder makes of a test set, and what it costs.

    Attributes:
      hypotheses: in the order of the sources, without surrounding whitespace.
      scores: against the references.
      tokens: new tokens of all rows.
      model_calls: summed over rows, each counted until it ended; prefill is not.
      seconds: in `decode` without compiling, over all batches; rows that fill up the last one take part.
    """

    hypotheses: list[str]
    scores: TextScores
    tokens: int
    model_calls: int
    seconds: float

    @property
    def tokens_per_call(self) -> float:
        """New tokens for each call of the model; plain decoding has 1.0."""
        return self.tokens / max(self.model_calls, 1)


def evaluate_decoding(
    model: Model,
    sources: Sequence[Prompt],
    references: Sequence[str],
    decoder: Decoder,
    *,
    max_new_tokens: int,
    batch_size: int,
    language: str,
    mesh: Mesh | None = None,
) -> DecodingReport:
    """Decodes a test set greedily and scores it.

    A model that has to be told the length of its outputs is told that of the references.

    Batches have `batch_size` rows of similar length, so that few programs are compiled. The randomness of
    a decoder that has some is keyed by a row's place among the sources, not by its batch.

    Args:
      model: with a tokenizer.
      sources: prompts, as in `decode`.
      references: one for each.
      decoder: the method.
      max_new_tokens: the budget of each row.
      batch_size: rows decoded together.
      language: of the references, as in `text_scores`.
      mesh: as in `decode`.

    Raises:
      ValueError: an argument does not fit; raised before anything is decoded.
    """
    if model.tokenizer is None:
        raise ValueError("model has no tokenizer, so its output has no text to score; give Model(tokenizer=...)")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    if isinstance(sources, str) or len(sources) != len(references) or not len(sources):
        raise ValueError(f"{len(sources)} sources, {len(references)} references: give lists, equally long, not empty")
    base_language(language)
    prompts = encode_prompts(model, list(sources))
    hypotheses = [""] * len(prompts)
    tokens, calls, seconds = 0, 0, 0.0
    # The longest first: if one does not fit the model's context, the first call says so.
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    for at in range(0, len(order), batch_size):
        kept = order[at : at + batch_size]
        rows = kept + [kept[-1]] * (batch_size - len(kept))
        output = decode(
            model,
            [prompts[row] for row in rows],
            decoder,
            max_new_tokens=max_new_tokens,
            row_ids=rows,
            lengths=[_length_of(model, references[row], max_new_tokens) for row in rows]
            if model.needs_lengths
            else None,
            mesh=mesh,
        )
        assert output.text is not None
        for row, text in zip(kept, output.text, strict=False):
            hypotheses[row] = text.strip()
        tokens += int(output.stats.tokens[: len(kept)].sum())
        calls += int(output.stats.model_calls[: len(kept)].sum())
        seconds += output.stats.total_seconds
    return DecodingReport(hypotheses, text_scores(hypotheses, references, language), tokens, calls, seconds)


def _length_of(model: Model, reference: str, most: int) -> int:
    """The tokens of a reference with its end, at most so many."""
    return min(len(model.tokenizer.encode(reference, add_special_tokens=False)) + 1, most)
