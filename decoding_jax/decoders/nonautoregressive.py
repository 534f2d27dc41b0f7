"""One-shot non-autoregressive decoding: one call of the model writes the whole output (Gu et al. 2018)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import struct

from decoding_jax.checks import check_whole
from decoding_jax.decoders.canvas import PAD, WRITTEN, Canvas, CanvasState, predict
from decoding_jax.rows import Context
from decoding_jax.types import Array


@struct.dataclass
class NonAutoregressive(Canvas):
    """Predicts every token of a canvas at once, each without knowing the others.

    Attributes:
      length_beam: how many of the most probable lengths are tried; the output is the one with the best mean
        log-probability, or the best of a `scorer` given to `decode`.
    """

    length_beam: int = struct.field(pytree_node=False, default=1)

    runs: ClassVar[tuple[str, ...]] = ("nonautoregressive",)

    def __post_init__(self) -> None:
        check_whole("length_beam", self.length_beam, 1)

    @property
    def num_candidates(self) -> int:
        return self.length_beam

    def select(self, ctx: Context, state: CanvasState, logits: Array) -> CanvasState:
        """Writes every place."""
        return write_all(ctx, state, logits, self.length_beam)


def write_all(ctx: Context, state: CanvasState, logits: Array, candidates: int) -> CanvasState:
    """Every place of every canvas as it is predicted now; the rows are done."""
    tokens, log_probs = predict(ctx, state.positions, state.steps, logits, candidates)
    inside = state.status != PAD
    return dataclasses.replace(
        state,
        tokens=jnp.where(inside, tokens, 0),
        status=jnp.where(inside, WRITTEN, state.status).astype(jnp.uint8),
        log_probs=jnp.where(inside, log_probs, 0.0),
        done=jnp.ones_like(state.done),
    )
