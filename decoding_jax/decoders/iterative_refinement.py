"""Iterative refinement: predict all places anew from the whole draft before (Lee et al. 2018)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from flax import struct

from decoding_jax.decoders.canvas import CanvasState, Refining
from decoding_jax.decoders.nonautoregressive import write_all
from decoding_jax.rows import Context
from decoding_jax.types import Array


@struct.dataclass
class IterativeRefinement(Refining):
    """Rewrites the canvas up to K times; a row is done when a round changes nothing.

    Attributes:
      iterations: K, the rounds at most; 1 is one-shot decoding.
      length_beam: how many of the most probable lengths are tried; the output is the one with the best mean
        log-probability, or the best of a `scorer` given to `decode`.
    """

    runs: ClassVar[tuple[str, ...]] = ("iterative_refinement",)

    def select(self, ctx: Context, state: CanvasState, logits: Array) -> CanvasState:
        """Rewrites every place."""
        new = write_all(ctx, state, logits, self.length_beam)
        # The first canvas is no draft: that it is written as it stood says nothing about the next round.
        same = (new.tokens == state.tokens).all(axis=1) & (state.steps > 1)
        return dataclasses.replace(new, done=same | (state.steps >= self.iterations))
