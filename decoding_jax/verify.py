"""Acceptance of drafts: which proposed tokens become output.

One walk serves chains and trees: from the root on, a rule picks at every node the token that is emitted, and the
child, if any, that it was proposed by. The rules:

    Coupled     the target draws its own token with its own noise; the walk goes on in the child that equals it.
                The output equals plain decoding's token for token, at any temperature, whatever was proposed.
    Rejection   the drafted token is kept with probability min(1, p / q), else the token comes from the residual.
                The output follows the target's law; it needs the law q that the draft was drawn from.
    Typical     tokens that the target finds probable enough are kept. More is accepted; the law is another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax import sampling as sampling_lib
from decoding_jax.checks import check_number
from decoding_jax.masks import ancestors
from decoding_jax.rows import Context, Rows, commit, next_token, processed_logits
from decoding_jax.types import Array


@struct.dataclass
class Nodes:
    """The nodes scored by one call: 0 is the last committed token, the others are proposals.

    Attributes:
      tokens: i32[B, W].
      parents: i32[B, W], a smaller index each; node 0's entry is ignored.
      verifiable: bool[B, W], nodes that may be accepted; node 0's entry is ignored.
      log_q: f32[B, P, V], the log, up to a constant, of the law that the children of nodes 0 .. P - 1 were drawn
        from, siblings without replacement in the order of their index; None where nothing was drawn. It is read
        only where some row's temperature is above 0.
      siblings: the most children of a node, where there is a log_q.
    """

    tokens: Array
    parents: Array
    verifiable: Array
    log_q: Array | None = None
    siblings: int = struct.field(pytree_node=False, default=1)


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


# (rows, node i32[B], its logits f32[B, V], its children bool[B, W]) -> tokens i32[B], which children proposed them.
Choose = Callable[[Rows, Array, Array, Array], tuple[Array, Array]]


class Rule(Protocol):
    """A rule of acceptance, a flax.struct dataclass; `lossless` says whether the output follows the target's law.

    One with settings may have `check()`, which raises ValueError where one has no meaning.
    """

    lossless: bool

    def chooser(self, ctx: Context, rows: Rows, nodes: Nodes, logits: Array) -> Choose:
        """How to go on at a node, given what was scored: logits f32[B, W, V]."""


@struct.dataclass
class Coupled:
    """The target's own draw at every node it passes: for drafts of any kind, drawn or not.

    Drawing one token per node and following the child that equals it needs no law of the draft, and with noise
    keyed by position the draws are those of plain decoding.
    """

    lossless = True

    def chooser(self, ctx: Context, rows: Rows, nodes: Nodes, logits: Array) -> Choose:
        """Follows the target's draw."""
        del rows, logits

        def choose(rows: Rows, node: Array, here: Array, children: Array) -> tuple[Array, Array]:
            del node
            tokens = next_token(ctx, rows, here)
            return tokens, children & (nodes.tokens == tokens[:, None])

        return choose


@struct.dataclass
class Rejection:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023), for chains and for trees of siblings.

    Siblings drawn without replacement are tried in their order: x is kept with probability min(1, p(x) / q(x));
    after a rejection p becomes max(0, p - q) normalised, and q loses x and is normalised (Jeon et al. 2024, Yang et
    al. 2024). A draft of the target's own law is always kept. What is left when all are rejected, or p itself
    where nothing was proposed, is drawn from with noise of its own.
    """

    lossless = True

    def chooser(self, ctx: Context, rows: Rows, nodes: Nodes, logits: Array) -> Choose:
        """Tries the siblings one after the other."""
        if nodes.log_q is None:
            raise ValueError("Rejection needs the law that the draft was drawn from; use Coupled for other drafts")
        log_q, index = nodes.log_q, jnp.arange(nodes.tokens.shape[1])
        at_temperature_0 = Coupled().chooser(ctx, rows, nodes, logits)  # where both do the same, and this costs less

        def sample(rows: Rows, node: Array, here: Array, children: Array) -> tuple[Array, Array]:
            p = jax.nn.softmax(sampling_lib.filter_logits(ctx.sampling, processed_logits(ctx, rows, here)))
            parent = jnp.minimum(node, log_q.shape[1] - 1)  # a node behind the last has no children
            q = jax.nn.softmax(jnp.take_along_axis(log_q, parent[:, None, None], axis=1)[:, 0])
            order = jnp.cumsum(children, axis=1)
            uniform = sampling_lib.acceptance_uniforms(ctx.seed, ctx.row_ids, rows.length, nodes.siblings)

            def attempt(rank: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                p, q, kept = carry
                child = children & (order == rank + 1)
                tried = child.any(axis=1) & ~kept.any(axis=1)
                token = jnp.where(child, nodes.tokens, 0).sum(axis=1)[:, None]
                at_token = jnp.arange(p.shape[1])[None] == token
                p_token, q_token = (jnp.take_along_axis(law, token, axis=1)[:, 0] for law in (p, q))
                keep = tried & (uniform[:, rank] * q_token < p_token)
                rejected = (tried & ~keep)[:, None]
                left = _normalised(jnp.maximum(p - q, 0.0), p)
                others = jnp.where(at_token, 0.0, q)
                return (
                    jnp.where(rejected, left, p),
                    jnp.where(rejected, _normalised(others, others), q),
                    kept | (child & keep[:, None]),
                )

            start = (p, q, jnp.zeros_like(children))
            p, _, kept = jax.lax.fori_loop(0, nodes.siblings, attempt, start)
            drafted = jnp.take_along_axis(nodes.tokens, jnp.where(kept, index, 0).max(axis=1)[:, None], axis=1)[:, 0]
            own = sampling_lib.draw_residual(ctx.sampling, ctx.seed, ctx.row_ids, rows.length, p)
            return jnp.where(kept.any(axis=1), drafted, own), kept

        def choose(rows: Rows, node: Array, here: Array, children: Array) -> tuple[Array, Array]:
            greedy = (ctx.sampling.temperature <= 0.0).all()
            return jax.lax.cond(greedy, at_temperature_0, sample, rows, node, here, children)

        return choose


def _normalised(law: Array, otherwise: Array) -> Array:
    """law f32[B, V] to sum 1; `otherwise` where nothing is left of it (p equals q up to rounding)."""
    total = law.sum(axis=1, keepdims=True)
    return jnp.where(total > 0.0, law / jnp.where(total > 0.0, total, 1.0), otherwise)


@struct.dataclass
class Typical:
    """Typical acceptance (Cai et al., Medusa, 2024): keeps what the target finds probable. Not the target's law.

    A proposal is kept if p(x) > min(epsilon, delta exp(-H(p))), each for itself, and the deepest path of kept ones
    is taken (of several the most probable). At temperature 0 only the best token is kept. The penalties see the
    committed prefix, not the proposals before a node.

    Attributes:
      epsilon: the probability that always suffices.
      delta: scales the threshold that falls with the entropy H of p, in nats.
    """

    lossless = False

    epsilon: float | Array = 0.09
    delta: float | Array = 0.3

    def check(self) -> None:
        """ValueError where a threshold is out of its range."""
        check_number("epsilon", self.epsilon)
        check_number("delta", self.delta)

    def chooser(self, ctx: Context, rows: Rows, nodes: Nodes, logits: Array) -> Choose:
        """Follows the deepest path of probable tokens."""
        reach = ancestors(nodes.parents)
        each = jax.vmap(lambda here: sampling_lib.filter_logits(ctx.sampling, processed_logits(ctx, rows, here)), 1, 1)
        log_p = jax.nn.log_softmax(each(logits))
        entropy = -jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0).sum(axis=2)
        parent_log_p = jax.vmap(lambda law, parent, token: law[parent, token])(log_p, nodes.parents, nodes.tokens)
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        kept = nodes.verifiable & (jnp.exp(parent_log_p) > jnp.take_along_axis(threshold, nodes.parents, axis=1))
        kept = kept.at[:, 0].set(True)
        whole = (~reach | kept[:, None]).all(axis=2)
        depth = jnp.where(whole, reach.sum(axis=2), 0)
        counts = reach & kept.at[:, 0].set(False)[:, None]
        likely = jnp.where(counts, parent_log_p[:, None], 0.0).sum(axis=2)
        best = jnp.argmax(jnp.where(depth == depth.max(axis=1, keepdims=True), likely, -jnp.inf), axis=1)
        on_path = jnp.take_along_axis(reach, best[:, None, None], axis=1)[:, 0]

        def choose(rows: Rows, node: Array, here: Array, children: Array) -> tuple[Array, Array]:
            del node
            child = children & on_path
            drafted = jnp.where(child, nodes.tokens, 0).sum(axis=1)
            return jnp.where(child.any(axis=1), drafted, next_token(ctx, rows, here)), child

        return choose


RULES: dict[str, Rule] = {"coupled": Coupled(), "rejection": Rejection(), "typical": Typical()}


def as_rule(acceptance: str | Rule) -> Rule:
    """The rule of that name; rules stay what they are.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(acceptance, str) and acceptance in RULES:
        return RULES[acceptance]
    if isinstance(acceptance, str | type) or not hasattr(acceptance, "chooser"):
        raise ValueError(
            f"acceptance={acceptance!r}: must be one of {', '.join(RULES)}, or a rule such as Typical(epsilon=0.2)"
        )
    return acceptance


Walk = tuple[Rows, Array, Array, Array]  # rows, the node reached, which rows go on, accepted so far


def verify(ctx: Context, rows: Rows, nodes: Nodes, logits: Array, depth: int, rule: Rule) -> Verdict:
    """Walks each row's draft from its root and commits what the rule emits.

    A masked scan over depth that looks at one [B, V] row of logits at a time: processors see exactly the accepted
    prefix, and a depth that no row reaches costs nothing.

    Args:
      ctx: the call.
      rows: the committed prefixes.
      nodes: what was scored.
      logits: f32[B, W, V], after each node.
      depth: the most proposals on any path.
      rule: of acceptance.

    Returns:
      The verdict. Every row that was not done gains at least one token.
    """
    width = nodes.tokens.shape[1]
    choose = rule.chooser(ctx, rows, nodes, logits)

    def visit(rows: Rows, node: Array, alive: Array, accepted: Array) -> Walk:
        here = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        children = (nodes.parents == node[:, None]) & nodes.verifiable
        tokens, child = choose(rows, node, here, children.at[:, 0].set(False))
        log_probs = jnp.take_along_axis(here, tokens[:, None], axis=1)[:, 0] - jax.nn.logsumexp(here, axis=-1)
        rows = commit(ctx, rows, tokens, log_probs, alive)
        found = alive & child.any(axis=1)
        node = jnp.where(found, jnp.argmax(child, axis=1).astype(jnp.int32), node)
        return rows, node, found & ~rows.done, accepted + found.astype(jnp.int32)

    def level(carry: Walk, _: None) -> tuple[Walk, Array]:
        carry = jax.lax.cond(carry[2].any(), visit, lambda *same: same, *carry)
        return carry, jnp.where(carry[2], carry[1], width)

    zeros = jnp.zeros_like(rows.length)
    (after, _, _, accepted), path = jax.lax.scan(level, (rows, zeros, ~rows.done, zeros), None, length=depth + 1)
    return Verdict(after, path[:depth].T, after.length - rows.length, accepted)
