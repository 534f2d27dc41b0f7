r"""A draft model for SmolLM2-135M-Instruct: 9 million parameters, taught by the target's own greedy outputs.

    python scripts/self_prompt.py --count=1600 --output=outputs/self_prompt
    python scripts/shrink_model.py --input=smollm2-135m-instruct --output=outputs/smollm2_small
    python -m train --config=configs/draft_smollm2.py:outputs

The path behind the colon is the folder of these two outputs.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from train.config import default_config


def get_config(folder: str = "outputs") -> ConfigDict:
    """The settings, given the data's folder; each can be changed on the command line with --config.name=value."""
    texts = f"{folder}/self_prompt"
    config = default_config()
    config.objective = "causal_lm"
    config.total_steps = 2000
    config.init_from = f"{folder}/smollm2_small"

    config.data.name = "plain_text"
    config.data.files = ConfigDict(
        {"train": f"{texts}/train.jsonl", "validation": f"{texts}/validation.jsonl", "test": ""}
    )
    config.data.markup = True
    config.data.batching = "packed"
    config.data.length = 256
    config.data.overlong = "cut"
    config.data.rows_per_batch = 8

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.final_fraction = 0.02
    config.optimizer.weight_decay = 0.05

    config.evaluation.every = 200
    config.evaluation.max_new_tokens = 48
    config.checkpoint.every = 400
    return config
