"""The canvas skeleton: fill a buffer of known length, all places at once, in a few rounds or one.

A method says what of a round's predictions it keeps; the length, the call of the model, draws, candidates, endings,
statistics and the trace are written here once. In every round

    canvas   the tokens that stand there, `mask_id` at hidden places
    score    one call of the model: every place sees every other and the source
    select   the method writes tokens, hides some again, or ends the row

The candidates of row b (its W most probable lengths) are rows b * W ... b * W + W - 1 of what the model sees.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.canvas_layout import UNKNOWN, canvas_inputs, first_canvas, length_scores, soft_copy
from decoding_jax.checks import check_whole
from decoding_jax.rows import Context
from decoding_jax.sampling import HISTORY_OFF, draw
from decoding_jax.stops import NOT_ENDED, StopArrays, ending
from decoding_jax.types import (
    FINISH_REASONS,
    LENGTH,
    Array,
    Cache,
    Candidates,
    CanvasSpec,
    DecodeOutput,
    ModelSpec,
    PyTree,
    Stats,
)

PAD, HIDDEN, WRITTEN = range(3)  # the status of a place
_NARROWEST = 8
_MOST_ROUNDS = 10_000  # with more, places times rounds might not be an int32


@struct.dataclass
class CanvasState:
    """The canvases of all candidates, C = B * W, and how far they are.

    Attributes:
      tokens: i32[C, L], what the model sees: `mask_id` at hidden places, or a copy of the source at first; 0 past each
        canvas.
      status: u8[C, L]: PAD, HIDDEN or WRITTEN.
      log_probs: f32[C, L], the model's own of each token when it was written, 0 elsewhere.
      memory: the encoded sources, [C, ...].
      carry: what the method remembers.
      steps: i32[C], rounds so far, which are calls of the model.
      done: bool[C].
    """

    tokens: Array
    status: Array
    log_probs: Array
    memory: PyTree
    carry: PyTree
    steps: Array
    done: Array

    @property
    def positions(self) -> Array:
        """i32[C, T], of the places."""
        return jnp.broadcast_to(jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None], self.tokens.shape)

    @property
    def lengths(self) -> Array:
        """i32[C], of the canvases."""
        return (self.status != PAD).sum(axis=1, dtype=jnp.int32)


class Canvas:
    """Base of the methods that fill a canvas. Subclasses are flax.struct dataclasses.

    A method supplies `runs`, the objectives whose models it decodes, and `select`; where it has candidates also
    `num_candidates`. One that does not need to know the length of its output before says so in `needs_lengths`, and
    chooses that of its canvas itself.
    """

    runs: ClassVar[tuple[str, ...]] = ()
    needs_lengths: ClassVar[bool] = True

    @property
    def num_candidates(self) -> int:
        """W, how many canvases each row has."""
        return 1

    def select(self, ctx: Context, state: CanvasState, logits: Array) -> CanvasState:
        """One round: the canvases after it, from the logits f32[C, T, V] of their first T places.

        The state that comes and goes has these T places only; `steps` counts this round already. Rows that are done
        are put back as they were.
        """
        raise TypeError(f"{type(self).__name__} does not say what it writes")

    def check(self, ctx: Context) -> None:
        """Refuses a model that was not trained for this, and settings that have no meaning here; ValueError."""
        check_model(type(self).__name__, self.runs, ctx.model)
        check_canvas_sampling(type(self).__name__, ctx)
        if ctx.lengths is not None and not self.needs_lengths:
            raise ValueError(f"lengths: {type(self).__name__} finds the length while it decodes; leave it out")
        if ctx.lengths is not None and self.num_candidates > 1:
            raise ValueError(
                f"length_beam={self.num_candidates}: the lengths are given, so there are no others to try; set it to 1"
            )
        if self.needs_lengths and ctx.lengths is None and ctx.model.length_logits is None:
            raise ValueError(
                f"lengths: the model has no length head, so {type(self).__name__} has to be told the length of every "
                "row; give lengths=[...], or train with canvas.length_head='offsets'"
            )

    def init(self, ctx: Context) -> CanvasState:
        """Encodes the sources, chooses lengths and lays out the first canvases."""
        count, memory = self.num_candidates, ctx.encode()
        lengths = self.choose_lengths(ctx, memory).reshape(-1)
        wide = ctx.repeat_rows(count)
        assert wide.sources is not None and wide.source_lengths is not None
        size = self.canvas_size(ctx)
        inside = jnp.arange(size)[None] < lengths[:, None]
        tokens = first_canvas(spec_of(ctx), wide.sources, wide.source_lengths, lengths, size)
        return CanvasState(
            tokens=jnp.where(inside, tokens, 0),
            status=jnp.where(inside, HIDDEN, PAD).astype(jnp.uint8),
            log_probs=jnp.zeros(inside.shape, jnp.float32),
            memory=jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), memory),
            carry=(),
            steps=jnp.zeros_like(lengths),
            done=lengths == 0,
        )

    def canvas_size(self, ctx: Context) -> int:
        """L, the places of the buffer."""
        return ctx.prompts.shape[1]

    def choose_lengths(self, ctx: Context, memory: PyTree) -> Array:
        """Each row's W most probable lengths i32[B, W], best first, or the one it is given; 0 is no canvas."""
        limits = ctx.limits - ctx.prompt_lengths
        if ctx.lengths is not None:  # and one candidate, which `check` has seen to
            return jnp.minimum(ctx.lengths, limits)[:, None]
        assert ctx.model.length_logits is not None and ctx.source_lengths is not None  # `check` has seen it
        logits = ctx.model.length_logits(ctx.params, memory)
        scores = length_scores(spec_of(ctx), logits, ctx.source_lengths, limits, self.canvas_size(ctx))
        count = min(self.num_candidates, scores.shape[1])
        best, index = ctx.top_k(scores, count)
        # There may be fewer lengths than W. What the head has no class for is only the last resort.
        known = (best > UNKNOWN) | ((jnp.arange(count)[None] == 0) & (best > -jnp.inf))
        lengths = jnp.where(known, index.astype(jnp.int32) + 1, 0)
        return jnp.pad(lengths, ((0, 0), (0, self.num_candidates - count)))

    def step(self, ctx: Context, state: CanvasState) -> CanvasState:
        """One round of every candidate that is not done, over no more places than the longest of them has."""
        wide = ctx.repeat_rows(self.num_candidates)
        longest = jnp.where(state.done, 0, state.lengths).max()
        widths = canvas_widths(state.tokens.shape[1])
        branch = sum((longest > width).astype(jnp.int32) for width in widths[:-1])
        rounds = [lambda old, width=width: self._round(wide, old, state.memory, width) for width in widths]
        # The memory is not part of what the branches return, or they would copy it.
        new = jax.lax.switch(branch, rounds, dataclasses.replace(state, memory=()))
        return dataclasses.replace(new, memory=state.memory)

    def _round(self, ctx: Context, old: CanvasState, memory: PyTree, width: int) -> CanvasState:
        names = ("tokens", "status", "log_probs")
        narrow = dataclasses.replace(
            old,
            **{name: getattr(old, name)[:, :width] for name in names},
            memory=memory,
            steps=old.steps + (~old.done).astype(jnp.int32),
        )
        new = self.select(ctx, narrow, self.score(ctx, narrow))
        whole = {name: getattr(old, name).at[:, :width].set(getattr(new, name)) for name in names}
        new = dataclasses.replace(new, **whole, memory=())
        keep = lambda new, old_: jnp.where(old.done.reshape(-1, *[1] * (new.ndim - 1)), old_, new)
        return jax.tree.map(keep, new, old)

    def score(self, ctx: Context, state: CanvasState) -> Array:
        """Logits f32[C, T, V] of every place, each of which sees the whole canvas and the source."""
        assert ctx.sources is not None and ctx.source_lengths is not None
        size = state.tokens.shape[1]
        embeds = soft_copy(ctx.model, ctx.params, ctx.sources, ctx.source_lengths, state.lengths, size)
        inputs = canvas_inputs(state.tokens, state.status != PAD, embeds)
        return ctx.readout(ctx.apply(inputs, Cache(slots=(), rows=state.memory)).hidden)

    def finalize(self, ctx: Context, state: CanvasState) -> DecodeOutput:
        """The best candidate of each row, up to the token that ends it (on the host)."""
        canvases = Canvases(state.tokens, state.status != PAD, state.log_probs, None, state.steps)
        return output_of_canvases(ctx, canvases, self.num_candidates)


@struct.dataclass
class Refining(Canvas):
    """Base of the methods that take several rounds over canvases of several lengths.

    Attributes:
      iterations: the most rounds.
      length_beam: how many of the most probable lengths are tried; the output is the one with the best mean
        log-probability, or the best of a `scorer` given to `decode`.
    """

    iterations: int = 4
    length_beam: int = struct.field(pytree_node=False, default=1)

    def __post_init__(self) -> None:
        check_whole("length_beam", self.length_beam, 1)

    def check(self, ctx: Context) -> None:
        """See `Canvas.check`. The number of rounds is traced: all share one program, but in a `DraftThenVerify`."""
        super().check(ctx)
        check_whole("iterations", self.iterations, 1)
        if self.iterations > _MOST_ROUNDS:
            raise ValueError(f"iterations={self.iterations}: must be at most {_MOST_ROUNDS:,}")

    @property
    def num_candidates(self) -> int:
        return self.length_beam


def spec_of(ctx: Context) -> CanvasSpec:
    """What the model's canvas looks like."""
    assert ctx.model.canvas is not None  # `check_model` has seen it
    return ctx.model.canvas


def check_model(name: str, runs: tuple[str, ...], model: ModelSpec) -> None:
    """ValueError where the method called `name`, which decodes models of the objectives `runs`, cannot run a model."""
    if model.canvas is None:
        raise ValueError(
            f"decoder: {name} fills a whole canvas, and this model writes from left to right; use Autoregressive, or "
            f"train a model with objective={runs[0]!r}"
        )
    if model.canvas.objective not in runs:
        raise ValueError(
            f"decoder: {name} runs models trained with {' or '.join(runs)}, and this one was trained with "
            f"{model.canvas.objective}; choose that one's decoder"
        )
    if model.encode is None:
        raise ValueError(f"decoder: {name} fills the canvas from a source, and this model has no encoder")


def check_canvas_sampling(name: str, ctx: Context) -> None:
    """ValueError where a setting counts the text before a token, which the method called `name` does not know."""
    for setting, value in HISTORY_OFF.items():
        if bool((getattr(ctx.sampling, setting) != value).any()):
            raise ValueError(
                f"sampling.{setting}: {name} writes many places at once, so there is no text before a token that it "
                f"could count; leave it at {value:g}"
            )


def canvas_widths(size: int) -> tuple[int, ...]:
    """How many places a round may take, ascending: the whole canvas, its half, and so on down to eight.

    >>> canvas_widths(64)
    (8, 16, 32, 64)
    """
    widths = [size]
    while widths[0] >= 2 * _NARROWEST:
        widths.insert(0, -(-widths[0] // 2))
    return tuple(widths)


def predict(
    ctx: Context,
    positions: Array,
    steps: Array,
    logits: Array,
    candidates: int = 1,
    emits_mask: bool = False,
) -> tuple[Array, Array]:
    """A token for every place, and the model's own log-probability of it, among the tokens that can stand there.

    Args:
      ctx: of the C rows.
      positions: i32[C, T], of the places, and
      steps: i32[C], how often they have been drawn: these key the noise.
      logits: f32[C, T, V].
      candidates: W, of each row.
      emits_mask: whether mask_id may be drawn, as CTC's blank is.

    Returns:
      i32[C, T] and f32[C, T]. Forbidden tokens are never drawn.
    """
    rows, size, vocab_size = logits.shape
    repeat = lambda leaf: jnp.repeat(leaf, size, axis=0)
    tokens = draw(
        jax.tree.map(repeat, ctx.sampling),
        ctx.seed,
        repeat(ctx.row_ids),
        positions.reshape(-1),
        process_places(ctx, logits, emits_mask).reshape(rows * size, vocab_size),
        candidates=repeat(jnp.arange(rows, dtype=jnp.int32) % candidates),
        steps=repeat(steps),
    ).reshape(rows, size)
    # What a model gives to its hidden id, as one trained with label smoothing does, would look like doubt.
    own = logits if emits_mask else jnp.where(jnp.arange(vocab_size) == spec_of(ctx).mask_id, -jnp.inf, logits)
    chosen = jnp.take_along_axis(own, tokens[:, :, None], axis=2)[:, :, 0]
    return tokens, chosen - jax.nn.logsumexp(own, axis=2)


def process_places(ctx: Context, logits: Array, emits_mask: bool = False) -> Array:
    """Logits f32[C, T, V] with bias, and -inf where a token may not be drawn; see `predict`."""
    is_mask = jnp.arange(logits.shape[2]) == spec_of(ctx).mask_id
    barred = ctx.rules.forbidden & ~is_mask if emits_mask else ctx.rules.forbidden | is_mask
    return jnp.where(barred[None, None], -jnp.inf, logits + ctx.rules.bias[None, None])


@jax.jit
def _endings(stops: StopArrays, tokens: Array, inside: Array) -> tuple[Array, Array]:
    """Where each canvas ends, i32[C], and why: behind the first token that ends a row, or at its last place."""

    def read(carry: tuple[Array, Array, Array], place: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        state, length, reason = carry
        token, here = place
        here = here & (reason == NOT_ENDED)
        state, why = ending(stops, state, token)
        return (state, length + here.astype(jnp.int32), jnp.where(here, why, reason)), None

    zeros = jnp.zeros(tokens.shape[:1], jnp.int32)
    first = (zeros, zeros, jnp.full_like(zeros, NOT_ENDED))
    _, length, reason = jax.lax.scan(read, first, (tokens.T, inside.T))[0]
    return length, jnp.where(reason == NOT_ENDED, LENGTH, reason)


@struct.dataclass
class Canvases:
    """What is written: tokens i32[C, L], where inside bool[C, L], log-probabilities f32[C, L] of the tokens; the texts'
    log-probabilities f32[C] to rank candidates by, None for the mean of the tokens'; and calls of the model i32[C]."""

    tokens: Array
    inside: Array
    log_probs: Array
    scores: Array | None
    steps: Array


def output_of_canvases(ctx: Context, canvases: Canvases, candidates: int) -> DecodeOutput:
    """Cuts canvases at their ends and ranks each row's candidates; those that are one text then become one."""
    length, reason = _endings(ctx.stops, canvases.tokens, canvases.inside)
    on_host: Any
    on_host, lengths, reasons, limits, starts = jax.device_get(
        (canvases, length, reason, ctx.limits, ctx.prompt_lengths)
    )
    size = max(int((limits - starts).max()), 0)
    new = np.arange(size)[None] < lengths[:, None]

    def cut(values: np.ndarray) -> np.ndarray:
        width = min(size, values.shape[1])
        whole = np.zeros((len(values), size), values.dtype)
        whole[:, :width] = values[:, :width]
        return np.where(new, whole, np.zeros((), values.dtype))

    tokens, log_probs, scores = cut(on_host.tokens), cut(on_host.log_probs), on_host.scores
    if scores is None:
        scores = np.where(lengths > 0, log_probs.sum(axis=1) / np.maximum(lengths, 1), np.float32(-np.inf))
    by_row = lambda values: values.reshape(len(values) // candidates, candidates, *values.shape[1:])
    if candidates > 1:
        scores = _merged(by_row(tokens), by_row(lengths), by_row(scores), add=on_host.scores is not None).reshape(-1)
        lengths = np.where(np.isfinite(scores), lengths, 0)
        new = np.arange(size)[None] < lengths[:, None]
        tokens, log_probs = cut(tokens), cut(log_probs)
    named = [[FINISH_REASONS[why] for why in row] for row in by_row(reasons)]
    found = Candidates(by_row(tokens), by_row(lengths), by_row(scores), by_row(log_probs), named)
    found = found.ranked_by(by_row(scores))
    calls = by_row(on_host.steps).max(axis=1)  # one call serves all candidates
    zeros = np.zeros_like(calls)
    kept = found.lengths[:, 0]
    return DecodeOutput(
        tokens=found.tokens[:, 0],
        lengths=kept,
        log_probs=found.log_probs[:, 0],
        finish_reason=[row[0] for row in found.finish_reason],
        stats=Stats(model_calls=calls, draft_calls=zeros, drafted=zeros, accepted=zeros, tokens=kept),
        candidates=found if candidates > 1 else None,
        lossless=False,
    )


def _merged(tokens: np.ndarray, lengths: np.ndarray, scores: np.ndarray, add: bool) -> np.ndarray:
    """The scores f32[B, W] of candidates, where equal texts count once: one has the sum, or best, of their probability
    and the others -inf."""
    merged = scores.copy()
    for row in range(len(scores)):
        first: dict[bytes, int] = {}
        for n in np.argsort(-scores[row], kind="stable"):
            text = tokens[row, n, : lengths[row, n]].tobytes()
            if text not in first:
                first[text] = n
                continue
            if add:
                merged[row, first[text]] = np.logaddexp(merged[row, first[text]], scores[row, n])
            merged[row, n] = -np.inf
    return merged
