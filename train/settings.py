"""Which settings a training run has and which values they take, checked before anything is read.

Errors name a setting as the command line does, behind `--config.`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from decoding_jax.loop import Decoder
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.registry import make_decoder
from decoding_jax.types import LENGTH_HEADS, SOURCE_COPIES
from train.command import unknown_setting
from train.config import OWN_DECODERS, default_config
from train.data.examples import FIELDS
from train.objectives import OBJECTIVES


@dataclasses.dataclass(frozen=True)
class Range:
    """The finite numbers from `low` to `high`, without an end that is open."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        low = f"above {self.low}" if self.open_low else f"at least {self.low}"
        if self.high == math.inf:
            return low
        start = low if self.open_low else f"from {self.low}"
        return f"{start} to {'below ' if self.open_high else ''}{self.high}"


_COUNT, _FROM_0, _ABOVE_0 = Range(1), Range(0), Range(0, open_low=True)
_RATE = Range(0, 1, open_high=True)
_SIZES = ("num_layers", "width", "mlp_width", "num_heads", "num_kv_heads", "head_size", "max_length")

RANGES: Mapping[str, Range] = {
    "seed": Range(0, 2**32 - 1),
    "total_steps": _COUNT,
    "label_smoothing": _RATE,
    "data.length": Range(2),  # a token and <eos>
    "data.rows_per_batch": _COUNT,
    "data.tokens_per_batch": _COUNT,
    "data.rows_multiple": _COUNT,
    "data.prefetch": _FROM_0,
    **{f"model.{name}": _COUNT for name in _SIZES},
    "model.vocab_size": _FROM_0,
    "model.encoder_layers": _FROM_0,
    "model.rope_theta": _ABOVE_0,
    "model.dropout": _RATE,
    "canvas.length_classes": _COUNT,
    "canvas.length_weight": _FROM_0,
    "canvas.outline_share": Range(0.01, 1),
    "canvas.upsample": _COUNT,
    "canvas.group": _COUNT,
    "canvas.glancing": Range(0, 1, open_high=True),
    "teacher.weight": Range(0, 1),
    "teacher.temperature": _ABOVE_0,
    "optimizer.learning_rate": _ABOVE_0,
    "optimizer.warmup_steps": _FROM_0,
    "optimizer.final_fraction": Range(0, 1),
    "optimizer.b1": _RATE,
    "optimizer.b2": _RATE,
    "optimizer.eps": _ABOVE_0,
    "optimizer.weight_decay": _FROM_0,
    "optimizer.clip_norm": _FROM_0,
    "optimizer.accumulate": _COUNT,
    "optimizer.ema": _RATE,
    "log_every": _COUNT,
    "checkpoint.every": _COUNT,
    "checkpoint.keep_last": _COUNT,
    "checkpoint.keep_best": _FROM_0,
    "evaluation.every": _COUNT,
    "evaluation.decode_every": _FROM_0,
    "evaluation.examples": _COUNT,
    "evaluation.samples": _FROM_0,
    "evaluation.max_new_tokens": _COUNT,
    "evaluation.batch_size": _COUNT,
    "evaluation.temperature": _FROM_0,
    "profile.first_step": _FROM_0,
    "profile.steps": _FROM_0,
}

CHOICES: Mapping[str, tuple[str, ...]] = {
    "objective": tuple(OBJECTIVES),
    "data.tokenizer.kind": ("characters", "bytes", "bpe", "file"),
    "data.batching": tuple(FIELDS),
    "data.overlong": ("drop", "cut"),
    "optimizer.schedule": ("cosine", "rsqrt", "constant"),
    "canvas.source_copy": SOURCE_COPIES,
    "canvas.length_head": tuple(head for head in LENGTH_HEADS if head != "gaps"),
    "canvas.outline": ("every", "rare"),
    "compute_dtype": ("float32", "bfloat16"),
    "evaluation.decoder": OWN_DECODERS,
}

_OPTIONAL = ("distillation", *(f"evaluation.{name}" for name in OWN_DECODERS))
_OPEN = ("data.files", *_OPTIONAL)  # parts whose names others check


def check_settings(config: Any) -> None:
    """Refuses a config with which a run could not start or could not end, as far as that shows without data.

    Raises:
      ValueError: a setting is missing, unknown or out of its range, or does not fit the others; with the remedy.
    """
    _check_names(config, default_config(), "")
    _check_values(config)
    evaluation_decoder(config)
    _check_canvas(config)
    given = config.data.tokenizer
    if given.path and given.kind != "file":
        raise ValueError(
            f"data.tokenizer.path={given.path!r} is read with data.tokenizer.kind='file' only; set that too"
        )
    if config.init_from:
        return  # the model's shape is that of another one
    with naming("model", config.model):
        TransformerConfig(**config.model.to_dict() | {"vocab_size": config.model.vocab_size or 1})
    check_data_length(config, config.model.max_length)
    layers, with_encoder = config.model.encoder_layers, OBJECTIVES[config.objective].encoder_decoder
    if with_encoder != (layers > 0):
        wanted = "at least 1" if with_encoder else "0"
        raise ValueError(f"model.encoder_layers={layers}: objective={config.objective!r} needs {wanted}")


def _check_names(given: Any, known: ConfigDict, path: str) -> None:
    """Compares the names and kinds of a config's settings with those of `default_config`."""
    if not isinstance(given, ConfigDict):
        what = path or "get_config of the config file"
        raise ValueError(
            f"{what} is a {type(given).__name__}; it must be a ConfigDict: change that of train.config.default_config"
        )
    fields = [field.name for field in dataclasses.fields(TransformerConfig)] if path == "model" else []
    for name in given:
        if name not in known and name not in fields:
            raise ValueError(unknown_setting(f"{path}.{name}".strip("."), [*known, *fields]))
    for name, default in known.items():
        full = f"{path}.{name}".strip(".")
        if name not in given:
            if full in _OPTIONAL:
                continue
            raise ValueError(f"the config file lacks the setting {full}; begin with train.config.default_config()")
        if isinstance(default, ConfigDict):
            if full not in _OPEN:
                _check_names(given[name], default, full)
        elif not _is_like(given[name], default):
            kind = "tuple of texts" if isinstance(default, tuple) else type(default).__name__
            raise ValueError(f"{full}={given[name]!r}: must be of the kind {kind}, as in {full}={default!r}")


def _check_canvas(config: ConfigDict) -> None:
    """ValueError where a setting of `canvas` says something that the objective has no use for."""
    objective, defaults = OBJECTIVES[config.objective], default_config().canvas
    used = objective.settings if objective.has_canvas else ()
    for name, value in config.canvas.items():
        if name not in used and value != defaults[name]:
            remedy = f"it uses {', '.join(used)}" if used else "its models write from left to right"
            raise ValueError(f"canvas.{name}={value!r}: objective={config.objective!r} has no use for it; {remedy}")
    copy = config.canvas.source_copy
    if objective.has_canvas and copy not in objective.copies:
        raise ValueError(
            f"canvas.source_copy={copy!r}: objective={config.objective!r} takes one of {', '.join(objective.copies)}"
        )


def _is_like(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple | list) and all(isinstance(item, str) for item in value)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, int | float if isinstance(default, float) else type(default))


def _check_values(config: ConfigDict) -> None:
    """Whether each number is in its range and each word one of the choices."""
    for name, numbers in RANGES.items():
        if (value := _value_of(config, name)) not in numbers:
            raise ValueError(f"{name}={value}: must be {numbers}")
    for name, choices in CHOICES.items():
        if (word := _value_of(config, name)) not in choices:
            raise ValueError(f"{name}={word!r}: choose one of {', '.join(choices)}")
    warmup, steps = config.optimizer.warmup_steps, config.total_steps
    if warmup >= steps:  # the learning rate would not reach its peak
        raise ValueError(
            f"optimizer.warmup_steps={warmup}: must be from 0 to below total_steps={steps}; lower it or raise "
            "total_steps"
        )


def _value_of(settings: Any, path: str) -> Any:
    return functools.reduce(lambda part, name: part[name], path.split("."), settings)


def check_data_length(config: ConfigDict, max_length: int) -> None:
    """ValueError where rows of text would not fit into the model's context."""
    if config.data.length > max_length:
        remedy = "lower it" if config.init_from else "lower it or raise model.max_length"
        raise ValueError(f"data.length={config.data.length} is more than the model's max_length={max_length}; {remedy}")


def evaluation_decoder(config: ConfigDict) -> Decoder:
    """What `evaluation.decoder` names, with its settings; ValueError where one has no meaning."""
    settings = config.evaluation
    with naming("evaluation", settings):
        return make_decoder(settings.decoder, settings.get(settings.decoder, {}))


@contextlib.contextmanager
def naming(section: str, settings: ConfigDict) -> Iterator[None]:
    """Puts the whole name of a setting in front of the ValueErrors of what knows only its last part.

    With the decoder beam, in the section evaluation:

        num_beams=0, n_best=1: need ...         evaluation.beam.num_beams=0, n_best=1: need ...
        sampling.temperature: Beam searches     evaluation.temperature=0.8: Beam searches
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(_named(str(error), section, settings)) from None


def _named(message: str, section: str, settings: ConfigDict) -> str:
    found = re.match(r"[\w.]*", message)
    path = found[0] if found else ""
    rest, last = message.removeprefix(path), path.rpartition(".")[2]
    for each in (path, last, f"{settings.get('decoder')}.{last}"):
        try:
            value = _value_of(settings, each)
        except (KeyError, TypeError, ValueError):
            continue
        shown = f"={value!r}" if rest.startswith(":") and not isinstance(value, ConfigDict) else ""
        return f"{section}.{each}{shown}{rest}"
    return f"{section}: {message}"
