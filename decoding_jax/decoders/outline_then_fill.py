"""An outline token by token, then all that lies between its tokens at once (compare Insertion Transformer, 2019)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.cache import write_slots
from decoding_jax.decoders.canvas import HIDDEN, PAD, WRITTEN, Canvas, CanvasState, predict, spec_of
from decoding_jax.masks import causal_mask
from decoding_jax.rows import Context
from decoding_jax.types import Array, Cache, Inputs


@struct.dataclass
class Outline:
    """An outline in the making, each token at its place in the canvas.

    Attributes:
      tokens: i32[B, L], 0 where nothing stands.
      log_probs: f32[B, L].
      there: bool[B, L], where a token stands.
      length: i32[B], the places up to the newest token.
      newest: i32[B], the newest token, <bos> at first.
      count: i32[B], how many tokens there are.
      cache: of the tokens one behind the other.
      ended: bool[B].
    """

    tokens: Array
    log_probs: Array
    there: Array
    length: Array
    newest: Array
    count: Array
    cache: Cache
    ended: Array


@struct.dataclass
class OutlineThenFill(Canvas):
    """Writes an outline from left to right, each token with the number of places left free before it, and fills these.

    A call of the outline costs what one of plain decoding does, and there is one more for all the gaps together. Which
    tokens make an outline is the model's, as it was trained. A token that would stand behind the budget ends it.
    """

    runs: ClassVar[tuple[str, ...]] = ("outline_then_fill",)
    needs_lengths: ClassVar[bool] = False

    def init(self, ctx: Context) -> CanvasState:
        """Encodes the sources and writes the outlines: places between their tokens are hidden."""
        size = ctx.prompts.shape[1]
        outline = _write_outline(ctx)
        limits = ctx.limits - ctx.prompt_lengths
        complete = ctx.stops.ends[outline.newest] & (outline.length > 0)
        lengths = jnp.where(complete, outline.length, limits)
        inside = jnp.arange(size)[None] < lengths[:, None]
        hidden = inside & ~outline.there
        return CanvasState(
            tokens=jnp.where(hidden, spec_of(ctx).mask_id, outline.tokens),
            status=jnp.where(hidden, HIDDEN, jnp.where(inside, WRITTEN, PAD)).astype(jnp.uint8),
            log_probs=outline.log_probs,
            memory=outline.cache.rows,
            carry=(),
            steps=outline.count,
            done=~hidden.any(axis=1),
        )

    def select(self, ctx: Context, state: CanvasState, logits: Array) -> CanvasState:
        """Writes all hidden places."""
        tokens, log_probs = predict(ctx, state.positions, state.steps, logits)
        hidden = state.status == HIDDEN
        return dataclasses.replace(
            state,
            tokens=jnp.where(hidden, tokens, state.tokens),
            status=jnp.where(hidden, WRITTEN, state.status).astype(jnp.uint8),
            log_probs=jnp.where(hidden, log_probs, state.log_probs),
            done=jnp.ones_like(state.done),
        )


def _write_outline(ctx: Context) -> Outline:
    """The outlines of all rows, token by token."""
    batch, size = ctx.prompts.shape
    zeros = jnp.zeros((batch,), jnp.int32)
    first = Outline(
        tokens=jnp.zeros((batch, size), jnp.int32),
        log_probs=jnp.zeros((batch, size), jnp.float32),
        there=jnp.zeros((batch, size), bool),
        length=zeros,
        newest=ctx.prompts[:, 0],
        count=zeros,
        cache=ctx.init_cache(size),
        ended=ctx.limits <= ctx.prompt_lengths,
    )
    step = lambda outline: _next_token(ctx, outline)
    return jax.lax.while_loop(lambda outline: ~outline.ended.all(), step, ctx.settle(first))


def _next_token(ctx: Context, outline: Outline) -> Outline:
    """One more token of every outline that has not ended, and the gap before it."""
    assert ctx.model.gap_logits is not None  # of a model with this objective
    size = outline.tokens.shape[1]
    at = outline.count[:, None]
    inputs = Inputs(
        tokens=outline.newest[:, None],
        positions=at,
        mask=causal_mask(at, size),
        slots=jnp.where(outline.ended[:, None], size, at),
    )
    out = ctx.apply(inputs, outline.cache)
    tokens, log_probs = predict(ctx, at, jnp.zeros_like(outline.count), ctx.readout(out.hidden))
    gaps = ctx.model.gap_logits(ctx.params, out.hidden)[:, 0].argmax(axis=1).astype(jnp.int32)
    token, place = tokens[:, 0], outline.length + gaps
    fits = ~outline.ended & (place < ctx.limits - ctx.prompt_lengths)
    slot = jnp.where(fits, place, size)[:, None]
    keep = lambda new, old: jnp.where(fits, new, old)
    return Outline(
        tokens=write_slots(outline.tokens, slot, tokens),
        log_probs=write_slots(outline.log_probs, slot, log_probs),
        there=write_slots(outline.there, slot, fits[:, None]),
        length=keep(place + 1, outline.length),
        newest=keep(token, outline.newest),
        count=outline.count + (~outline.ended).astype(jnp.int32),
        cache=out.cache,
        ended=outline.ended | ~fits | ctx.stops.ends[token],
    )
