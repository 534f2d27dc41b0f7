"""The loss of connectionist temporal classification: -log p of a target, summed over all paths that say it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoding_jax.ctc import Lattice
from decoding_jax.types import Array


def needed_frames(targets: Any, lengths: Any) -> Any:
    """The fewest frames that can say each target: a frame a token, and a blank between two equal ones.

    Args:
      targets: i32[B, U], of NumPy or JAX.
      lengths: i32[B], likewise.

    Returns:
      i32[B], likewise.
    """
    both = np.arange(1, max(targets.shape[1], 1), dtype=np.int32)[None] < lengths[:, None]
    return lengths + ((targets[:, 1:] == targets[:, :-1]) & both).sum(axis=1, dtype=lengths.dtype)


# optax.ctc_loss (0.2.8) has the same recursion, but cannot be held to what is promised here. It normalises again what
# it is given, and looks log p up by a product with a one-hot [B, U, V]: with V = 8,000, U = 32 and 8 rows of 96 frames
# the gradient takes 58 MB and 0.8 GFLOP beside 2 MB and next to none, one -inf makes every row NaN, and a TPU's default
# precision rounds log p to bfloat16. It can fall below 0, and mixes float32 into float64. Its rows with too few frames,
# about 1e5 each, could be masked. What is left to write is one scan over the lattice that the Viterbi alignment needs.
def ctc_loss(log_probs: Array, frames: Array, targets: Array, target_lengths: Array, blank: int) -> tuple[Array, Array]:
    """-log p(target | frames) by the forward recursion in log space (Graves et al. 2006, sec. 4.1).

    Args:
      log_probs: f32[B, T, V], normalised. One below -1e20 counts as -1e20, so that the loss stays finite.
      frames: i32[B], the frames of each row; the rest is padding.
      targets: i32[B, U]; no blanks. Padding may hold anything.
      target_lengths: i32[B].
      blank: its id.

    Returns:
      losses f32[B], in nats, at least 0; feasible bool[B], whether the frames suffice (`needed_frames`). Where they
      do not, the loss and its gradient are 0.
    """
    lattice = Lattice.of(log_probs, targets, target_lengths, blank)

    def forward(scores: Array, frame: tuple[Array, Array]) -> tuple[Array, None]:
        symbols, at = frame
        # logsumexp and not logaddexp: its weights sum to 1 even where rounding swallows log 2, so that no gradient
        # of states that nothing reaches can grow from frame to frame.
        after = jax.nn.logsumexp(lattice.ways(scores), axis=0) + symbols
        return jnp.where((at < frames)[:, None], after, scores), None

    places = jnp.arange(log_probs.shape[1], dtype=jnp.int32)
    scores, _ = jax.lax.scan(forward, lattice.start(), (jnp.moveaxis(lattice.scores, 1, 0), places))
    losses = -jax.nn.logsumexp(lattice.ends(scores), axis=0)
    # Rounding can take p past 1. The gradient is right all the same, so only the value is held at 0.
    losses += jax.lax.stop_gradient(jnp.maximum(losses, 0.0) - losses)
    feasible = needed_frames(targets, target_lengths) <= frames
    return jnp.where(feasible, losses, 0.0), feasible
