r"""Your own text: a language model with byte pairs on plain text files.

    python -m train --config=configs/own_text.py:book.txt --workdir=workdirs/own-text
    python -m train --config=configs/own_text.py:one.txt,two.txt --workdir=workdirs/own-text
    python -m train --config=configs/own_text.py:texts --workdir=workdirs/own-text

The last takes all .txt and .txt.gz files of the folder texts. The first 90% of each file is for training, the rest for
validation. Samples at the end of the run go on from prompts of yours:

    ... --config.evaluation.prompts="('Once upon a time',)"

Afterwards:

    import decoding_jax as dj
    model = dj.load("workdirs/own-text")
    print(dj.decode(model, "Once upon a time", sampling=dj.Sampling(temperature=0.8), max_new_tokens=100).text)

The size suits some megabytes of text. With less of it raise model.dropout and stop earlier (lower total_steps) once the
validation loss rises; with more raise total_steps, model.width and model.num_layers.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from train.config import default_config


def find_files(path: str) -> list[str]:
    """The files that the argument names; ValueError where its folder has no texts."""
    if not Path(path).is_dir():
        return path.split(",")
    files = sorted(str(file) for pattern in ("*.txt", "*.txt.gz") for file in Path(path).glob(pattern))
    if not files:
        raise ValueError(f"the folder {path!r} has no .txt or .txt.gz; name the files, separated by commas")
    return files


def get_config(path: str = "") -> ConfigDict:
    """The settings, given files or their folder; each can be changed on the command line with --config.name=value."""
    if not path:
        raise ValueError("name your files, or their folder, behind a colon: --config=configs/own_text.py:book.txt")
    files = find_files(path)
    config = default_config()
    config.objective = "causal_lm"
    config.total_steps = 2000

    config.data.name = "plain_text"
    train, validation = (",".join(f"{file}[{part}]" for file in files) for part in (":90%", "90%:"))
    config.data.files = ConfigDict({"train": train, "validation": validation, "test": ""})
    config.data.tokenizer.vocab_size = 4000
    config.data.batching = "windows"
    config.data.length = 128
    config.data.rows_per_batch = 16

    config.model.num_layers = 4
    config.model.width = 192
    config.model.mlp_width = 512
    config.model.num_heads = 6
    config.model.num_kv_heads = 6
    config.model.head_size = 32
    config.model.max_length = 512
    config.model.dropout = 0.1

    config.optimizer.learning_rate = 2e-3
    config.optimizer.weight_decay = 0.1

    config.evaluation.every = 250
    config.evaluation.max_new_tokens = 100
    config.checkpoint.every = 250
    return config
