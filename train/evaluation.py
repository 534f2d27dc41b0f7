"""How good and how fast: losses in readable units, samples for the log, and decoding a whole test set."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from decoding_jax.analysis.scores import TextScores, base_language, paired, text_scores
from decoding_jax.api import decode
from decoding_jax.loop import Decoder
from decoding_jax.prepare import Prompt, encode_prompts
from decoding_jax.types import Model

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


def samples_of(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], count: int
) -> list[dict[str, str]]:
    """The first `count` examples for `Logs.samples`: {"source", "hypothesis", "reference"}.

    Raises:
      ValueError: the counts of the texts differ or are 0.
    """
    texts = paired(sources=sources, hypotheses=hypotheses, references=references)
    names = ("source", "hypothesis", "reference")
    return [dict(zip(names, row, strict=True)) for row in list(zip(*texts, strict=True))[: max(count, 0)]]


@dataclasses.dataclass(frozen=True)
class DecodingReport:
    """What a decoder makes of a test set, and what it costs.

    Attributes:
      hypotheses: in the order of the sources, without surrounding whitespace.
      scores: against the references.
      tokens: new tokens of all rows.
      model_calls: summed over rows, each counted until it ended; prefill is not.
      draft_calls: of a second model that drafts, likewise.
      seconds: in `decode` without compiling, over all batches; rows that fill up the last one take part.
    """

    hypotheses: list[str]
    scores: TextScores
    tokens: int
    model_calls: int
    draft_calls: int
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
    drafter: Model | None = None,
    scorer: Model | None = None,
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
      drafter, scorer, mesh: as in `decode`.

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
    tokens, calls, drafts, seconds = 0, 0, 0, 0.0
    # The longest first: if one does not fit the model's context, the first call says so.
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    for at in range(0, len(order), batch_size):
        kept = order[at : at + batch_size]
        rows = kept + [kept[-1]] * (batch_size - len(kept))
        output = decode(
            model,
            [prompts[row] for row in rows],
            decoder,
            drafter=drafter,
            scorer=scorer,
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
        drafts += int(output.stats.draft_calls[: len(kept)].sum())
        seconds += output.stats.total_seconds
    return DecodingReport(hypotheses, text_scores(hypotheses, references, language), tokens, calls, drafts, seconds)


def _length_of(model: Model, reference: str, most: int) -> int:
    """The tokens of a reference with its end, at most so many."""
    return min(len(model.tokenizer.encode(reference, add_special_tokens=False)) + 1, most)
