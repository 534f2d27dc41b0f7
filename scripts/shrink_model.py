r"""Makes a small language model of a large one's tokenizer and embedding: where the training of a draft model starts.

    python scripts/shrink_model.py --input=smollm2-135m-instruct --output=outputs/smollm2_small

The embedding is the large one's, projected to the small width by its principal components, so that tokens of a kind
are neighbours from the start; a vocabulary of 49,152 would otherwise take most of a short training to sort. The layers
are random. Continue with --config.init_from=outputs/smollm2_small (configs/draft_smollm2.py does).

Exit code: 0 done; 2 bad usage.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import decoding_jax as dj
from decoding_jax.checkpoints.orbax import by_path
from decoding_jax.models.functional import init_transformer
from decoding_jax.models.transformer import TransformerConfig
from train.command import run, say

_INPUT = flags.DEFINE_string("input", None, "The large model: what dj.load takes.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist yet.", required=True)
_WIDTH = flags.DEFINE_integer("width", 160, "The width of the features; a multiple of 32.", lower_bound=32)
_LAYERS = flags.DEFINE_integer("layers", 4, "How many layers.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", 128, "How many positions back a layer looks.", lower_bound=2)

_HEAD_SIZE = 32
_EMBEDDING = "embed/embedding"
_SCALE = 0.05  # the embedding's standard deviation, so that the first predictions are nearly uniform


def project(table: np.ndarray, width: int) -> np.ndarray:
    """The rows of a table [V, D] by their `width` leading principal components: f32[V, width], rescaled."""
    centred = table - table.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)  # in ascending order
    small = centred @ vectors[:, ::-1][:, :width]
    return (small * (_SCALE / small.std())).astype(np.float32)


def shrink(model: dj.Model, width: int, layers: int, window: int) -> dj.Model:
    """A model with `layers` random layers and the projected embedding, tied to the readout.

    Raises:
      ValueError: the model is no decoder-only Transformer, or the width does not fit.
    """
    large = model.config
    if not isinstance(large, TransformerConfig) or large.encoder_layers:
        raise ValueError(f"input={_INPUT.value!r} is no decoder-only Transformer")
    if width % _HEAD_SIZE or width > large.width:
        raise ValueError(f"width={width}: must be a multiple of {_HEAD_SIZE}, and at most the model's {large.width}")
    heads = width // _HEAD_SIZE
    config = TransformerConfig(
        vocab_size=large.vocab_size,
        num_layers=layers,
        width=width,
        mlp_width=width * 8 // 3 // 32 * 32,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=_HEAD_SIZE,
        max_length=large.max_length,
        tie_embeddings=True,
        sliding_window=window,
    )
    small = init_transformer(config, tokenizer=model.tokenizer, eos_ids=model.eos_ids)
    arrays, structure = by_path(small.params)
    table = np.asarray(by_path(model.params)[0][_EMBEDDING], np.float32)
    arrays[_EMBEDDING] = jnp.asarray(project(table, width))
    return dataclasses.replace(small, params=jax.tree.unflatten(structure, list(arrays.values())))


def main() -> None:
    model = shrink(dj.load(_INPUT.value), _WIDTH.value, _LAYERS.value, _WINDOW.value)
    dj.save(model, _OUTPUT.value)
    say(f"{model!r} in {_OUTPUT.value}")


if __name__ == "__main__":
    run(main)
