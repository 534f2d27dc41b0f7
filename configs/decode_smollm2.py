r"""Decodes a file of prompts with SmolLM2-135M-Instruct, a real language model that setup.sh installs.

    printf '%s\n' '{"id": 1, "prompt": "The capital of France is"}' \
        '{"id": 2, "messages": [{"role": "user", "content": "Name three colours."}]}' > prompts.jsonl
    python scripts/decode.py --config=configs/decode_smollm2.py --input=prompts.jsonl --output=outputs/first

Expect outputs/first/part-00000-of-00001.jsonl with two lines (the first one's text begins with
" Paris") and summary.json. The first run converts the weights and compiles, about a minute on two
cores; later runs start within some ten seconds.

Copying from the prompt makes summaries, edits and code faster; the text is the same:

    python scripts/decode.py --config=configs/decode_smollm2.py \
        --input=prompts.jsonl --output=outputs/lookup \
        --config.decoder=prompt_lookup --config.prompt_lookup.num_draft=6

The four best continuations of each prompt:

    python scripts/decode.py --config=configs/decode_smollm2.py \
        --input=prompts.jsonl --output=outputs/beam \
        --config.decoder=beam --config.beam.n_best=4

Drafting with a copy of the model in int8, for the same text in fewer calls of the model itself:

    python scripts/decode.py --config=configs/decode_smollm2.py \
        --input=prompts.jsonl --output=outputs/int8 \
        --config.decoder=self_speculative --config.drafter=int8 --config.self_speculative.num_draft=4
"""

from __future__ import annotations

from typing import Any

import ml_collections
from ml_collections.config_dict import placeholder

from decoding_jax.checkpoints.cache_files import cache_dir


def drafting(**more: Any) -> ml_collections.ConfigDict:
    """The settings of drafting with a model."""
    return ml_collections.ConfigDict(
        {
            "num_draft": 5,
            "acceptance": "coupled",  # or "rejection", or "typical", which is not lossless
            "tree": placeholder(tuple),  # children at each depth, (2,1,1), or paths, ((0,),(1,),(0,0)); none: a chain
            "adaptive": False,
            "draft_cost": 0.1,
            "position_cost": 0.02,
            "min_confidence": 0.0,
            **more,
        }
    )


def get_config() -> ml_collections.ConfigDict:
    """The settings; each can be changed on the command line with --config.name=value."""
    config = ml_collections.ConfigDict()

    # What `dj.load` takes: a packaged model's name, a Hugging Face or Orbax folder, a .gguf file.
    config.model = "smollm2-135m-instruct"
    config.dtype = "float32"

    # One of decoding_jax.registry.DECODERS; the settings of the others are ignored.
    config.decoder = "autoregressive"
    config.autoregressive = ml_collections.ConfigDict()
    config.beam = ml_collections.ConfigDict(
        {"num_beams": 4, "length_penalty": 1.0, "n_best": 1, "early_stopping": False}
    )
    config.jacobi = ml_collections.ConfigDict({"block_length": 8, "sliding": True})
    config.lookahead = ml_collections.ConfigDict(
        {"window": 7, "ngram": 5, "candidates": 7, "pool_size": 512, "prompt_ngrams": False}
    )
    config.prompt_lookup = ml_collections.ConfigDict(
        {"num_draft": 8, "max_ngram": 3, "min_ngram": 1, "weak_draft": 2, "num_matches": 1}
    )
    config.speculative = drafting()  # drafts with config.drafter
    # Drafts with a part of the model, by exit_layer or skip_layers, or else with config.drafter="int8".
    config.self_speculative = drafting(exit_layer=placeholder(int), skip_layers=())

    # Of models that were trained to write several tokens at once; each is decoded by the decoder of its objective.
    config.nonautoregressive = ml_collections.ConfigDict({"length_beam": 1})
    config.ctc = ml_collections.ConfigDict({"beam": 1, "top": 16, "length_bonus": 0.0})
    config.mask_predict = ml_collections.ConfigDict({"iterations": 10, "length_beam": 1})
    config.iterative_refinement = ml_collections.ConfigDict({"iterations": 4, "length_beam": 1})
    config.group_autoregressive = ml_collections.ConfigDict()
    config.segment_parallel = ml_collections.ConfigDict()
    config.outline_then_fill = ml_collections.ConfigDict()
    # Drafts with such a model, config.drafter, and verifies with config.model; `draft` is the drafter's decoder.
    config.draft_then_verify = ml_collections.ConfigDict({"draft": "nonautoregressive", "num_draft": 8})

    # The model that drafts, of the same vocabulary: what `dj.load` takes, "int8" for a copy of the model with coarser
    # weights, "" for none.
    config.drafter = ""

    # The numbers of `dj.Sampling`; temperature 0 is greedy.
    config.sampling = ml_collections.ConfigDict(
        {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_new_tokens": 0,
        }
    )
    config.seed = 0
    config.max_new_tokens = 128

    # What ends a row besides the model's end-of-sequence ids.
    config.stop_token_ids = ()
    config.stop_strings = ()

    config.batch_size = 8
    config.batches_per_part = 4  # a part is what a kill can cost
    config.data_parallel = 1  # devices that share each batch
    config.compilation_cache = str(cache_dir() / "compiled")  # compiled programs are kept here; "": nowhere
    return config
