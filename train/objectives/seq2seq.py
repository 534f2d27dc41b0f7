"""seq2seq: predict each target token from the source and the target before it. Every prefix decoder runs the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.types import Array, Cache, Inputs, ModelSpec, PyTree
from train.objectives.losses import TokenPrediction


@struct.dataclass
class Seq2Seq(TokenPrediction):
    """loss = - mean of log p(token | source, target before it), with label smoothing and a teacher where given."""

    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    encoder_decoder: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    def abstract_batch(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch: B = rows, M = T = length."""
        shapes = {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in ("source", "tokens", "targets")}
        shapes["source_lengths"] = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return shapes | {"weights": jax.ShapeDtypeStruct((rows, length), jnp.float32)}

    @staticmethod
    def logits(model: ModelSpec, params: PyTree, batch: dict[str, Array], key: Array | None) -> Array:
        """Logits f32[B * T, V] of every target token."""
        assert model.encode is not None  # the trainer gives an encoder-decoder
        keys = (None, None) if key is None else jax.random.split(key)
        memory = model.encode(params, batch["source"], batch["source_lengths"], keys[0])
        rows, size = batch["tokens"].shape
        positions = jnp.broadcast_to(jnp.arange(size)[None], (rows, size))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool))[None], (rows, size, size))
        inputs = Inputs(batch["tokens"], positions, mask, dropout_key=keys[1])
        hidden = model.apply(params, inputs, Cache(slots=(), rows=memory)).hidden
        return model.readout(params, hidden.reshape(-1, hidden.shape[-1])).astype(jnp.float32)
