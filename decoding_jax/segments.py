"""Where the tokens of segments stand that are written side by side; training and decoding share it.

The tokens of K segments are laid out by time: all first tokens, then all second ones, and so on. Of abcde in two
segments abc and de, with $ for the end of a segment:

    place       0 1   2 3   4 5   6 7        position   segment * STRIDE + time
    time        0 0   1 1   2 2   3 3        sees       all places up to its own time that hold something
    token       a d   b e   c $   $ -        fed        what stands one time before, <bos> at time 0
"""

from __future__ import annotations

import jax.numpy as jnp

from decoding_jax.types import Array

STRIDE = 64  # between the positions of two segments


def segment_positions(places: Array, segments: int) -> Array:
    """The position of each place i32[...].

    >>> segment_positions(jnp.arange(4), 2).tolist()
    [0, 64, 1, 65]
    """
    return places % segments * STRIDE + places // segments


def segment_mask(places: Array, segments: int, fed: Array) -> Array:
    """Which slots each place i32[B, T] sees, of those that are fed bool[B, S]: bool[B, T, S]."""
    time = jnp.arange(fed.shape[1]) // segments
    return fed[:, None] & (time[None, None] <= (places // segments)[:, :, None])
