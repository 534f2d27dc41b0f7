"""Models without a cache: any causal function of a whole row, whatever library it is written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from decoding_jax.cache import read_slots, write_slots
from decoding_jax.types import Array, Cache, Features, Inputs, Model, PyTree

Forward = Callable[[PyTree, Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class UncachedApply:
    """`apply` of a forward function: remembers tokens instead of keys and values, and recomputes the row."""

    forward: Forward

    def __call__(self, params: PyTree, inputs: Inputs, cache: Any) -> Features:
        if inputs.slots is None:
            return Features(self.forward(params, inputs.tokens, inputs.positions, inputs.mask), (), cache)
        tokens = write_slots(cache.slots["tokens"], inputs.slots, inputs.tokens)
        positions = write_slots(cache.slots["positions"], inputs.slots, inputs.positions)
        batch, size = tokens.shape
        # What is committed stands in order, so slots see what is before them; this call says the rest.
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
        mask = write_slots(causal, inputs.slots, inputs.mask)
        hidden = read_slots(self.forward(params, tokens, positions, mask), inputs.slots)
        return Features(hidden, (), dataclasses.replace(cache, slots={"tokens": tokens, "positions": positions}))


def _token_cache(batch: int, capacity: int) -> Cache:
    zeros = jnp.zeros((batch, capacity), jnp.int32)
    return Cache(slots={"tokens": zeros, "positions": zeros})


def uncached_model(forward: Forward, params: PyTree, vocab_size: int, **fields: Any) -> Model:
    """A Model over a function that looks at a whole row.

    Every call recomputes the whole row, so this is for trying a model out and for short rows; a model with
    a cache of its own is a `Model` with `init_cache`.

    Args:
      forward: (params, tokens i32[B, S], positions i32[B, S], mask bool[B, S, S]) -> logits [B, S, V] (or
        features, with `readout`). Where the mask is False a position must not look; a function that is
        causal by itself may ignore it as long as no decoder drafts trees.
      params: pytree of arrays.
      vocab_size: V.
      **fields: further fields of `Model`.
    """
    return Model(apply=UncachedApply(forward), params=params, vocab_size=vocab_size, init_cache=_token_cache, **fields)
