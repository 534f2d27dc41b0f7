"""Prompt lookup decoding: copy what followed the last tokens earlier (Saxena 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.cache import read_slots
from decoding_jax.checks import check_whole
from decoding_jax.decoders.prefix import Draft, Prefix, PrefixState
from decoding_jax.rows import Context
from decoding_jax.trees import merge_chains
from decoding_jax.types import Array

_MOST_MATCHES = 64  # as many places as the smallest buffer of a row has


def rank_matches(tokens: Array, length: Array, max_ngram: int, min_ngram: int) -> Array:
    """Ranks the places of a row to copy from: behind the longest, then latest, earlier occurrence of its last tokens.

    Args:
      tokens: i32[N], one row.
      length: i32[], how much of it is committed.
      max_ngram, min_ngram: the longest match that is looked for and the shortest that counts.

    Returns:
      i32[N], for each index as the first token to copy: the match's length * N + the index; -1 where nothing matches.

    >>> row = jnp.asarray([5, 1, 2, 7, 5, 1, 2, 0, 0])
    >>> ranks = rank_matches(row, jnp.asarray(7), 3, 1)  # [5, 1, 2] stands at 0: copy from 3
    >>> int(ranks.argmax()), int(ranks.max()) // 9
    (3, 3)
    """
    start = jnp.arange(tokens.shape[0])
    back = jnp.arange(1, max_ngram + 1)
    earlier = jnp.take(tokens, start[:, None] - back[None], mode="clip")
    tail = jnp.take(tokens, length - back, mode="clip")
    same = (earlier == tail[None]) & (start[:, None] >= back[None]) & (length >= back)[None]
    matched = jnp.cumprod(same, axis=1, dtype=jnp.int32).sum(axis=1)
    usable = (start < length) & (matched >= min_ngram)
    return jnp.where(usable, matched * tokens.shape[0] + start, -1).astype(jnp.int32)


@struct.dataclass
class PromptLookup(Prefix):
    """Drafts by copying from the prompt and the output so far; lossless, and free of any draft model.

    A copy that reaches the end of the row goes on with what it has copied, so a loop of any period
    fills the draft. A match of one token is weak evidence, so it drafts less.

    Attributes:
      num_draft: K, the most tokens copied in a round. Wide drafts are nearly free on accelerators; on a
        CPU, where a call on several positions costs two or three plain ones, min_ngram=2 may be faster.
      max_ngram: the most last tokens that are matched.
      min_ngram: the fewest that count as a match.
      weak_draft: the most tokens copied after a match of one token; num_draft or more: no difference.
      num_matches: how many matches are copied from; more than one are verified as a tree, in one call.
    """

    num_draft: int = struct.field(pytree_node=False, default=8)
    max_ngram: int = struct.field(pytree_node=False, default=3)
    min_ngram: int = struct.field(pytree_node=False, default=1)
    weak_draft: int = struct.field(pytree_node=False, default=2)
    num_matches: int = struct.field(pytree_node=False, default=1)

    def __post_init__(self) -> None:
        check_whole("num_draft", self.num_draft, 1, "Autoregressive drafts nothing")
        check_whole("min_ngram", self.min_ngram, 1)
        check_whole("max_ngram", self.max_ngram, 1)
        check_whole("num_matches", self.num_matches, 1)
        check_whole("weak_draft", self.weak_draft, 1, "min_ngram=2 leaves weak matches out")
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: need 1 <= min_ngram <= max_ngram"
            )
        if self.num_matches > _MOST_MATCHES:
            raise ValueError(f"num_matches={self.num_matches}: must be from 1 to {_MOST_MATCHES}")

    @property
    def num_nodes(self) -> int:
        """W = K for each match."""
        return self.num_draft * self.num_matches

    @property
    def widths(self) -> tuple[int, ...]:
        """No match, weak matches, ends of rows, one full draft, all."""
        one = {0, min(self.weak_draft, self.num_draft), self.num_draft // 2, self.num_draft}
        return tuple(sorted(one | {self.num_nodes}))

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """Copied tokens: a chain for each match, or nothing where nothing matches."""
        tokens, length = state.rows.tokens, state.rows.length
        size = tokens.shape[1]
        rank = jax.vmap(lambda row, end: rank_matches(row, end, self.max_ngram, self.min_ngram))
        ranks, _ = ctx.top_k(rank(tokens, length), self.num_matches)
        start, matched = ranks % size, ranks // size
        step = jnp.arange(self.num_draft)[None, None]
        # A copy that reaches the end of the row goes on with what it has copied.
        period = jnp.maximum(length[:, None] - start, 1)[:, :, None]
        at = (start[:, :, None] + step % period).reshape(-1, self.num_nodes)
        chains = read_slots(tokens, at).reshape(-1, self.num_matches, self.num_draft)
        longest = jnp.where(matched > 1, self.num_draft, jnp.where(matched > 0, self.weak_draft, 0))
        if self.num_matches == 1:
            return Draft(chains[:, 0], step[0] < longest, depth=self.num_draft), state
        nodes, parents, new = merge_chains(chains, longest)
        return Draft(nodes, new, parents, depth=self.num_draft), state
