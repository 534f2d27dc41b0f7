"""Plain decoding: one token per call of the model. The empty draft."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from decoding_jax.decoders.prefix import Draft, Prefix, PrefixState
from decoding_jax.rows import Context


@struct.dataclass
class Autoregressive(Prefix):
    """Draws each token from the model's law given everything before it; greedy at temperature 0."""

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """Proposes nothing."""
        del ctx
        batch = state.rows.length.shape[0]
        return Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool), depth=0), state
