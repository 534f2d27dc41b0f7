r"""A draft model for SmolLM2-135M-Instruct: 5 of its 30 layers, taught by its own greedy outputs.

    python scripts/prune_layers.py --input=smollm2-135m-instruct --layers=0,1,12,24,29 --output=outputs/pruned
    python -m train --config=configs/draft_smollm2.py

25 minutes on two CPU cores; expect a validation loss of 2.43 nats per token. The texts are in
train/data/smollm2_answers; another model's, or more, are made by

    python scripts/self_prompt.py --count=1600 --output=outputs/self_prompt
    python -m train --config=configs/draft_smollm2.py:outputs/self_prompt

with their folder behind the colon. What its drafts bring is in docs/draft_verify.md.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

import train.data
from train.config import default_config


def get_config(texts: str = "") -> ConfigDict:
    """The settings, given the texts' folder; each can be changed on the command line with --config.name=value."""
    config = default_config()
    config.objective = "causal_lm"
    config.total_steps = 360
    config.compute_dtype = "bfloat16"
    config.init_from = "outputs/pruned"
    config.frozen = ("embed/.*",)  # the target's own, which is the readout too

    folder, ending = (texts, "") if texts else (Path(train.data.__file__).parent / "smollm2_answers", ".gz")
    files = {split: f"{folder}/{split}.jsonl{ending}" for split in ("train", "validation")}
    config.data.name = "plain_text"
    config.data.files = ConfigDict(files | {"test": ""})
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
