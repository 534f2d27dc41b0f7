"""nonautoregressive: predict every target token from the source alone. `NonAutoregressive` runs the result."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.types import Array, PyTree
from train.objectives.parallel import Parallel, Predicted, choose_places


@struct.dataclass
class NonAutoregressive(Parallel):
    """loss = - mean of log p(token | source, length) (Gu et al. 2018).

    With glancing the model first writes the canvas. Of each row then as many randomly chosen places as `glancing` times
    its wrong tokens hold the target's token in the canvas, and the others are learnt (Qian et al. 2021).
    """

    copies: ClassVar[tuple[str, ...]] = ("none", "uniform", "soft")
    settings: ClassVar[tuple[str, ...]] = (*Parallel.settings, "glancing")

    def predict(self, params: PyTree, memory: PyTree, batch: dict[str, Array], key: Array | None) -> Predicted:
        """All targets from the first canvas."""
        canvas, embeds = self.begin(params, batch)
        targets, weights = batch["targets"], batch["weights"]
        inside = weights > 0
        if key is None:  # nothing is shown when the model is evaluated
            return Predicted(self.logits(params, memory, canvas, inside, None, embeds), weights)
        choice, dropout = jax.random.split(key)

        def glance(_: None) -> Array:
            guess = self.logits(*jax.lax.stop_gradient((params, memory)), canvas, inside, None, embeds)
            wrong = (guess.argmax(axis=1).reshape(targets.shape) != targets) & inside
            counts = jnp.floor(self.glancing * wrong.sum(axis=1).astype(jnp.float32)).astype(jnp.int32)
            return choose_places(choice, inside, counts)

        shown = jax.lax.cond(self.glancing > 0, glance, lambda _: jnp.zeros(inside.shape, bool), None)
        if embeds is not None:
            assert self.model.embed is not None
            embeds = jnp.where(shown[:, :, None], self.model.embed(params, targets), embeds)
        canvas = jnp.where(shown, targets, canvas)
        weights = jnp.where(shown, 0.0, weights)
        return Predicted(self.logits(params, memory, canvas, inside, dropout, embeds), weights)
