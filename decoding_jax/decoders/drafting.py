"""Drafting with a model, level by level: what `Speculative` and `SelfSpeculative` share.

The draft model feeds the nodes of one level of the draft's shape and draws the next level from what it says of
them. A chain is a shape whose levels have one node. All levels but the first are one loop, so a longer draft compiles
no longer; it ends with the last level that a row asks for. A `DynamicTree` is grown in `dynamic_drafting`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.cache import read_slots
from decoding_jax.checks import check_flag, check_number, check_whole
from decoding_jax.decoders.dynamic_drafting import Siblings, feed_levels, grow
from decoding_jax.decoders.prefix import Accepted, Draft, Prefix, PrefixState
from decoding_jax.masks import causal_mask, tree_mask
from decoding_jax.rows import Context, Rows
from decoding_jax.sampling import draw_siblings, process_logits
from decoding_jax.trees import DynamicTree, Tree
from decoding_jax.types import Array, Inputs, PyTree
from decoding_jax.verify import Rejection, Rule, as_rule


@struct.dataclass
class AcceptanceHistory:
    """How often a row's drafts were kept, older rounds counting less: f32[B] each."""

    kept: Array
    tried: Array


@struct.dataclass
class ModelDraft(Prefix):
    """Base of the methods that draft with a model. See `Speculative` for the settings."""

    num_draft: int = struct.field(pytree_node=False, default=5)
    acceptance: str | Rule = "coupled"
    tree: Tree | DynamicTree | None = struct.field(pytree_node=False, default=None)
    adaptive: bool = struct.field(pytree_node=False, default=False)
    draft_cost: float | Array = 0.1
    position_cost: float | Array = 0.02
    min_confidence: float | Array = 0.0

    def __post_init__(self) -> None:
        check_whole("num_draft", self.num_draft, 1, "Autoregressive drafts nothing")
        check_flag("adaptive", self.adaptive)
        if not isinstance(self.tree, Tree | DynamicTree | None):
            raise ValueError(
                f"tree={self.tree!r}: give a Tree, such as dj.Tree.of_branches((2, 1, 1)), or a DynamicTree"
            )
        object.__setattr__(self, "acceptance", as_rule(self.acceptance))
        if isinstance(self.tree, DynamicTree) and isinstance(self.rule, Rejection):
            raise ValueError(
                "acceptance='rejection': a DynamicTree keeps tokens for their probability, which biases what rejection "
                "relies on; use acceptance='coupled', or a Tree"
            )

    @property
    def shape(self) -> Tree | DynamicTree:
        """The draft's shape: the tree, or a chain of `num_draft`."""
        return self.tree or Tree.of_branches((1,) * self.num_draft)

    @property
    def num_nodes(self) -> int:
        """W: the nodes of the tree, or K."""
        return self.shape.size

    @property
    def rule(self) -> Rule:
        """How proposals are accepted: what `acceptance` says."""
        return as_rule(self.acceptance)

    def check(self, ctx: Context) -> None:
        """ValueError where a number is out of its range, or a node has more children than there are tokens."""
        check_number("min_confidence", self.min_confidence, most=1.0)
        check_number("draft_cost", self.draft_cost)
        check_number("position_cost", self.position_cost)
        if check := getattr(self.rule, "check", None):
            check()
        if (most := self.shape.siblings) > ctx.model.vocab_size:
            raise ValueError(
                f"tree: a node has {most} children, and the vocabulary only {ctx.model.vocab_size} ids; give fewer"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """As of any draft; where rows choose their depth finer, as a power of two each."""
        if not self.adaptive:
            return super().widths
        powers = (2**i for i in range(self.num_nodes.bit_length()))
        return tuple(sorted({0, *powers, self.num_nodes}))

    def no_history(self, ctx: Context) -> AcceptanceHistory:
        """The history of rows that have none yet: as if one token had been tried, and 0.7 of it kept."""
        ones = jnp.ones(ctx.prompt_lengths.shape, jnp.float32)
        return AcceptanceHistory(kept=ones * 0.7, tried=ones)

    def lengths(self, history: AcceptanceHistory) -> Array:
        """i32[B], how deep each row drafts: the depth that gains the most tokens for its time, by its history.

        With a chance a of keeping each token, k drafts give (1 - a^(k + 1)) / (1 - a) tokens (Leviathan et al. 2023)
        and cost 1 + k draft_cost + n position_cost calls, where n is the least of `widths` that holds the draft.
        """
        depth = self.shape.depth
        if not self.adaptive:
            return jnp.full(history.kept.shape, depth, jnp.int32)
        chance = history.kept / history.tried
        drafts = jnp.arange(1, depth + 1, dtype=jnp.float32)
        gained = 1.0 + jnp.cumsum(chance[:, None] ** drafts[None], axis=1)
        nodes = [min(w for w in self.widths if w >= self.shape.nodes_within(k)) for k in range(1, depth + 1)]
        cost = 1.0 + drafts * self.draft_cost + jnp.asarray(nodes, jnp.float32) * self.position_cost
        return (jnp.argmax(gained / cost[None], axis=1) + 1).astype(jnp.int32)

    def learn(
        self, history: AcceptanceHistory, state: PrefixState, draft: Draft, result: Accepted
    ) -> AcceptanceHistory:
        """The history with the newest round; rows that took no part keep theirs, and all where it is not used."""
        if not self.adaptive:
            return history
        drafted = jnp.where(state.record.verifiable, draft.depths, 0).max(axis=1)
        # The first token that was not kept was tried; those behind it were not.
        tried = jnp.minimum(result.accepted + 1, drafted).astype(jnp.float32)
        kept = result.accepted.astype(jnp.float32)
        mix = lambda old, new: jnp.where(result.emitted > 0, _FORGET * old + new, old)
        return AcceptanceHistory(kept=mix(history.kept, kept), tried=mix(history.tried, tried))

    def draft(
        self, ctx: Context, rows: Rows, cache: PyTree, lengths: Array, committed: int
    ) -> tuple[Draft, PyTree, Array, Array]:
        """Drafts behind each row's prefix.

        Args:
          ctx: the call, with the draft model in the place of the model.
          rows: the prefixes.
          cache: the draft model's, which holds all but the last `committed` tokens of each row.
          lengths: i32[B], how deep each row drafts.
          committed: 1 or 2.

        Returns:
          The draft; the cache; how many calls of the draft model were made, i32[]; and the place behind the root in
          the cache of each proposal that was drafted on, i32[B or 1, W].
        """
        root = rows.length - 1
        capacity = rows.tokens.shape[1] + self.num_nodes
        lengths = jnp.minimum(lengths, ctx.limits - rows.length)  # no call for what lies behind the budget
        # The first call feeds what the cache does not hold for certain; writing a slot again changes nothing.
        at = root[:, None] - jnp.arange(committed)[None, ::-1]
        inputs = Inputs(
            tokens=read_slots(rows.tokens, jnp.maximum(at, 0)),
            positions=at,
            mask=causal_mask(at, capacity),
            slots=jnp.where((at >= 0) & ~rows.done[:, None], at, capacity),
        )
        out = ctx.apply(inputs, cache)
        first = out.hidden[:, -1:]
        if isinstance(self.shape, DynamicTree):
            draw = functools.partial(self.draw_children, ctx, rows)
            return grow(self.shape, ctx, rows, out.cache, first, lengths, draw)
        draft, cache, calls = self._draft_levels(self.shape, ctx, rows, out.cache, first, lengths)
        return draft, cache, calls, jnp.arange(1, self.shape.size + 1)[None]

    def _draft_levels(
        self, shape: Tree, ctx: Context, rows: Rows, cache: PyTree, hidden: Array, lengths: Array
    ) -> tuple[Draft, PyTree, Array]:
        """Drafts a tree of a fixed shape, from the root's features [B, 1, D] on."""
        root, capacity = rows.length - 1, rows.tokens.shape[1] + shape.size
        width = max(map(len, shape.levels[1:]))
        plan = _plan(shape, width)
        nothing = self._nothing_drawn(shape, ctx, rows, width)
        drafting = self._draw(shape, ctx, rows, lengths, hidden, nothing, jax.tree.map(lambda x: x[0], plan))

        def feed(carry: tuple[_Drafting, PyTree], depth: Array) -> tuple[_Drafting, PyTree]:
            drafting, cache = carry
            level = jax.tree.map(lambda x: x[depth], plan)
            node = level["node"][None]
            reach = jnp.broadcast_to(level["reach"], (len(rows.length), *level["reach"].shape))
            inputs = Inputs(
                tokens=drafting.level,
                positions=jnp.broadcast_to(root[:, None] + level["depth"], drafting.level.shape),
                mask=tree_mask(root, reach, capacity),
                slots=jnp.where(drafting.going & (node <= shape.size), root[:, None] + node, capacity),
            )
            out = ctx.apply(inputs, cache)
            return self._draw(shape, ctx, rows, lengths, out.hidden, drafting, level), out.cache

        still = lambda carry: carry[0].going.any(axis=1)
        (drafting, cache), fed = feed_levels(feed, still, (drafting, cache), lengths, shape.depth)
        draft = Draft(
            tokens=drafting.tokens[:, 1 : shape.size + 1],
            verifiable=drafting.verifiable[:, 1 : shape.size + 1],
            parents=None if self.tree is None else jnp.asarray(shape.parents, jnp.int32),
            log_q=drafting.laws[:, : shape.levels[-1][0]] if self._keeps_laws else None,
            depth=shape.depth,
            siblings=shape.siblings,
        )
        return draft, cache, 1 + fed

    def draw_children(self, ctx: Context, rows: Rows, hidden: Array, paths: Array, depth: Array) -> Siblings:
        """Draws the children of the M nodes of one level.

        Args:
          ctx: the call, with the draft model in the place of the model.
          rows: the prefixes.
          hidden: [B, M, D], the nodes' features.
          paths: i32[B, M, K], the tokens on the way to each node.
          depth: i32[], of the nodes.
        """
        batch, columns, deepest = *hidden.shape[:2], paths.shape[2]
        vocab_size = ctx.rules.bias.shape[0]
        logits = _fit(ctx.readout(hidden), vocab_size).reshape(batch * columns, vocab_size)
        each = ctx.repeat_rows(columns) if columns > 1 else ctx
        at = jnp.repeat(rows.length + depth, columns)
        # Penalties see the prefix and the tokens on the way to a node.
        tokens_before = jax.vmap(lambda row, path, end: jax.lax.dynamic_update_slice(row, path, (end,)))(
            jnp.repeat(jnp.pad(rows.tokens, ((0, 0), (0, deepest))), columns, axis=0),
            paths.reshape(batch * columns, deepest),
            jnp.repeat(rows.length, columns),
        )
        processed = process_logits(
            each.sampling, ctx.rules, logits, tokens_before, each.prompt_lengths, at, ctx.stops.ends
        )
        tokens, possible, law = draw_siblings(
            each.sampling, ctx.seed, each.row_ids, at, processed, self.shape.siblings, ctx.top_k
        )
        own = jnp.take_along_axis(logits, tokens, axis=1) - jax.nn.logsumexp(logits, axis=1, keepdims=True)
        by_column = lambda x: x.reshape(batch, columns, -1)
        sure = jnp.exp(own) >= self.min_confidence
        return Siblings(*map(by_column, (tokens, possible, sure, own, law)))

    @property
    def _keeps_laws(self) -> bool:
        return isinstance(self.rule, Rejection)

    def _nothing_drawn(self, shape: Tree, ctx: Context, rows: Rows, width: int) -> _Drafting:
        """The root alone; buffers have room for a slice of M columns behind the last node."""
        batch, nodes, vocab_size = len(rows.length), shape.size + 1 + width, ctx.rules.bias.shape[0]
        return _Drafting(
            tokens=jnp.zeros((batch, nodes), jnp.int32),
            verifiable=jnp.zeros((batch, nodes), bool),
            laws=jnp.zeros((batch, nodes if self._keeps_laws else 0, vocab_size), jnp.float32),
            level=jnp.broadcast_to(rows.last, (batch, width)),
            going=jnp.ones((batch, width), bool),
            paths=jnp.zeros((batch, width, shape.depth), jnp.int32),
        )

    def _draw(
        self, shape: Tree, ctx: Context, rows: Rows, lengths: Array, hidden: Array, drafting: _Drafting, level: PyTree
    ) -> _Drafting:
        """Draws the next level from features [B, M, D] of this one; of the root alone M is 1."""
        columns, depth = hidden.shape[1], level["depth"]
        found = self.draw_children(ctx, rows, hidden, drafting.paths[:, :columns], depth)
        column = jnp.minimum(level["parent"], columns - 1)
        of_children = lambda x: x[:, column, level["rank"]]
        drawn = of_children(found.tokens)
        wanted = (lengths > depth)[:, None] & ~rows.done[:, None] & level["is_child"][None]
        counts = drafting.going[:, column] & wanted & of_children(found.possible)
        put = lambda buffer, x, at: jax.lax.dynamic_update_slice(buffer, x, (0, at, *[0] * (x.ndim - 2)))
        laws = drafting.laws
        return _Drafting(
            tokens=put(drafting.tokens, drawn, level["start"]),
            verifiable=put(drafting.verifiable, counts, level["start"]),
            laws=put(laws, found.law, level["parents_start"]) if self._keeps_laws else laws,
            level=drawn,
            # A draft is dropped for what stands before it, never for its own value: that would bias the law.
            going=counts & of_children(found.sure),
            paths=drafting.paths[:, column].at[:, :, depth].set(drawn),
        )


_FORGET = 0.9  # what a round counts for in the next one: the history remembers about ten rounds


@struct.dataclass
class _Drafting:
    """A draft in the making: buffers by node, and of the newest level (padded to M columns) its tokens, which of
    them are drafted on from, and the tokens on the way to each."""

    tokens: Array
    verifiable: Array
    laws: Array
    level: Array
    going: Array
    paths: Array


def _plan(shape: Tree, width: int) -> PyTree:
    """For each depth from 0: its nodes by column, who sees whom, and how the next level hangs on them.

    Buffers by node are written in slices of M columns. What a slice writes past its level's end is written over by
    the next level's.
    """
    levels, reach = shape.levels, np.pad(shape.reach, ((0, width), (0, width)))
    parents, ranks = np.array([0, *shape.parents]), np.array([0, *(path[-1] for path in shape.paths)])
    rows = []
    for depth, (nodes, children) in enumerate(itertools.pairwise(levels)):
        spare = np.arange(shape.size + 1, shape.size + 1 + width)  # columns without a node
        node = np.concatenate([nodes, spare])[:width]
        pad = lambda x: np.pad(x, (0, width - len(x)))
        rows.append(
            {
                "depth": np.int32(depth),
                "node": node.astype(np.int32),
                "reach": reach[node][:, : shape.size + 1],
                "parent": pad(parents[children] - nodes[0]).astype(np.int32),
                "rank": pad(ranks[children]).astype(np.int32),
                "is_child": np.arange(width) < len(children),
                "start": np.int32(children[0]),
                "parents_start": np.int32(nodes[0]),
            }
        )
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *rows)


def _fit(logits: Array, vocab_size: int) -> Array:
    """Logits [..., V'] of a draft model whose vocabulary is padded otherwise: ids that it lacks are never drafted."""
    missing = max(vocab_size - logits.shape[-1], 0)
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits[..., :vocab_size], pad, constant_values=-jnp.inf)


def counted(state: PrefixState, calls: Array) -> PrefixState:
    """The state with that many draft calls more in every row that is not done."""
    return dataclasses.replace(state, draft_calls=state.draft_calls + jnp.where(state.done, 0, calls))
