"""The contracts of the library: what a model takes and gives, and what a decode returns.

Shape letters, used everywhere:

    B  rows of the batch                 V  vocabulary
    T  positions in this call            D  width of the hidden features
    S  cache slots                       H  heads
    N  length of a row's token buffer    K  depth of a draft (tokens)
    L  canvas length                     W  nodes of a draft, or beams of a row
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import struct

Array = jax.Array
PyTree = Any


class Inputs(NamedTuple):
    """One call of a model. Who sees whom is only ever `mask`.

    Attributes:
      tokens: i32[B, T].
      positions: i32[B, T], the place of each token in its row, padding not counted.
      mask: bool[B, T, S], True where a query may look at a slot.
      slots: i32[B, T], where the new keys and values go; S means nowhere. None: nothing is kept
        and the keys are those of this call (S = T).
      time: f32[B], diffusion time, for models that take one.
      features: f32[B, T, ...], another model's hidden features, for drafters that take them.
      embeds: f32[B, T, D], soft inputs instead of `tokens`.
      dropout_key: a typed random key, for training with dropout; None: no dropout.
    """

    tokens: Array
    positions: Array
    mask: Array
    slots: Array | None = None
    time: Array | None = None
    features: Array | None = None
    embeds: Array | None = None
    dropout_key: Array | None = None


class Features(NamedTuple):
    """What a call returns: hidden features [B, T, D], the asked-for inner layers' outputs, the cache."""

    hidden: Array
    taps: tuple[Array, ...]
    cache: PyTree


@struct.dataclass
class Cache:
    """What a model remembers of its rows. How much of it is committed is the decoder's `length`, nowhere else.

    Attributes:
      slots: leaves [B, S, ...], one entry per cached position: moved when a draft's accepted path
        is compacted and when rows are reordered.
      rows: leaves [B, ...], per-row things such as an encoder's memory: reordered only.
    """

    slots: PyTree
    rows: PyTree = ()


@dataclasses.dataclass(frozen=True)
class CanvasSpec:
    """What a model that fills a whole canvas was trained to see. Decoders obey it, so that nothing can be mismatched.

    Attributes:
      objective: what it was trained for, an objective's name such as "mask_predict".
      mask_id: the token that stands at hidden positions; CTC's blank, and what deletes a segment. It is never emitted.
      source_copy: what stands in the first canvas. "none": mask_id. "uniform": position j of a canvas of n holds the
        source's token round(j (m - 1) / (n - 1)) of m (Gu et al. 2018). "soft": a mean of all the source's embeddings,
        with weights softmax(-|i - j (m - 1) / (n - 1)| / 0.3) (compare Wei et al. 2019).
      length_head: what the model's distribution over lengths is about: canvas "lengths" 0, 1, 2, ...; "offsets" of
        these from the source's length; "gaps" of 0, 1, 2, ... places before the next token of an outline; or "none"
        where it has none.
      length_classes: how many of these; offsets run from -(length_classes // 2).
      upsample: canvas positions for each token of the source (CTC); 0 where a length is chosen instead.
      group: how many tokens are predicted at once (group_autoregressive), or in how many segments (segment_parallel).
    """

    objective: str
    mask_id: int
    source_copy: Literal["none", "uniform", "soft"] = "none"
    length_head: Literal["none", "lengths", "offsets", "gaps"] = "none"
    length_classes: int = 0
    upsample: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("source_copy", SOURCE_COPIES), ("length_head", LENGTH_HEADS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        if self.source_copy == "soft" and self.objective in ("mask_predict", "iterative_refinement"):
            raise ValueError(
                f"source_copy='soft': {self.objective} sees its own tokens in later rounds; choose 'none' or 'uniform'"
            )
        if (self.length_head == "none") != (self.length_classes == 0):
            raise ValueError(
                f"length_classes={self.length_classes}: must be 0 without a length head, and above 0 with length_head="
                f"{self.length_head!r}"
            )
        if (self.objective == "outline_then_fill") != (self.length_head == "gaps"):
            raise ValueError(
                f"length_head={self.length_head!r}: outline_then_fill has gaps, and other models have none; give it "
                "'gaps', these 'offsets' or 'lengths'"
            )
        for name, users in (("upsample", ("ctc",)), ("group", ("group_autoregressive", "segment_parallel"))):
            if (self.objective in users) != (getattr(self, name) > 0):
                value, who = getattr(self, name), " and ".join(users)
                raise ValueError(f"{name}={value}: {who} need at least 1, and other models have no use for it")

    @property
    def takes_lengths(self) -> bool:
        """Whether its canvases have a length that is chosen before, or given."""
        return not self.upsample and not self.group and self.length_head != "gaps"


SOURCE_COPIES = ("none", "uniform", "soft")
LENGTH_HEADS = ("none", "lengths", "offsets", "gaps")
ApplyFn = Callable[[PyTree, Inputs, Any], Features]
EmbedFn = Callable[[PyTree, Array], Array]
LengthFn = Callable[[PyTree, PyTree], Array]
EncodeFn = Callable[..., PyTree]
ReadoutFn = Callable[[PyTree, Array], Array]
InitCacheFn = Callable[[int, int], Any]


def identity_readout(params: PyTree, hidden: Array) -> Array:
    """The default readout: the model's features are its logits."""
    del params
    return hidden


def no_cache(batch: int, capacity: int) -> Cache:
    """The default cache: a model that looks only at the tokens of this call remembers nothing."""
    del batch, capacity
    return Cache(slots=())


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The static part of a model, hashed by value: equal specs share compiled programs, whatever the weights."""

    apply: ApplyFn
    readout: ReadoutFn
    init_cache: InitCacheFn
    vocab_size: int
    encode: EncodeFn | None = None
    canvas: CanvasSpec | None = None
    embed: EmbedFn | None = None
    length_logits: LengthFn | None = None
    gap_logits: ReadoutFn | None = None

    def view(
        self,
        *,
        taps: Sequence[int] = (),
        start: int = 0,
        stop: int | None = None,
        exit: int | None = None,
        skip: Sequence[int] = (),
        remat: bool = False,
    ) -> ModelSpec:
        """The same with other layers run; see `Model.view`."""
        make = getattr(self.apply, "view", None)
        if make is None:
            raise ValueError(f"view: {self.apply!r} has no layers to choose from; only Transformers can be viewed")
        selection = (tuple(taps), start, stop, exit, tuple(skip), remat)
        encode = None if self.encode is None else self.encode.view(*selection)  # type: ignore[attr-defined]
        return dataclasses.replace(self, apply=make(*selection), encode=encode)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Any JAX function as a model that every decoder can run.

    `dj.Model(apply=..., params=..., vocab_size=V)` is enough for a function of the last token;
    `init_cache` makes it remember. A bigram table:

    >>> import jax.numpy as jnp, decoding_jax as dj
    >>> bigram = dj.Model(apply=lambda p, i, c: dj.Features(p[i.tokens], (), c), params=jnp.eye(4), vocab_size=4)

    Attributes:
      apply: (params, Inputs, cache) -> Features. A pure function; keep one function object per model
        definition, since programs are compiled per function.
      params: pytree of arrays, an argument of the compiled programs and never part of their state.
      vocab_size: V, the number of token ids.
      init_cache: (batch, capacity) -> Cache, an empty cache with `capacity` slots a row.
      readout: (params, hidden [..., D]) -> logits f32[..., V]; default: the features are the logits.
      encode: (params, sources i32[B, M], lengths i32[B]) -> `Cache.rows`, for encoder-decoders: prompts are then
        sources, and what is generated begins behind `start_id`. A source given as text ends with the first of
        `eos_ids`, where there is one.
      start_id: the token that an encoder-decoder's output begins behind.
      canvas: of a model that fills a whole canvas at once, what it was trained to see; None for models that write from
        left to right.
      embed: (params, tokens i32[...]) -> the tokens' embeddings [..., D], for canvases that begin with a soft copy of
        the source.
      length_logits: (params, `Cache.rows`) -> f32[B, length_classes], of models whose canvas has a length head.
      gap_logits: (params, hidden [..., D]) -> f32[..., length_classes], of models whose length head is about gaps.
      tokenizer: turns text into ids and back; None where prompts are ids. It has `encode(text,
        add_special_tokens) -> ids`, `decode(ids) -> text`, `token_bytes` (what each id adds to a text), and
        for chat `apply_chat_template(messages) -> text`, as `decoding_jax.checkpoints.Tokenizer` has.
      eos_ids: ids that end a row.
      max_length: the most positions a row may have, None for no bound.
      config: whatever describes the model, for people and for checkpoints.
    """

    apply: ApplyFn
    params: PyTree
    vocab_size: int
    init_cache: InitCacheFn = no_cache
    readout: ReadoutFn = identity_readout
    encode: EncodeFn | None = None
    start_id: int | None = None
    canvas: CanvasSpec | None = None
    embed: EmbedFn | None = None
    length_logits: LengthFn | None = None
    gap_logits: ReadoutFn | None = None
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    max_length: int | None = None
    config: Any = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size}: a model needs at least one token id")
        lacking = [n for n in ("encode", "decode", "token_bytes") if not hasattr(self.tokenizer, n)]
        if self.tokenizer is not None and lacking:
            raise ValueError(
                f"tokenizer={type(self.tokenizer).__name__} has no {', '.join(lacking)}; use "
                "decoding_jax.checkpoints.Tokenizer (from a tokenizer.json), or None"
            )
        if (self.encode is None) != (self.start_id is None) or not 0 <= (self.start_id or 0) < self.vocab_size:
            raise ValueError(
                f"start_id={self.start_id}: give encode and start_id (an id of the vocabulary) together, or neither"
            )
        if self.canvas is not None:
            self._check_canvas(self.canvas)
        bad = [i for i in self.eos_ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"eos_ids={self.eos_ids}: {bad} are outside the vocabulary 0..{self.vocab_size - 1}")

    def _check_canvas(self, canvas: CanvasSpec) -> None:
        if not 0 <= canvas.mask_id < self.vocab_size:
            raise ValueError(f"canvas.mask_id={canvas.mask_id}: outside the vocabulary 0..{self.vocab_size - 1}")
        needed = {
            "embed": canvas.source_copy == "soft",
            "gap_logits": canvas.length_head == "gaps",
            "length_logits": canvas.length_head in ("lengths", "offsets"),
        }
        lacking = [name for name, wanted in needed.items() if wanted and getattr(self, name) is None]
        if lacking:
            raise ValueError(f"canvas={canvas}: the model needs {' and '.join(lacking)} for it, and has none")

    @property
    def needs_lengths(self) -> bool:
        """Whether a call has to say how long its outputs are to be."""
        return self.canvas is not None and self.canvas.takes_lengths and self.length_logits is None

    @property
    def spec(self) -> ModelSpec:
        names = [field.name for field in dataclasses.fields(ModelSpec)]
        return ModelSpec(**{name: getattr(self, name) for name in names})

    def view(self, **selection: Any) -> Model:
        """The same params and cache, with other layers run.

        Args:
          taps: layers whose outputs are returned in `Features.taps`, in this order.
          start: the first layer to run; `Inputs.embeds` then holds the features that enter it.
          stop: the layer before which to leave; what enters it is returned as it is.
          exit: the layer before which to leave early: the last norm follows, so the features can be read out.
          skip: layers to leave out.
          remat: keep only the layers' inputs for a gradient and compute the rest again: less memory, a third
            more work.

        Raises:
          ValueError: the model's `apply` cannot be viewed, or a layer does not exist.
        """
        spec = self.spec.view(**selection)
        return dataclasses.replace(self, apply=spec.apply, encode=spec.encode)

    def __repr__(self) -> str:
        count = sum(math.prod(np.shape(x)) for x in jax.tree.leaves(self.params))
        name = type(self.config).__name__ if self.config is not None else getattr(self.apply, "__name__", "apply")
        return f"Model({name}, {count:,} parameters, vocab_size={self.vocab_size}, max_length={self.max_length})"


FINISH_REASONS = ("length", "eos", "stop")
LENGTH, EOS, STOP = range(3)


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a decode cost. Per row (numpy [B]), and once for the call.

    Attributes:
      model_calls: calls of the model while the row was unfinished; prefill is not counted.
      draft_calls: calls of a draft model while the row was unfinished, whichever row of the batch asked for them.
      drafted: proposed positions within the budget.
      accepted: proposed tokens that were emitted.
      tokens: emitted tokens.
      compile_seconds: tracing and compiling in this call.
      first_token_seconds: from the start to the first tokens (prefill and one step), without compiling.
      total_seconds: the whole call, without compiling.
    """

    model_calls: np.ndarray
    draft_calls: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    tokens: np.ndarray
    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tokens_per_call(self) -> float:
        """Emitted tokens per call of the model over all rows; plain decoding has 1.0."""
        return float(self.tokens.sum() / max(self.model_calls.sum(), 1))

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted positions over all rows, 0 where nothing was drafted."""
        return float(self.accepted.sum() / max(self.drafted.sum(), 1))

    def __repr__(self) -> str:
        return (
            f"Stats(tokens={int(self.tokens.sum())}, model_calls={int(self.model_calls.sum())}, "
            f"tokens_per_call={self.tokens_per_call:.2f}, draft_calls={int(self.draft_calls.sum())}, "
            f"drafted={int(self.drafted.sum())}, "
            f"accepted={int(self.accepted.sum())}, first_token={self.first_token_seconds:.3f}s, "
            f"total={self.total_seconds:.3f}s, compile={self.compile_seconds:.1f}s)"
        )


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """One step of one row: what was proposed, what was kept, in text where there is a tokenizer.

    Attributes:
      emitted: the step's new tokens; of a canvas those that it wrote or changed, in order of place.
      canvas: of methods that fill one, the tokens that stand there after the step, None at hidden places; of the first
        candidate.
      text: that of `emitted`, or of the canvas, with "_" at hidden places.
    """

    step: int
    row: int
    proposed: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    text: str | None = None
    canvas: tuple[int | None, ...] | None = None

    def __repr__(self) -> str:
        shown = repr(self.text) if self.text is not None else str(list(self.canvas or self.emitted))
        if self.canvas is not None:
            return f"step {self.step:3d} row {self.row}: {len(self.emitted)} places written, now {shown}"
        return f"step {self.step:3d} row {self.row}: {self.accepted}/{len(self.proposed)} drafts kept, wrote {shown}"


class Trace(tuple[TraceStep, ...]):
    """The steps of a decode in order; `print(out.trace)` shows one line a step."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "Trace()"


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The n best hypotheses of each row, best first.

    Attributes:
      tokens: i32[B, n, N], zero after each length.
      lengths: i32[B, n]; 0 where fewer were found.
      scores: f32[B, n], what they are ranked by; -inf where fewer were found.
      log_probs: f32[B, n, N], the model's own.
      finish_reason: per row and candidate, as in `DecodeOutput`.
      text: per row and candidate, where there is a tokenizer.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray
    log_probs: np.ndarray
    finish_reason: list[list[str]]
    text: list[list[str]] | None = None

    def ranked_by(self, scores: np.ndarray) -> Candidates:
        """The same in the order of other scores f32[B, n], best first; text has to be made anew."""
        order = np.argsort(-scores, axis=1, kind="stable")
        pick = lambda x: np.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)
        reasons = [[row[n] for n in best] for row, best in zip(self.finish_reason, order, strict=True)]
        return Candidates(pick(self.tokens), pick(self.lengths), pick(scores), pick(self.log_probs), reasons)


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """What every decoder returns; numpy arrays on the host.

    Attributes:
      tokens: i32[B, N], the new tokens, zero after each row's length. An end-of-sequence token and
        the token that completes a stop are part of it.
      lengths: i32[B].
      log_probs: f32[B, N], the model's own log-probability of each token at temperature 1, before
        any processor; zero after each row's length.
      finish_reason: per row "eos", "stop" or "length".
      stats: what it cost.
      text: the new text of each row, cut before a stop string; None without a tokenizer.
      candidates: the n best of each row, for decoders that keep several.
      trace: the steps, if asked for.
      lossless: whether the output follows the law of plain decoding with the same settings, by construction.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    finish_reason: list[str]
    stats: Stats
    text: list[str] | None = None
    candidates: Candidates | None = None
    trace: Trace | None = None
    lossless: bool = True

    def __repr__(self) -> str:
        rows = []
        for i, length in enumerate(self.lengths):
            shown = repr(self.text[i]) if self.text is not None else self.tokens[i, :length].tolist()
            rows.append(f"  [{i}] {int(length)} tokens, {self.finish_reason[i]}: {shown}")
        return "\n".join([f"DecodeOutput({self.stats}", *rows]) + ")"
