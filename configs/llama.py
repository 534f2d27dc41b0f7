r"""Llama 3 in the sizes 1B and 8B on plain text, for 8 devices: to see that a step fits before renting them.

JAX_NUM_CPU_DEVICES=8 python -m train --config=configs/llama.py:8b --compile_only

This takes about a minute and 1 GiB, since nothing of the model's size is made, and prints

    8,030,261,248 parameters on 8 devices (data=1, fsdp=4, tensor=2), batches of 8 x 2,048 tokens
    lowered and compiled in 39.4 s; GiB per device:
      params, optimizer, averages          11.22
      batch, teacher                        0.00
      temporary arrays                     12.00
      together                             23.22
      for comparison, logits in float32     0.98

(1b: 1.73, 9.08 and 10.81 GiB.) The first number is exact. The temporary arrays are what XLA's CPU compiler would need,
an estimate for devices with 80 or 95 GiB that leaves room for more rows.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from train.config import default_config

SHAPES = {
    "1b": {"num_layers": 16, "width": 2048, "mlp_width": 8192, "head_size": 64, "tie_embeddings": True},
    "8b": {"num_layers": 32, "width": 4096, "mlp_width": 14336, "head_size": 128, "tie_embeddings": False},
}


def get_config(size: str = "1b") -> ConfigDict:
    """The settings of a size, 1b or 8b; each can be changed on the command line with --config.name=value."""
    if size not in SHAPES:
        raise ValueError(f"configs/llama.py:{size}: the size must be one of {', '.join(SHAPES)}")
    config = default_config()
    config.objective = "causal_lm"
    config.total_steps = 10_000

    config.data.name = "plain_text"
    config.data.files = ConfigDict({"train": "train.txt", "validation": "validation.txt", "test": ""})
    config.data.batching = "packed"
    config.data.length = 2048
    config.data.overlong = "cut"
    config.data.rows_per_batch = 8

    config.model.update(SHAPES[size])
    config.model.vocab_size = 128_256
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.max_length = 8192
    config.model.rope_theta = 500_000.0

    config.compute_dtype = "bfloat16"
    config.remat = True
    config.mesh = ConfigDict({"data": 1, "fsdp": 4, "tensor": 2})
    return config
