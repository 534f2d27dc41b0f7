"""Acceptance of drafts: which proposed tokens become output.

`coupled` serves every deterministic draft (a lookup, the heads' best guesses, a fixed-point iteration):
the target draws its own token at each accepted node and the walk goes on in the child that equals it.
Everything emitted is the target's own draw with its own noise, so the output equals plain decoding's
token for token, at any temperature, whatever was proposed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from decoding_jax.rows import Context, Rows, commit, next_token
from decoding_jax.types import Array


class Nodes(NamedTuple):
    """The nodes scored by one call: 0 is the last committed token, the others are proposals.

    Attributes:
      tokens: i32[B, W].
      parents: i32[B, W], a smaller index each; node 0's entry is ignored.
      verifiable: bool[B, W], nodes that may be accepted; node 0's entry is ignored.
    """

    tokens: Array
    parents: Array
    verifiable: Array


class Verdict(NamedTuple):
    """What the walk emitted.

    Attributes:
      rows: the rows with the emitted tokens committed.
      path: i32[B, depth], the accepted node at depth 1, 2, ...; W past the last one.
      emitted: i32[B], emitted tokens (accepted ones and the one after them); 0 in rows that were done.
      accepted: i32[B], emitted tokens that had been proposed; one less, or all where a proposal ended the row.
    """

    rows: Rows
    path: Array
    emitted: Array
    accepted: Array


Walk = tuple[Rows, Array, Array, Array]  # rows, the node reached, which rows go on, accepted so far


def coupled(ctx: Context, rows: Rows, nodes: Nodes, logits: Array, depth: int) -> Verdict:
    """Walks each row's draft from its root, committing the target's own token at every node it passes.

    A masked scan over depth that looks at one [B, V] row of logits at a time: processors see exactly the
    accepted prefix, and a depth that no row reaches costs nothing.

    Args:
      ctx: the call.
      rows: the committed prefixes.
      nodes: what was scored.
      logits: f32[B, W, V], after each node.
      depth: the most proposals on any path.

    Returns:
      The verdict. Every row that was not done gains at least one token.
    """
    width = nodes.tokens.shape[1]

    def visit(rows: Rows, node: Array, alive: Array, accepted: Array) -> tuple[Rows, Array, Array, Array]:
        here = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        tokens, log_probs = next_token(ctx, rows, here)
        rows = commit(ctx, rows, tokens, log_probs, alive)
        child = (nodes.parents == node[:, None]) & (nodes.tokens == tokens[:, None]) & nodes.verifiable
        child = child.at[:, 0].set(False)
        found = alive & child.any(axis=1)
        node = jnp.where(found, jnp.argmax(child, axis=1).astype(jnp.int32), node)
        return rows, node, found & ~rows.done, accepted + found.astype(jnp.int32)

    def level(carry: Walk, _: None) -> tuple[Walk, Array]:
        carry = jax.lax.cond(carry[2].any(), visit, lambda *same: same, *carry)
        return carry, jnp.where(carry[2], carry[1], width)

    zeros = jnp.zeros_like(rows.length)
    (after, _, _, accepted), path = jax.lax.scan(level, (rows, zeros, ~rows.done, zeros), None, length=depth + 1)
    return Verdict(after, path[:depth].T, after.length - rows.length, accepted)
