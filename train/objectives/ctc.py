"""ctc: predict a token or a blank for every frame; what they say without repeats and blanks is the target.

`CTC` runs the result.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from ml_collections import ConfigDict

from decoding_jax.canvas_layout import first_canvas, soft_copy
from decoding_jax.ctc import best_path_alignment
from decoding_jax.types import Array, ModelSpec, PyTree
from train.data.examples import Examples
from train.objectives.ctc_loss import ctc_loss
from train.objectives.losses import Metrics, Teacher, refuse_teacher
from train.objectives.parallel import Parallel, choose_places, target_lengths

_MOST_INFEASIBLE = 0.2  # of the examples; with more the factor is a mistake


@struct.dataclass
class CTC(Parallel):
    """loss = - sum of log p(target | source) / tokens of the targets, over all paths of frames that say a target.

    There are `canvas.upsample` frames for each token of the source (Libovicky & Helcl 2018). Targets that need more are
    left out. With glancing as many frames as `glancing` times those where the best path so far differs from the best
    one that says the target hold the latter's token in the canvas (Gu & Kong 2021).
    """

    copies: ClassVar[tuple[str, ...]] = ("none", "uniform", "soft")
    settings: ClassVar[tuple[str, ...]] = ("source_copy", "upsample", "glancing")

    @classmethod
    def make(cls, config: ConfigDict, spec: ModelSpec, teacher: Teacher | None) -> Any:
        """As `Parallel.make`; ValueError where a setting has no meaning for a loss over paths."""
        if config.label_smoothing:
            raise ValueError(f"label_smoothing={config.label_smoothing}: ctc has no law of single tokens; set it to 0")
        refuse_teacher(teacher, "ctc", "since its frames stand for none of them")
        return super().make(config, spec, teacher)

    def examine(self, examples: Examples) -> str | None:
        """How many targets need more frames than their source gives; ValueError where these are too many."""
        sources, targets = examples.fields["source"], examples.fields["target"]
        # `needed_frames` of ragged rows: how often a token equals the one before it, up to each token of the stream.
        repeats = np.append(0, np.cumsum(targets.tokens[1:] == targets.tokens[:-1]))
        needed = targets.lengths + repeats[targets.offsets[1:] - 1] - repeats[targets.offsets[:-1]]
        short = needed > self.spec.upsample * sources.lengths
        share = float(short.mean())
        if share > _MOST_INFEASIBLE:
            raise ValueError(
                f"canvas.upsample={self.spec.upsample}: {share:.0%} of the {len(short):,} targets of the split "
                f"{examples.split!r} need more frames than their sources give; raise it"
            )
        return f"{int(short.sum()):,} of {len(short):,} targets ({share:.1%}) need more frames and are left out"

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, Metrics]:
        """See `Objective.loss`."""
        assert self.model.encode is not None  # the trainer gives an encoder-decoder
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        source, source_lengths = batch["source"], batch["source_lengths"]
        memory = self.model.encode(params, source, source_lengths, keys[0])
        frames, size = self.spec.upsample * source_lengths, self.spec.upsample * source.shape[1]
        inside = jnp.arange(size)[None] < frames[:, None]
        canvas = first_canvas(self.spec, source, source_lengths, frames, size)
        embeds = soft_copy(self.model, params, source, source_lengths, frames, size)
        targets, lengths = batch["targets"], target_lengths(batch)

        def law(params: PyTree, memory: PyTree, canvas: Array, embeds: Array | None, key: Array | None) -> Array:
            logits = self.logits(params, memory, canvas, inside, key, embeds)
            return jax.nn.log_softmax(logits).reshape(*canvas.shape, -1)

        def glance(key: Array) -> tuple[Array, Array]:
            guess = law(*jax.lax.stop_gradient((params, memory)), canvas, embeds, None)
            wanted = best_path_alignment(guess, frames, targets, lengths, self.spec.mask_id)
            wrong = (guess.argmax(axis=2) != wanted) & inside
            counts = jnp.floor(self.glancing * wrong.sum(axis=1).astype(jnp.float32)).astype(jnp.int32)
            return choose_places(key, inside, counts), wanted

        if keys[2] is not None:
            nothing = lambda _: (jnp.zeros(inside.shape, bool), jnp.zeros(inside.shape, jnp.int32))
            shown, wanted = jax.lax.cond(self.glancing > 0, glance, nothing, keys[2])
            canvas = jnp.where(shown, wanted, canvas)
            if embeds is not None:
                assert self.model.embed is not None
                embeds = jnp.where(shown[:, :, None], self.model.embed(params, wanted), embeds)
        losses, feasible = ctc_loss(
            law(params, memory, canvas, embeds, keys[1]), frames, targets, lengths, self.spec.mask_id
        )
        real = (lengths > 0).astype(jnp.float32)
        learnt = feasible.astype(jnp.float32) * real
        count = (learnt * lengths.astype(jnp.float32)).sum()
        total = (losses * learnt).sum()
        metrics = {
            "loss": (total, count),
            "nats_per_token": (total, count),
            "infeasible": (real.sum() - learnt.sum(), real.sum()),
        }
        return total / jnp.maximum(count, 1.0), metrics
