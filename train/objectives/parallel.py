"""What the objectives share whose models fill a canvas from a source, all places at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from ml_collections import ConfigDict

from decoding_jax.canvas_layout import canvas_inputs, first_canvas, length_class, soft_copy, unclipped_class
from decoding_jax.types import Array, Cache, CanvasSpec, ModelSpec, PyTree
from train.data.examples import Examples
from train.objectives.losses import AnyExamples, Metrics, Teacher, token_loss
from train.objectives.seq2seq import Seq2Seq


@struct.dataclass
class Parallel(AnyExamples):
    """Base of these objectives: a loss on tokens, and one on the canvas's length where the model has a head for it.

    loss = (sum of the tokens' losses + length_weight * sum over rows of -log p(length)) / (tokens with a loss)

    so that a row's length counts like `length_weight` tokens, and in as many rounds as these are learnt.

    Attributes:
      model: the static part of the model, which has a `canvas`.
      label_smoothing: f32[], of the tokens.
      length_weight: f32[].
      glancing: f32[], the share of its wrong places that a row is shown (Qian et al. 2021); 0: none.
      teacher: an autoregressive model, learnt from beside the data, None without one.
    """

    model: ModelSpec = struct.field(pytree_node=False)
    label_smoothing: Array
    length_weight: Array
    glancing: Array
    teacher: Teacher | None = None

    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    encoder_decoder: ClassVar[bool] = True
    is_likelihood: ClassVar[bool] = False
    has_canvas: ClassVar[bool] = True
    copies: ClassVar[tuple[str, ...]] = ("none",)  # what `canvas.source_copy` may be
    settings: ClassVar[tuple[str, ...]] = ("source_copy", "length_head", "length_classes", "length_weight")
    fixed: ClassVar[Mapping[str, Any]] = {}  # fields of its CanvasSpec that no setting changes
    abstract_batch = staticmethod(Seq2Seq.abstract_batch)

    @classmethod
    def make(cls, config: ConfigDict, spec: ModelSpec, teacher: Teacher | None) -> Any:
        """The objective that a config describes."""
        smoothing, weight, glancing = map(
            jnp.float32, (config.label_smoothing, config.canvas.length_weight, config.canvas.glancing)
        )
        return cls(spec, smoothing, weight, glancing, teacher)

    def predict(self, params: PyTree, memory: PyTree, batch: dict[str, Array], key: Array | None) -> Predicted:
        """What the model says of the targets."""
        raise TypeError("an objective says what its model predicts")

    def examine(self, examples: Examples) -> str | None:
        """How many targets have a length that the head has no class for and takes the nearest one of."""
        if self.spec.length_head not in ("lengths", "offsets"):
            return None
        sources, targets = (examples.fields[name].lengths for name in ("source", "target"))
        wanted = np.asarray(unclipped_class(self.spec, jnp.asarray(targets), jnp.asarray(sources)))
        unknown = np.count_nonzero((wanted < 0) | (wanted >= self.spec.length_classes))
        if not unknown:
            return None
        return f"{unknown:,} of {len(targets):,} targets have a length without a class; raise canvas.length_classes"

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, Metrics]:
        """See `Objective.loss`."""
        assert self.model.encode is not None  # the trainer gives an encoder-decoder
        keys = (None, None) if key is None else jax.random.split(key)
        memory = self.model.encode(params, batch["source"], batch["source_lengths"], keys[0])
        found = self.predict(params, memory, batch, keys[1])
        rounds = found.weights.shape[0] // batch["targets"].shape[0]
        counted = {"targets": jnp.tile(batch["targets"], (rounds, 1)), "weights": found.weights}
        taught = None
        if self.teacher is not None:
            own = Seq2Seq.logits(self.teacher.model, self.teacher.params, batch, None)
            taught = jnp.tile(own, (rounds, 1))
        loss, metrics = token_loss(found.logits, taught, counted, self.label_smoothing, self.teacher)
        if self.model.length_logits is None:
            return loss, metrics
        weight = rounds * self.length_weight
        return _with_length(self.spec, self.model.length_logits(params, memory), batch, weight, metrics)

    @property
    def spec(self) -> CanvasSpec:
        """What the model's canvas looks like."""
        assert self.model.canvas is not None  # the trainer gives one
        return self.model.canvas

    def logits(
        self, params: PyTree, memory: PyTree, canvas: Array, inside: Array, key: Array | None, embeds: Any = None
    ) -> Array:
        """Logits f32[B * T, V] of canvases i32[B, T] whose places inside bool[B, T] see each other and the source."""
        inputs = canvas_inputs(canvas, inside, embeds, key)
        hidden = self.model.apply(params, inputs, Cache(slots=(), rows=memory)).hidden
        return self.model.readout(params, hidden.reshape(-1, hidden.shape[-1])).astype(jnp.float32)

    def begin(self, params: PyTree, batch: dict[str, Array]) -> tuple[Array, Array | None]:
        """The canvas i32[B, T] of each target's length before anything is written, and its embeddings where soft."""
        sources, lengths, size = batch["source"], target_lengths(batch), batch["targets"].shape[1]
        embeds = soft_copy(self.model, params, sources, batch["source_lengths"], lengths, size)
        return first_canvas(self.spec, sources, batch["source_lengths"], lengths, size), embeds


@struct.dataclass
class Predicted:
    """Logits f32[R * B * T, V] of R rounds over the targets, and which of them have a loss, weights f32[R * B, T]."""

    logits: Array
    weights: Array


def target_lengths(batch: dict[str, Array]) -> Array:
    """i32[B], <eos> included; 0 in padding rows."""
    return batch["weights"].sum(axis=1).astype(jnp.int32)


def choose_places(key: Array, inside: Array, counts: Array) -> Array:
    """Draws counts i32[B] of each row's places inside bool[B, T], all sets alike: bool[B, T]."""
    noise = jnp.where(inside, jax.random.uniform(key, inside.shape, jnp.float32), 2.0)
    rank = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
    return inside & (rank < counts[:, None])


def _with_length(
    spec: CanvasSpec, logits: Array, batch: dict[str, Array], weight: Array, metrics: Metrics
) -> tuple[Array, Metrics]:
    """The loss with that of the length from its logits f32[B, C], and how often the head is right."""
    lengths = target_lengths(batch)
    rows = (lengths > 0).astype(jnp.float32)
    wanted = length_class(spec, lengths, batch["source_lengths"])
    return with_class_loss(logits, wanted, rows, weight, metrics, "length")


def with_class_loss(
    logits: Array, wanted: Array, counts: Array, weight: Array, metrics: Metrics, name: str
) -> tuple[Array, Metrics]:
    """The loss with that of a head, and the head's own metrics.

    Args:
      logits: f32[N, C], the head's.
      wanted: i32[N], classes.
      counts: f32[N], 1 where there is one.
      weight: f32[], how many tokens a class counts as.
      metrics: so far.
      name: of the head.
    """
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[:, None], axis=1)[:, 0]
    hits = (logits.argmax(axis=1) == wanted).astype(jnp.float32)
    total, count = metrics["loss"]
    total = total + weight * (losses * counts).sum()
    metrics |= {
        "loss": (total, count),
        f"{name}_nats": ((losses * counts).sum(), counts.sum()),
        f"{name}_accuracy": ((hits * counts).sum(), counts.sum()),
    }
    return total / jnp.maximum(count, 1.0), metrics
