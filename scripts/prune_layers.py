r"""Makes a smaller language model of a few layers of a larger one: where the training of a draft model starts.

    python scripts/prune_layers.py --input=smollm2-135m-instruct --layers=0,1,12,24,29 --output=outputs/pruned

The embedding, the last norm and the layers that stay are the large model's own. Which layers change their input most
says `measure_draft_verify.py --what=skip` (Men et al. 2024). By itself the result predicts nothing: continue with
--config.init_from=outputs/pruned, as configs/draft_smollm2.py does.

Exit code: 0 done; 2 bad usage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from absl import flags

import decoding_jax as dj
from decoding_jax.checkpoints.orbax import by_path
from decoding_jax.models.functional import abstract_transformer, transformer_model
from decoding_jax.models.transformer import TransformerConfig
from train.command import run, say

_INPUT = flags.DEFINE_string("input", None, "The large model: what dj.load takes.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist yet.", required=True)
_LAYERS = flags.DEFINE_list("layers", None, "The layers to keep, counted from 0.", required=True)


def prune(model: dj.Model, layers: Sequence[int]) -> dj.Model:
    """A model of some layers of a decoder-only Transformer, in their order.

    Raises:
      ValueError: the model is none, or a layer does not exist or is there twice.
    """
    config = model.config
    if not isinstance(config, TransformerConfig) or config.encoder_layers:
        raise ValueError(f"input={_INPUT.value!r} is no decoder-only Transformer")
    if not layers or sorted({*layers}) != [*layers] or not 0 <= layers[0] <= layers[-1] < config.num_layers:
        raise ValueError(f"layers={layers}: give ascending numbers from 0 to {config.num_layers - 1}")
    config = dataclasses.replace(config, num_layers=len(layers))
    large, _ = by_path(model.params)
    names, structure = by_path(abstract_transformer(config)[1])

    def source(name: str) -> str:
        """The large model's name of a param: "layers/3/..." is that of the layer that stays fourth."""
        first, *rest = name.split("/")
        return "/".join([first, str(layers[int(rest[0])]), *rest[1:]]) if first == "layers" else name

    params = jax.tree.unflatten(structure, [large[source(name)] for name in names])
    return transformer_model(config, params, tokenizer=model.tokenizer, eos_ids=model.eos_ids)


def main() -> None:
    try:
        layers = [int(number) for number in _LAYERS.value]
    except ValueError:
        raise ValueError(f"layers={','.join(_LAYERS.value)}: give numbers with commas between them") from None
    model = prune(dj.load(_INPUT.value), layers)
    dj.save(model, _OUTPUT.value)
    say(f"{model!r} in {_OUTPUT.value}")


if __name__ == "__main__":
    run(main)
