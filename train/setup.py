"""From a config to what the loop needs: texts, tokenizer, batches, the model's shape, the objective."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

import decoding_jax as dj
from decoding_jax.analysis.scores import base_language
from decoding_jax.batch_job import Job, check_job
from decoding_jax.checkpoints import Tokenizer
from decoding_jax.checkpoints.cache_files import cache_dir
from decoding_jax.checkpoints.orbax import is_complete, read_model_files
from decoding_jax.models.functional import abstract_transformer, transformer_model, transformer_spec
from decoding_jax.models.quantized import dequantized
from decoding_jax.models.sharding import TRAINING_RULES, place
from decoding_jax.models.transformer import TransformerConfig, View
from decoding_jax.prepare import check_length, encode_prompt
from decoding_jax.types import CanvasSpec, Model
from train.command import say
from train.data.batches import Plan, make_plan
from train.data.examples import Examples, tokenise
from train.data.texts import Texts, open_texts
from train.data.tokenizers import make_tokenizer, mask_id_of, start_id_of, unknown_characters
from train.jobs import load_as
from train.objectives import OBJECTIVES, Teacher
from train.optimizers import make_optimizer
from train.settings import check_data_length, check_settings, evaluation_decoder, naming
from train.state import Layout

_MADE_ANEW = "remove its config.json, and the same command makes it anew"


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
    """The class of the objective."""
    return OBJECTIVES[config.objective]


def open_data(config: ConfigDict, tokenizer: Tokenizer | None) -> Data:
    """Reads, tokenises and plans the data.

    Args:
      config: of the run.
      tokenizer: of an earlier start of this run or of the model to go on from; None: make one.

    Raises:
      ValueError: a setting or a text does not fit, or there is no training split.
    """
    settings = config.data
    texts = open_texts(settings)
    if "train" not in texts.splits:
        raise ValueError(
            f"data.files.train={settings.files.get('train', '')!r}: there is no training split, only "
            f"{' and '.join(texts.splits)}; name the texts to learn from"
        )
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
        if split == "validation" and not found.characters:
            raise ValueError(
                f"data.files.validation={settings.files.get('validation', '')!r}: every document is one token, so that "
                "nothing is predicted; give longer ones, or none"
            )
        _report(found, plans[split], settings)
    return Data(texts, tokenizer, examples, plans)


def check_rows(config: ConfigDict, mesh: Mesh) -> None:
    """`check_settings`, and ValueError where mesh and optimizer.accumulate cannot take a batch apart evenly.

    The batches do not depend on the mesh, so that a run can go on on another one.
    """
    check_settings(config)
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * config.optimizer.accumulate
    rows, multiple = config.data.rows_per_batch, config.data.rows_multiple
    made = f"{parts}, the parts that the mesh (data times fsdp) and optimizer.accumulate make of a batch"
    if multiple % parts:
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
        notes.append(f"{_counted(examples.unknown, 'token')} for unknown characters")
    notes.append(f"{_counted(plan.batches_per_epoch, 'batch', 'es')} per epoch, {plan.waste:.0%} padding")
    say("; ".join([f"{examples.split}: {_counted(len(examples), 'example')}, {_counted(tokens, 'token')}", *notes]))


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{'' if count == 1 else plural}"


def model_config(
    config: ConfigDict, tokenizer: Tokenizer | None, base: TransformerConfig | None = None
) -> TransformerConfig:
    """The shape of the model to train: that of the model to go on from (with our dropout and canvas), or the config's.

    Raises:
      ValueError: the vocabulary is unknown or too small, or has no <mask> where the objective needs one.
    """
    if base is None:
        shape = TransformerConfig(**_described(config, tokenizer))
    else:
        shape = dataclasses.replace(base, dropout=config.model.dropout)
        if objective_of(config).has_canvas:
            mask_id = base.canvas.mask_id if base.canvas is not None else _mask_id(tokenizer)
            shape = dataclasses.replace(shape, canvas=canvas_spec(config, mask_id))
    known = 0 if tokenizer is None else tokenizer.vocab_size
    if shape.vocab_size < known:
        name = "model.vocab_size" if base is None else f"init_from={config.init_from!r} with vocab_size"
        raise ValueError(f"{name}={shape.vocab_size}: fewer than the {known} ids of the tokenizer")
    return shape


def _described(config: ConfigDict, tokenizer: Tokenizer | None) -> dict[str, Any]:
    fields: dict[str, Any] = config.model.to_dict()
    if not fields["vocab_size"]:
        if tokenizer is None:
            made = config.data.tokenizer
            size = made.vocab_size if made.kind == "bpe" else "<its size>"
            raise ValueError(
                f"model.vocab_size=0 stands for that of the tokenizer, and there is none without the texts; give "
                f"--config.model.vocab_size={size}"
            )
        fields["vocab_size"] = tokenizer.vocab_size
    objective = objective_of(config)
    if objective.encoder_decoder:
        fields["start_id"] = 0 if tokenizer is None else start_id_of(tokenizer)
    if objective.has_canvas:
        fields["canvas"] = canvas_spec(config, _mask_id(tokenizer))
    return fields


def _mask_id(tokenizer: Tokenizer | None) -> int:
    return 0 if tokenizer is None else mask_id_of(tokenizer)  # none where a step is only compiled


def canvas_spec(config: ConfigDict, mask_id: int) -> CanvasSpec:
    """What the model's canvas looks like; ValueError where the settings of `canvas` have no meaning."""
    objective, known = objective_of(config), [field.name for field in dataclasses.fields(CanvasSpec)]
    settings = {name: value for name, value in config.canvas.items() if name in objective.settings and name in known}
    settings |= objective.fixed
    if settings.get("length_head") == "none":
        settings["length_classes"] = 0
    return CanvasSpec(config.objective, mask_id, **settings)


def check_decoding(config: ConfigDict, data: Data, shape: TransformerConfig) -> None:
    """ValueError where an evaluation by decoding would fail, which is noticed too late at the end of the training."""
    settings, tokenizer = config.evaluation, data.tokenizer
    _, params = abstract_transformer(shape)
    model = transformer_model(shape, params, tokenizer=tokenizer, eos_ids=tuple(tokenizer.eos_ids))
    pairs = "source" in data.texts.fields
    if not pairs and not settings.prompts:
        return
    with naming("evaluation", settings):
        if pairs:
            base_language(settings.language)
        sampling = dj.Sampling(temperature=0.0 if pairs else settings.temperature)
        check_job(model, Job(evaluation_decoder(config), settings.max_new_tokens, sampling))
    if pairs:
        _check_sources(config, data, model)
    else:
        _check_prompts(config, model)


def _check_sources(config: ConfigDict, data: Data, model: Model) -> None:
    """All that is decoded: at the end the validation and the test split, before it the first of the former."""
    splits = {split: len(data.texts.splits[split]) for split in ("validation", "test") if split in data.texts.splits}
    if config.evaluation.decode_every and "validation" not in splits:
        splits["train"] = min(config.evaluation.examples, len(data.texts.splits["train"]))
    for split, count in splits.items():
        for i, pair in enumerate(itertools.islice(data.texts.splits[split], count)):
            name = f"source {i} of the {split} split"
            check_length(model, encode_prompt(model, pair["source"], name), 0, name)


def _check_prompts(config: ConfigDict, model: Model) -> None:
    prompts = config.evaluation.prompts
    for i, prompt in enumerate(prompts):
        name = f"evaluation.prompts[{i}]"
        check_length(model, encode_prompt(model, prompt, name), config.evaluation.max_new_tokens, name)
    if unknown := unknown_characters(model.tokenizer, "".join(prompts)):
        say(f"evaluation.prompts has characters that the tokenizer does not know: {unknown!r}; the model gets <unk>")


def base_model(config: ConfigDict, mesh: Mesh) -> Model | None:
    """The model of `init_from`, float32 and spread over the mesh; None without one.

    One that writes from left to right may become one that fills a canvas; the heads of that are new.

    Raises:
      ValueError: it cannot be loaded, or does not fit the objective.
    """
    if not config.init_from:
        return None
    model = load_as("init_from", config.init_from, dtype="float32", placement=place(mesh, TRAINING_RULES))
    model = dequantized(model)
    if model.tokenizer is not None and model.start_id not in (None, start_id_of(model.tokenizer)):
        raise ValueError(f"init_from={config.init_from!r}: start_id={model.start_id} is not its tokenizer's <bos>")
    if (model.encode is not None) != objective_of(config).encoder_decoder:
        kind = "a decoder-only model" if model.encode is None else "an encoder-decoder"
        raise ValueError(f"init_from={config.init_from!r} is {kind}, which objective={config.objective!r} cannot train")
    canvas = model.config.canvas
    if canvas is not None and not objective_of(config).has_canvas:
        raise ValueError(
            f"init_from={config.init_from!r} fills a canvas, which objective={config.objective!r} cannot train"
        )
    if canvas is not None:
        wanted = canvas_spec(config, canvas.mask_id)
        heads = [(each.length_head, each.length_classes) for each in (canvas, wanted)]
        if heads[0] != heads[1]:
            raise ValueError(
                f"init_from={config.init_from!r} has a head for {heads[0][1]} {heads[0][0]}, and objective="
                f"{config.objective!r} with this config one for {heads[1][1]} {heads[1][0]}; give both the same"
            )
    check_data_length(config, model.config.max_length)
    return model


def make_layout(config: ConfigDict, shape: TransformerConfig, mesh: Mesh) -> Layout:
    """Where the state of the run lives.

    Raises:
      ValueError: the mesh or `frozen` does not fit the shape.
    """
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    return Layout(shape, mesh, optimizer, tuple(config.frozen), config.optimizer.ema > 0)


def make_objective(config: ConfigDict, layout: Layout, tokenizer: Tokenizer | None) -> Any:
    """The objective over the model in its compute dtype, with the teacher if there is one.

    Raises:
      ValueError: the teacher cannot be loaded, or has another vocabulary or form.
    """
    spec = transformer_spec(layout.config, config.compute_dtype, View(remat=config.remat))
    teacher = None
    if config.teacher.path:
        teacher = load_teacher(config, layout, tokenizer)
    return objective_of(config).make(config, spec, teacher)


def load_teacher(config: ConfigDict, layout: Layout, tokenizer: Tokenizer | None) -> Teacher:
    """A trained model whose predictions are learnt, beside the student on the mesh; ValueError if it does not fit."""
    settings = config.teacher
    model = load_as("teacher.path", settings.path, placement=place(layout.mesh, TRAINING_RULES))
    if model.canvas is not None:
        raise ValueError(
            f"teacher.path={settings.path!r} was trained with {model.canvas.objective} and writes several words at "
            "once; give an autoregressive teacher"
        )
    if config.data.length > model.config.max_length:
        raise ValueError(
            f"teacher.path={settings.path!r} reads at most {model.config.max_length} tokens, and data.length is "
            f"{config.data.length}; lower that"
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


@dataclasses.dataclass(frozen=True)
class Kept:
    """What an earlier start of the run wrote beside its checkpoints: the model's shape and its tokenizer."""

    config: TransformerConfig
    tokenizer: Tokenizer


def kept_model(workdir: Path) -> Kept | None:
    """What the folder keeps; None where its config.json is not there.

    Raises:
      ValueError: a file is damaged.
    """
    if not is_complete(workdir):
        return None
    try:
        config, _, fields = read_model_files(workdir)
        return Kept(config, fields.get("tokenizer") or Tokenizer.from_folder(workdir))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"workdir={str(workdir)!r}: the files of its model are damaged ({str(error).split('; ')[0]}); {_MADE_ANEW}"
        ) from None


def check_kept_shape(workdir: Path, kept: TransformerConfig, shape: TransformerConfig) -> None:
    """ValueError where the folder keeps another shape than that of the run, whose checkpoints could not be loaded."""
    there, here = dataclasses.asdict(kept), dataclasses.asdict(shape)
    different = [f"{name} is {there[name]!r}, not {here[name]!r}" for name in here if there[name] != here[name]]
    if different:
        raise ValueError(f"{workdir / 'config.json'} describes another model ({', '.join(different)}); {_MADE_ANEW}")


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
