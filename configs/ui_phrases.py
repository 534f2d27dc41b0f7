r"""Short interface phrases, English to German or Chinese, on data inside this package: a teacher and its students.

    python -m train --config=configs/ui_phrases.py:en-de
    python -m train --config=configs/ui_phrases.py:en-zh

3 + 3 layers of width 192, 6,000 joint byte pairs, 3.8 million parameters. Half an hour on two CPU cores. Expect on the
test split

    en-de   2.54 nats per token in validation; greedy BLEU 18.8, chrF 48.4; 5 beams BLEU 20.3, chrF 50.7
    en-zh   2.82 nats per token in validation; greedy BLEU 39.5, chrF 37.7; 5 beams BLEU 41.0, chrF 39.3

(BLEU of characters for Chinese) by

    python scripts/evaluate_translation.py --model=workdirs/ui_phrases-en-de

A student writes several words at once. It starts from the teacher's params, and learns from the pairs as they are or
from the teacher's translations of them, in 20 to 30 minutes on two CPU cores. For en-de a teacher,
dj.load("ui-phrases-en-de"), and its translations by 5 beams that stop early are in this package, so one command trains
a student:

    python -m train --config=configs/ui_phrases.py:en-de,ctc                 # from the pairs
    python -m train --config=configs/ui_phrases.py:en-de,ctc,distilled       # from its teacher's translations
    python -m train --config=configs/ui_phrases.py:en-de,mask_predict,distilled --config.teacher.path=ui-phrases-en-de

with nonautoregressive, ctc, mask_predict, iterative_refinement, group_autoregressive, segment_parallel or
outline_then_fill behind the pair; the last one learns its teacher's probabilities too. For en-zh the teacher and its
translations are those of

    python -m train --config=configs/ui_phrases.py:en-zh
    python -m train.distill --teacher=workdirs/ui_phrases-en-zh --config.distillation.decoder=beam

and another teacher is given by

    python -m train.distill --teacher=workdirs/ui_phrases-en-de --config.distillation.decoder=beam
    python -m train --config=configs/ui_phrases.py:en-de,ctc --config.init_from=workdirs/ui_phrases-en-de \
        --config.data.distilled=workdirs/ui_phrases-en-de/distilled-beam

16,297 pairs are few: many words of the test split occur nowhere in training, and a phrase has several good
translations, so these are scores of a small teacher and not of good translation.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

import train.data
from decoding_jax.checkpoints import OWN_MODELS, find_model
from train.config import default_config, make_student


def get_config(argument: str = "en-de") -> ConfigDict:
    """The settings for "PAIR" or "PAIR,OBJECTIVE[,distilled]"; --config.name=value changes each."""
    language_pair, *student = argument.split(",")
    config = default_config()
    config.objective = "seq2seq"
    config.total_steps = 3000
    config.label_smoothing = 0.1

    config.data.name = "ui_phrases"
    config.data.language_pair = language_pair
    config.data.files = ConfigDict({"train": "train", "validation": "validation", "test": "test"})
    config.data.tokenizer.vocab_size = 6000
    config.data.batching = "bucketed"
    config.data.length = 48
    config.data.tokens_per_batch = 2048

    config.model.num_layers = 3
    config.model.encoder_layers = 3
    config.model.width = 192
    config.model.mlp_width = 384
    config.model.num_heads = 6
    config.model.num_kv_heads = 6
    config.model.head_size = 32
    config.model.max_length = 128
    config.model.dropout = 0.3

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 300
    config.optimizer.final_fraction = 0.02
    config.optimizer.weight_decay = 0.02
    config.optimizer.ema = 0.998

    config.evaluation.every = 250
    config.evaluation.language = language_pair.partition("-")[2]
    config.evaluation.batch_size = 64
    config.checkpoint.every = 250
    if student:
        teacher = Path("workdirs") / f"ui_phrases-{language_pair}"
        translations = teacher / "distilled-beam"
        if (name := f"ui-phrases-{language_pair}") in OWN_MODELS:
            teacher = find_model(name)
            translations = Path(train.data.__file__).parent / "ui_phrases" / f"distilled-{language_pair}"
        make_student(config, student, str(teacher), str(translations))
    return config
