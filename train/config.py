"""The settings of a training run and their defaults. A config file starts from `default_config()`."""

from __future__ import annotations

from ml_collections import ConfigDict


def default_config() -> ConfigDict:
    """All settings; what has no sensible default must be set by the config file."""
    config = ConfigDict()
    config.objective = "causal_lm"  # one of train.objectives.OBJECTIVES
    config.seed = 0  # of the initial params, the order of the data, dropout
    config.total_steps = 1000
    config.label_smoothing = 0.0

    # The texts, the tokenizer and the batches; train/data says what the names mean.
    config.data = ConfigDict()
    config.data.name = ""
    config.data.language_pair = ""
    config.data.files = ConfigDict({"train": "", "validation": "", "test": ""})
    config.data.fields = ()
    config.data.data_dir = ""
    config.data.lowercase = False
    config.data.distilled = ""
    config.data.tokenizer = ConfigDict({"kind": "bpe", "vocab_size": 8000, "path": ""})
    config.data.batching = "packed"
    config.data.length = 256  # the longest row, in tokens
    config.data.overlong = "drop"
    config.data.rows_per_batch = 16
    config.data.tokens_per_batch = 4096
    config.data.rows_multiple = 8  # rows of a batch are a multiple of it; the parts of the mesh must divide it
    config.data.prefetch = 4

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
    config.model.dropout = 0.0
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

    config.log_every = 50
    config.checkpoint = ConfigDict({"every": 500, "keep_last": 2, "keep_best": 1})

    config.evaluation = ConfigDict()
    config.evaluation.every = 500  # steps between two losses on the validation split; checkpoints bring one too
    config.evaluation.decode_every = 0  # steps between two decodings of it; 0: only at the end, with the test split
    config.evaluation.examples = 200  # how many are decoded before the end
    config.evaluation.samples = 5  # how many go into the log
    config.evaluation.decoder = "autoregressive"  # one of decoding_jax.registry.DECODERS; its settings as in decode
    config.evaluation.autoregressive = ConfigDict()
    config.evaluation.beam = ConfigDict({"num_beams": 5, "length_penalty": 1.0, "n_best": 1})
    config.evaluation.prompt_lookup = ConfigDict({"num_draft": 8, "max_ngram": 3, "min_ngram": 1})
    config.evaluation.max_new_tokens = 64
    config.evaluation.batch_size = 32
    config.evaluation.language = ""  # of the targets, such as "de"
    config.evaluation.prompts = ()  # of a language model's samples
    config.evaluation.temperature = 0.8  # of these; beam search takes 0

    # What train.distill does with a teacher; the settings of decoders and sampling are those of decode.
    config.distillation = ConfigDict()
    config.distillation.split = "train"
    config.distillation.decoder = "autoregressive"
    config.distillation.autoregressive = ConfigDict()
    config.distillation.beam = ConfigDict({"num_beams": 5, "length_penalty": 1.0, "n_best": 1})
    config.distillation.prompt_lookup = ConfigDict({"num_draft": 8, "max_ngram": 3, "min_ngram": 1})
    config.distillation.sampling = ConfigDict({"temperature": 0.0, "top_k": 0, "top_p": 1.0})  # 0: greedy
    config.distillation.seed = 0  # of the draws
    config.distillation.max_new_tokens = 64
    config.distillation.batch_size = 64
    config.distillation.batches_per_part = 4  # a part is what a kill can cost

    config.profile = ConfigDict({"first_step": 0, "steps": 0})  # a window for jax.profiler; 0 steps: none
    config.compilation_cache = "default"  # a folder, "default" for one in the user's cache, "" for none
    return config
