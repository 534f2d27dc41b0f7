r"""Multi30k English-German (task 1) in the published "Transformer-Tiny" size: 4 + 4 layers, width 128, 4 heads.

    python -m train --config=configs/multi30k.py:multi30k

multi30k, or whatever path stands behind the colon, is a folder with {train,val,test_2016_flickr}.{en,de}.gz, those in
https://github.com/multi30k/dataset/tree/master/data/task1/raw: 29,000, 1,014 and 1,000 pairs, lower-cased here as in
the papers that report this size. 10,000 joint byte pairs. The gated feed-forward of width 256 makes 2.9 million
parameters where the published plain one makes 2.6.

About an hour on two CPU cores (84 minutes with other work beside it). Expect a validation loss of 1.86 nats per token,
and on test_2016_flickr 35.7 tokenised lower-cased BLEU greedily and 36.9 with 5 beams:

    python scripts/evaluate_translation.py --model=workdirs/multi30k-multi30k --tokenised

A student that writes several words at once (docs/parallel.md) learns from the pairs or from the translations of this
teacher:

    python -m train.distill --teacher=workdirs/multi30k-multi30k --config.distillation.decoder=beam
    python -m train --config=configs/multi30k.py:multi30k,ctc,distilled
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from train.config import default_config, make_student

SPLITS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}


def get_config(argument: str = "multi30k") -> ConfigDict:
    """The settings for "FOLDER" or "FOLDER,OBJECTIVE[,distilled]"; --config.name=value changes each."""
    folder, *student = argument.split(",")
    config = default_config()
    config.objective = "seq2seq"
    config.total_steps = 4200
    config.label_smoothing = 0.1

    config.data.name = "parallel_text"
    config.data.files = ConfigDict(
        {name: f"{folder}/{part}.en.gz,{folder}/{part}.de.gz" for name, part in SPLITS.items()}
    )
    config.data.lowercase = True
    config.data.tokenizer.vocab_size = 10_000
    config.data.batching = "bucketed"
    config.data.length = 64
    config.data.tokens_per_batch = 3072

    config.model.num_layers = 4
    config.model.encoder_layers = 4
    config.model.width = 128
    config.model.mlp_width = 256
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.head_size = 32
    config.model.max_length = 128
    config.model.dropout = 0.3

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 400
    config.optimizer.final_fraction = 0.02
    config.optimizer.weight_decay = 0.02
    config.optimizer.ema = 0.998

    config.evaluation.every = 300
    config.evaluation.language = "de"
    config.evaluation.batch_size = 64
    config.checkpoint.every = 300
    if student:
        teacher = f"workdirs/multi30k-{Path(folder).name}"
        make_student(config, student, teacher, f"{teacher}/distilled-beam")
    return config
