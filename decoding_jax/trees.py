"""Draft trees: from lists of paths and branching factors, by probability, and from several candidate chains."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from decoding_jax.checks import check_whole, is_whole
from decoding_jax.sampling import TopK
from decoding_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Tree:
    """The shape of a draft: node 0 is the last committed token, the others are proposals, level by level.

    Attributes:
      paths: of each proposal, in order: the rank among its siblings at every depth down to it. (1, 0) is the best
        child of the root's second child.

    Raises:
      ValueError: there is no path, a path is there twice or its parent is missing, or a rank is negative or is
        there without the ranks before it.

    >>> Tree(((0,), (0, 0), (1,))).parents
    (0, 0, 1)
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not all(isinstance(each, Sequence) for each in (self.paths, *self.paths)):
            raise ValueError(f"tree: {self.paths!r} is no list of paths; give some such as ((0,), (1,), (0, 0))")
        paths = [tuple(path) for path in self.paths]
        if not paths:
            raise ValueError("tree: there is no path; give at least ((0,),)")
        for path in paths:
            if not path or not all(map(is_whole, path)) or min(path) < 0:
                raise ValueError(f"tree: {path} is no path; give ranks of siblings from 0, one for each depth")
            if paths.count(path) > 1:
                raise ValueError(f"tree: the path {path} is there twice")
            if path[:-1] and path[:-1] not in paths:
                raise ValueError(f"tree: the path {path} has no parent; add {path[:-1]}")
            if path[-1] and (*path[:-1], path[-1] - 1) not in paths:
                raise ValueError(f"tree: the path {path} has no sibling of rank {path[-1] - 1}; ranks run from 0")
        object.__setattr__(self, "paths", tuple(sorted(paths, key=lambda path: (len(path), path))))

    @classmethod
    def of_branches(cls, branches: Sequence[int]) -> Tree:
        """Every node at depth d has branches[d] children: (1, 1, 1) is a chain.

        >>> Tree.of_branches((2, 1)).paths
        ((0,), (1,), (0, 0), (1, 0))
        """
        if not isinstance(branches, Sequence) or not branches or not all(is_whole(n) and n > 0 for n in branches):
            raise ValueError(f"branches={branches!r}: give the children of a node at each depth, at least 1")
        ranges = [range(count) for count in branches]
        return cls(tuple(path for d in range(len(ranges)) for path in itertools.product(*ranges[: d + 1])))

    @property
    def size(self) -> int:
        """W, the number of proposals."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """The most proposals on a path."""
        return len(self.paths[-1])

    @property
    def siblings(self) -> int:
        """The most children of a node."""
        return max(path[-1] for path in self.paths) + 1

    def nodes_within(self, depth: int) -> int:
        """How many proposals are at most that deep."""
        return sum(len(path) <= depth for path in self.paths)

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """Of each proposal, as nodes: 0 is the root, i + 1 is proposal i."""
        node = {path: i + 1 for i, path in enumerate(self.paths)} | {(): 0}
        return tuple(node[path[:-1]] for path in self.paths)

    @functools.cached_property
    def levels(self) -> tuple[np.ndarray, ...]:
        """The nodes at depth 0, 1, ...; they have neighbouring numbers."""
        depths = np.array([0, *map(len, self.paths)])
        return tuple(np.flatnonzero(depths == d) for d in range(self.depth + 1))

    @functools.cached_property
    def reach(self) -> np.ndarray:
        """bool[W + 1, W + 1], [node, ancestor], itself included."""
        paths = [(), *self.paths]
        return np.array([[node[: len(other)] == other for other in paths] for node in paths])


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A draft whose shape follows the drafter's own probabilities (Li et al., EAGLE-2, 2024).

    At every depth the `width` most probable nodes, each by the product of the probabilities on its path, get `width`
    children; of all nodes the `size` most probable are verified. Children are drawn: above temperature 0 they are not
    the most probable tokens, though ranked by the drafter's own probability.

    Attributes:
      size: W, the proposals of a round.
      depth: the most proposals on a path.
      width: nodes that are drafted on at every depth, and children of each.

    Raises:
      ValueError: a number is below 1, `size` is less than the nodes that are drafted on, (depth - 1) * width, or more
        than all that there are.
    """

    size: int = 24
    depth: int = 5
    width: int = 4

    def __post_init__(self) -> None:
        for name in ("size", "depth", "width"):
            check_whole(f"tree: {name}", getattr(self, name), 1)
        least, most = (self.depth - 1) * self.width, self.width + (self.depth - 1) * self.width**2
        if not least <= self.size <= most:
            raise ValueError(
                f"tree: size={self.size}: with depth={self.depth} and width={self.width} it must be from "
                f"{max(least, 1)}, the nodes that are drafted on, to {most}, all nodes"
            )

    @property
    def siblings(self) -> int:
        """The most children of a node."""
        return self.width

    def nodes_within(self, depth: int) -> int:
        """How many proposals are at most that deep in a tree that ends there."""
        return min(self.size, self.width + (depth - 1) * self.width**2)


def most_probable(log_probs: Array, parents: Array, count: int, top_k: TopK) -> tuple[Array, Array]:
    """The `count` most probable nodes of a tree; no path is more probable than its beginning, so parents are kept.

    Args:
      log_probs: f32[B, C], of each node's whole path; -inf where there is no node.
      parents: i32[B, C], of each: 0 is the root, i + 1 is node i; a parent comes before its children.
      count: at most C.
      top_k: finds the best of f32[B, C], of equal ones the first, which keeps a parent that is as probable as its
        child.

    Returns:
      index i32[B, count], which nodes, ascending, but those of probability 0 behind all others; and their parents among
      themselves, i32[B, count], 0 is the root.

    >>> from jax.lax import top_k
    >>> log_probs = jnp.log(jnp.asarray([[0.6, 0.3, 0.5, 0.1]]))
    >>> chosen, parents = most_probable(log_probs, jnp.asarray([[0, 0, 1, 1]]), 2, top_k)
    >>> chosen[0].tolist(), parents[0].tolist()
    ([0, 2], [0, 1])
    """
    size = log_probs.shape[1]
    best, index = top_k(log_probs, count)
    order = jnp.sort(jnp.where(best > -jnp.inf, index, index + size), axis=1)
    index = order % size
    parent = jnp.take_along_axis(parents, index, axis=1)
    # How many chosen nodes come before the parent, itself included.
    return index, (order[:, None, :] < parent[:, :, None]).sum(axis=2, dtype=jnp.int32)


def merge_chains(chains: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Candidate chains as one tree: those that begin alike share their beginning, so that siblings differ.

    Args:
      chains: i32[B, G, K].
      lengths: i32[B, G], how much of each counts.

    Returns:
      Of the proposals in the order chain by chain: tokens i32[B, G * K], parents i32[B, G * K] as in a Draft, and
      which of them are not copies of an earlier chain's and within their length, bool[B, G * K].

    >>> tokens, parents, new = merge_chains(jnp.asarray([[[5, 6], [5, 7]]]), jnp.asarray([[2, 2]]))
    >>> parents[0].tolist(), new[0].tolist()
    ([0, 1, 0, 1], [True, True, False, True])
    """
    batch, count, depth = chains.shape
    within = jnp.arange(depth)[None, None] < lengths[:, :, None]
    # same[b, i, j, d]: the chains i and j agree in their first d + 1 tokens.
    both = within[:, :, None] & within[:, None]
    same = jnp.cumprod((chains[:, :, None] == chains[:, None]) & both, axis=3, dtype=jnp.int32) > 0
    first = jnp.argmax(same, axis=2)  # the earliest chain that begins like i, up to each depth
    node = first * depth + jnp.arange(depth)[None, None] + 1
    parents = jnp.concatenate([jnp.zeros_like(node[:, :, :1]), node[:, :, :-1]], axis=2)
    new = within & (first == jnp.arange(count)[None, :, None])
    flat = lambda x: x.reshape(batch, count * depth)
    return flat(chains), flat(parents), flat(new)
