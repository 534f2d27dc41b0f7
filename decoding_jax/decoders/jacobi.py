"""Parallel fixed-point decoding of an ordinary autoregressive model (Santilli et al., ACL 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.checks import check_flag, check_whole
from decoding_jax.decoders.prefix import Accepted, Draft, Prefix, PrefixState
from decoding_jax.rows import Context, processed_logits
from decoding_jax.sampling import draw
from decoding_jax.types import Array


@struct.dataclass
class Jacobi(Prefix):
    """Guesses a block of tokens and replaces all of them by the model's own draws, until they stay as they are.

    What the model would draw anyway is committed at once: the guesses that agree with it, and the token behind
    them. The draws have the noise of their positions, so a fixed point is plain decoding's output at any temperature.

    `block_length` of the whole budget is the paper's parallel Jacobi decoding (PJ); shorter blocks that are finished
    one after the other (`sliding=False`) are its Gauss-Seidel-Jacobi decoding (PGJ), and as an accepted end of sequence
    stops the row, its hybrid (HGJ). By default the block slides on with what is committed.

    Attributes:
      block_length: K, how many tokens are guessed.
      sliding: whether the block begins behind the committed tokens, or at a multiple of K behind the prompt.
    """

    reads_logits = True

    block_length: int = struct.field(pytree_node=False, default=8)
    sliding: bool = struct.field(pytree_node=False, default=True)

    def __post_init__(self) -> None:
        check_whole("block_length", self.block_length, 1)
        check_flag("sliding", self.sliding)

    @property
    def num_nodes(self) -> int:
        """W = K."""
        return self.block_length

    @property
    def widths(self) -> tuple[int, ...]:
        """The whole block in every round."""
        return (self.block_length,)

    def begin(self, ctx: Context) -> Array:
        """The first guesses i32[B, K]: the prompt's last token again and again."""
        last = jnp.take_along_axis(ctx.prompts, ctx.prompt_lengths[:, None] - 1, axis=1)
        return jnp.broadcast_to(last, (last.shape[0], self.block_length))

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """The guesses."""
        left = jnp.full_like(state.rows.length, self.block_length)
        if not self.sliding:
            left -= (state.rows.length - ctx.prompt_lengths) % self.block_length
        verifiable = jnp.arange(self.block_length)[None] < left[:, None]
        return Draft(state.carry, verifiable, depth=self.block_length), state

    def observe(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> Array:
        """What the model draws behind each guess; where it has not looked yet, its last draw again."""
        rows, logits = state.rows, result.logits
        assert logits is not None
        first = rows.length - result.emitted  # the position that the root's draw fills

        def behind(node: Array, logits: Array) -> Array:
            processed = processed_logits(ctx, rows, logits)
            return draw(ctx.sampling, ctx.seed, ctx.row_ids, first + node, processed)

        draws = jax.vmap(behind, in_axes=(0, 1), out_axes=1)(jnp.arange(self.block_length + 1), logits)
        looked = state.record.verifiable.sum(axis=1, keepdims=True)  # what is not verified has no keys
        at = jnp.minimum(result.emitted[:, None] + jnp.arange(self.block_length)[None], looked)
        return jnp.where(result.emitted[:, None] > 0, jnp.take_along_axis(draws, at, axis=1), state.carry)
