"""Beam search: keep the W most probable prefixes of every row.

The beams of row b are rows b * W ... b * W + W - 1 of the batch that the model sees. Each step

    live beams      W prefixes, each with its summed log-probability
    continuing      the best 2W one-token extensions that do not end a row; W of them live on
    ended           the best W extensions by an ending id, and those that complete a stop string
    finished        the W best ended hypotheses so far, by score

Ending and continuing extensions are ranked apart, so any number of ending ids leaves W live beams.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.cache import reorder_candidates
from decoding_jax.checks import check_flag, check_whole
from decoding_jax.masks import causal_mask
from decoding_jax.rows import Context, prefill, start_rows
from decoding_jax.sampling import process_logits
from decoding_jax.stops import NOT_ENDED, ending
from decoding_jax.types import (
    FINISH_REASONS,
    LENGTH,
    STOP,
    Array,
    Cache,
    Candidates,
    DecodeOutput,
    Inputs,
    Stats,
)


@struct.dataclass
class Hypotheses:
    """W hypotheses of each row.

    Attributes:
      tokens: i32[B, W, N], prompt, then output, then zeros.
      log_probs: f32[B, W, N], the model's own, of the output.
      length: i32[B, W].
      total: f32[B, W]: live ones carry their summed log-probability, finished ones their score; -inf
        marks a place that holds none.
      stop_state: i32[B, W], states of the stop-string automaton.
      reason: i32[B, W].
    """

    tokens: Array
    log_probs: Array
    length: Array
    total: Array
    stop_state: Array
    reason: Array


@struct.dataclass
class BeamState:
    """Attributes: live and finished hypotheses, the cache of B * W rows, done bool[B], model calls i32[B]."""

    live: Hypotheses
    finished: Hypotheses
    cache: Cache
    done: Array
    model_calls: Array


def _pick(pool: Hypotheses, index: Array) -> Hypotheses:
    """Hypotheses index i32[B, n] of each row's pool."""
    return jax.tree.map(lambda leaf: jax.vmap(lambda row, at: row[at])(leaf, index), pool)


def _join(*pools: Hypotheses) -> Hypotheses:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *pools)


def _best(ctx: Context, pool: Hypotheses, count: int) -> Hypotheses:
    return _pick(pool, ctx.top_k(pool.total, count)[1])


def _reordered(ctx: Context, cache: Cache, parents: Array) -> Cache:
    """The cache with each row's beams in the order of parents i32[B, W]; what all of them know of a source stays."""
    slots = reorder_candidates(cache.slots, parents)
    return Cache(slots, cache.rows if ctx.model.encode is not None else reorder_candidates(cache.rows, parents))


@struct.dataclass
class Beam:
    """Searches for the sequence with the best score, sum of log p / (new tokens) ** length_penalty.

    The new tokens include the one that ends the row. With length_penalty 0 the score is the
    log-probability, with 1 its mean; larger favours longer (Wu et al. 2016 use another curve). A row
    stops when no live beam can still beat its worst finished hypothesis, whatever the other rows do.
    Processors apply before log p; temperature and filters do not.

    Attributes:
      num_beams: W.
      n_best: how many hypotheses `DecodeOutput.candidates` holds, at most W.
      length_penalty: the exponent.
      early_stopping: a row stops already when it has W finished hypotheses, though a live beam might become better:
        fewer calls, as most toolkits search. Then an end by an id or a string counts only where it is among the W
        best extensions of its step; else W ends that no one would write were there after two steps.
    """

    num_beams: int = struct.field(pytree_node=False, default=4)
    n_best: int = struct.field(pytree_node=False, default=1)
    length_penalty: float | Array = 1.0
    early_stopping: bool | Array = False

    def check(self, ctx: Context) -> None:
        """Refuses settings that have no meaning for a search; ValueError says which."""
        check_whole("num_beams", self.num_beams, 1)
        check_whole("n_best", self.n_best, 1)
        if self.n_best > self.num_beams:
            raise ValueError(f"num_beams={self.num_beams}, n_best={self.n_best}: need 1 <= n_best <= num_beams")
        check_flag("early_stopping", self.early_stopping)
        if not np.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty={self.length_penalty}: must be a finite number; 0 is off")
        if bool((ctx.sampling.temperature > 0).any()):
            raise ValueError("sampling.temperature: Beam searches and does not draw; use temperature 0")
        if self.num_beams >= ctx.model.vocab_size:
            raise ValueError(f"num_beams={self.num_beams}: must be below the vocabulary size {ctx.model.vocab_size}")

    def init(self, ctx: Context) -> BeamState:
        """Prefills every prompt once and gives each of its beams a copy."""
        beams = self.num_beams
        batch, size = ctx.prompts.shape
        rows = start_rows(ctx)
        wide = lambda leaf: jnp.repeat(leaf[:, None], beams, axis=1)
        # All beams start equal, so only one of them counts.
        first = jnp.full((1, beams), -jnp.inf, jnp.float32).at[0, 0].set(0.0)
        live = Hypotheses(
            tokens=wide(rows.tokens),
            log_probs=wide(rows.log_probs),
            length=wide(rows.length),
            total=jnp.broadcast_to(first, (batch, beams)),
            stop_state=wide(rows.stop_state),
            reason=wide(rows.reason),
        )
        return BeamState(
            live=live,
            finished=dataclasses.replace(
                live,
                total=jnp.full((batch, beams), -jnp.inf, jnp.float32),
                reason=jnp.full((batch, beams), LENGTH, jnp.int32),
            ),
            cache=jax.tree.map(lambda leaf: jnp.repeat(leaf, beams, axis=0), prefill(ctx, size)),
            done=rows.done,
            model_calls=jnp.zeros((batch,), jnp.int32),
        )

    def _score(self, ctx: Context, total: Array, length: Array) -> Array:
        """Scores f32[B, n] of summed log-probabilities at lengths i32[B, n]."""
        new = jnp.maximum(length - ctx.prompt_lengths[:, None], 1).astype(jnp.float32)
        return total / new**self.length_penalty

    def _expand(self, ctx: Context, state: BeamState) -> tuple[Array, Array, Cache]:
        """One call of the model on all beams: log p after processors, the model's own, both f32[B, W, V]."""
        batch, beams, size = state.live.tokens.shape
        wide = ctx.repeat_rows(beams)
        flat = jax.tree.map(lambda leaf: leaf.reshape(batch * beams, *leaf.shape[2:]), state.live)
        positions = flat.length[:, None] - 1
        done = jnp.repeat(state.done, beams)
        inputs = Inputs(
            tokens=jnp.take_along_axis(flat.tokens, positions, axis=1),
            positions=positions,
            mask=causal_mask(positions, size),
            slots=jnp.where(done[:, None], size, positions),
        )
        out = ctx.apply(inputs, state.cache)
        logits = ctx.readout(out.hidden)[:, 0]
        processed = process_logits(
            wide.sampling, ctx.rules, logits, flat.tokens, wide.prompt_lengths, flat.length, ctx.stops.ends
        )
        shape = (batch, beams, -1)
        own = jax.nn.log_softmax(logits).reshape(shape)
        return jax.nn.log_softmax(processed).reshape(shape), own, out.cache

    def step(self, ctx: Context, state: BeamState) -> BeamState:
        """Extends every live beam by one token and keeps the best."""
        batch, beams, size = state.live.tokens.shape
        log_p, own, cache = self._expand(ctx, state)
        vocab_size = log_p.shape[-1]
        total = (state.live.total[:, :, None] + log_p).reshape(batch, -1)
        ends = jnp.tile(ctx.stops.ends, beams)

        def extend(allowed: Array, count: int) -> tuple[Hypotheses, Array]:
            """The best `count` extensions by allowed tokens, and the beam that each extends."""
            best, index = ctx.top_k(jnp.where(allowed[None], total, -jnp.inf), count)
            beam, token = index // vocab_size, (index % vocab_size).astype(jnp.int32)
            old = _pick(state.live, beam)
            stop_state, reason = ending(ctx.stops, old.stop_state.reshape(-1), token.reshape(-1))
            at = jnp.arange(size)[None, None] == old.length[:, :, None]
            log_prob = jnp.take_along_axis(own.reshape(batch, -1), index, axis=1)
            longer = Hypotheses(
                tokens=jnp.where(at, token[:, :, None], old.tokens),
                log_probs=jnp.where(at, log_prob[:, :, None], old.log_probs),
                length=old.length + 1,
                total=best,
                stop_state=stop_state.reshape(batch, count),
                reason=reason.reshape(batch, count),
            )
            return longer, beam

        by_id, _ = extend(ends, beams)
        other, parent = extend(~ends, min(2 * beams, beams * (vocab_size - 1)))
        by_string = other.reason == STOP
        order = ctx.top_k(jnp.where(by_string, -jnp.inf, other.total), beams)[1]
        live = _pick(other, order)
        live = dataclasses.replace(live, total=jnp.where(live.reason == NOT_ENDED, live.total, -jnp.inf))
        full = live.length >= ctx.limits[:, None]
        # The W-th best extension, in whatever way it goes on.
        least = ctx.top_k(jnp.concatenate([by_id.total, other.total], axis=1), beams)[0][:, -1:]
        least = jnp.where(self.early_stopping, least, -jnp.inf)
        ended = _join(
            dataclasses.replace(by_id, total=jnp.where(by_id.total >= least, by_id.total, -jnp.inf)),
            dataclasses.replace(other, total=jnp.where(by_string & (other.total >= least), other.total, -jnp.inf)),
            dataclasses.replace(
                live, total=jnp.where(full, live.total, -jnp.inf), reason=jnp.full_like(live.reason, LENGTH)
            ),
        )
        ended = dataclasses.replace(ended, total=self._score(ctx, ended.total, ended.length))
        finished = _best(ctx, _join(state.finished, ended), beams)

        # A live sum can only fall; its score is best at the longest length, or the next one if length costs.
        longest = jnp.where(self.length_penalty > 0, ctx.limits[:, None], live.length + 1)
        hope = self._score(ctx, live.total, longest).max(axis=1)
        worst = finished.total.min(axis=1)
        done = full.all(axis=1) | (worst >= hope) | (jnp.isfinite(worst) & self.early_stopping)

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(state.done.reshape(batch, *[1] * (new.ndim - 1)), old, new)

        return BeamState(
            live=jax.tree.map(keep, live, state.live),
            finished=jax.tree.map(keep, finished, state.finished),
            cache=_reordered(ctx, cache, jnp.take_along_axis(parent, order, axis=1)),
            done=state.done | done,
            model_calls=state.model_calls + (~state.done).astype(jnp.int32),
        )

    def finalize(self, ctx: Context, state: BeamState) -> DecodeOutput:
        """The best hypothesis of each row, and the n best as candidates (on the host)."""
        finished, start, limits, calls = jax.device_get(
            (state.finished, ctx.prompt_lengths, ctx.limits, state.model_calls)
        )
        order = np.argsort(-finished.total, axis=1, kind="stable")[:, : self.n_best]
        best = jax.tree.map(lambda leaf: np.stack([row[at] for row, at in zip(leaf, order, strict=True)]), finished)
        found = np.isfinite(best.total)
        lengths = np.where(found, best.length - start[:, None], 0)
        at = np.arange(max(int((limits - start).max()), 0))
        index = np.minimum(start[:, None] + at, best.tokens.shape[2] - 1)[:, None]
        new = at < lengths[:, :, None]
        tokens = np.where(new, np.take_along_axis(best.tokens, index, axis=2), 0)
        log_probs = np.where(new, np.take_along_axis(best.log_probs, index, axis=2), np.float32(0.0))
        finish_reasons = [[FINISH_REASONS[r] for r in reasons] for reasons in best.reason]
        zeros = np.zeros_like(calls)
        return DecodeOutput(
            tokens=tokens[:, 0],
            lengths=lengths[:, 0],
            log_probs=log_probs[:, 0],
            finish_reason=[reasons[0] for reasons in finish_reasons],
            stats=Stats(model_calls=calls, draft_calls=zeros, drafted=zeros, accepted=zeros, tokens=lengths[:, 0]),
            candidates=Candidates(tokens, lengths, best.total, log_probs, finish_reasons),
            lossless=False,
        )
