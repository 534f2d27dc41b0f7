r"""Tiny Shakespeare by characters, in nanoGPT's setting for a CPU.

    python -m train --config=configs/shakespeare_char_cpu.py:input.txt

input.txt, or whatever path stands behind the colon, is the tiny Shakespeare file (1,115,394 characters),
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt; its first 90% is for
training, the rest for validation.

4 layers, 4 heads, width 128, context 64, batches of 12 rows, 2,000 steps, no dropout. The gated feed-forward of width
256 has three quarters of the weights of nanoGPT's.

Two to two and a half minutes on two CPU cores. Expect a validation loss of 1.67 nats per character; a third of the
steps (--config.total_steps=666 --config.optimizer.warmup_steps=33) gives 1.87. scripts/compare_nanogpt.py runs both.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from train.config import default_config


def get_config(path: str = "input.txt") -> ConfigDict:
    """The settings, given the text's path; each can be changed on the command line with --config.name=value."""
    config = default_config()
    config.objective = "causal_lm"
    config.total_steps = 2000

    config.data.name = "plain_text"
    config.data.files = ConfigDict({"train": f"{path}[:90%]", "validation": f"{path}[90%:]", "test": ""})
    config.data.tokenizer.kind = "characters"
    config.data.batching = "windows"
    config.data.length = 64
    config.data.rows_per_batch = 12
    config.data.rows_multiple = 4  # not 8, which would pad each batch to 16 rows

    config.model.num_layers = 4
    config.model.width = 128
    config.model.mlp_width = 256
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.head_size = 32
    config.model.max_length = 256

    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.final_fraction = 0.0
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.1

    config.evaluation.every = 1000
    config.evaluation.prompts = ("ROMEO:", "To be, or")
    config.evaluation.max_new_tokens = 120
    config.checkpoint.every = 1000
    return config
