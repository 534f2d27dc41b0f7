"""What models are trained for: one objective, one file. A new one is a file and a line in OBJECTIVES.

| objective              | data           | decoders that run the result |
|------------------------|----------------|------------------------------|
| `causal_lm`            | documents      | every prefix decoder         |
| `seq2seq`              | pairs of texts | every prefix decoder         |
| `nonautoregressive`    | pairs of texts | `NonAutoregressive`          |
| `mask_predict`         | pairs of texts | `MaskPredict`                |
| `iterative_refinement` | pairs of texts | `IterativeRefinement`        |
| `ctc`                  | pairs of texts | `CTC`                        |
| `group_autoregressive` | pairs of texts | `GroupAutoregressive`        |
| `segment_parallel`     | pairs of texts | `SegmentParallel`            |
| `outline_then_fill`    | pairs of texts | `OutlineThenFill`            |
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from ml_collections import ConfigDict

from decoding_jax.types import Array, ModelSpec, PyTree
from train.data.examples import Examples
from train.objectives.causal_lm import CausalLM
from train.objectives.ctc import CTC
from train.objectives.group_autoregressive import GroupAutoregressive
from train.objectives.iterative_refinement import IterativeRefinement
from train.objectives.losses import Metrics, Teacher
from train.objectives.mask_predict import MaskPredict
from train.objectives.nonautoregressive import NonAutoregressive
from train.objectives.outline_then_fill import OutlineThenFill
from train.objectives.parallel import Parallel
from train.objectives.segment_parallel import SegmentParallel
from train.objectives.seq2seq import Seq2Seq

__all__ = ["CTC", "OBJECTIVES", "CausalLM", "Metrics", "Objective", "Parallel", "Seq2Seq", "Teacher"]


class Objective(Protocol):
    """A loss on a model. A flax.struct dataclass: static parts and numeric knobs apart, as in a decoder.

    Attributes:
      fields: the texts that an example has.
      encoder_decoder: whether the model has an encoder.
      is_likelihood: whether the sum of its losses is -log p of the targets, so that it has a perplexity.
      has_canvas: whether the model predicts several tokens at once, and so has a `CanvasSpec`.
    """

    fields: ClassVar[tuple[str, ...]]
    encoder_decoder: ClassVar[bool]
    is_likelihood: ClassVar[bool]
    has_canvas: ClassVar[bool]

    @classmethod
    def make(cls, config: ConfigDict, spec: ModelSpec, teacher: Teacher | None) -> Any:
        """The objective that a config describes, over a model in the dtype that it computes in."""

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, Metrics]:
        """The mean loss of a batch, and its metrics.

        Args:
          params: of the model, in the dtype that it computes in.
          batch: from `train.data.batches`.
          key: of this step's randomness; None when evaluating, where nothing is random.

        Returns:
          f32[], and sums with their counts; "loss" is one of them and its quotient is the first result.
        """

    def fit(self, examples: Examples) -> Any:
        """The objective with what it has to know of the training split, such as which tokens are rare."""

    def examine(self, examples: Examples) -> str | None:
        """What there is to say of a split before training, such as how much of it cannot be learnt; None: nothing.

        Raises:
          ValueError: there is no point in training on it.
        """

    @staticmethod
    def abstract_batch(rows: int, length: int) -> dict[str, Any]:
        """The shapes of a batch of `rows` rows of `length` tokens, for compiling without data."""


OBJECTIVES: dict[str, type[Any]] = {
    "causal_lm": CausalLM,
    "ctc": CTC,
    "group_autoregressive": GroupAutoregressive,
    "iterative_refinement": IterativeRefinement,
    "mask_predict": MaskPredict,
    "nonautoregressive": NonAutoregressive,
    "outline_then_fill": OutlineThenFill,
    "segment_parallel": SegmentParallel,
    "seq2seq": Seq2Seq,
}
