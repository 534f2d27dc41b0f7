"""A parallel model drafts the whole output, an autoregressive one verifies it piece by piece; lossless.

This is speculative decoding (Leviathan et al. 2023) with one call, or a few, of a non-autoregressive drafter.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.cache import read_slots
from decoding_jax.checks import check_whole
from decoding_jax.decoders.canvas import Canvas, CanvasState
from decoding_jax.decoders.nonautoregressive import NonAutoregressive
from decoding_jax.decoders.prefix import Accepted, Draft, Prefix, PrefixState
from decoding_jax.rows import Context
from decoding_jax.sampling import HISTORY_OFF
from decoding_jax.types import Array

_WINDOW = 4  # how far from its place a draft goes on, in tokens


@struct.dataclass
class WholeDraft:
    """A drafted output i32[B, L] and its length i32[B], where it goes on i32[B], and the calls that it took i32[B]."""

    tokens: Array
    lengths: Array
    cursor: Array
    calls: Array


@struct.dataclass
class DraftThenVerify(Prefix):
    """Proposes the next tokens of an output that the drafter has written at once, greedily, before the first round.

    Behind a token that is not the draft's it goes on beside the nearest place of the draft where that token stands,
    looked for within four tokens (words left out or put in), else at the next place (another word).

    Attributes:
      draft: how the drafter decodes: the decoder of its objective, with one candidate.
      num_draft: K, the most tokens verified in a round.
    """

    draft: Canvas = struct.field(pytree_node=False, default=NonAutoregressive())
    num_draft: int = struct.field(pytree_node=False, default=8)

    takes_drafter = True
    drafts_in_parallel = True
    drafter_hint = "a model that writes a whole output at once, with the same vocabulary, as drafter"

    def __post_init__(self) -> None:
        check_whole("num_draft", self.num_draft, 1, "Autoregressive drafts nothing")
        if not isinstance(self.draft, Canvas):
            raise ValueError(f"draft={self.draft!r}: give the decoder that the drafter was trained for, such as CTC()")
        if self.draft.num_candidates > 1 or getattr(self.draft, "beam", 1) > 1:
            raise ValueError(f"draft={self.draft!r}: a draft is one output; leave length_beam and beam at 1")

    @property
    def num_nodes(self) -> int:
        """W = K."""
        return self.num_draft

    def check(self, ctx: Context) -> None:
        """Refuses a drafter that `draft` cannot decode; ValueError."""
        drafting, name = _of_drafter(ctx), type(self.draft).__name__
        if drafting.model.canvas is None:
            raise ValueError(
                "drafter: it writes token by token; use Speculative (in configs speculative), or give a model that "
                "writes a whole output at once"
            )
        if drafting.model.vocab_size != ctx.model.vocab_size:
            raise ValueError(
                f"drafter: its vocabulary is padded to {drafting.model.vocab_size} ids and the target's to "
                f"{ctx.model.vocab_size}; give one of the same size"
            )
        if self.draft.needs_lengths and drafting.model.length_logits is None:
            raise ValueError(f"drafter: it has no length head, so {name} cannot choose a length; give one that has")
        try:
            self.draft.check(drafting)
        except ValueError as error:
            raise ValueError(f"draft={name}(): {error}") from None

    def begin(self, ctx: Context) -> WholeDraft:
        """Drafts the whole output."""
        drafting = _of_drafter(ctx)
        going = lambda state: ~state.done.all()
        step = lambda state: self.draft.step(drafting, state)
        state: CanvasState = jax.lax.while_loop(going, step, drafting.settle(self.draft.init(drafting)))
        return WholeDraft(state.tokens, state.lengths, jnp.zeros_like(state.steps), state.steps)

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """What the draft says next."""
        del ctx
        whole: WholeDraft = state.carry
        at = whole.cursor[:, None] + jnp.arange(self.num_draft)[None]
        draft = Draft(read_slots(whole.tokens, at), at < whole.lengths[:, None], depth=self.num_draft)
        return draft, dataclasses.replace(state, draft_calls=whole.calls)

    def observe(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> WholeDraft:
        """Goes on behind the newest tokens."""
        del ctx, draft
        whole, rows = state.carry, state.rows
        next_to = whole.cursor + result.emitted
        last = read_slots(rows.tokens, jnp.maximum(rows.length[:, None] - jnp.arange(1, 3)[None], 0))
        place = jnp.arange(1, whole.tokens.shape[1] + 1)[None]  # behind each token of the draft
        before = jnp.pad(whole.tokens[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        matched = jnp.where(whole.tokens == last[:, :1], 1 + (before == last[:, 1:]).astype(jnp.int32), 0)
        distance = jnp.abs(place - next_to[:, None])
        usable = (matched > 0) & (distance <= _WINDOW) & (place <= whole.lengths[:, None])
        rank = jnp.where(usable, matched * (_WINDOW + 1) - distance, -1)
        best = jnp.where(rank.max(axis=1) > 0, rank.argmax(axis=1).astype(jnp.int32) + 1, next_to)
        return dataclasses.replace(whole, cursor=best)


def _of_drafter(ctx: Context) -> Context:
    """The same call for the drafter, which writes greedily: what is drawn is the target's business."""
    neutral = {name: jnp.full_like(getattr(ctx.sampling, name), value) for name, value in HISTORY_OFF.items()}
    greedy = dataclasses.replace(ctx.sampling, temperature=jnp.zeros_like(ctx.sampling.temperature), **neutral)
    return dataclasses.replace(ctx.of_drafter, sampling=greedy)
