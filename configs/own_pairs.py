r"""Your own pairs, such as sentences and their translations: an encoder-decoder on two aligned files or a TSV.

Two files, line n of one being the translation of line n of the other, the source's file first:

    python -m train --config=configs/own_pairs.py:data/train.en,data/train.de --workdir=workdirs/own

One file of source, tab, target (or JSON lines with "source" and "target"), or the folder of a train.tsv:

    python -m train --config=configs/own_pairs.py:data/train.tsv --config.evaluation.language=de --workdir=workdirs/own
    python -m train --config=configs/own_pairs.py:data --config.evaluation.language=de --workdir=workdirs/own

Files beside these that have "validation" or "test" in place of "train" in their names (data/validation.tsv) are the
other splits. Without a validation split nothing tells when the model stops getting better, so put some pairs aside:

    shuf pairs.tsv > shuffled.tsv
    head -n 500 shuffled.tsv > data/validation.tsv
    tail -n +501 shuffled.tsv > data/train.tsv

Scores, and translations of new sources, one {"id": 1, "source": "..."} on each line of a file:

    python scripts/evaluate_translation.py --model=workdirs/own --split=validation
    python scripts/decode.py --config=configs/decode_smollm2.py --config.model=workdirs/own \
        --config.decoder=beam --input=sources.jsonl --output=outputs/own

The size suits some ten thousand short pairs, which take about half an hour on two CPU cores. With more of them raise
total_steps, model.width and model.num_layers, and lower model.dropout to 0.1.
"""

from __future__ import annotations

import re
from pathlib import Path

from ml_collections import ConfigDict

from train.config import default_config


def split_files(train: str, split: str) -> str:
    """The files of another split, which are called like the training files; "" where there are none."""
    files = [Path(name) for name in train.split(",")]
    others = [file.with_name(file.name.replace("train", split)) for file in files]
    there = all(file != other and other.is_file() for file, other in zip(files, others, strict=True))
    return ",".join(map(str, others)) if there else ""


def target_language(train: str) -> str:
    """ "de" for train.en,train.de and train.en.gz,train.de.gz; "" where the last file is not called by a language."""
    found = re.search(r",.*\.([a-z]{2})(\.gz)?$", train)
    return found[1] if found else ""


def get_config(path: str = "") -> ConfigDict:
    """The settings, given files or their folder; each can be changed on the command line with --config.name=value."""
    if not path:
        raise ValueError("name your files behind a colon: --config=configs/own_pairs.py:data/train.en,data/train.de")
    train = str(Path(path) / "train.tsv") if Path(path).is_dir() else path
    config = default_config()
    config.objective = "seq2seq"
    config.total_steps = 3000
    config.label_smoothing = 0.1

    config.data.name = "parallel_text"
    config.data.files = ConfigDict(
        {"train": train} | {name: split_files(train, name) for name in ("validation", "test")}
    )
    config.data.tokenizer.vocab_size = 6000  # byte pairs of both languages together
    config.data.batching = "bucketed"
    config.data.length = 64  # longer pairs are left out and counted
    config.data.tokens_per_batch = 2048

    config.model.num_layers = 3
    config.model.encoder_layers = 3
    config.model.width = 192
    config.model.mlp_width = 384
    config.model.num_heads = 6
    config.model.num_kv_heads = 6
    config.model.head_size = 32
    config.model.max_length = 256
    config.model.dropout = 0.3

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 300
    config.optimizer.final_fraction = 0.02
    config.optimizer.weight_decay = 0.02
    config.optimizer.ema = 0.998

    config.evaluation.every = 250
    config.evaluation.language = target_language(train)
    config.evaluation.batch_size = 64
    config.checkpoint.every = 250
    return config
