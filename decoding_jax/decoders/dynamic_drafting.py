"""Growing a draft level by level, and by probability: what a `DynamicTree` does (Li et al., EAGLE-2, 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.decoders.prefix import Draft
from decoding_jax.masks import tree_mask
from decoding_jax.rows import Context, Rows
from decoding_jax.trees import DynamicTree, most_probable
from decoding_jax.types import Array, Inputs, PyTree


@struct.dataclass
class Siblings:
    """The children that were drawn of M nodes.

    Attributes:
      tokens: i32[B, M, S].
      possible: bool[B, M, S], which of them the draft's law can give.
      sure: bool[B, M, S], which of them may be drafted on from.
      log_probs: f32[B, M, S], the draft model's own.
      law: f32[B, M, V], the log, up to a constant, of the law that they were drawn from.
    """

    tokens: Array
    possible: Array
    sure: Array
    log_probs: Array
    law: Array


# (features of M nodes [B, M, D], the tokens on the way to each i32[B, M, K], their depth i32[]) -> their children
DrawSiblings = Callable[[Array, Array, Array], Siblings]


@struct.dataclass
class _Frontier:
    """The M nodes that are drafted on at one depth.

    Attributes:
      tokens, log_probs: i32[B, M], f32[B, M], of the whole path; -inf where there is no node.
      node: i32[B, M], their numbers; 0 is the root.
      paths: i32[B, M, K], the tokens on the way to each.
      reach: bool[B, M, W + 1], the places behind the root that each sees.
      going: bool[B, M].
    """

    tokens: Array
    log_probs: Array
    node: Array
    paths: Array
    reach: Array
    going: Array


@struct.dataclass
class _Nodes:
    """All that was drawn, a block of M * M nodes for each depth: tokens, log_probs, parents, places [B, C]."""

    tokens: Array
    log_probs: Array
    parents: Array
    places: Array


def feed_levels(
    feed: Callable[[Any, Array], Any], going: Callable[[Any], Array], start: Any, lengths: Array, depth: int
) -> tuple[Any, Array]:
    """Drafts one level after the other, from 1 to `depth` - 1, for as long as a row asks for the next one.

    Args:
      feed: from what is drafted so far and a level, i32[], to what is drafted with it.
      going: of what is drafted so far, bool[B], the rows that can be drafted on.
      start: the root, and level 0.
      lengths: i32[B], how deep each row drafts.
      depth: of the whole draft.

    Returns:
      What is drafted, and how many levels were fed, i32[].
    """
    if depth == 1:
        return start, jnp.int32(0)
    # A row that asks for no further level asks for none behind it.
    asked = lambda carry: (carry[0] < depth) & ((lengths > carry[0]) & going(carry[1])).any()
    level, drafted = jax.lax.while_loop(
        asked, lambda carry: (carry[0] + 1, feed(carry[1], carry[0])), (jnp.int32(1), start)
    )
    return drafted, level - 1


def grow(
    tree: DynamicTree, ctx: Context, rows: Rows, cache: PyTree, hidden: Array, lengths: Array, draw: DrawSiblings
) -> tuple[Draft, PyTree, Array, Array]:
    """Drafts the most probable tree behind each row's prefix; see `ModelDraft.draft` for what is returned.

    Args:
      tree: the sizes.
      ctx: the call, with the draft model in the place of the model.
      rows: the prefixes.
      cache: the draft model's, which holds them whole.
      hidden: [B, 1, D], the features of the roots.
      lengths: i32[B], how deep each row drafts.
      draw: draws the children of a level.
    """
    batch, width, root = len(rows.length), tree.width, rows.length - 1
    capacity = rows.tokens.shape[1] + tree.size

    def feed(carry: tuple[_Frontier, _Nodes, PyTree], depth: Array) -> tuple[_Frontier, _Nodes, PyTree]:
        frontier, nodes, cache = carry
        places = (depth - 1) * width + 1 + jnp.arange(width)
        reach = frontier.reach | (jnp.arange(tree.size + 1)[None] == places[:, None])[None]
        inputs = Inputs(
            tokens=frontier.tokens,
            positions=jnp.broadcast_to(root[:, None] + depth, (batch, width)),
            mask=tree_mask(root, reach, capacity),
            slots=jnp.where(frontier.going, root[:, None] + places[None], capacity),
        )
        out = ctx.apply(inputs, cache)
        at = jnp.where(frontier.going, frontier.node - 1, nodes.places.shape[1])
        put = lambda row, at: row.at[at].set(places, mode="drop")
        nodes = dataclasses.replace(nodes, places=jax.vmap(put)(nodes.places, at))
        return *expand(dataclasses.replace(frontier, reach=reach), nodes, out.hidden, depth), out.cache

    def expand(frontier: _Frontier, nodes: _Nodes, hidden: Array, depth: Array) -> tuple[_Frontier, _Nodes]:
        """Draws the children of the frontier, whose features are given, and chooses the next frontier among them."""
        columns = hidden.shape[1]
        found = draw(hidden, frontier.paths[:, :columns], depth)
        goes_on = frontier.going & (lengths > depth)[:, None] & ~rows.done[:, None]
        counts = goes_on[:, :columns, None] & found.possible
        # Rounding must not make a path more probable than its beginning.
        log_probs = frontier.log_probs[:, :columns, None] + jnp.minimum(found.log_probs, 0.0)
        log_probs = jnp.where(counts, log_probs, -jnp.inf)
        block = lambda x, fill: jnp.pad(
            x.reshape(batch, columns * width), ((0, 0), (0, (width - columns) * width)), constant_values=fill
        )
        tokens, log_probs = block(found.tokens, 0), block(log_probs, -jnp.inf)
        put = lambda buffer, x: jax.lax.dynamic_update_slice(buffer, x, (0, depth * width**2))
        nodes = dataclasses.replace(
            nodes,
            tokens=put(nodes.tokens, tokens),
            log_probs=put(nodes.log_probs, log_probs),
            parents=put(nodes.parents, jnp.repeat(frontier.node, width, axis=1)),
        )
        best, index = ctx.top_k(log_probs, width)
        take = lambda x: jnp.take_along_axis(x, index, axis=1)
        of_parent = lambda x: jnp.take_along_axis(x, (index // width)[:, :, None], axis=1)
        chosen = take(tokens)
        frontier = _Frontier(
            tokens=chosen,
            log_probs=best,
            node=depth * width**2 + index + 1,
            paths=of_parent(frontier.paths).at[:, :, depth].set(chosen),
            reach=of_parent(frontier.reach),
            going=(best > -jnp.inf) & take(block(found.sure, False)),
        )
        return frontier, nodes

    frontier, nodes = expand(*_root_alone(tree, rows), hidden, jnp.int32(0))
    still = lambda carry: carry[0].going.any(axis=1)
    (_, nodes, cache), fed = feed_levels(feed, still, (frontier, nodes, cache), lengths, tree.depth)
    index, parents = most_probable(nodes.log_probs, nodes.parents, tree.size, ctx.top_k)
    take = lambda x: jnp.take_along_axis(x, index, axis=1)
    verifiable = take(nodes.log_probs) > -jnp.inf
    draft = Draft(
        tokens=take(nodes.tokens),
        verifiable=verifiable,
        parents=jnp.where(verifiable, parents, 0),
        depth=tree.depth,
        siblings=tree.siblings,
    )
    return draft, cache, 1 + fed, take(nodes.places)


def _root_alone(tree: DynamicTree, rows: Rows) -> tuple[_Frontier, _Nodes]:
    batch, width = len(rows.length), tree.width
    first = jnp.arange(width) == 0
    root = jnp.arange(tree.size + 1) == 0
    everywhere = lambda x: jnp.broadcast_to(x, (batch, *x.shape))
    frontier = _Frontier(
        tokens=jnp.broadcast_to(rows.last, (batch, width)),
        log_probs=everywhere(jnp.where(first, 0.0, -jnp.inf)),
        node=jnp.zeros((batch, width), jnp.int32),
        paths=jnp.zeros((batch, width, tree.depth), jnp.int32),
        reach=everywhere(jnp.broadcast_to(root, (width, tree.size + 1))),
        going=everywhere(first),
    )
    shape = (batch, tree.depth * width**2)
    nodes = _Nodes(
        tokens=jnp.zeros(shape, jnp.int32),
        log_probs=jnp.full(shape, -jnp.inf),
        parents=jnp.zeros(shape, jnp.int32),
        places=jnp.full(shape, tree.size + 1, jnp.int32),
    )
    return frontier, nodes
