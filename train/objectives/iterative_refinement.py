"""iterative_refinement: predict all of a target from a draft of it. `IterativeRefinement` runs the result."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.types import Array, PyTree
from train.objectives.parallel import Parallel, Predicted


@struct.dataclass
class IterativeRefinement(Parallel):
    """The mean of two losses - mean of log p(token | draft, source): of the first canvas, and of a draft of the target.

    For half of the rows the draft is what the model itself writes in the first round, for the others the target with a
    share of its tokens, uniform from 0 to 1, replaced by random ones (both as Lee et al. 2018).
    """

    copies: ClassVar[tuple[str, ...]] = ("none", "uniform")

    def predict(self, params: PyTree, memory: PyTree, batch: dict[str, Array], key: Array | None) -> Predicted:
        """All targets, twice. An evaluation knows the model's own drafts only."""
        targets, weights = batch["targets"], batch["weights"]
        inside = weights > 0
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        first = self.logits(params, memory, self.begin(params, batch)[0], inside, keys[0])
        draft = jax.lax.stop_gradient(first).argmax(axis=1).reshape(targets.shape).astype(jnp.int32)
        if keys[2] is not None:
            draft = self._with_noise(keys[2], draft, targets)
        second = self.logits(params, memory, draft, inside, keys[1])
        return Predicted(jnp.concatenate([first, second]), jnp.tile(weights, (2, 1)))

    def _with_noise(self, key: Array, drafts: Array, targets: Array) -> Array:
        """Drafts i32[B, T], in half of the rows instead the targets with random tokens in them."""
        coin, share, place, token = jax.random.split(key, 4)
        rows = (len(targets), 1)
        replaced = jax.random.uniform(place, targets.shape, jnp.float32) < jax.random.uniform(share, rows, jnp.float32)
        noise = jax.random.randint(token, targets.shape, 0, self.model.vocab_size, jnp.int32)
        noised = jnp.where(replaced, noise, targets)
        return jnp.where(jax.random.bernoulli(coin, 0.5, rows), drafts, noised)
