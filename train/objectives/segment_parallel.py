"""segment_parallel: predict the next token of all segments of a target from the source and what they hold so far.

`SegmentParallel` runs the result.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from ml_collections import ConfigDict

from decoding_jax.segments import STRIDE, segment_mask, segment_positions
from decoding_jax.types import Array, Cache, Inputs, ModelSpec, PyTree
from train.data.examples import Examples
from train.objectives.losses import Metrics, Teacher, refuse_teacher, token_loss
from train.objectives.seq2seq import Seq2Seq

_SHARE_WITH_REPEAT = 0.3  # of the rows in training


@struct.dataclass
class SegmentParallel(Seq2Seq):
    """loss = - mean of log p(token | source, all `canvas.group` segments before its time) (Ran et al. 2020).

    The borders of the segments are drawn around those of equal segments. In a part of the rows one segment says again
    what the one before it says, and ends with <mask>: so the model learns to delete what it has written twice.
    """

    is_likelihood: ClassVar[bool] = False
    has_canvas: ClassVar[bool] = True
    copies: ClassVar[tuple[str, ...]] = ("none",)
    settings: ClassVar[tuple[str, ...]] = ("group",)

    @classmethod
    def make(cls, config: ConfigDict, spec: ModelSpec, teacher: Teacher | None) -> Any:
        """The objective that a config describes; ValueError where a teacher is to be learnt from word by word."""
        refuse_teacher(teacher, "segment_parallel", "which come in another order")
        return super().make(config, spec, teacher)

    def examine(self, examples: Examples) -> None:
        """ValueError where a segment might not fit between the positions of two."""
        longest = int(examples.fields["target"].lengths.max())
        if self.model.canvas is not None and self.model.canvas.group > 1 and longest > STRIDE:
            raise ValueError(
                f"data.length: the split {examples.split!r} has a target of {longest} tokens, and segments have room "
                f"for {STRIDE}; lower it to that"
            )

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, Metrics]:
        """See `Objective.loss`. An evaluation has equal segments, none of them written twice."""
        model = self.model
        assert model.encode is not None and model.canvas is not None  # the trainer gives both
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        memory = model.encode(params, batch["source"], batch["source_lengths"], keys[0])
        segments = model.canvas.group
        targets, weights = cut_segments(batch, segments, model.canvas.mask_id, keys[2])
        places = jnp.broadcast_to(jnp.arange(targets.shape[1])[None], targets.shape)
        inputs = Inputs(
            tokens=jnp.where(places < segments, batch["tokens"][:, :1], jnp.roll(targets, segments, axis=1)),
            positions=segment_positions(places, segments),
            mask=segment_mask(places, segments, weights > 0),
            dropout_key=keys[1],
        )
        hidden = model.apply(params, inputs, Cache(slots=(), rows=memory)).hidden
        logits = model.readout(params, hidden.reshape(-1, hidden.shape[-1])).astype(jnp.float32)
        return token_loss(logits, None, {"targets": targets, "weights": weights}, self.label_smoothing, None)


def cut_segments(batch: dict[str, Array], segments: int, deletes: int, key: Array | None) -> tuple[Array, Array]:
    """Targets i32[B, T] as segments side by side (see `decoding_jax.segments`): tokens and weights [B, K * times].

    Args:
      batch: its `targets` and `weights`; each target ends with <eos>, which ends every segment too.
      segments: K.
      deletes: the token that ends a segment that says what the one before it says.
      key: of the borders, and of what is written twice; None: equal segments, nothing twice.
    """
    targets, weights = batch["targets"], batch["weights"]
    rows, size = targets.shape
    lengths = weights.sum(axis=1).astype(jnp.int32)
    content = jnp.maximum(lengths - 1, 0)  # without <eos>
    # One segment fewer has text where one is written twice, and borders move by half a segment at most.
    times = min(2 * -(-size // max(segments - 1, 1)) + 2, size)
    twice, shift = jnp.full((rows,), segments), jnp.zeros((rows, segments + 1), jnp.float32)
    if key is not None and segments > 1:
        coin, place, move = jax.random.split(key, 3)
        chosen = jax.random.randint(place, (rows,), 1, segments)
        twice = jnp.where(jax.random.bernoulli(coin, _SHARE_WITH_REPEAT, (rows,)), chosen, segments)
        shift = jax.random.uniform(move, shift.shape, jnp.float32, -0.5, 0.5)
    real = jnp.where(twice < segments, segments - 1, segments)[:, None]
    index = jnp.arange(segments + 1)[None]
    step = content[:, None].astype(jnp.float32) / real.astype(jnp.float32)
    inner = (index > 0) & (index < real)
    border = jnp.floor((index.astype(jnp.float32) + jnp.where(inner, shift, 0.0)) * step + 1e-4).astype(jnp.int32)
    border = jnp.where(index >= real, content[:, None], border)
    # Segment number -> which part of the text it says.
    number = index[:, :-1]
    part = number - (number >= twice[:, None]).astype(jnp.int32)
    start = jnp.take_along_axis(border, part, axis=1)
    length = jnp.take_along_axis(border, part + 1, axis=1) - start
    time = jnp.arange(times)[None, :, None]
    at = jnp.minimum(start[:, None] + time, size - 1).reshape(rows, -1)
    tokens = jnp.take_along_axis(targets, at, axis=1).reshape(rows, times, segments)
    eos = jnp.take_along_axis(targets, jnp.maximum(lengths - 1, 0)[:, None], axis=1)
    end = jnp.where(number == twice[:, None], deletes, eos)
    tokens = jnp.where(time < length[:, None], tokens, end[:, None])
    counts = (time <= length[:, None]) & (lengths > 0)[:, None, None]
    flat = lambda x: x.reshape(rows, times * segments)
    return jnp.where(flat(counts), flat(tokens), 0), flat(counts).astype(jnp.float32)
