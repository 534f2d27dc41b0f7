"""Connectionist temporal classification: what frames say, the best texts, and how a text lies on the frames.

A path gives every frame one symbol, a token or the blank. It says its tokens with repeats taken out first and blanks
then, so `a a blank a b` says `a a b`. A text is as probable as all the paths that say it (Graves et al. 2006).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoding_jax.types import Array

# (tokens i32[B, W, T], lengths i32[B, W], candidates i32[B, W, K]) -> f32[B, W, K]
Fusion = Callable[[Array, Array, Array], Array]

# Finite, so that neither a difference nor a gradient is NaN; no path of possible steps sums up to UNREACHED.
LEAST, UNREACHED = -1e20, -1e30


def collapse(frames: Array, lengths: Array, blank: int) -> tuple[Array, Array, Array]:
    """What each row's path says.

    Args:
      frames: i32[B, T], a symbol per frame.
      lengths: i32[B], the frames of each row.
      blank: its id.

    Returns:
      tokens i32[B, T], zero past those kept; kept i32[B], how many there are; and at i32[B, T], the frame in which
      each token first stood, T past those kept.

    >>> tokens, kept, at = collapse(jnp.asarray([[3, 3, 9, 3, 4]]), jnp.asarray([5]), blank=9)
    >>> tokens[0].tolist(), kept.tolist(), at[0].tolist()
    ([3, 3, 4, 0, 0], [3], [0, 3, 4, 5, 5])
    """
    size = frames.shape[1]
    places = jnp.arange(size, dtype=jnp.int32)
    # The frame before the first is a blank.
    before = jnp.pad(frames, ((0, 0), (1, 0)), constant_values=blank)[:, :-1]
    keep = (frames != blank) & (frames != before) & (places[None] < lengths[:, None])
    order = jnp.cumsum(keep, axis=1, dtype=jnp.int32)
    to = jnp.where(keep, order - 1, size)
    tokens = jax.vmap(lambda row, to: jnp.zeros_like(row).at[to].set(row, mode="drop"))(frames, to)
    at = jax.vmap(lambda to: jnp.full_like(to, size).at[to].set(places, mode="drop"))(to)
    return tokens, order[:, -1], at


class Beams(NamedTuple):
    """The prefixes of each row; no two that can still be extended are equal.

    Attributes:
      tokens: i32[B, W, T], zero past the lengths.
      lengths: i32[B, W].
      last: i32[B, W], the last token; the blank where there is none, which no candidate equals.
      in_blank: f32[B, W], log p of the paths that say the prefix and end in a blank.
      in_token: f32[B, W], of those that end in its last token.
      fused: f32[B, W], what fusion added.
      begins: bool[B, W, W], [v, w]: w begins with the whole of v; False where w has no probability.
    """

    tokens: Array
    lengths: Array
    last: Array
    in_blank: Array
    in_token: Array
    fused: Array
    begins: Array


def _ranked(in_blank: Array, in_token: Array, fused: Array) -> Array:
    total = jnp.logaddexp(in_blank, in_token)
    return jnp.where(total > -jnp.inf, total + fused, -jnp.inf)  # whatever fusion says of what cannot be


def prefix_beam(
    log_probs: Array,
    lengths: Array,
    blank: int,
    width: int,
    top: int = 16,
    fusion: Fusion | None = None,
    top_k: Callable[[Array, int], tuple[Array, Array]] = jax.lax.top_k,
) -> tuple[Array, Array, Array]:
    """Searches for the most probable texts (prefix search, Graves et al. 2006, as a beam: Hannun et al. 2014).

    Paths that end in a blank and in a token are summed apart, since a token that repeats the last one says something
    new only behind a blank. A prefix reached by several ways is one prefix: nothing is merged in what it says.

    Args:
      log_probs: f32[B, T, V].
      lengths: i32[B], the frames of each row.
      blank: its id.
      width: W, the prefixes that are kept.
      top: new prefixes are made with this many of a frame's most probable tokens; those that are kept already get
        the paths that lead to them in any case.
      fusion: what is added to a prefix's score when each of the candidates is appended, such as
        `alpha * log p_lm + beta` (Graves & Jaitly 2014; Hannun et al. 2014). It ranks; paths are summed without it.
      top_k: finds the best of f32[B, n].

    Returns:
      tokens i32[B, W, T], zero past the lengths; lengths i32[B, W]; scores f32[B, W], log p of the paths found and
      what fusion added, best first. Where fewer were found: length 0, score -inf.
    """
    batch, size, vocab_size = log_probs.shape
    nothing = jnp.full((batch, width), -jnp.inf, log_probs.dtype)
    zeros = jnp.zeros((batch, width), jnp.int32)
    start = Beams(
        tokens=jnp.zeros((batch, width, size), jnp.int32),
        lengths=zeros,
        last=zeros + blank,
        in_blank=nothing.at[:, 0].set(0.0),
        in_token=nothing,
        fused=jnp.zeros_like(nothing),
        begins=jnp.zeros((batch, width, width), bool).at[:, 0, 0].set(True),
    )

    def visit(beams: Beams, at: Array) -> Beams:
        symbols = jax.lax.dynamic_index_in_dim(log_probs, at, axis=1, keepdims=False)
        values, candidates = top_k(symbols, min(top + 1, vocab_size))
        # The blank may be one of them, so one more was asked for. To take it out before would copy the vocabulary.
        usable = candidates != blank
        usable &= jnp.cumsum(usable, axis=1, dtype=jnp.int32) <= top
        pool = _continue(beams, symbols, blank, jnp.where(usable, values, -jnp.inf), candidates, fusion)
        after = _choose(beams, pool, candidates, *top_k(_ranked(*pool), width))
        within = lambda new: (at < lengths).reshape(-1, *[1] * (new.ndim - 1))
        return jax.tree.map(lambda new, old: jnp.where(within(new), new, old), after, beams)

    def frame(beams: Beams, at: Array) -> tuple[Beams, None]:
        return jax.lax.cond((at < lengths).any(), visit, lambda same, _: same, beams, at), None

    beams, _ = jax.lax.scan(frame, start, jnp.arange(size, dtype=jnp.int32))
    scores = _ranked(beams.in_blank, beams.in_token, beams.fused)
    found = scores > -jnp.inf
    return jnp.where(found[:, :, None], beams.tokens, 0), jnp.where(found, beams.lengths, 0), scores


Pool = tuple[Array, Array, Array]  # in_blank, in_token and fused, of the W prefixes and their W * K continuations


def _continue(
    beams: Beams, symbols: Array, blank: int, values: Array, candidates: Array, fusion: Fusion | None
) -> Pool:
    """One frame on: its log_probs are symbols f32[B, V], those of the candidates i32[B, K] are values f32[B, K]."""
    batch = candidates.shape[0]
    last, total = beams.last, jnp.logaddexp(beams.in_blank, beams.in_token)
    # parent[v, w]: w is v and one token more, so v's paths flow into w; if it repeats v's last token, only those
    # that end in a blank.
    parent = beams.begins & (beams.lengths[:, :, None] + 1 == beams.lengths[:, None])
    flows = jnp.where(last[:, :, None] == last[:, None], beams.in_blank[:, :, None], total[:, :, None])
    inflow = jnp.where(parent, flows, -jnp.inf).max(axis=1)
    in_blank = total + symbols[:, blank][:, None]
    in_token = jnp.logaddexp(beams.in_token, inflow) + jnp.take_along_axis(symbols, last, axis=1)

    repeats = last[:, :, None] == candidates[:, None]
    longer = jnp.where(repeats, beams.in_blank[:, :, None], total[:, :, None]) + values[:, None]
    kept_already = (parent[..., None] & (last[:, None, :, None] == candidates[:, None, None])).any(axis=2)
    longer = jnp.where(kept_already, -jnp.inf, longer)
    fused = jnp.broadcast_to(beams.fused[:, :, None], longer.shape)
    if fusion is not None:
        fused += fusion(beams.tokens, beams.lengths, jnp.broadcast_to(candidates[:, None], longer.shape))
    both = lambda stays, longer: jnp.concatenate([stays, longer.reshape(batch, -1)], axis=1)
    return both(in_blank, jnp.full_like(longer, -jnp.inf)), both(in_token, longer), both(beams.fused, fused)


def _choose(beams: Beams, pool: Pool, candidates: Array, scores: Array, index: Array) -> Beams:
    """The members index i32[B, W] of the pool, whose scores f32[B, W] are, as the next beams."""
    size, width, number = beams.tokens.shape[2], index.shape[1], candidates.shape[1]
    of = lambda leaf, at: jax.vmap(lambda row, at: row[at])(leaf, at)
    is_longer = index >= width
    beam = jnp.where(is_longer, (index - width) // number, index)
    token = of(candidates, (index - width) % number)
    ends = of(beams.lengths, beam)
    here = is_longer[:, :, None] & (jnp.arange(size, dtype=jnp.int32)[None, None] == ends[:, :, None])
    tokens = jnp.where(here, token[:, :, None], of(beams.tokens, beam))
    lengths = ends + is_longer.astype(jnp.int32)
    last = jnp.where(is_longer, token, of(beams.last, beam))
    # w begins with v if what w came from begins with what v came from, and v's last token is there in w as well.
    # This is exact: equal prefixes are never made twice, as `_continue` takes out what is kept already.
    came = jax.vmap(lambda row, beam: row[beam][:, beam])(beams.begins, beam)
    there = jax.vmap(lambda row, at: row[:, at].T)(tokens, jnp.maximum(lengths - 1, 0))
    reaches = (lengths[:, :, None] <= lengths[:, None]) & (there == last[:, :, None])
    begins = came & (reaches | (lengths == 0)[:, :, None]) & (scores > -jnp.inf)[:, None]
    in_blank, in_token, fused = (of(each, index) for each in pool)
    return Beams(tokens, lengths, last, in_blank, in_token, fused, begins)


class Lattice(NamedTuple):
    """The paths that say a target y, as walks through S = 2U + 1 states: blank, y1, blank, y2, ... blank.

    A walk stands in state 0 before the first frame. With each frame it stays, goes one state on, or skips a blank
    between two different tokens; it ends in the last token or in the blank behind it (Graves et al. 2006, sec. 4.1).

    Attributes:
      scores: f32[B, T, S], log p of each state's symbol, at least LEAST.
      symbols: i32[B, S]; the blank in the states past a target, which no walk needs.
      skip: bool[B, S], whether the state can be reached from two states before.
      lengths: i32[B], of the targets.
    """

    scores: Array
    symbols: Array
    skip: Array
    lengths: Array

    @classmethod
    def of(cls, log_probs: Array, targets: Array, target_lengths: Array, blank: int) -> Lattice:
        """Of log_probs f32[B, T, V] and targets i32[B, U], whose padding may hold anything."""
        size = targets.shape[1]
        within = jnp.arange(size, dtype=jnp.int32)[None] < target_lengths[:, None]
        labels = jnp.pad(jnp.where(within, targets, blank), ((0, 0), (1, 0)), constant_values=blank)
        # Only U + 1 symbols are looked up; the blank's is then repeated.
        scores = jnp.maximum(jax.vmap(lambda row, ids: row[:, ids])(log_probs, labels), LEAST)
        which = np.zeros(2 * size + 1, np.int32)
        which[1::2] = np.arange(1, size + 1)
        symbols = labels[:, which]
        before = jnp.pad(symbols, ((0, 0), (2, 0)), constant_values=blank)[:, :-2]
        return cls(scores[:, :, which], symbols, (symbols != blank) & (symbols != before), target_lengths)

    def start(self) -> Array:
        """f32[B, S], the score of standing in each state before the first frame."""
        batch, _, states = self.scores.shape
        return jnp.full((batch, states), UNREACHED, self.scores.dtype).at[:, 0].set(0.0)

    def ways(self, scores: Array) -> Array:
        """f32[3, B, S], with what score each state is reached by staying, a step and a skip, from scores f32[B, S]."""
        moved = lambda by: jnp.pad(scores, ((0, 0), (by, 0)), constant_values=UNREACHED)[:, : scores.shape[1]]
        return jnp.stack([scores, moved(1), jnp.where(self.skip, moved(2), UNREACHED)])

    def ends(self, scores: Array) -> Array:
        """f32[2, B], the scores of ending in the last blank and in the last token, from scores f32[B, S]."""
        states = 2 * self.lengths[:, None] - jnp.arange(2, dtype=jnp.int32)[None]
        found = jnp.take_along_axis(scores, jnp.maximum(states, 0), axis=1)
        return jnp.where(states >= 0, found, UNREACHED).T


def best_path_alignment(log_probs: Array, frames: Array, targets: Array, target_lengths: Array, blank: int) -> Array:
    """The most probable of the paths that say each target (Viterbi): what glancing training with CTC shows parts of.

    (Qian et al. 2021; with CTC, Gu & Kong 2021.)

    Args:
      log_probs: f32[B, T, V].
      frames: i32[B], the frames of each row.
      targets: i32[B, U]; no blanks.
      target_lengths: i32[B].
      blank: its id.

    Returns:
      i32[B, T], a symbol per frame; the blank past the frames, and throughout where they are too few.
    """
    lattice = Lattice.of(log_probs, targets, target_lengths, blank)
    places = jnp.arange(log_probs.shape[1], dtype=jnp.int32)

    def forward(best: Array, frame: tuple[Array, Array]) -> tuple[Array, Array]:
        scores, at = frame
        ways = lattice.ways(best)
        within = (at < frames)[:, None]
        move = jnp.where(within, ways.argmax(axis=0).astype(jnp.int32), 0)
        return jnp.where(within, ways.max(axis=0) + scores, best), move

    best, moves = jax.lax.scan(forward, lattice.start(), (jnp.moveaxis(lattice.scores, 1, 0), places))
    ends = lattice.ends(best)
    state = 2 * target_lengths - ends.argmax(axis=0).astype(jnp.int32)

    def backward(state: Array, move: Array) -> tuple[Array, Array]:
        at = lambda leaf: jnp.take_along_axis(leaf, state[:, None], axis=1)[:, 0]
        return state - at(move), at(lattice.symbols)

    _, path = jax.lax.scan(backward, state, moves, reverse=True)
    says = (places[None] < frames[:, None]) & (ends.max(axis=0) > UNREACHED / 2)[:, None]
    return jnp.where(says, path.T, blank)
