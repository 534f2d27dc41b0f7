"""Our own checkpoint format: Orbax (v1 API) params beside a config.json and the tokenizer's files.

folder/config.json     {"format": "decoding_jax", "transformer": {...}, "dtype": ..., "eos_ids": [...]}
folder/params/         an Orbax checkpoint of {"layers/0/attention/qkv/kernel": array, ...}
folder/tokenizer.json  ... if the model has a tokenizer
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from decoding_jax.checkpoints.huggingface import (
    Placement,
    config_as_dict,
    config_from_dict,
    dtype_of,
    path_of,
    read_config,
    sharding_for,
)
from decoding_jax.checkpoints.tokenizer import Tokenizer
from decoding_jax.models.functional import abstract_transformer, transformer_model
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.types import Model

FORMAT = "decoding_jax"


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder whole or not at all: `fill` writes into a temporary one beside it, then it is renamed.

    Raises:
      ValueError: the folder exists, or cannot be written.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder or remove it first")
    scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None
    try:
        fill(scratch)
        os.replace(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def save(model: Model, folder: str | os.PathLike[str]) -> None:
    """Writes a Transformer model as a folder that `load` takes.

    Raises:
      ValueError: the model is no Transformer, or the folder exists.
    """
    config = model.config
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"{model!r} has no TransformerConfig; only Transformers can be saved in this format")

    def fill(scratch: Path) -> None:
        leaves = jax.tree.flatten_with_path(model.params)[0]
        ocp.save(scratch / "params", {path_of(key_path): leaf for key_path, leaf in leaves})
        if model.tokenizer is not None:
            model.tokenizer.save(scratch)
        raw = {
            "format": FORMAT,
            "transformer": config_as_dict(config),
            "dtype": leaves[0][1].dtype.name,
            "eos_ids": list(model.eos_ids),
        }
        (scratch / "config.json").write_text(json.dumps(raw, indent=2) + "\n")

    write_folder(Path(folder).absolute(), fill)


def load_orbax(folder: Path, dtype: Any = None, placement: Placement = None) -> Model:
    """Reads a folder that `save` wrote; params are cast to `dtype` and restored straight to their placement.

    Raises:
      ValueError: the config or the checkpoint cannot be read; it names the file.
    """
    raw = read_config(folder)
    try:
        config, eos_ids = config_from_dict(raw["transformer"]), tuple(raw["eos_ids"])
        dtype = dtype_of(dtype or raw["dtype"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: not a config of this version ({error!r})") from None
    _, abstract = abstract_transformer(config, dtype)
    leaves, treedef = jax.tree.flatten_with_path(abstract)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {}
    for key_path, leaf in leaves:
        path = path_of(key_path)
        sharding = sharding_for(placement, path, leaf.shape) or here
        wanted[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    try:
        arrays = ocp.load(folder.absolute() / "params", wanted)
    except Exception as error:  # Orbax and TensorStore raise many kinds; none of them names the remedy
        raise ValueError(f"{folder / 'params'} cannot be restored ({error}); save or convert it again") from error
    params = jax.tree.unflatten(treedef, [arrays[path] for path in wanted])
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    return transformer_model(config, params, tokenizer=tokenizer, eos_ids=eos_ids)
