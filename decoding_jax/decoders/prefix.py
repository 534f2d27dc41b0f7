"""The prefix skeleton: grow a committed prefix by propose, score, verify, commit.

A method says what it proposes; scoring, acceptance, stops, statistics and the trace are written here
once. The slots and positions of a draft behind a prefix of length n (its last token is the root):

    node        0 (root)   1        2        3          a tree: 1 and 3 are siblings
    parent      -          0        1        0
    slot        n - 1      n        n + 1    n + 2      root + index
    position    n - 1      n        n + 1    n          root + depth

After the walk the accepted path is moved next to its root, so slots run with positions again. The
cache then holds everything committed but the last token, which is the next round's root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.cache import compact_path, read_slots
from decoding_jax.masks import ancestors, causal_mask, tree_mask
from decoding_jax.rows import Context, Rows, prefill, start_rows
from decoding_jax.types import FINISH_REASONS, Array, Cache, DecodeOutput, Inputs, PyTree, Stats
from decoding_jax.verify import Coupled, Nodes, Rule, verify


@struct.dataclass
class Draft:
    """What a method proposes behind the last committed token.

    Attributes:
      tokens: i32[B, W].
      verifiable: bool[B, W], the proposals that count; a row may have fewer than W.
      parents: None for a chain. For a tree i32[W] or i32[B, W], each proposal's parent: 0 is the last
        committed token, i + 1 is proposal i. A parent comes before its children, and siblings differ.
      log_q, siblings: as in `Nodes`.
      depth: the most proposals on any path.
      riders: how many of the proposals, the first ones, are never verified: they are scored in the same call
        for the method's own use.
    """

    tokens: Array
    verifiable: Array
    parents: Array | None = None
    log_q: Array | None = None
    depth: int = struct.field(pytree_node=False, kw_only=True)
    siblings: int = struct.field(pytree_node=False, default=1)
    riders: int = struct.field(pytree_node=False, default=0)

    @property
    def depths(self) -> Array:
        """i32[B or 1, W], how far each proposal is from the root."""
        if self.parents is None:
            return jnp.arange(1, self.tokens.shape[1] + 1)[None]
        parents = jnp.atleast_2d(self.parents)
        return ancestors(jnp.pad(parents, ((0, 0), (1, 0)))).sum(axis=2, dtype=jnp.int32)[:, 1:] - 1


@struct.dataclass
class Accepted:
    """What a round brought, for methods that learn from it.

    Attributes:
      emitted: i32[B], how many tokens; they are rows.tokens[length - emitted : length].
      accepted: i32[B], those of them that had been proposed.
      path: i32[B, depth], the accepted nodes by depth; W + 1 past the last one.
      hidden: [B, depth + 1, D], the features that each emitted token was drawn from.
      taps: the inner layers' outputs at the same places.
      scored: [B, W + 1, D], the features of all nodes; zeros for those that the round's width left out.
      logits: f32[B, W + 1, V], of all nodes, for methods that ask for them by `reads_logits`; else None.
    """

    emitted: Array
    accepted: Array
    path: Array
    hidden: Array
    taps: tuple[Array, ...]
    scored: Array
    logits: Array | None = None


@struct.dataclass
class StepRecord:
    """One step, for the trace: i32[B, W] proposals, which of them counted, how many were accepted and emitted."""

    proposed: Array
    verifiable: Array
    accepted: Array
    emitted: Array


@struct.dataclass
class PrefixState:
    """The rows, the model's cache, what the method carries, counters i32[B], and the last step's record."""

    rows: Rows
    cache: Cache
    carry: PyTree
    model_calls: Array
    draft_calls: Array
    drafted: Array
    accepted: Array
    record: StepRecord

    @property
    def done(self) -> Array:
        return self.rows.done


class Prefix:
    """Base of the methods that grow a prefix. Subclasses are flax.struct dataclasses.

    A method supplies `num_nodes` and `propose`, and where it remembers something between rounds also
    `begin` and `observe`. One that drafts with a second model says so in `takes_drafter`, and in `drafter_hint`
    what it lacks without one; one that learns from what the target says of every proposal says so in `reads_logits`
    (it then has one width and no riders).
    """

    grows_prefix = True
    takes_drafter = False
    drafter_hint = "a smaller model with the same vocabulary as drafter"
    reads_logits = False

    @property
    def rule(self) -> Rule:
        """How proposals are accepted."""
        return Coupled()

    @property
    def num_nodes(self) -> int:
        """W, the most proposals of a round."""
        return 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Proposals that a round's call may hold, ascending; a round takes the least that holds every row's."""
        nodes = self.num_nodes
        return tuple(sorted({0, nodes // 2, nodes}))

    def begin(self, ctx: Context) -> PyTree:
        """What the method carries from round to round."""
        del ctx
        return ()

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """The draft of this round, and the state with what drafting has changed: `carry`, `draft_calls`, `cache`."""
        raise TypeError(f"{type(self).__name__} does not say what it proposes")

    def observe(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> PyTree:
        """The carry after a round; `state` has the round's tokens committed."""
        del ctx, draft, result
        return state.carry

    def init(self, ctx: Context) -> PrefixState:
        """Prefills the prompts."""
        batch, size = ctx.prompts.shape
        zeros = jnp.zeros((batch,), jnp.int32)
        shape = (batch, self.num_nodes)
        return PrefixState(
            rows=start_rows(ctx),
            cache=prefill(ctx, size + self.num_nodes),
            carry=self.begin(ctx),
            model_calls=zeros,
            draft_calls=zeros,
            drafted=zeros,
            accepted=zeros,
            record=StepRecord(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), zeros, zeros),
        )

    def step(self, ctx: Context, state: PrefixState) -> PrefixState:
        """One round. Every row that is not done gains at least one token."""
        rows = state.rows
        draft, state = self.propose(ctx, state)
        nodes, node_depth, reach = _lay_out(rows, draft)
        within = (ctx.limits - rows.length)[:, None] >= node_depth
        nodes = dataclasses.replace(nodes, verifiable=nodes.verifiable & within & ~rows.done[:, None])

        used = jnp.where(nodes.verifiable, jnp.arange(nodes.tokens.shape[1]), 0).max()
        branch = sum((used > width).astype(jnp.int32) for width in self.widths[:-1])
        score = [
            lambda nodes, state, width=width: _score(ctx, state, nodes, node_depth, reach, width, draft, self)
            for width in self.widths
        ]
        verdict_rows, cache, result = jax.lax.switch(branch, score, nodes, state)

        verifiable = nodes.verifiable[:, 1:]
        state = dataclasses.replace(
            state,
            rows=verdict_rows,
            cache=cache,
            model_calls=state.model_calls + (~rows.done).astype(jnp.int32),
            drafted=state.drafted + verifiable.sum(axis=1, dtype=jnp.int32),
            accepted=state.accepted + result.accepted,
            record=StepRecord(draft.tokens, verifiable, result.accepted, result.emitted),
        )
        return dataclasses.replace(state, carry=self.observe(ctx, state, draft, result))

    def finalize(self, ctx: Context, state: PrefixState) -> DecodeOutput:
        """Cuts the new tokens out of the rows (on the host)."""
        counters = state.model_calls, state.draft_calls, state.drafted, state.accepted
        return output_of_rows(ctx, state.rows, *counters, lossless=self.rule.lossless)


def _lay_out(rows: Rows, draft: Draft) -> tuple[Nodes, Array, Array | None]:
    """Nodes with the root in front, their depths i32[B or 1, W + 1], and who descends from whom (None: a chain)."""
    batch, width = draft.tokens.shape
    index = jnp.arange(width + 1)
    if draft.parents is None:
        parents, depth, reach = jnp.broadcast_to(index - 1, (batch, width + 1)), index[None], None
    else:
        parents = jnp.pad(jnp.broadcast_to(draft.parents, (batch, width)), ((0, 0), (1, 0)))
        reach = ancestors(parents)
        depth = reach.sum(axis=2, dtype=jnp.int32) - 1
    nodes = Nodes(
        tokens=jnp.concatenate([rows.last, draft.tokens], axis=1),
        parents=parents,
        verifiable=jnp.pad(draft.verifiable, ((0, 0), (1, 0))),
        log_q=draft.log_q,
        siblings=draft.siblings,
    )
    return nodes, depth, reach


def _score(
    ctx: Context,
    state: PrefixState,
    nodes: Nodes,
    depth: Array,
    reach: Array | None,
    width: int,
    draft: Draft,
    method: Prefix,
) -> tuple[Rows, Cache, Accepted]:
    """Scores the root and the first `width` proposals in one call, verifies, and compacts the cache."""
    rows, size, whole = state.rows, width + 1, draft.tokens.shape[1] + 1
    nodes = dataclasses.replace(
        nodes, **{name: getattr(nodes, name)[:, :size] for name in ("tokens", "parents", "verifiable")}
    )
    capacity = rows.tokens.shape[1] + whole - 1
    root = rows.length - 1
    index = jnp.arange(size)[None]
    kept = (nodes.verifiable | (index <= draft.riders)) & ~rows.done[:, None]
    positions = root[:, None] + depth[:, :size]
    inputs = Inputs(
        tokens=nodes.tokens,
        positions=positions,
        mask=(causal_mask(positions, capacity) if reach is None else tree_mask(root, reach[:, :size, :size], capacity)),
        slots=jnp.where(kept, root[:, None] + index, capacity),
    )
    out = ctx.apply(inputs, state.cache)
    levels = min(width - draft.riders, draft.depth)
    verified, logits = _verified(nodes, ctx.readout, out.hidden, draft.riders)
    verdict = verify(ctx, rows, verified, logits, levels, method.rule)

    path = jnp.where(verdict.path < size - draft.riders, verdict.path + draft.riders, whole)
    cache = out.cache
    if reach is not None and levels:
        cache = compact_path(cache, root, jnp.where(path < whole, root[:, None] + path, capacity))
    drawn_from = jnp.pad(jnp.where(path < whole, path, 0), ((0, 0), (1, draft.depth - levels)))
    hidden, taps = jax.tree.map(lambda x: read_slots(x, drawn_from), (out.hidden, out.taps))
    path = jnp.pad(path, ((0, 0), (0, draft.depth - levels)), constant_values=whole)
    scored = jnp.pad(out.hidden, ((0, 0), (0, whole - size), (0, 0)))
    result = Accepted(verdict.emitted, verdict.accepted, path, hidden, taps, scored)
    return verdict.rows, cache, dataclasses.replace(result, logits=logits if method.reads_logits else None)


def _verified(nodes: Nodes, readout: Callable[[Array], Array], hidden: Array, riders: int) -> tuple[Nodes, Array]:
    """The nodes that are verified, without the riders, and their logits."""
    if not riders:
        return nodes, readout(hidden)
    cut = lambda x: jnp.concatenate([x[:, :1], x[:, riders + 1 :]], axis=1)
    parents = jnp.maximum(cut(nodes.parents) - riders, 0)
    nodes = dataclasses.replace(nodes, tokens=cut(nodes.tokens), parents=parents, verifiable=cut(nodes.verifiable))
    return nodes, readout(cut(hidden))


def output_of_rows(
    ctx: Context, rows: Rows, model_calls: Array, draft_calls: Array, drafts: Array, kept: Array, *, lossless: bool
) -> DecodeOutput:
    """The new part of each row as numpy arrays i32[B, budget]."""
    tokens, log_probs, length, reason = jax.device_get((rows.tokens, rows.log_probs, rows.length, rows.reason))
    start, limits = jax.device_get((ctx.prompt_lengths, ctx.limits))
    calls, second_calls, drafted, accepted = jax.device_get((model_calls, draft_calls, drafts, kept))
    lengths = length - start
    at = np.arange(max(int((limits - start).max()), 0))
    index = np.minimum(start[:, None] + at, tokens.shape[1] - 1)
    new = at < lengths[:, None]
    return DecodeOutput(
        tokens=np.where(new, np.take_along_axis(tokens, index, axis=1), 0),
        lengths=lengths,
        log_probs=np.where(new, np.take_along_axis(log_probs, index, axis=1), np.float32(0.0)),
        finish_reason=[FINISH_REASONS[r] for r in reason],
        stats=Stats(
            model_calls=calls,
            draft_calls=second_calls,
            drafted=drafted,
            accepted=accepted,
            tokens=lengths,
        ),
        lossless=lossless,
    )
