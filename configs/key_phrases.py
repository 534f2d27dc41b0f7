r"""The key phrases of a text, as an unordered set: a second task for models that write several words at once.

    python -m train --config=configs/key_phrases.py                  # ctc, one call of the model
    python -m train --config=configs/key_phrases.py:seq2seq          # token by token, to compare with
    python scripts/measure_nonautoregressive.py --what=key_phrases

with any objective of docs/parallel.md behind the colon. The texts are made of interface phrases in this package
(train/data/builders/key_phrases.py); a target such as "Geofence; front door; battery level" is copied from its text.
2 + 2 layers of width 128, 4,000 byte pairs.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from train.config import default_config


def get_config(objective: str = "ctc") -> ConfigDict:
    """The settings for an objective; each can be changed on the command line with --config.name=value."""
    config = default_config()
    config.objective = objective
    config.total_steps = 1200

    config.data.name = "key_phrases"
    config.data.tokenizer.vocab_size = 4000
    config.data.batching = "bucketed"
    config.data.length = 64
    config.data.tokens_per_batch = 1024

    config.model.num_layers = 2
    config.model.encoder_layers = 2
    config.model.max_length = 256
    config.model.dropout = 0.1

    config.optimizer.learning_rate = 2e-3
    config.optimizer.final_fraction = 0.02
    config.optimizer.ema = 0.99

    config.evaluation.every = 200
    config.evaluation.language = "en"
    config.evaluation.batch_size = 64
    config.checkpoint.every = 200
    if objective != "seq2seq":
        config.evaluation.decoder = objective
    if objective == "ctc":
        config.canvas.upsample = 1  # a target is a part of its text
        config.canvas.source_copy = "uniform"
    return config
