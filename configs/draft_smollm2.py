r"""A draft model for SmolLM2-135M-Instruct: 5 of its 30 layers, taught by its own greedy outputs.

    python scripts/self_prompt.py --count=1600 --output=outputs/self_prompt
    python scripts/prune_layers.py --input=smollm2-135m-instruct --layers=0,1,12,24,29 --output=outputs/pruned
    python -m train --config=configs/draft_smollm2.py:outputs

The path behind the colon is the folder of these two outputs. On two CPU cores the first command takes an hour and the
last 20 minutes. Trained on the first 1,256 answers, 188,000 tokens with their questions, the validation loss is 2.74
nats per token at step 200, the best one; what its drafts bring is in docs/draft_verify.md. As the loss rises from there
on, more answers may make better drafts.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from train.config import default_config


def get_config(folder: str = "outputs") -> ConfigDict:
    """The settings, given the data's folder; each can be changed on the command line with --config.name=value."""
    config = default_config()
    config.objective = "causal_lm"
    config.total_steps = 300
    config.init_from = f"{folder}/pruned"
    config.frozen = ("embed/.*",)  # the target's own, which is the readout too

    texts = f"{folder}/self_prompt"
    config.data.name = "plain_text"
    config.data.files = ConfigDict(
        {"train": f"{texts}/train.jsonl", "validation": f"{texts}/validation.jsonl", "test": ""}
    )
    config.data.markup = True
    config.data.batching = "packed"
    config.data.length = 256
    config.data.overlong = "cut"
    config.data.rows_per_batch = 8

    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.final_fraction = 0.02

    config.evaluation.every = 50
    config.checkpoint.every = 100
    return config
