"""The settings of a training run and their defaults. A config file starts from `default_config()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ml_collections import ConfigDict

from decoding_jax.prepare import takes_drafter
from decoding_jax.registry import DECODERS, OBJECTS

# What evaluates and distils: one model, which nothing drafts for.
OWN_DECODERS = tuple(name for name, decoder in DECODERS.items() if not takes_drafter(decoder))


def decoder_sections() -> dict[str, ConfigDict]:
    """A part for each of OWN_DECODERS, called like it, with all its settings: their defaults, but 5 beams."""
    fields = {name: dataclasses.fields(DECODERS[name]) for name in OWN_DECODERS}  # type: ignore[arg-type]
    sections = {
        name: ConfigDict({field.name: field.default for field in fields[name] if field.name not in OBJECTS})
        for name in OWN_DECODERS
    }
    sections["beam"].num_beams = 5
    return sections


def default_config() -> ConfigDict:
    """All settings; what has no sensible default must be set by the config file."""
    config = ConfigDict()
    config.objective = "causal_lm"  # one of train.objectives.OBJECTIVES
    config.seed = 0  # of the initial params, the order of the data, dropout
    config.total_steps = 1000
    # From 0 to below 1. The training loss that is logged is with smoothing and dropout; nats_per_token is without
    # smoothing, the validation loss without both.
    config.label_smoothing = 0.0

    # The texts; train/data/texts.py says more.
    config.data = ConfigDict()
    config.data.name = ""  # "plain_text", "parallel_text", "ui_phrases", "key_phrases", or one that TFDS has prepared
    config.data.language_pair = ""  # of ui_phrases: "en-de" or "en-zh"
    # Of plain_text "a.txt,b.jsonl", also a part as in "a.txt[:90%]"; of parallel_text "a.en,a.de", "a.tsv" or
    # "a.jsonl"; of another data set its split, as in "train[:95%]". "": there is no such split.
    config.data.files = ConfigDict({"train": "", "validation": "", "test": ""})
    config.data.fields = ()  # features that serve: ("source", "target") of pairs in this order, one of texts; (): all
    config.data.data_dir = ""  # the folder of prepared data sets; "": one in the user's cache
    config.data.lowercase = False  # whether texts are lower-cased
    config.data.markup = False  # whether special tokens that are written out in a text are these tokens, not text
    config.data.distilled = ""  # a folder of train.distill, whose pairs replace the training split; "": none

    # How they become ids: kind "characters", "bytes" or "bpe", made from the training split, "bpe" of vocab_size tokens
    # (256 bytes and the special ones included), or "file" of a model's folder `path`.
    config.data.tokenizer = ConfigDict({"kind": "bpe", "vocab_size": 8000, "path": ""})

    # How ids become batches; train/data/batches.py shows them.
    config.data.batching = "packed"  # whole documents side by side; "windows": of one stream; "bucketed": pairs
    config.data.length = 256  # the longest row, of pairs the longest side, in tokens with <eos>; at least 2
    config.data.overlong = "drop"  # longer ones are left out, with "cut" shortened; windows take any length
    config.data.rows_per_batch = 16  # of packed and windows: at most so many, rounded up to rows_multiple
    config.data.tokens_per_batch = 4096  # of bucketed: at most so many of the target's side, padding included
    config.data.rows_multiple = 8  # rows of a batch are a multiple of it; the parts of the mesh must divide it
    config.data.prefetch = 4  # batches that threads make ahead; 0: each is made when it is asked for

    # Fields of TransformerConfig; a config file may add others of them. A vocab_size of 0 is the tokenizer's;
    # encoder-decoders start behind its <bos>.
    config.model = ConfigDict()
    config.model.vocab_size = 0
    config.model.num_layers = 4
    config.model.encoder_layers = 0
    config.model.width = 128
    config.model.mlp_width = 256
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.head_size = 32
    config.model.max_length = 512
    config.model.rope_theta = 10000.0
    config.model.tie_embeddings = True
    config.model.dropout = 0.0  # rate in training, from 0 to below 1; the training loss is with it

    # Of objectives whose models fill a canvas; each takes some of these.
    config.canvas = ConfigDict()
    config.canvas.source_copy = "none"  # what stands in it first: "none" (<mask>), "uniform" or "soft" copies
    config.canvas.length_head = "offsets"  # from the source's length; "lengths" themselves; "none": they are given
    config.canvas.length_classes = 128  # of the head
    config.canvas.length_weight = 1.0  # how many tokens a length counts as in the loss
    config.canvas.upsample = 3  # frames for each token of the source, of ctc
    config.canvas.group = 2  # tokens at once, of group_autoregressive; segments, of segment_parallel
    config.canvas.outline = "every"  # n-th token, or the "rare" ones, of outline_then_fill
    config.canvas.outline_share = 0.34  # of all tokens
    config.canvas.glancing = 0.0  # share of the wrong tokens that are shown; 0: none

    config.init_from = ""  # what dj.load takes: its model and tokenizer replace the settings above
    config.frozen = ()  # regular expressions; params whose whole path matches one are not trained

    config.teacher = ConfigDict({"path": "", "weight": 0.5, "temperature": 1.0})  # learnt word by word

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 1e-3  # its peak
    config.optimizer.schedule = "cosine"  # or "rsqrt" or "constant", all after a linear warmup
    config.optimizer.warmup_steps = 100
    config.optimizer.final_fraction = 0.1  # of the peak, where cosine ends
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.01  # of matrices; norms and biases are not decayed
    config.optimizer.clip_norm = 1.0  # 0: no clipping
    config.optimizer.accumulate = 1  # parts that a batch is computed in, one after the other
    config.optimizer.ema = 0.0  # decay of the averaged params, which then decode and are evaluated; 0: off

    config.compute_dtype = "float32"  # or "bfloat16"; params and optimizer are float32
    config.remat = False  # compute activations again in the gradient: less memory, a third more work

    # Devices along each axis of the mesh; -1 takes what the others leave.
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})

    config.log_every = 50  # steps; for metrics.jsonl, while the screen goes by the clock
    config.checkpoint = ConfigDict({"every": 500, "keep_last": 2, "keep_best": 1})

    config.evaluation = ConfigDict()
    config.evaluation.every = 500  # steps between two losses on the validation split; checkpoints bring one too
    config.evaluation.decode_every = 0  # steps between two decodings of it; 0: only at the end, with the test split
    config.evaluation.examples = 200  # how many are decoded before the end
    config.evaluation.samples = 5  # how many go into samples.jsonl and results.json
    config.evaluation.decoder = "autoregressive"  # one of OWN_DECODERS; each has its settings in a part
    config.evaluation.update(decoder_sections())
    config.evaluation.max_new_tokens = 64
    config.evaluation.batch_size = 32
    config.evaluation.language = ""  # of the targets, such as "de"
    config.evaluation.prompts = ()  # of a language model's samples
    config.evaluation.temperature = 0.8  # of these; beam search takes 0

    # What train.distill does with a teacher; the settings of decoders and sampling are those of decode.
    config.distillation = ConfigDict()
    config.distillation.split = "train"
    config.distillation.decoder = "autoregressive"
    config.distillation.update(decoder_sections())
    config.distillation.sampling = ConfigDict({"temperature": 0.0, "top_k": 0, "top_p": 1.0})  # 0: greedy
    config.distillation.seed = 0  # of the draws
    config.distillation.max_new_tokens = 64
    config.distillation.batch_size = 64
    config.distillation.batches_per_part = 4  # a part is what a kill can cost

    config.profile = ConfigDict({"first_step": 0, "steps": 0})  # a window for jax.profiler; 0 steps: none
    config.compilation_cache = "default"  # a folder, "default" for one in the user's cache, "" for none
    return config


def make_student(config: ConfigDict, student: Sequence[str], teacher: str, translations: str) -> None:
    """Makes the config of a translator that of its student: another objective, from the translator's params on.

    Args:
      config: changed in place.
      student: (objective,) or (objective, "distilled"); any objective of pairs. One of seq2seq has the translator's
        tokenizer, but params of its own.
      teacher: the folder of the translator.
      translations: the folder of what it made of the training split, the targets of a student that is "distilled".

    Raises:
      ValueError: there is another word behind the objective.
    """
    objective, *more = student
    if more and more != ["distilled"]:
        raise ValueError(
            f"{','.join(student)!r}: behind the objective stands only 'distilled', for a teacher's targets"
        )
    config.objective = objective
    if more:
        config.data.distilled = translations
        # The validation split has other targets than the student learns, and says little about when it is best: the
        # last checkpoint is the model.
        config.checkpoint.keep_best, config.checkpoint.keep_last = 0, 1
    if objective == "seq2seq":
        config.data.tokenizer.kind, config.data.tokenizer.path = "file", teacher
        return
    # It knows the words already, so that half of the steps on half of the batches are enough, and with as much dropout
    # it would not even learn the training split.
    config.init_from = teacher
    config.total_steps //= 2
    config.data.tokens_per_batch //= 2
    config.model.dropout = 0.1
    config.optimizer.learning_rate /= 2
    config.optimizer.warmup_steps //= 4
    config.optimizer.ema = 0.995
    config.evaluation.decoder = objective
    if objective in ("nonautoregressive", "ctc"):
        config.canvas.source_copy = "uniform"
        config.canvas.glancing = 0.5
    if objective == "ctc":
        config.label_smoothing = 0.0  # it has no law of single tokens
        config.canvas.upsample = 2
