"""causal_lm: predict each token from those before it in its document. Every prefix decoder runs the result."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.types import Array, Inputs, ModelSpec, PyTree
from train.objectives.losses import TokenPrediction


@struct.dataclass
class CausalLM(TokenPrediction):
    """loss = - mean of log p(token | tokens before it), with label smoothing and a teacher where they are given."""

    fields: ClassVar[tuple[str, ...]] = ("text",)
    encoder_decoder: ClassVar[bool] = False

    @staticmethod
    def abstract_batch(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch: B = rows, T = length."""
        names = ("tokens", "targets", "positions", "segments")
        shapes = {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in names}
        return shapes | {"weights": jax.ShapeDtypeStruct((rows, length), jnp.float32)}

    @staticmethod
    def logits(model: ModelSpec, params: PyTree, batch: dict[str, Array], key: Array | None) -> Array:
        """Logits f32[B * T, V] of every next token: each position sees its own document up to itself."""
        segments = batch["segments"]
        size = segments.shape[1]
        earlier = jnp.tril(jnp.ones((size, size), bool))[None]
        mask = earlier & (segments[:, :, None] == segments[:, None, :])
        inputs = Inputs(batch["tokens"], batch["positions"], mask, dropout_key=key)
        hidden = model.apply(params, inputs, None).hidden
        return model.readout(params, hidden.reshape(-1, hidden.shape[-1])).astype(jnp.float32)
