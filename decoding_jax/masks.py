"""Who sees whom: boolean masks over cache slots, True where a query may look."""

from __future__ import annotations

import math

import jax.numpy as jnp

from decoding_jax.types import Array


def causal_mask(positions: Array, capacity: int) -> Array:
    """Causal over a cache whose slots run with the positions: i32[B, T] -> bool[B, T, S]."""
    return jnp.arange(capacity)[None, None, :] <= positions[:, :, None]


def group_mask(positions: Array, group: int, capacity: int) -> Array:
    """Causal over groups: places i32[B, T] see all slots up to the end of their own group: bool[B, T, S].

    >>> group_mask(jnp.asarray([[1, 2]]), 2, 5)[0].astype(int).tolist()
    [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    """
    return jnp.arange(capacity)[None, None] < ((positions // group + 1) * group)[:, :, None]


def ancestors(parents: Array) -> Array:
    """Which nodes lie on the way from the root to each node, itself included.

    Args:
      parents: i32[B, W], each node's parent, a smaller index; node 0 is the root and its entry is ignored.

    Returns:
      bool[B, W, W], [node, ancestor].

    >>> ancestors(jnp.asarray([[0, 0, 1, 0]]))[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    """
    width = parents.shape[1]
    node = jnp.arange(width)
    step = (parents[:, :, None] == node[None, None]) & (node > 0)[None, :, None] | jnp.eye(width, dtype=bool)[None]
    reach = step.astype(jnp.int32)
    for _ in range(math.ceil(math.log2(max(width, 2)))):  # paths of 1, 2, 4, ... edges
        reach = jnp.minimum(reach @ reach, 1)
    return reach > 0


def tree_mask(root: Array, reach: Array, capacity: int) -> Array:
    """A draft tree in slots root, root + 1, ...: each node sees the prefix before the root and its ancestors.

    Args:
      root: i32[B], the slot of node 0.
      reach: bool[B, T, W], of the nodes that look, which of all W they look at (see `ancestors`).
      capacity: S.

    Returns:
      bool[B, T, S].
    """
    width = reach.shape[2]
    node = jnp.arange(capacity)[None, :] - root[:, None]  # which node a slot holds, if any
    inside = (node >= 0) & (node < width)
    index = jnp.broadcast_to(jnp.clip(node, 0, width - 1)[:, None, :], (*reach.shape[:2], capacity))
    seen = jnp.take_along_axis(reach, index, axis=2)
    return jnp.where(inside[:, None, :], seen, node[:, None, :] < 0)
