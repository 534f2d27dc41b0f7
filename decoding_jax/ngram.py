"""N-gram models of token ids: interpolated Kneser-Ney, trained by NumPy, looked up inside compiled programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.checks import check_whole
from decoding_jax.types import Array


@struct.dataclass
class NGram:
    """p(token | the order - 1 tokens before it), smoothed by Kneser-Ney (1995), interpolated (Chen & Goodman 1999).

    p(w | v ctx) = gain(v ctx w) + backoff(v ctx) p(w | ctx), down to 1 / vocab_size. The longest n-grams count how
    often they occur, shorter ones in how many places: behind how many different tokens. An end-of-sequence token is
    a token like others; the begin marker stands before each sequence and is never predicted.

    The n-grams are a trie: node 0 is the empty one, then come those of one token, of two, and so on, each length in
    lexicographic order, so that the children of a node are neighbours. A last node stands for all that is not there.

    Attributes:
      token: i32[M + 1], the last token of each node's n-gram.
      first: i32[M + 2], each node's first child; the last is before the next node's first.
      gain: f32[M + 1], the discounted relative frequency of the last token behind the others.
      backoff: f32[M + 1], of the n-gram as a context: the share of the shorter one.
      order: the most tokens of an n-gram.
      vocab_size: V.
    """

    token: Array
    first: Array
    gain: Array
    backoff: Array
    order: int = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)

    @classmethod
    def train(cls, sequences: Iterable[Sequence[int]], order: int, vocab_size: int) -> NGram:
        """Counts the n-grams of the sequences. Whoever wants an end predicted ends them with its id.

        Raises:
          ValueError: a setting is no whole number of at least 1, or an id is outside the vocabulary.
        """
        check_whole("order", order, 1)
        check_whole("vocab_size", vocab_size, 1)
        levels = _count([np.asarray(ids, np.int64) for ids in sequences], order, vocab_size)
        sizes = [1, *(level.token.size for level in levels)]
        gains, backoffs = [np.zeros(1)], []
        for level, parents in zip(levels, sizes[:-1], strict=True):
            discount = _discount(level.occurs)
            total = np.bincount(level.parent, weights=level.occurs, minlength=parents)
            kinds = np.bincount(level.parent, weights=level.occurs > 0, minlength=parents)
            some = np.maximum(total, 1)
            gains.append(np.maximum(level.occurs - discount, 0) / some[level.parent])
            backoffs.append(np.where(total > 0, discount * kinds / some, 1.0))
        children = [
            np.bincount(level.parent, minlength=parents) for level, parents in zip(levels, sizes[:-1], strict=True)
        ]
        return cls(
            token=jnp.asarray(np.concatenate([[-1], *(level.token for level in levels), [-1]]), jnp.int32),
            first=jnp.asarray(
                np.cumsum(np.concatenate([[1], *children, np.zeros(sizes[-1] + 1, np.int64)])), jnp.int32
            ),
            gain=jnp.asarray(np.concatenate([*gains, [0.0]]), jnp.float32),
            backoff=jnp.asarray(np.concatenate([*backoffs, np.ones(sizes[-1] + 1)]), jnp.float32),
            order=order,
            vocab_size=vocab_size,
        )

    def log_prob(self, context: Array, lengths: Array, tokens: Array) -> Array:
        """log p of tokens, each behind the same context, so that it can be what `ctc.prefix_beam` fuses.

        Args:
          context: i32[..., N], of which the last order - 1 of the first `lengths` tokens are read.
          lengths: i32[...]; before the first token stands the begin marker.
          tokens: i32[..., K].

        Returns:
          f32[..., K]; the exponentials over the whole vocabulary sum to 1.
        """
        law = jnp.full(tokens.shape, 1 / self.vocab_size, jnp.float32)
        before = {back: self._before(context, lengths, back) for back in range(1, self.order)}
        for size in range(self.order):
            node = jnp.zeros(lengths.shape, jnp.int32)
            for back in range(size, 0, -1):
                node = self._child(node, before[back])
            found = self._child(jnp.broadcast_to(node[..., None], tokens.shape), tokens)
            law = self.gain[found] + self.backoff[node][..., None] * law
        return jnp.log(law)

    def totals(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """log p f64[B] of whole sequences, the first `lengths` i32[B] tokens of i32[B, N]."""
        ids, counts = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
        if not ids.shape[1]:
            return np.zeros((len(tokens),))

        def one(at: Array) -> Array:
            return self.log_prob(ids, jnp.full_like(counts, at), jax.lax.dynamic_slice_in_dim(ids, at, 1, axis=1))[:, 0]

        each = jax.lax.map(one, jnp.arange(ids.shape[1], dtype=jnp.int32)).T
        inside = np.arange(ids.shape[1])[None] < np.asarray(lengths)[:, None]
        return np.where(inside, np.asarray(each, np.float64), 0.0).sum(axis=1)

    def _before(self, context: Array, lengths: Array, back: int) -> Array:
        """i32[...], the token that many places back; the begin marker is V, and before it is V + 1, never found."""
        at = lengths - back
        token = jnp.take_along_axis(context, jnp.clip(at, 0, context.shape[-1] - 1)[..., None], axis=-1)[..., 0]
        return jnp.where(at >= 0, token, jnp.where(at == -1, self.vocab_size, self.vocab_size + 1))

    def _child(self, node: Array, token: Array) -> Array:
        """The node behind each node by its token, of one shape, by bisection: `searchsorted` among its children.

        `jnp.searchsorted` itself would need one key for node and token, which does not fit 32 bits.
        """
        end = self.first[node + 1]

        def halve(_: int, limits: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = limits
            middle = (low + high) // 2
            less = (low < high) & (self.token[middle] < token)
            return jnp.where(less, middle + 1, low), jnp.where(less, high, middle)

        # A node has at most V + 1 children.
        low, _ = jax.lax.fori_loop(0, (self.vocab_size + 1).bit_length(), halve, (self.first[node], end))
        return jnp.where((low < end) & (self.token[low] == token), low, self.token.size - 1)


class Level(NamedTuple):
    """The n-grams of one length, sorted: last token, which of the shorter ones it continues, and how often."""

    token: np.ndarray
    parent: np.ndarray
    occurs: np.ndarray


def _count(sequences: Sequence[np.ndarray], order: int, vocab_size: int) -> list[Level]:
    """Levels 1 to order, with the counts that Kneser-Ney takes: see `NGram`."""
    stream = np.concatenate([np.zeros(0, np.int64), *(np.insert(ids, 0, vocab_size) for ids in sequences)])
    begins = np.zeros(stream.size, bool)
    sizes = np.array([ids.size + 1 for ids in sequences], np.int64)
    begins[np.cumsum(sizes) - sizes] = True
    bad = stream[~begins & ((stream < 0) | (stream >= vocab_size))]
    if bad.size:
        raise ValueError(f"sequences: id {bad[0]} is outside the vocabulary 0..{vocab_size - 1}; use its tokenizer")
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(stream.size)  # tokens from here to the sequence's end
    node = np.zeros(stream.size, np.int64)  # of the n-gram that begins at each place, its rank among its length
    levels: list[Level] = []
    for size in range(1, order + 1):
        at = np.flatnonzero(left >= size)
        key = node[at] * (vocab_size + 1) + stream[at + size - 1]
        keys, where, rank, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        if levels:
            # Each different n-gram is one more place for what it ends with. Behind the begin marker nothing
            # stands, so what begins with it keeps its count.
            shorter = levels[-1]
            places = np.bincount(node[at[where] + 1], minlength=shorter.occurs.size)
            levels[-1] = shorter._replace(occurs=np.where(places > 0, places, shorter.occurs))
        node = np.zeros(stream.size, np.int64)
        node[at] = rank
        levels.append(Level(token=keys % (vocab_size + 1), parent=keys // (vocab_size + 1), occurs=count))
    levels[0] = levels[0]._replace(occurs=np.where(levels[0].token == vocab_size, 0, levels[0].occurs))
    return levels


def _discount(counts: np.ndarray) -> float:
    """What is taken from every count: n1 / (n1 + 2 n2) (Ney et al. 1994), 3/4 where nothing occurs once or twice."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once and twice else 0.75
