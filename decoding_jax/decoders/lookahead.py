"""Lookahead decoding (Fu et al. 2024): n-grams that the model makes on the side become its drafts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.cache import read_slots
from decoding_jax.checks import check_flag, check_whole
from decoding_jax.decoders.prefix import Accepted, Draft, Prefix, PrefixState
from decoding_jax.rows import Context
from decoding_jax.trees import merge_chains
from decoding_jax.types import Array


@struct.dataclass
class Pool:
    """The n-grams of each row: i32[B, P, N], and when each was met last, i32[B, P], 0 where there is none."""

    ngrams: Array
    met: Array


@struct.dataclass
class _Carry:
    """The window i32[B, N - 1, W], whose first entry is never read, and the pool."""

    window: Array
    pool: Pool


@struct.dataclass
class Lookahead(Prefix):
    """Refines a window of guesses by Jacobi iteration and verifies the n-grams that appear in it.

    One call scores both: the window as riders, and as drafts the n-grams of the row's pool that begin with its last
    token. The window has N - 1 rows of W guesses; a guess sees the prefix, the first row up to its column, and its
    own column above it, which makes the window a tree:

        root - w01 - w02 - ...      row 0: column 0 is the last committed token itself
         |      |     |
        w10    w11   w12            row 1, and so on

    The model's best token under every column of the last row completes an n-gram, from the top of the column down.
    Rows then move up by one. The pool belongs to the row and the call; its oldest n-grams make place for new ones.

    Attributes:
      window: W, columns.
      ngram: N, the length of an n-gram; N - 1 tokens are drafted at most.
      candidates: G, the most n-grams that are verified in a round.
      pool_size: P, n-grams that a row remembers.
      prompt_ngrams: whether the pool begins with those of the prompt's end.
    """

    window: int = struct.field(pytree_node=False, default=7)
    ngram: int = struct.field(pytree_node=False, default=5)
    candidates: int = struct.field(pytree_node=False, default=7)
    pool_size: int = struct.field(pytree_node=False, default=512)
    prompt_ngrams: bool = struct.field(pytree_node=False, default=False)

    def __post_init__(self) -> None:
        check_flag("prompt_ngrams", self.prompt_ngrams)
        for name, least in {"window": 1, "ngram": 2, "candidates": 1, "pool_size": self.candidates}.items():
            check_whole(name, getattr(self, name), least)

    @property
    def num_riders(self) -> int:
        """R: the window without the last committed token."""
        return self.window * (self.ngram - 1) - 1

    @property
    def num_nodes(self) -> int:
        """W: the window and the candidates."""
        return self.num_riders + self.candidates * (self.ngram - 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """The window with no, with half and with all of the candidates."""
        drafts = self.num_nodes - self.num_riders
        return tuple(sorted({self.num_riders, self.num_riders + drafts // 2, self.num_nodes}))

    def begin(self, ctx: Context) -> _Carry:
        """A window of tokens from all over the prompt, and an empty pool or the prompt's."""
        batch, shape = ctx.prompts.shape[0], (self.ngram - 1, self.window)
        # A prime, so that the places are scattered whatever the prompt's length.
        scattered = 7919 * jnp.arange(1, self.num_riders + 2)[None] % ctx.prompt_lengths[:, None]
        window = read_slots(ctx.prompts, scattered).reshape(batch, *shape)
        ngrams = jnp.zeros((batch, self.pool_size, self.ngram), jnp.int32)
        met = jnp.zeros((batch, self.pool_size), jnp.int32)
        if self.prompt_ngrams:
            start = ctx.prompt_lengths[:, None] - self.ngram - jnp.arange(self.pool_size)[None]
            at = jnp.maximum(start, 0)[:, :, None] + jnp.arange(self.ngram)[None, None]
            ngrams = read_slots(ctx.prompts, at.reshape(batch, -1)).reshape(ngrams.shape)
            # Of equal ones the newest alone: copies would take the place of other candidates.
            same = (ngrams[:, :, None] == ngrams[:, None]).all(axis=3)
            copies = (same & jnp.tril(jnp.ones(same.shape[1:], bool), -1)[None]).any(axis=2)
            met = jnp.where(copies, 0, jnp.maximum(start + 1, 0))
        return _Carry(window, Pool(ngrams, met))

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """The window, then the newest n-grams that begin with the last token."""
        carry: _Carry = state.carry
        batch, length = state.rows.length.shape[0], self.ngram - 1
        fits = (carry.pool.ngrams[:, :, 0] == state.rows.last) & (carry.pool.met > 0)
        newest, which = ctx.top_k(jnp.where(fits, carry.pool.met, 0), self.candidates)
        chains = read_slots(carry.pool.ngrams, which)[:, :, 1:]
        tokens, parents, new = merge_chains(chains, jnp.where(newest > 0, length, 0))
        riders = carry.window.reshape(batch, -1)[:, 1:]
        window_parents = jnp.broadcast_to(jnp.asarray(self._window_parents()), riders.shape)
        draft = Draft(
            tokens=jnp.concatenate([riders, tokens], axis=1),
            verifiable=jnp.concatenate([jnp.zeros(riders.shape, bool), new], axis=1),
            parents=jnp.concatenate([window_parents, jnp.where(parents > 0, parents + self.num_riders, 0)], axis=1),
            depth=length,
            riders=self.num_riders,
        )
        return draft, state

    def _window_parents(self) -> np.ndarray:
        """Of each guess but the first, as nodes: entry i of the flat window is node i."""
        node = np.arange(self.window * (self.ngram - 1))
        return np.where(node < self.window, node - 1, node - self.window)[1:].astype(np.int32)

    def observe(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> _Carry:
        """Completes the window's n-grams, remembers them, and moves the window's rows up."""
        carry: _Carry = state.carry
        took_part = result.emitted > 0
        # The flat window's last row; the first entry of the first row is the root.
        last_row = result.scored[:, self.num_riders + 1 - self.window : self.num_riders + 1]
        best = jnp.argmax(ctx.readout(last_row), axis=2).astype(jnp.int32)
        root = read_slots(state.rows.tokens, jnp.maximum(state.rows.length - result.emitted - 1, 0)[:, None])
        columns = jnp.concatenate([carry.window, best[:, None]], axis=1).at[:, 0, :1].set(root)
        pool = jax.vmap(_remember)(carry.pool, jnp.swapaxes(columns, 1, 2), took_part)
        # A round commits at least one token, so what stood in a row stands one place further on in the row above.
        return _Carry(jnp.where(took_part[:, None, None], columns[:, 1:], carry.window), pool)


def _remember(pool: Pool, ngrams: Array, took_part: Array) -> Pool:
    """One row's pool with the n-grams i32[W, N] put in the place of the same ones, or else of the oldest."""

    def put(pool: Pool, ngram: Array) -> tuple[Pool, None]:
        same = (pool.ngrams == ngram[None]).all(axis=1) & (pool.met > 0)
        place = jnp.where(same.any(), jnp.argmax(same), jnp.argmin(pool.met))
        place = jnp.where(took_part, place, pool.met.shape[0])
        now = pool.met.max() + 1
        return Pool(pool.ngrams.at[place].set(ngram, mode="drop"), pool.met.at[place].set(now, mode="drop")), None

    return jax.lax.scan(put, pool, ngrams)[0]
