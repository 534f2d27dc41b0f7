"""group_autoregressive: predict each group of target tokens from the source and the groups before it.

`GroupAutoregressive` runs the result.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.masks import group_mask
from decoding_jax.types import Array, Cache, Inputs, ModelSpec, PyTree
from train.objectives.seq2seq import Seq2Seq


@struct.dataclass
class GroupAutoregressive(Seq2Seq):
    """loss = - mean of log p(token | source, groups before its own) (Wang et al. 2018), `canvas.group` tokens each."""

    has_canvas: ClassVar[bool] = True
    copies: ClassVar[tuple[str, ...]] = ("none",)
    settings: ClassVar[tuple[str, ...]] = ("group",)

    @staticmethod
    def logits(model: ModelSpec, params: PyTree, batch: dict[str, Array], key: Array | None) -> Array:
        """Logits f32[B * T, V] of every target token."""
        if model.canvas is None:  # the teacher, which writes token by token
            return Seq2Seq.logits(model, params, batch, key)
        assert model.encode is not None  # the trainer gives an encoder-decoder
        keys = (None, None) if key is None else jax.random.split(key)
        memory = model.encode(params, batch["source"], batch["source_lengths"], keys[0])
        rows, size = batch["targets"].shape
        group = model.canvas.group
        whole = -(-size // group) * group  # a group sees all of itself, also where its end is no target
        positions = jnp.broadcast_to(jnp.arange(whole)[None], (rows, whole))
        before = jnp.pad(batch["targets"], ((0, 0), (group, 0)))[:, :whole]
        tokens = jnp.where(positions < group, batch["tokens"][:, :1], before)
        inputs = Inputs(tokens, positions, group_mask(positions, group, whole), dropout_key=keys[1])
        hidden = model.apply(params, inputs, Cache(slots=(), rows=memory)).hidden[:, :size]
        return model.readout(params, hidden.reshape(-1, hidden.shape[-1])).astype(jnp.float32)
