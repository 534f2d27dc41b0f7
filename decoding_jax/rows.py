"""What one call brings (`Context`), what its rows have become (`Rows`), and the commit of one token a row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from decoding_jax import sampling as sampling_lib
from decoding_jax.cache import write_slots
from decoding_jax.masks import causal_mask
from decoding_jax.sampling import SamplingArrays, TokenRules
from decoding_jax.stops import NOT_ENDED, StopArrays, ending
from decoding_jax.types import LENGTH, Array, Cache, Features, Inputs, ModelSpec, PyTree


@struct.dataclass
class Context:
    """Everything a call brings. All of it is traced but the last three, so changing a value compiles nothing.

    Attributes:
      params: the model's weights.
      prompts: i32[B, N], zero after each prompt; N holds prompt and output. An encoder-decoder's output begins
        behind a prompt of one token.
      prompt_lengths: i32[B], at least 1.
      limits: i32[B], the length at which a row is full (prompt + budget).
      row_ids: i32[B], what a row's randomness is keyed by.
      seed: u32[].
      sampling: settings per row.
      rules: settings per token.
      stops: what ends a row.
      sources: i32[B, M], what an encoder-decoder encodes; None for other models.
      source_lengths: i32[B].
      lengths: i32[B], how long the outputs are to be, where a call says so; else None.
      drafter_params: the weights of a second model that drafts.
      model: the static part of the model.
      drafter: the static part of the second model; None where there is none.
      rows_sharding: how rows are split over devices; None on one device.
    """

    params: PyTree
    prompts: Array
    prompt_lengths: Array
    limits: Array
    row_ids: Array
    seed: Array
    sampling: SamplingArrays
    rules: TokenRules
    stops: StopArrays
    sources: Array | None = None
    source_lengths: Array | None = None
    lengths: Array | None = None
    drafter_params: PyTree = ()
    model: ModelSpec = struct.field(pytree_node=False, kw_only=True)
    drafter: ModelSpec | None = struct.field(pytree_node=False, default=None)
    rows_sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)

    @property
    def of_drafter(self) -> Context:
        """The same call with the second model in the place of the model."""
        assert self.drafter is not None
        return dataclasses.replace(self, params=self.drafter_params, model=self.drafter)

    def apply(self, inputs: Inputs, cache: Any) -> Features:
        if self.model.vocab_size < self.rules.bias.shape[0]:  # a drafter's table may be padded less than the target's
            inputs = inputs._replace(tokens=jnp.minimum(inputs.tokens, self.model.vocab_size - 1))
        return self.model.apply(self.params, inputs, cache)

    def init_cache(self, capacity: int) -> Cache:
        """A cache with `capacity` slots for each row, empty but for the memory of its encoded source."""
        cache = self.model.init_cache(self.prompts.shape[0], capacity)
        return cache if self.model.encode is None else dataclasses.replace(cache, rows=self.encode())

    def encode(self) -> PyTree:
        """The memory of every row's source."""
        assert self.model.encode is not None  # of an encoder-decoder
        return self.model.encode(self.params, self.sources, self.source_lengths)

    def readout(self, hidden: Array) -> Array:
        # Softmax, log-probabilities and noise are float32 whatever the model computes in.
        return self.model.readout(self.params, hidden).astype(jnp.float32)

    def settle(self, state: PyTree) -> PyTree:
        """The same state in the one form that all programs take: no weak types, rows split over the devices."""
        state = jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), state)
        sharding = self.rows_sharding
        if sharding is None:
            return state
        # Only the rows: other axes, such as the heads of a cache, stay split as the model split them.
        free = jax.sharding.PartitionSpec.UNCONSTRAINED

        def constrain(leaf: Array) -> Array:
            spec = jax.sharding.PartitionSpec(*sharding.spec, *[free] * (leaf.ndim - 1))
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(sharding.mesh, spec))

        return jax.tree.map(constrain, state)

    def top_k(self, values: Array, count: int) -> tuple[Array, Array]:
        """`lax.top_k` of values [B, n], each row on its own device (XLA would gather the batch for it)."""

        def of_rows(rows: Array) -> tuple[Array, Array]:
            best, index = jax.lax.top_k(rows, count)
            return best, index

        if self.rows_sharding is not None:
            spec, mesh = self.rows_sharding.spec, self.rows_sharding.mesh
            of_rows = jax.shard_map(of_rows, mesh=mesh, in_specs=spec, out_specs=spec)
        return of_rows(values)

    def repeat_rows(self, times: int) -> Context:
        """Each row `times` times in a row, for decoders that keep several candidates of it."""
        repeat = lambda tree: jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), tree)
        return dataclasses.replace(self, **{name: repeat(getattr(self, name)) for name in ROW_FIELDS})


_LARGEST_CHUNK = 128  # positions of a prefill call

# Those with a row axis.
ROW_FIELDS = ("prompts", "prompt_lengths", "limits", "row_ids", "sampling", "sources", "source_lengths", "lengths")


@struct.dataclass
class Rows:
    """The committed part of each row.

    Attributes:
      tokens: i32[B, N], prompt, then output, then zeros.
      log_probs: f32[B, N], the model's own log-probability of each output token, 0 elsewhere.
      length: i32[B], how much is committed; the cache holds all of it but the last token.
      stop_state: i32[B], states of the stop-string automaton.
      reason: i32[B], why a row ended (EOS, STOP, LENGTH) or NOT_ENDED.
    """

    tokens: Array
    log_probs: Array
    length: Array
    stop_state: Array
    reason: Array

    @property
    def done(self) -> Array:
        return self.reason != NOT_ENDED

    @property
    def last(self) -> Array:
        """i32[B, 1], the last committed token."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)


def start_rows(ctx: Context) -> Rows:
    """Rows that hold their prompts; one without a budget is done."""
    zeros = jnp.zeros_like(ctx.prompt_lengths)
    return Rows(
        tokens=ctx.prompts,
        log_probs=jnp.zeros(ctx.prompts.shape, jnp.float32),
        length=ctx.prompt_lengths,
        stop_state=zeros,
        reason=jnp.where(ctx.prompt_lengths >= ctx.limits, LENGTH, NOT_ENDED),
    )


def prefill(ctx: Context, capacity: int) -> Cache:
    """A cache that holds every prompt but its last token, filled in chunks of positions.

    No logits are made. The last token is held back for the first step, so that every token is drawn by
    the same code, whatever the prompt.
    """
    batch, size = ctx.prompts.shape
    cache = ctx.init_cache(capacity)
    held = ctx.prompt_lengths - 1
    # Half the buffer: a chunk much longer than the prompts would be wasted work, a short one more calls.
    chunk = min(size // 2, _LARGEST_CHUNK)

    def fill(index: Array, cache: Cache) -> Cache:
        positions = jnp.broadcast_to(index * chunk + jnp.arange(chunk), (batch, chunk))
        inputs = Inputs(
            tokens=jnp.take_along_axis(ctx.prompts, jnp.minimum(positions, size - 1), axis=1),
            positions=positions,
            mask=causal_mask(positions, capacity),
            slots=jnp.where(positions < held[:, None], positions, capacity),
        )
        return ctx.apply(inputs, cache).cache

    return jax.lax.fori_loop(0, -(-held.max() // chunk), fill, cache)


def processed_logits(ctx: Context, rows: Rows, logits: Array) -> Array:
    """Logits f32[B, V] after each row's last token, with bias, penalties and what is forbidden."""
    return sampling_lib.process_logits(
        ctx.sampling, ctx.rules, logits, rows.tokens, ctx.prompt_lengths, rows.length, ctx.stops.ends
    )


def next_token(ctx: Context, rows: Rows, logits: Array) -> Array:
    """The target's own draw i32[B] after each row's prefix, given the model's logits f32[B, V] there."""
    processed = processed_logits(ctx, rows, logits)
    return sampling_lib.draw(ctx.sampling, ctx.seed, ctx.row_ids, rows.length, processed)


def commit(ctx: Context, rows: Rows, tokens: Array, log_probs: Array, active: Array) -> Rows:
    """Appends one token to each active row and ends the rows that it ends.

    An end-of-sequence or stop wins over a full budget. Rows that are done or not active are untouched.

    Args:
      ctx: the call.
      rows: the prefixes.
      tokens: i32[B].
      log_probs: f32[B].
      active: bool[B].
    """
    active = active & ~rows.done
    at = jnp.where(active, rows.length, rows.tokens.shape[1])[:, None]
    stop_state, reason = ending(ctx.stops, rows.stop_state, tokens)
    length = rows.length + active.astype(jnp.int32)
    full = jnp.where(length >= ctx.limits, LENGTH, NOT_ENDED)
    return Rows(
        tokens=write_slots(rows.tokens, at, tokens[:, None]),
        log_probs=write_slots(rows.log_probs, at, log_probs[:, None]),
        length=length,
        stop_state=jnp.where(active, stop_state, rows.stop_state),
        reason=jnp.where(active, jnp.where(reason == NOT_ENDED, full, reason), rows.reason),
    )
