"""Mask-predict: write all places, hide the least certain ones again, predict these anew (Ghazvininejad et al. 2019)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import struct

from decoding_jax.decoders.canvas import HIDDEN, PAD, WRITTEN, CanvasState, Refining, predict, spec_of
from decoding_jax.rows import Context
from decoding_jax.types import Array


@struct.dataclass
class MaskPredict(Refining):
    """Refines a canvas in T rounds, of which every one writes what is hidden and hides less than the one before.

    After round t of T, floor(n (T - t) / T) of a canvas's n places are hidden again: those whose tokens had the lowest
    probability when they were written (of equals the later ones). A row is done when nothing is hidden, so one with
    fewer places than rounds may need fewer.

    Attributes:
      iterations: T.
      length_beam: how many of the most probable lengths are tried; the output is the one with the best mean
        log-probability, or the best of a `scorer` given to `decode`.
    """

    iterations: int = 10

    runs: ClassVar[tuple[str, ...]] = ("mask_predict",)

    def select(self, ctx: Context, state: CanvasState, logits: Array) -> CanvasState:
        """Writes the hidden places and hides the least probable ones again."""
        tokens, log_probs = predict(ctx, state.positions, state.steps, logits, self.length_beam)
        hidden, inside = state.status == HIDDEN, state.status != PAD
        tokens = jnp.where(hidden, tokens, state.tokens)
        log_probs = jnp.where(hidden, log_probs, state.log_probs)
        quota = state.lengths * jnp.maximum(self.iterations - state.steps, 0) // self.iterations
        again = inside & (rank_ascending(jnp.where(inside, log_probs, jnp.inf)) < quota[:, None])
        return dataclasses.replace(
            state,
            tokens=jnp.where(again, spec_of(ctx).mask_id, tokens),
            status=jnp.where(inside, jnp.where(again, HIDDEN, WRITTEN), PAD).astype(jnp.uint8),
            log_probs=jnp.where(again, 0.0, log_probs),
            done=quota == 0,
        )


def rank_ascending(values: Array) -> Array:
    """The rank i32[B, T] of each value among its row's, 0 the lowest; of equals the last one ranks lowest.

    >>> rank_ascending(jnp.asarray([[0.5, 0.1, 0.5, 0.9]]))[0].tolist()
    [2, 0, 1, 3]
    """
    at = jnp.arange(values.shape[1])
    mine, other = values[:, :, None], values[:, None, :]
    before = (other < mine) | ((other == mine) & (at[None, None] > at[None, :, None]))
    return before.sum(axis=2, dtype=jnp.int32)
