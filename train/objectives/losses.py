"""Losses per token, and how they and other counts are reduced to means."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from ml_collections import ConfigDict

from decoding_jax.types import Array, ModelSpec, PyTree
from train.data.examples import Examples

# Each metric is a sum and what it is to be divided by, so that parts of a batch add up to its exact mean.
Metrics = dict[str, tuple[Array, Array]]


@jax.custom_vjp
def cross_entropy(logits: Array, targets: Array, smoothing: Array) -> tuple[Array, Array]:
    """Cross-entropy against targets smoothed over the vocabulary, and the plain one (Szegedy et al. 2016).

    loss = logsumexp(logits) - (1 - s) logits[target] - s mean(logits); with s = 0 both are -log p(target).
    The gradient makes the softmax again instead of keeping it: half the time and memory at large vocabularies.

    Args:
      logits: f32[N, V].
      targets: i32[N].
      smoothing: f32[], s.

    Returns:
      Two f32[N], in nats.
    """
    return _cross_entropy_forward(logits, targets, smoothing)[0]


def _is_target(logits: Array, targets: Array) -> Array:
    # A comparison and not an index: it fuses into the sums, and a vocabulary split over devices stays split.
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]


def _cross_entropy_forward(logits: Array, targets: Array, smoothing: Array) -> Any:
    total = jax.nn.logsumexp(logits, axis=1)
    plain = total - jnp.where(_is_target(logits, targets), logits, 0.0).sum(axis=1)
    loss = (1 - smoothing) * plain + smoothing * (total - logits.mean(axis=1))
    return (loss, plain), (logits, targets, smoothing, total)


def _cross_entropy_backward(kept: Any, gradients: tuple[Array, Array]) -> tuple[Array, None, None]:
    logits, targets, smoothing, total = kept
    of_loss, of_plain = (gradient[:, None] for gradient in gradients)
    probability = jnp.exp(logits - total[:, None])
    at_target = of_loss * (1 - smoothing) + of_plain
    gradient = (of_loss + of_plain) * probability - of_loss * smoothing / logits.shape[1]
    return gradient - jnp.where(_is_target(logits, targets), at_target, 0.0), None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@struct.dataclass
class Teacher:
    """A model whose predictions are learnt word by word, beside the data (Hinton et al. 2015; Kim & Rush 2016).

    Attributes:
      params: its weights; they are not trained.
      weight: f32[], the share of the loss that it gets.
      temperature: f32[], of both distributions; the loss is scaled by its square, as the gradient shrinks by it.
      model: its static part.
    """

    params: PyTree
    weight: Array
    temperature: Array
    model: ModelSpec = struct.field(pytree_node=False)

    def divergence(self, own: Array, logits: Array) -> Array:
        """KL(teacher || student) f32[N] at the temperature, from the teacher's and the student's logits f32[N, V]."""
        wanted = jax.nn.log_softmax(jax.lax.stop_gradient(own) / self.temperature)
        given = jax.nn.log_softmax(logits / self.temperature)
        return (jnp.exp(wanted) * (wanted - given)).sum(axis=1) * self.temperature**2


def token_loss(
    logits: Array, taught: Array | None, batch: dict[str, Array], smoothing: Array, teacher: Teacher | None
) -> tuple[Array, Metrics]:
    """The mean loss over the tokens with weight, and the metrics of the batch.

    Args:
      logits: f32[N, V], for all N = B * T tokens.
      taught: f32[N, V], the teacher's logits.
      batch: its `targets` and `weights` [B, T] are read.
      smoothing: f32[], the share of the target's probability that is spread over the vocabulary.
      teacher: whose logits `taught` are.
    """
    targets, weights = batch["targets"].reshape(-1), batch["weights"].reshape(-1)
    losses, plain = cross_entropy(logits, targets, smoothing)
    count = weights.sum()
    metrics = {}
    if teacher is not None and taught is not None:
        divergence = teacher.divergence(taught, logits)
        losses = (1 - teacher.weight) * losses + teacher.weight * divergence
        metrics["divergence"] = ((divergence * weights).sum(), count)
    total = (losses * weights).sum()
    hits = (logits.argmax(axis=1) == targets).astype(jnp.float32)
    metrics |= {
        "loss": (total, count),
        "nats_per_token": ((plain * weights).sum(), count),
        "accuracy": ((hits * weights).sum(), count),
    }
    return total / jnp.maximum(count, 1.0), metrics


def refuse_teacher(teacher: Teacher | None, objective: str, reason: str) -> None:
    """ValueError where there is a teacher, whose words an objective cannot learn for some reason."""
    if teacher is not None:
        raise ValueError(
            f"teacher.path: {objective} cannot learn a teacher's words, {reason}; learn from its translations instead "
            "(train.distill, data.distilled)"
        )


class AnyExamples:
    """Base of the objectives that learn every example and have to know nothing of them before."""

    def fit(self, examples: Examples) -> Any:
        """Nothing has to be known."""
        del examples
        return self

    def examine(self, examples: Examples) -> str | None:
        """Every example can be learnt."""
        del examples
        return None


@struct.dataclass
class TokenPrediction(AnyExamples):
    """Base of the objectives that predict every token of a target: loss = - mean of log p, with what is added to it.

    Attributes:
      model: the static part of the model.
      label_smoothing: f32[].
      teacher: learnt from beside the data, None without one.
    """

    model: ModelSpec = struct.field(pytree_node=False)
    label_smoothing: Array
    teacher: Teacher | None = None

    is_likelihood: ClassVar[bool] = True
    has_canvas: ClassVar[bool] = False

    @classmethod
    def make(cls, config: ConfigDict, spec: ModelSpec, teacher: Teacher | None) -> Any:
        """The objective that a config describes."""
        return cls(spec, jnp.float32(config.label_smoothing), teacher)

    @staticmethod
    def logits(model: ModelSpec, params: PyTree, batch: dict[str, Array], key: Array | None) -> Array:
        """Logits f32[B * T, V] of every target of a batch."""
        raise TypeError("an objective says how its model reads a batch")

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, Metrics]:
        """See `Objective.loss`."""
        logits = self.logits(self.model, params, batch, key)
        taught = None if self.teacher is None else self.logits(self.teacher.model, self.teacher.params, batch, None)
        return token_loss(logits, taught, batch, self.label_smoothing, self.teacher)
