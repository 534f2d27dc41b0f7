"""Slots of a cache and of any other per-row buffer: writing, gathering, compacting, reordering.

Everything per row is a `vmap` of the one-row form: on a device mesh, scatters and gathers indexed by
[rows, slots] compile to all-gathers, and the vmapped ones do not. A slot that means "nowhere" is the
buffer's size S, never negative: `x.at[-1]` writes the last element, whatever the mode.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from decoding_jax.types import Array, Cache, PyTree


def write_slots(buffer: Array, slots: Array, values: Array) -> Array:
    """Writes values [B, T, ...] at slots i32[B, T] of buffer [B, S, ...]; slots of S or more are dropped.

    >>> write_slots(jnp.zeros((1, 4), int), jnp.asarray([[2, 4]]), jnp.asarray([[7, 9]]))[0].tolist()
    [0, 0, 7, 0]
    """
    write = lambda row, at, new: row.at[at].set(new.astype(row.dtype), mode="drop")
    return jax.vmap(write)(buffer, slots, values)


def read_slots(buffer: Array, slots: Array) -> Array:
    """Reads buffer [B, S, ...] at slots i32[B, T] (within 0..S-1): [B, T, ...]."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(buffer, slots)


def compact_path(cache: Cache, root: Array, path: Array) -> Cache:
    """Moves an accepted path next to its root, so that slots run with the positions again.

    Args:
      cache: slots leaves [B, S, ...].
      root: i32[B], the slot of the draft's root.
      path: i32[B, K], the slots of the accepted nodes by depth; S past the last one.

    A path [9, 12, S] under root 7 moves 9 to 8 and 12 to 9. Sources are read before anything is
    written, so overlapping moves are safe.
    """

    def move(leaf: Array) -> Array:
        size, depth = leaf.shape[1], path.shape[1]
        targets = jnp.where(path < size, root[:, None] + 1 + jnp.arange(depth)[None], size)
        return write_slots(leaf, targets, read_slots(leaf, path))

    return dataclasses.replace(cache, slots=jax.tree.map(move, cache.slots))


def reorder_candidates(tree: PyTree, parents: Array) -> PyTree:
    """Candidate j of row b becomes its old candidate parents[b, j], in every leaf [B * W, ...]; parents i32[B, W].

    Written within each row, so that rows on a mesh stay on their devices.
    """
    batch, count = parents.shape

    def move(leaf: Array) -> Array:
        grouped = leaf.reshape(batch, count, *leaf.shape[1:])
        return jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(grouped, parents).reshape(leaf.shape)

    return jax.tree.map(move, tree)
