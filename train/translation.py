"""Trained encoder-decoders and the pairs they are used on: what distillation and evaluation both open."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from decoding_jax.checkpoints import Placement
from decoding_jax.checkpoints.cache_files import cache_dir
from decoding_jax.types import Model
from train.data.examples import Examples, tokenise
from train.data.texts import Split, Texts, open_texts
from train.jobs import load_as
from train.workdir import digest_of_params


def load_translator(flag: str, path: str | os.PathLike[str], placement: Placement = None) -> Model:
    """An encoder-decoder with a tokenizer.

    Args:
      flag: what errors call the model, such as "teacher".
      path: what `dj.load` takes, such as the workdir of a training run.
      placement: as in `dj.load`.

    Raises:
      ValueError: it cannot be loaded, or it is another kind of model.
    """
    model = load_as(flag, path, placement=placement)
    if model.encode is None:
        raise ValueError(
            f"{flag}={os.fspath(path)!r} is a decoder-only model, which takes no source; give the workdir of a run "
            "with objective='seq2seq'"
        )
    if model.tokenizer is None or not model.tokenizer.eos_ids:
        raise ValueError(
            f"{flag}={os.fspath(path)!r} has no tokenizer that names an <eos>; put the tokenizer.json and "
            "tokenizer_config.json (with its eos_token) that it was trained with beside its config.json"
        )
    return model


def open_pairs(settings: Mapping[str, Any], split: str) -> Split:
    """A split of pairs.

    Args:
      settings: the `data` part of a config.
      split: "train", "validation" or "test".

    Raises:
      ValueError: as `open_texts`; or the data set has documents, or no such split.
    """
    texts = open_texts(settings)
    if texts.fields != ("source", "target"):
        raise ValueError(
            f"data.name={settings['name']!r} has no pairs of source and target, only documents; choose a config with "
            "objective='seq2seq', or name two features in data.fields"
        )
    if split not in texts.splits:
        raise ValueError(
            f"split={split!r}: data.name={settings['name']!r} has only {', '.join(texts.splits)}; choose one of them"
        )
    return texts.splits[split]


def encode_sources(pairs: Split, split: str, model: Model, longest: int) -> Examples:
    """The sources of a split as the trainer makes ids of them: with <eos>, and special tokens in a text are text.

    Args:
      pairs: the split.
      split: its name.
      model: from `load_translator`.
      longest: sources of more tokens, <eos> included, are left out and counted.

    Returns:
      Examples whose field "text" has the sources.

    Raises:
      ValueError: no source is left.
    """
    sources = dataclasses.replace(pairs, features={"text": pairs.features["source"]})
    documents = Texts({split: sources}, ("text",), pairs.digest)
    settings = {"batching": "packed", "length": longest, "overlong": "drop", "markup": False}
    return tokenise(documents, split, model.tokenizer, settings, cache_dir() / "tokenised")


def digest_of(model: Model) -> str:
    """SHA-256 of all that a model decodes with: shape, params, vocabulary. It changes when it is trained further."""
    about = f"{model.config} {model.eos_ids} {model.tokenizer.vocabulary_digest()}"
    return digest_of_params(model.params, about)
