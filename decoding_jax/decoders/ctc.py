"""CTC: frames all at once, of which repeats and blanks are dropped (Graves et al. 2006; Libovicky & Helcl 2018)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.checks import check_number, check_whole
from decoding_jax.ctc import best_path_alignment, collapse, prefix_beam
from decoding_jax.decoders.canvas import (
    PAD,
    WRITTEN,
    Canvas,
    Canvases,
    CanvasState,
    output_of_canvases,
    predict,
    process_places,
    spec_of,
)
from decoding_jax.ngram import NGram
from decoding_jax.rows import Context
from decoding_jax.types import Array, DecodeOutput, PyTree


@struct.dataclass
class CTC(Canvas):
    """Predicts a token or a blank for every frame, `upsample` frames for each token of the source, in one call.

    The output is what is left when repeats, then blanks are dropped, so its length needs no head.

    Attributes:
      beam: 1 takes the most probable path of frames. More search for the most probable text, the sum of all its
        paths, among so many prefixes; `DecodeOutput.candidates` has them, ranked by log p(text) of the tokens that may
        be drawn, and what the language model and the bonus add.
      top: how many tokens of each frame a search tries.
      language_model: of the targets, which a search asks for every token that it appends; None: none.
      language_model_weight: what its log-probability counts, beside that of the frames.
      length_bonus: at least 0, added to a search's score for every token, since a language model favours short texts.
    """

    beam: int = struct.field(pytree_node=False, default=1)
    top: int = struct.field(pytree_node=False, default=16)
    language_model: NGram | None = None
    language_model_weight: float | Array = 0.3
    length_bonus: float | Array = 0.0

    runs: ClassVar[tuple[str, ...]] = ("ctc",)
    needs_lengths: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("beam", self.beam, 1)
        check_whole("top", self.top, 1)

    def check(self, ctx: Context) -> None:
        """See `Canvas.check`; a search draws nothing, and an n-gram model steers nothing but a search."""
        super().check(ctx)
        check_number("language_model_weight", self.language_model_weight)
        check_number("length_bonus", self.length_bonus)
        if self.beam > 1 and bool((ctx.sampling.temperature > 0).any()):
            raise ValueError("sampling.temperature: a beam of CTC searches and does not draw; use temperature 0")
        if self.beam == 1 and (self.language_model is not None or float(self.length_bonus)):
            name = "length_bonus" if self.language_model is None else "language_model"
            raise ValueError(f"{name}: beam=1 takes the best path of frames and ranks no texts; give a beam")
        known, wanted = getattr(self.language_model, "vocab_size", None), ctx.model.vocab_size
        if self.language_model is not None and known != wanted:
            raise ValueError(
                f"language_model: its vocabulary has {known} ids and the model's {wanted}; train it on ids of the "
                "model's tokenizer"
            )

    def canvas_size(self, ctx: Context) -> int:
        """L, enough frames for the longest source."""
        assert ctx.sources is not None
        return spec_of(ctx).upsample * ctx.sources.shape[1]

    def choose_lengths(self, ctx: Context, memory: PyTree) -> Array:
        """The frames of each row, i32[B, 1]."""
        del memory
        assert ctx.source_lengths is not None
        frames = spec_of(ctx).upsample * ctx.source_lengths
        return jnp.where(ctx.limits > ctx.prompt_lengths, frames, 0)[:, None]

    def init(self, ctx: Context) -> CanvasState:
        """As `Canvas.init`, and room for what a search finds: tokens, log-probabilities [B, W, L], scores [B, W]."""
        state = super().init(ctx)
        if self.beam == 1:
            return state
        batch, size = state.tokens.shape
        shape = (batch, self.beam, size)
        found = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape[:2], jnp.float32)
        return dataclasses.replace(state, carry=(*found, jnp.zeros(shape[:2], jnp.int32)))

    def select(self, ctx: Context, state: CanvasState, logits: Array) -> CanvasState:
        """Reads the frames."""
        blank, frames = spec_of(ctx).mask_id, state.lengths
        size = logits.shape[1]
        if self.beam == 1:
            symbols, log_probs = predict(ctx, state.positions, state.steps, logits, emits_mask=True)
            tokens, kept, at = collapse(symbols, frames, blank)
            log_probs = jnp.take_along_axis(log_probs, jnp.minimum(at, size - 1), axis=1)
        else:
            carry = self._search(ctx, state, logits, frames)
            tokens, log_probs, kept = carry[0][:, 0, :size], carry[1][:, 0, :size], carry[3][:, 0]
            state = dataclasses.replace(state, carry=carry)
        kept = jnp.minimum(kept, ctx.limits - ctx.prompt_lengths)
        inside = jnp.arange(size)[None] < kept[:, None]
        return dataclasses.replace(
            state,
            tokens=jnp.where(inside, tokens, 0),
            status=jnp.where(inside, WRITTEN, PAD).astype(jnp.uint8),
            log_probs=jnp.where(inside, log_probs, 0.0),
            done=jnp.ones_like(state.done),
        )

    def _search(
        self, ctx: Context, state: CanvasState, logits: Array, frames: Array
    ) -> tuple[Array, Array, Array, Array]:
        """The best texts: tokens i32[B, W, L], log-probabilities f32[B, W, L], scores f32[B, W], lengths i32[B, W]."""
        _, size, vocab_size = logits.shape
        blank, room = spec_of(ctx).mask_id, state.carry[0].shape[2] - size
        law = jax.nn.log_softmax(process_places(ctx, logits, emits_mask=True))
        top = min(self.top, vocab_size - 1)
        tokens, lengths, scores = prefix_beam(law, frames, blank, self.beam, top, self._fuse, ctx.top_k)
        # Where each token of a text stands is read off its most probable path.
        align = jax.vmap(best_path_alignment, in_axes=(None, None, 1, 1, None), out_axes=1)
        path = align(law, frames, tokens, lengths, blank)
        at = jax.vmap(lambda each: collapse(each, frames, blank)[2], in_axes=1, out_axes=1)(path)
        own = jax.nn.log_softmax(logits)
        log_probs = jax.vmap(lambda row, at, ids: row[at, ids])(own, jnp.minimum(at, size - 1), tokens)
        log_probs = jnp.where(jnp.arange(size)[None, None] < lengths[:, :, None], log_probs, 0.0)
        pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room)))
        return pad(tokens), pad(log_probs), scores, lengths

    def _fuse(self, tokens: Array, lengths: Array, candidates: Array) -> Array:
        """What appending each of the candidates i32[B, W, K] adds to a prefix's score."""
        bonus = jnp.broadcast_to(jnp.asarray(self.length_bonus, jnp.float32), candidates.shape)
        if self.language_model is None:
            return bonus
        return self.language_model_weight * self.language_model.log_prob(tokens, lengths, candidates) + bonus

    def finalize(self, ctx: Context, state: CanvasState) -> DecodeOutput:
        """The text of each row, and the others that a search found as candidates (on the host)."""
        if self.beam == 1:
            return super().finalize(ctx, state)
        tokens, log_probs, scores, lengths = state.carry
        size = tokens.shape[2]
        limits = (ctx.limits - ctx.prompt_lengths)[:, None]
        inside = jnp.arange(size)[None, None] < jnp.minimum(lengths, limits)[:, :, None]
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        canvases = Canvases(
            flat(jnp.where(inside, tokens, 0)),
            flat(inside),
            flat(jnp.where(inside, log_probs, 0.0)),
            flat(scores),
            jnp.repeat(state.steps, self.beam),
        )
        return output_of_canvases(ctx.repeat_rows(self.beam), canvases, self.beam)
