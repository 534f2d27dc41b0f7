"""Our own checkpoint format: Orbax (v1 API) params beside a config.json and the tokenizer's files.

folder/config.json     {"format": "decoding_jax", "transformer": {...}, "dtype": ..., "eos_ids": [...], "int8": false}
folder/params/         an Orbax checkpoint of {"layers/0/attention/qkv/kernel": array, ...}
folder/tokenizer.json  ... if the model has a tokenizer
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from decoding_jax.checkpoints.cache_files import write_atomically
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
from decoding_jax.models.functional import abstract_transformer, float_dtype, transformer_model
from decoding_jax.models.quantized import is_quantized, quantize_params
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.types import Model, PyTree

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
        arrays, _ = by_path(model.params)
        ocp.save(scratch / "params", arrays)
        dtype, int8 = float_dtype(model.params).name, is_quantized(model.params)
        write_model_files(config, model.tokenizer, model.eos_ids, scratch, dtype, int8)

    write_folder(Path(folder).absolute(), fill)


def load_orbax(folder: Path, dtype: Any = None, placement: Placement = None) -> Model:
    """Reads a folder that `save` wrote; params are cast to `dtype` and restored straight to their placement.

    Raises:
      ValueError: the config or the checkpoint cannot be read; it names the file.
    """
    config, dtype, fields = read_model_files(folder, dtype)
    int8 = bool(read_config(folder).get("int8"))  # not in folders of older versions
    return transformer_model(config, restore_params(folder / "params", config, dtype, placement, int8=int8), **fields)


def write_model_files(
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    eos_ids: Sequence[int],
    folder: Path,
    dtype: str = "float32",
    int8: bool = False,
) -> None:
    """Writes all of a model but its params: config.json, and the tokenizer's files if it has one.

    `dtype` is that of the params, `int8` whether the matrices among them are quantised.

    The config comes last and in one step, so a folder that has one is complete.
    """
    if tokenizer is not None:
        tokenizer.save(folder)
    about = {"dtype": dtype, "eos_ids": list(eos_ids), "int8": int8}
    raw = {"format": FORMAT, "transformer": config_as_dict(config)} | about
    write_atomically(folder / "config.json", (json.dumps(raw, indent=2) + "\n").encode())


def is_complete(folder: Path) -> bool:
    """Whether `write_model_files` has come to its end in a folder."""
    return (folder / "config.json").exists()


def read_model_files(folder: Path, dtype: Any = None) -> tuple[TransformerConfig, Any, dict[str, Any]]:
    """The inverse of `write_model_files`: the config, the params' dtype (`dtype` goes first), and fields of Model.

    Raises:
      ValueError: a file cannot be read; it names the file.
    """
    raw = read_config(folder)
    try:
        config, eos_ids = config_from_dict(raw["transformer"]), tuple(raw["eos_ids"])
        dtype = dtype_of(dtype or raw["dtype"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: not a config of this version ({error!r})") from None
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    return config, dtype, {"tokenizer": tokenizer, "eos_ids": eos_ids}


def restore_params(
    path: Path,
    config: TransformerConfig,
    dtype: Any,
    placement: Placement = None,
    item: str | None = None,
    int8: bool = False,
) -> PyTree:
    """A Transformer's params from an Orbax checkpoint of them, or from one `item` of it, each to its placement.

    Raises:
      ValueError: the checkpoint cannot be read or holds another model; it names the path.
    """
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = abstract_transformer(config, dtype)[1]
    abstract, treedef = by_path(jax.eval_shape(quantize_params, params) if int8 else params)
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_for(placement, name, x.shape) or here)
        for name, x in abstract.items()
    }
    named = {} if item is None else {"checkpointable_name": item}
    try:
        arrays = ocp.load(path.absolute(), wanted, **named)
    except Exception as error:  # Orbax and TensorStore raise many kinds; none of them names the remedy
        raise ValueError(f"{path} cannot be restored ({reason(error)}); save or convert it again") from error
    return jax.tree.unflatten(treedef, [arrays[name] for name in wanted])


def by_path(tree: PyTree) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by their paths as text, in order, and its structure.

    Raises:
      ValueError: two leaves have the same path.
    """
    leaves, treedef = jax.tree.flatten_with_path(tree)
    named = {path_of(key_path): leaf for key_path, leaf in leaves}
    if len(named) < len(leaves):
        paths = [path_of(key_path) for key_path, _ in leaves]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"several leaves of the pytree have the path {twice[0]!r}; rename one of their keys")
    return named, treedef


def reason(error: BaseException) -> str:
    """Why Orbax failed, in one line: it wraps the cause in messages about handlers."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
