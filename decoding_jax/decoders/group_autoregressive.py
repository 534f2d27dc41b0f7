"""Groups in order, parallel inside: the semi-autoregressive Transformer (SAT; Wang et al. 2018)."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.decoders.canvas import check_model, spec_of
from decoding_jax.decoders.prefix import StepRecord, output_of_rows
from decoding_jax.masks import group_mask
from decoding_jax.rows import Context, Rows, commit, next_token, start_rows
from decoding_jax.types import Array, Cache, DecodeOutput, Inputs


@struct.dataclass
class GroupState:
    """The rows, the cache of all groups but the last one, counters i32[B], and the last step's record."""

    rows: Rows
    cache: Cache
    model_calls: Array
    record: StepRecord

    @property
    def done(self) -> Array:
        return self.rows.done


@struct.dataclass
class GroupAutoregressive:
    """Predicts `group` tokens a call, each from all groups before it and none of its own.

    The group is the model's, as it was trained; with 1 it is autoregressive. Row g of the table is the call that writes
    group g of a, b, c, d, ... with a group of 2:

        fed         <bos> <bos>     a b     c d         position, slot   0 1   2 3   4 5
        predicted   a     b         c d     e f         sees the slots   0-1   0-3   0-5
    """

    grows_prefix: ClassVar[bool] = True
    runs: ClassVar[tuple[str, ...]] = ("group_autoregressive",)

    def check(self, ctx: Context) -> None:
        """Refuses a model that was not trained for this; ValueError."""
        check_model(type(self).__name__, self.runs, ctx.model)

    def init(self, ctx: Context) -> GroupState:
        """Encodes the sources; nothing is fed yet."""
        batch, size = ctx.prompts.shape
        zeros, none = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, 0), jnp.int32)
        cache = ctx.init_cache(size + spec_of(ctx).group)
        return GroupState(start_rows(ctx), cache, zeros, StepRecord(none, none.astype(bool), zeros, zeros))

    def step(self, ctx: Context, state: GroupState) -> GroupState:
        """One group of every row that is not done."""
        rows, group = state.rows, spec_of(ctx).group
        capacity = rows.tokens.shape[1] + group
        written = rows.length - ctx.prompt_lengths
        at = written[:, None] + jnp.arange(group)[None]
        before = jnp.take_along_axis(rows.tokens, jnp.maximum(rows.length[:, None] - group, 0) + at - at[:, :1], axis=1)
        out = ctx.apply(
            Inputs(
                tokens=jnp.where(written[:, None] > 0, before, ctx.prompts[:, :1]),
                positions=at,
                mask=group_mask(at, group, capacity),
                slots=jnp.where(rows.done[:, None], capacity, at),
            ),
            state.cache,
        )
        logits, length = ctx.readout(out.hidden), rows.length
        for place in range(group):
            law = logits[:, place]
            is_mask = jnp.arange(law.shape[1])[None] == spec_of(ctx).mask_id
            tokens = next_token(ctx, rows, jnp.where(is_mask, -jnp.inf, law))
            own = jnp.take_along_axis(law, tokens[:, None], axis=1)[:, 0] - jax.nn.logsumexp(law, axis=1)
            rows = commit(ctx, rows, tokens, own, ~rows.done)
        emitted = rows.length - length
        calls = state.model_calls + (~state.done).astype(jnp.int32)
        record = StepRecord(state.record.proposed, state.record.verifiable, jnp.zeros_like(emitted), emitted)
        return GroupState(rows, out.cache, calls, record)

    def finalize(self, ctx: Context, state: GroupState) -> DecodeOutput:
        """Cuts the new tokens out of the rows (on the host)."""
        zeros = jnp.zeros_like(state.model_calls)
        return output_of_rows(ctx, state.rows, state.model_calls, zeros, zeros, zeros, lossless=spec_of(ctx).group == 1)
