"""What models are trained for: one objective, one file. A new one is a file and a line in OBJECTIVES.

| objective   | data             | decoders that run the result |
|-------------|------------------|------------------------------|
| `causal_lm` | documents        | every prefix decoder         |
| `seq2seq`   | pairs of texts   | every prefix decoder         |
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from decoding_jax.types import Array, PyTree
from train.objectives.causal_lm import CausalLM
from train.objectives.losses import Metrics, Teacher
from train.objectives.seq2seq import Seq2Seq

__all__ = ["OBJECTIVES", "CausalLM", "Metrics", "Objective", "Seq2Seq", "Teacher"]


class Objective(Protocol):
    """A loss on a model. A flax.struct dataclass: static parts and numeric knobs apart, as in a decoder.

    Attributes:
      fields: the texts that an example has.
      encoder_decoder: whether the model has an encoder.
    """

    fields: ClassVar[tuple[str, ...]]
    encoder_decoder: ClassVar[bool]

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, Metrics]:
        """The mean loss of a batch, and its metrics.

        Args:
          params: of the model, in the dtype that it computes in.
          batch: from `train.data.batches`.
          key: of this step's randomness; None when evaluating, where nothing is random.

        Returns:
          f32[], and sums with their counts; "loss" is one of them and its quotient is the first result.
        """

    @staticmethod
    def abstract_batch(rows: int, length: int) -> dict[str, Any]:
        """The shapes of a batch of `rows` rows of `length` tokens, for compiling without data."""


OBJECTIVES: dict[str, type[Any]] = {"causal_lm": CausalLM, "seq2seq": Seq2Seq}
