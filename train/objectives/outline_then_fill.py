"""outline_then_fill: predict some of a target's tokens in order, then all the others at once from these.

`OutlineThenFill` runs the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from ml_collections import ConfigDict

from decoding_jax.cache import write_slots
from decoding_jax.types import Array, Cache, Inputs, ModelSpec, PyTree
from train.data.examples import Examples
from train.objectives.losses import Metrics, Teacher, refuse_teacher, token_loss
from train.objectives.parallel import Parallel, with_class_loss


@struct.dataclass
class OutlineThenFill(Parallel):
    """loss = - mean of log p(token), of an outline's tokens from those before them, of the others from the outline.

    To it come the gaps: length_weight * sum over the outline of -log p(places left free before its next token).
    <eos> always belongs to the outline, and beside it

        "every"   each n-th token, n = 1 / outline_share rounded
        "rare"    the rarest tokens of the training split, which together are outline_share of it

    Attributes:
      rule: "every" or "rare".
      share: of the tokens that an outline has, from above 0 to 1.
      rare: bool[V], the tokens that "rare" means.
    """

    rare: Array | None = None
    rule: str = struct.field(pytree_node=False, default="every")
    share: float = struct.field(pytree_node=False, default=0.3)

    settings: ClassVar[tuple[str, ...]] = ("length_classes", "length_weight", "outline", "outline_share")
    fixed: ClassVar[Mapping[str, Any]] = {"length_head": "gaps"}

    @classmethod
    def make(cls, config: ConfigDict, spec: ModelSpec, teacher: Teacher | None) -> Any:
        """As `Parallel.make`; ValueError where a teacher is to be learnt from word by word."""
        refuse_teacher(teacher, "outline_then_fill", "which come in another order")
        objective = super().make(config, spec, None)
        canvas = config.canvas
        nothing = jnp.zeros((spec.vocab_size,), bool)
        return dataclasses.replace(objective, rare=nothing, rule=canvas.outline, share=canvas.outline_share)

    def fit(self, examples: Examples) -> OutlineThenFill:
        """Counts the tokens of the training split."""
        counts = np.bincount(examples.fields["target"].tokens, minlength=self.model.vocab_size)
        order = np.argsort(counts, kind="stable")
        before = np.cumsum(counts[order]) - counts[order]
        rare = np.zeros(len(counts), bool)
        rare[order[before < self.share * counts.sum()]] = True
        return dataclasses.replace(self, rare=jnp.asarray(rare))

    def examine(self, examples: Examples) -> str | None:
        """How many gaps are wider than the head has a class for, and count as the widest that it has."""
        target = examples.fields["target"]
        if self.rule == "rare":
            chosen = np.asarray(self.rare)[target.tokens]
        else:
            place = np.arange(len(target.tokens)) - np.repeat(target.offsets[:-1], target.lengths)
            chosen = (place + 1) % self.every == 0
        chosen[target.offsets[1:] - 1] = True
        gaps = np.diff(np.flatnonzero(chosen), prepend=-1) - 1  # each row's last token belongs to the outline
        unknown = np.count_nonzero(gaps >= self.spec.length_classes)
        if not unknown:
            return None
        return f"{unknown:,} of {len(gaps):,} gaps are wider than any class; raise canvas.length_classes"

    @property
    def every(self) -> int:
        """n, where the outline is each n-th token."""
        return round(1 / self.share)

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, Metrics]:
        """See `Objective.loss`."""
        model = self.model
        assert model.encode is not None and model.gap_logits is not None  # the trainer gives both
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        memory = model.encode(params, batch["source"], batch["source_lengths"], keys[0])
        targets, weights = batch["targets"], batch["weights"]
        (rows, size), inside = targets.shape, weights > 0
        chosen = self.outline(targets, inside)
        tokens, gaps, counts = _gathered(targets, chosen)
        fed = jnp.concatenate([batch["tokens"][:, :1], tokens[:, :-1]], axis=1)
        places = jnp.broadcast_to(jnp.arange(size)[None], (rows, size))
        earlier = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool))[None], (rows, size, size))
        inputs = Inputs(fed, places, earlier, dropout_key=keys[1])
        hidden = model.apply(params, inputs, Cache(slots=(), rows=memory)).hidden.reshape(rows * size, -1)
        written = model.readout(params, hidden).astype(jnp.float32)
        filled = self.logits(params, memory, jnp.where(chosen, targets, self.spec.mask_id), inside, keys[2])
        counted = {
            "targets": jnp.concatenate([tokens, targets]),
            "weights": jnp.concatenate([counts, (inside & ~chosen).astype(jnp.float32)]),
        }
        _, metrics = token_loss(jnp.concatenate([written, filled]), None, counted, self.label_smoothing, None)
        metrics["outline"] = counts.sum(), weights.sum()
        law = model.gap_logits(params, hidden)
        wanted = jnp.minimum(gaps, law.shape[1] - 1).reshape(-1)
        return with_class_loss(law, wanted, counts.reshape(-1), self.length_weight, metrics, "gap")

    def outline(self, targets: Array, inside: Array) -> Array:
        """Which of the targets i32[B, T], inside bool[B, T], make the outline: bool[B, T]."""
        place = jnp.arange(targets.shape[1])[None]
        last = place == inside.sum(axis=1, keepdims=True) - 1
        if self.rule == "rare":
            assert self.rare is not None  # `make` gives one
            return inside & (self.rare[targets] | last)
        return inside & (((place + 1) % self.every == 0) | last)


def _gathered(targets: Array, chosen: Array) -> tuple[Array, Array, Array]:
    """The chosen targets of each row one behind the other i32[B, T], the places between them, and weights f32[B, T].

    >>> _gathered(jnp.asarray([[7, 8, 9, 0]]), jnp.asarray([[False, True, False, True]]))[:2]
    (Array([[8, 0, 0, 0]], dtype=int32), Array([[1, 1, 0, 0]], dtype=int32))
    """
    size = targets.shape[1]
    rank = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1
    at = jnp.where(chosen, rank, size)
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], targets.shape)
    gather = lambda values: write_slots(jnp.zeros_like(values), at, values)
    tokens, places = gather(targets), gather(place)
    there = place < chosen.sum(axis=1, keepdims=True, dtype=jnp.int32)
    before = jnp.pad(places[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return tokens, jnp.where(there, places - before - 1, 0), there.astype(jnp.float32)
