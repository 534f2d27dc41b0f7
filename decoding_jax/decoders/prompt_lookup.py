"""Prompt lookup decoding: copy what followed the last tokens earlier (Saxena 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.decoders.prefix import Draft, Prefix, PrefixState
from decoding_jax.rows import Context
from decoding_jax.types import Array, PyTree


def find_continuation(tokens: Array, length: Array, max_ngram: int, min_ngram: int) -> Array:
    """Where the copy starts: behind the longest, then latest, earlier occurrence of a row's last tokens.

    Args:
      tokens: i32[N], one row.
      length: i32[], how much of it is committed.
      max_ngram, min_ngram: the longest match that is looked for and the shortest that counts.

    Returns:
      i32[], the index of the first token to copy; `length` where nothing matches.

    >>> row = jnp.asarray([5, 1, 2, 7, 5, 1, 2, 0, 0])
    >>> int(find_continuation(row, jnp.asarray(7), 3, 1))  # [5, 1, 2] stands at 0, so copy from 3
    3
    """
    start = jnp.arange(tokens.shape[0])
    back = jnp.arange(1, max_ngram + 1)
    earlier = jnp.take(tokens, start[:, None] - back[None], mode="clip")
    tail = jnp.take(tokens, length - back, mode="clip")
    same = (earlier == tail[None]) & (start[:, None] >= back[None]) & (length >= back)[None]
    matched = jnp.cumprod(same, axis=1, dtype=jnp.int32).sum(axis=1)
    usable = (start < length) & (matched >= min_ngram)
    best = jnp.argmax(jnp.where(usable, matched * tokens.shape[0] + start, -1))
    return jnp.where(usable.any(), best, length).astype(jnp.int32)


@struct.dataclass
class PromptLookup(Prefix):
    """Drafts by copying from the prompt and the output so far; lossless, and free of any draft model.

    A copy that reaches the end of the row goes on with what it has copied, so a loop of any period
    fills the draft.

    Attributes:
      num_draft: K, the most tokens copied in a round.
      max_ngram: the most last tokens that are matched.
      min_ngram: the fewest that count as a match.
    """

    num_draft: int = struct.field(pytree_node=False, default=8)
    max_ngram: int = struct.field(pytree_node=False, default=3)
    min_ngram: int = struct.field(pytree_node=False, default=1)

    def __post_init__(self) -> None:
        if self.num_draft < 1:
            raise ValueError(f"num_draft={self.num_draft}: must be at least 1; Autoregressive drafts nothing")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: need 1 <= min_ngram <= max_ngram"
            )

    @property
    def num_nodes(self) -> int:
        """W = K."""
        return self.num_draft

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PyTree]:
        """A chain of copied tokens, or nothing where nothing matches."""
        del ctx

        def copy(tokens: Array, length: Array) -> tuple[Array, Array]:
            start = find_continuation(tokens, length, self.max_ngram, self.min_ngram)
            period = length - start
            at = start + jnp.arange(self.num_draft) % jnp.maximum(period, 1)
            return jnp.take(tokens, at, mode="clip"), jnp.broadcast_to(period > 0, (self.num_draft,))

        tokens, found = jax.vmap(copy)(state.rows.tokens, state.rows.length)
        return Draft(tokens, found, depth=self.num_draft), state.carry
