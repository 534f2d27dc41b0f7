"""Speculative decoding with a second, smaller model (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct

from decoding_jax.cache import compact_path
from decoding_jax.decoders.drafting import AcceptanceHistory, ModelDraft, counted
from decoding_jax.decoders.prefix import Accepted, Draft, PrefixState
from decoding_jax.rows import Context, prefill
from decoding_jax.types import Array, Cache


@struct.dataclass
class _Carry:
    """The drafter's cache, the place in it of each proposal of the newest draft, and the rows' history."""

    cache: Cache
    places: Array
    history: AcceptanceHistory


@struct.dataclass
class Speculative(ModelDraft):
    """Drafts with the model given as `decode(..., drafter=...)` and verifies in one call of the target.

    The drafter keeps a cache of its own. Every round feeds it the last two committed tokens first, so it holds the
    committed prefix after full, partial and empty acceptance alike, without a call of its own for that.

    Attributes:
      num_draft: K, tokens drafted in a round, or with `adaptive` the most.
      acceptance: "coupled" gives plain decoding's tokens for the same seed; "rejection" its law, and keeps more
        drafts where the sampling is hot; "typical", or a `Typical` with thresholds of your own, keeps still more and
        is not lossless.
      tree: drafts several siblings at each place instead of a chain of `num_draft`: a `Tree`, or a `DynamicTree`,
        whose shape follows the drafter's probabilities.
      adaptive: each row drafts as deep as pays by its own history of acceptance; calls of the target then come in
        widths of every power of two, which takes longer to compile.
      draft_cost: with `adaptive`, a call of the drafter, in calls of the target on one position.
      position_cost: with `adaptive`, what each further position adds to a call of the target, in such calls;
        small on accelerators, 0.1 to 0.3 on CPUs.
      min_confidence: a row stops to draft behind a token that the drafter itself, at temperature 1 and before any
        processor, gives less than this probability (transformers' assistant_confidence_threshold); 0 is off.
    """

    takes_drafter = True

    def begin(self, ctx: Context) -> Any:
        """Prefills the drafter."""
        capacity = ctx.prompts.shape[1] + self.num_nodes
        unused = jnp.zeros((len(ctx.prompt_lengths), self.num_nodes), jnp.int32)
        return _Carry(prefill(ctx.of_drafter, capacity), unused, self.no_history(ctx))

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """What the drafter draws."""
        carry: _Carry = state.carry
        lengths = self.lengths(carry.history)
        draft, cache, calls, places = self.draft(ctx.of_drafter, state.rows, carry.cache, lengths, committed=2)
        carry = _Carry(cache, jnp.broadcast_to(places, carry.places.shape), carry.history)
        return draft, dataclasses.replace(counted(state, calls), carry=carry)

    def observe(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> Any:
        """Moves the accepted path in the drafter's cache, and remembers how much was kept."""
        carry: _Carry = state.carry
        cache = carry.cache
        if self.tree is not None:
            root = state.rows.length - result.emitted - 1
            capacity = state.rows.tokens.shape[1] + self.num_nodes
            accepted = result.path <= self.num_nodes
            place = jnp.take_along_axis(carry.places, jnp.where(accepted, result.path - 1, 0), axis=1)
            # The last accepted proposal may not have been fed; the next round feeds it.
            fed = accepted & (place <= self.num_nodes)
            cache = compact_path(cache, root, jnp.where(fed, root[:, None] + place, capacity))
        return dataclasses.replace(carry, cache=cache, history=self.learn(carry.history, state, draft, result))
