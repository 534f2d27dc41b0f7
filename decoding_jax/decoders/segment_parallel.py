"""Segments in parallel, in order inside, repeated ones deleted: RecoverSAT (Ran et al. 2020)."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.cache import write_slots
from decoding_jax.decoders.canvas import (
    Canvases,
    check_canvas_sampling,
    check_model,
    output_of_canvases,
    predict,
    spec_of,
)
from decoding_jax.rows import Context
from decoding_jax.segments import STRIDE, segment_mask, segment_positions
from decoding_jax.types import Array, Cache, DecodeOutput, Inputs


@struct.dataclass
class SegmentState:
    """What is written, place by place (see `segments`).

    Attributes:
      tokens: i32[B, L].
      log_probs: f32[B, L].
      fed: bool[B, L], the places whose input the cache holds.
      ended: bool[B, K], the segments that have their end.
      cache: of L slots.
      steps: i32[B], tokens of each segment so far, which are calls of the model.
      done: bool[B].
    """

    tokens: Array
    log_probs: Array
    fed: Array
    ended: Array
    cache: Cache
    steps: Array
    done: Array


@struct.dataclass
class SegmentParallel:
    """Writes the next token of every segment in one call, each knowing all that is written so far in all of them.

    A segment ends with an end-of-sequence token, or with the model's mask token, which deletes it: that is how a model
    takes back a segment that says again what another one says. How many there are is the model's, as it was trained.
    """

    runs: ClassVar[tuple[str, ...]] = ("segment_parallel",)

    def check(self, ctx: Context) -> None:
        """Refuses a model that was not trained for this, and settings that have no meaning here; ValueError."""
        check_model(type(self).__name__, self.runs, ctx.model)
        check_canvas_sampling(type(self).__name__, ctx)
        budget = int((ctx.limits - ctx.prompt_lengths).max())
        if spec_of(ctx).group > 1 and budget > STRIDE:
            raise ValueError(
                f"max_new_tokens={budget}: segments have room for {STRIDE} tokens each; SegmentParallel takes no more"
            )
        if not bool(ctx.stops.eos.any()):
            raise ValueError("eos_ids: SegmentParallel ends its segments with one, and the model names none")

    def init(self, ctx: Context) -> SegmentState:
        """Encodes the sources; nothing is fed yet."""
        batch, size = ctx.prompts.shape
        segments = spec_of(ctx).group
        shape = (batch, size * segments)
        return SegmentState(
            tokens=jnp.zeros(shape, jnp.int32),
            log_probs=jnp.zeros(shape, jnp.float32),
            fed=jnp.zeros(shape, bool),
            ended=jnp.zeros((batch, segments), bool),
            cache=ctx.init_cache(size * segments),
            steps=jnp.zeros((batch,), jnp.int32),
            done=ctx.limits <= ctx.prompt_lengths,
        )

    def step(self, ctx: Context, state: SegmentState) -> SegmentState:
        """One token of every segment that has not ended."""
        segments, capacity = spec_of(ctx).group, state.tokens.shape[1]
        places = state.steps[:, None] * segments + jnp.arange(segments)[None]
        going = ~state.ended & ~state.done[:, None]
        slots = jnp.where(going, places, capacity)
        fed = write_slots(state.fed, slots, going)
        before = jnp.take_along_axis(state.tokens, jnp.maximum(places - segments, 0), axis=1)
        positions = segment_positions(places, segments)
        out = ctx.apply(
            Inputs(
                tokens=jnp.where(state.steps[:, None] > 0, before, ctx.prompts[:, :1]),
                positions=positions,
                mask=segment_mask(places, segments, fed),
                slots=slots,
            ),
            state.cache,
        )
        tokens, log_probs = predict(ctx, places, jnp.zeros_like(state.steps), ctx.readout(out.hidden), emits_mask=True)
        ends = ctx.stops.eos[tokens] | (tokens == spec_of(ctx).mask_id)
        ended = state.ended | (going & ends)
        steps = state.steps + (~state.done).astype(jnp.int32)
        return SegmentState(
            tokens=write_slots(state.tokens, slots, tokens),
            log_probs=write_slots(state.log_probs, slots, log_probs),
            fed=fed,
            ended=ended,
            cache=out.cache,
            steps=steps,
            done=state.done | ended.all(axis=1) | (steps >= ctx.limits - ctx.prompt_lengths),
        )

    def finalize(self, ctx: Context, state: SegmentState) -> DecodeOutput:
        """The segments that were not deleted, one behind the other, and an end if all have theirs (on the host)."""
        return output_of_canvases(ctx, _joined(ctx, state), 1)


@jax.jit
def _joined(ctx: Context, state: SegmentState) -> Canvases:
    """The texts of the rows, i32[B, N]."""
    segments, size = spec_of(ctx).group, ctx.prompts.shape[1]
    batch = len(state.steps)
    by_segment = lambda x: x.reshape(batch, size, segments).swapaxes(1, 2)  # [B, K, N]
    tokens, log_probs, fed = map(by_segment, (state.tokens, state.log_probs, state.fed))
    deletes = fed & (tokens == spec_of(ctx).mask_id)
    content = fed & ~ctx.stops.eos[tokens] & ~deletes & ~deletes.any(axis=2, keepdims=True)
    flat = lambda x: x.reshape(batch, segments * size)
    place = jnp.cumsum(flat(content), axis=1, dtype=jnp.int32) - 1
    at = jnp.where(flat(content), place, size)
    count = flat(content).sum(axis=1, dtype=jnp.int32)
    whole = state.ended.all(axis=1)
    # The end of the text is that of its last segment.
    ends = flat(fed & ctx.stops.eos[tokens])
    at_end = ends.shape[1] - 1 - jnp.argmax(ends[:, ::-1], axis=1)[:, None]
    last = jnp.take_along_axis(flat(log_probs), at_end, axis=1)
    end = jnp.where(whole, count, size)[:, None]
    eos = jnp.broadcast_to(jnp.argmax(ctx.stops.eos).astype(jnp.int32), end.shape)
    join = lambda values, ending: write_slots(
        write_slots(jnp.zeros((batch, size), values.dtype), at, flat(values)), end, ending
    )
    length = jnp.minimum(count + whole.astype(jnp.int32), ctx.limits - ctx.prompt_lengths)
    inside = jnp.arange(size)[None] < length[:, None]
    tokens, log_probs = join(tokens, eos), join(log_probs, last)
    return Canvases(jnp.where(inside, tokens, 0), inside, jnp.where(inside, log_probs, 0.0), None, state.steps)
