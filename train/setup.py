"""From a config to what the loop needs: texts, tokenizer, batches, the model's shape, the objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

import decoding_jax as dj
from decoding_jax.checkpoints import Tokenizer
from decoding_jax.checkpoints.cache_files import cache_dir
from decoding_jax.checkpoints.orbax import is_complete
from decoding_jax.models.functional import abstract_transformer, transformer_model, transformer_spec
from decoding_jax.models.sharding import TRAINING_RULES, place
from decoding_jax.models.transformer import TransformerConfig, View
from decoding_jax.prepare import check_length, encode_prompt
from decoding_jax.types import Model
from train.command import say
from train.data.batches import Plan, make_plan
from train.data.examples import Examples, tokenise
from train.data.texts import Texts, open_texts
from train.data.tokenizers import make_tokenizer, start_id_of
from train.evaluation import base_language
from train.objectives import OBJECTIVES, Teacher
from train.optimizers import make_optimizer
from train.state import Layout


@dataclasses.dataclass(frozen=True)
class Data:
    """The texts of a run and their batches, by split.

    Attributes:
      texts: the data set.
      tokenizer: made from it, or given.
      examples: the token ids of the training and the validation split.
      plans: their batches; shuffled for training, in order for validation.
    """

    texts: Texts
    tokenizer: Tokenizer
    examples: Mapping[str, Examples]
    plans: Mapping[str, Plan]


def objective_of(config: ConfigDict) -> Any:
    """The class of the objective; ValueError lists what there is."""
    if config.objective not in OBJECTIVES:
        raise ValueError(f"objective={config.objective!r}: choose one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[config.objective]


def open_data(config: ConfigDict, tokenizer: Tokenizer | None) -> Data:
    """Reads, tokenises and plans the data.

    Args:
      config: of the run.
      tokenizer: of an earlier start of this run or of the model to go on from; None: make one.

    Raises:
      ValueError: a setting does not fit.
    """
    settings = config.data
    texts = open_texts(settings)
    wanted = objective_of(config).fields
    if texts.fields != wanted:
        raise ValueError(
            f"objective={config.objective!r} learns from {' and '.join(wanted)}, but data.name={settings.name!r} has "
            f"{' and '.join(texts.fields)}"
        )
    if tokenizer is None:
        tokenizer = make_tokenizer(settings.tokenizer, texts)
    examples = {
        split: tokenise(texts, split, tokenizer, settings, cache_dir() / "tokenised")
        for split in ("train", "validation")
        if split in texts.splits
    }
    plans = {
        split: make_plan(found, settings, config.seed, split == "train", settings.rows_multiple)
        for split, found in examples.items()
    }
    for split, found in examples.items():
        _report(found, plans[split], settings)
    return Data(texts, tokenizer, examples, plans)


def check_counts(config: ConfigDict) -> None:
    """ValueError where a number of things is below 1, or the seed out of range."""
    counts = {
        "total_steps": config.total_steps,
        "log_every": config.log_every,
        "checkpoint.every": config.checkpoint.every,
        "evaluation.every": config.evaluation.every,
        "evaluation.batch_size": config.evaluation.batch_size,
        "evaluation.examples": config.evaluation.examples,
        "optimizer.accumulate": config.optimizer.accumulate,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count}: must be at least 1")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed={config.seed}: must be from 0 to 2**32 - 1")


def check_rows(config: ConfigDict, mesh: Mesh) -> None:
    """ValueError where a batch cannot be taken apart evenly by the mesh and optimizer.accumulate, or a count is none.

    The batches do not depend on the mesh, so that a run can go on on another one.
    """
    check_counts(config)
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * config.optimizer.accumulate
    rows, multiple = config.data.rows_per_batch, config.data.rows_multiple
    made = f"{parts}, the parts that the mesh (data times fsdp) and optimizer.accumulate make of a batch"
    if multiple < 1 or multiple % parts:
        raise ValueError(f"data.rows_multiple={multiple} is not a multiple of {made}; change one of them")
    if config.data.batching != "bucketed" and rows % parts:
        raise ValueError(f"data.rows_per_batch={rows} is not a multiple of {made}; change one of them")


def _report(examples: Examples, plan: Plan, settings: ConfigDict) -> None:
    tokens = sum(len(ragged.tokens) for ragged in examples.fields.values())
    counts = {
        f"longer than {settings.length} tokens and left out": examples.dropped,
        f"longer than {settings.length} tokens and cut": examples.cut,
        "empty and left out": examples.empty,
    }
    notes = [f"{count:,} {what}" for what, count in counts.items() if count]
    if examples.unknown:
        notes.append(f"{examples.unknown:,} unknown characters")
    notes.append(f"{plan.batches_per_epoch:,} batches, of which {plan.waste:.0%} is padding")
    say("; ".join([f"{examples.split}: {len(examples):,} examples, {tokens:,} tokens", *notes]))


def model_config(config: ConfigDict, tokenizer: Tokenizer | None, base: Model | None = None) -> TransformerConfig:
    """The shape of the model to train: that of the model to go on from (with our dropout), or the config's.

    Raises:
      ValueError: the objective and the model do not fit, or the vocabulary is unknown or too small.
    """
    if base is None:
        shape = TransformerConfig(**_described(config, tokenizer))
    else:
        shape = dataclasses.replace(base.config, dropout=config.model.dropout)
    known = 0 if tokenizer is None else tokenizer.vocab_size
    if shape.vocab_size < known:
        name = "model.vocab_size" if base is None else f"init_from={config.init_from!r} with vocab_size"
        raise ValueError(f"{name}={shape.vocab_size}: fewer than the {known} ids of the tokenizer")
    if config.data.length > shape.max_length:
        raise ValueError(f"data.length={config.data.length} is more than the model's max_length={shape.max_length}")
    return shape


def _described(config: ConfigDict, tokenizer: Tokenizer | None) -> dict[str, Any]:
    fields: dict[str, Any] = config.model.to_dict()
    if not fields["vocab_size"]:
        if tokenizer is None:
            raise ValueError("model.vocab_size=0 stands for that of the tokenizer, and there is none yet; set it")
        fields["vocab_size"] = tokenizer.vocab_size
    with_encoder = objective_of(config).encoder_decoder
    if with_encoder != (fields["encoder_layers"] > 0):
        wanted = "at least 1" if with_encoder else "0"
        raise ValueError(
            f"model.encoder_layers={fields['encoder_layers']}: objective={config.objective!r} needs {wanted}"
        )
    return fields | ({"start_id": 0 if tokenizer is None else start_id_of(tokenizer)} if with_encoder else {})


def check_decoding(config: ConfigDict, data: Data, shape: TransformerConfig) -> None:
    """ValueError where an evaluation by decoding would fail, which is noticed too late at the end of the training."""
    settings, tokenizer = config.evaluation, data.tokenizer
    _, params = abstract_transformer(shape)
    model = transformer_model(shape, params, tokenizer=tokenizer, eos_ids=tuple(tokenizer.eos_ids))
    if "source" not in data.texts.fields:
        for i, prompt in enumerate(settings.prompts):
            name = f"evaluation.prompts[{i}]"
            check_length(model, encode_prompt(model, prompt, name), settings.max_new_tokens, name)
        return
    try:
        base_language(settings.language)
    except ValueError as error:
        raise ValueError(f"evaluation.{error}") from None
    check_length(model, [start_id_of(tokenizer)], settings.max_new_tokens, "the beginning of a target")
    for split in ("validation", "test"):
        for i, pair in enumerate(data.texts.splits.get(split, ())):
            name = f"source {i} of the {split} split"
            check_length(model, encode_prompt(model, pair["source"], name), 0, name)


def base_model(config: ConfigDict, mesh: Mesh) -> Model | None:
    """The model of `init_from`, float32 and spread over the mesh; None without one.

    Raises:
      ValueError: it cannot be loaded, or does not fit the objective.
    """
    if not config.init_from:
        return None
    model = dj.load(config.init_from, dtype="float32", placement=place(mesh, TRAINING_RULES))
    if model.tokenizer is not None and model.start_id not in (None, start_id_of(model.tokenizer)):
        raise ValueError(f"init_from={config.init_from!r}: start_id={model.start_id} is not its tokenizer's <bos>")
    if (model.encode is not None) != objective_of(config).encoder_decoder:
        kind = "a decoder-only model" if model.encode is None else "an encoder-decoder"
        raise ValueError(f"init_from={config.init_from!r} is {kind}, which objective={config.objective!r} cannot train")
    return model


def make_layout(config: ConfigDict, shape: TransformerConfig, mesh: Mesh) -> Layout:
    """Where the state of the run lives.

    Raises:
      ValueError: a setting of the optimizer, the mesh or `frozen` does not fit.
    """
    if not 0 <= config.optimizer.ema < 1:
        raise ValueError(f"optimizer.ema={config.optimizer.ema}: must be from 0 (off) to below 1")
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    return Layout(shape, mesh, optimizer, tuple(config.frozen), config.optimizer.ema > 0)


def make_objective(config: ConfigDict, layout: Layout, tokenizer: Tokenizer | None) -> Any:
    """The objective over the model in its compute dtype, with the teacher if there is one.

    Raises:
      ValueError: a setting cannot be used, or the teacher has another vocabulary or form.
    """
    if config.compute_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"compute_dtype={config.compute_dtype!r}: choose float32 or bfloat16")
    if not 0 <= config.label_smoothing < 1:
        raise ValueError(f"label_smoothing={config.label_smoothing}: must be from 0 to below 1")
    spec = transformer_spec(layout.config, config.compute_dtype, View(remat=config.remat))
    teacher = None
    if config.teacher.path:
        teacher = load_teacher(config.teacher, layout, tokenizer)
    return objective_of(config)(spec, jnp.float32(config.label_smoothing), teacher)


def load_teacher(settings: ConfigDict, layout: Layout, tokenizer: Tokenizer | None) -> Teacher:
    """A trained model whose predictions are learnt, beside the student on the mesh; ValueError if it does not fit."""
    model = dj.load(settings.path, placement=place(layout.mesh, TRAINING_RULES))
    if not 0 <= settings.weight <= 1 or not settings.temperature > 0:
        raise ValueError(
            f"teacher.weight={settings.weight} must be from 0 to 1, teacher.temperature={settings.temperature} above 0"
        )
    if (model.encode is None) != (layout.config.encoder_layers == 0):
        raise ValueError(f"teacher.path={settings.path!r}: teacher and student must both have an encoder or both none")
    digests = [None if t is None else t.vocabulary_digest() for t in (model.tokenizer, tokenizer)]
    known = tokenizer is not None  # not where a step is only compiled
    if (known and digests[0] != digests[1]) or model.vocab_size != layout.config.vocab_size:
        raise ValueError(
            f"teacher.path={settings.path!r} has another vocabulary than the student; give the student its tokenizer "
            "(data.tokenizer.kind=file, data.tokenizer.path=the teacher's folder)"
        )
    return Teacher(model.params, jnp.float32(settings.weight), jnp.float32(settings.temperature), model.spec)


def workdir_tokenizer(workdir: Path) -> Tokenizer | None:
    """The tokenizer that an earlier start of the run kept."""
    return Tokenizer.from_folder(workdir) if is_complete(workdir) else None


def compiled_folder(config: ConfigDict) -> str:
    """Where compiled programs are kept; "" for nowhere."""
    return str(cache_dir() / "compiled") if config.compilation_cache == "default" else config.compilation_cache


def to_devices(batch: Mapping[str, Any], layout: Layout) -> dict[str, jax.Array]:
    """This process's rows of a batch, in place on its devices."""
    arrays = {name: value for name, value in batch.items() if name != "examples"}
    if jax.process_count() == 1:
        return jax.device_put(arrays, layout.rows)
    _, shares = layout.share
    return {
        name: jax.make_array_from_process_local_data(layout.rows, value, (len(value) * shares, *value.shape[1:]))
        for name, value in arrays.items()
    }
