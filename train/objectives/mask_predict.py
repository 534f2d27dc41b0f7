"""mask_predict: predict the hidden tokens of a target from the others and the source. `MaskPredict` runs the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from decoding_jax.types import Array, PyTree
from train.objectives.parallel import Parallel, Predicted, choose_places, target_lengths


@struct.dataclass
class MaskPredict(Parallel):
    """loss = - mean over the hidden tokens of log p(token | the others, source) (Ghazvininejad et al. 2019).

    Each row hides a number of tokens that is uniform from 1 to all, at random places.
    """

    def predict(self, params: PyTree, memory: PyTree, batch: dict[str, Array], key: Array | None) -> Predicted:
        """The hidden targets. What an evaluation hides is random too, but the same in all of them."""
        number, choice, dropout = jax.random.split(jax.random.key(0) if key is None else key, 3)
        targets, inside = batch["targets"], batch["weights"] > 0
        lengths = target_lengths(batch)
        share = jax.random.uniform(number, lengths.shape, jnp.float32)
        counts = jnp.minimum((share * lengths.astype(jnp.float32)).astype(jnp.int32) + 1, lengths)
        hidden = choose_places(choice, inside, counts)
        canvas = jnp.where(hidden, self.spec.mask_id, targets)
        logits = self.logits(params, memory, canvas, inside, None if key is None else dropout)
        return Predicted(logits, hidden.astype(jnp.float32))
