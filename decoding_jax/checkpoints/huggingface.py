"""Hugging Face folders: config.json, safetensors and tokenizer to a Model, and back.

One table maps our params to the tensors of a folder, for every family that the Transformer covers.
Files are read tensor by tensor: a tensor is transposed or fused on the host and goes straight to its
device placement, so the host never holds more than one layer's weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from decoding_jax.models.functional import abstract_transformer
from decoding_jax.models.transformer import RopeScaling, TransformerConfig
from decoding_jax.types import CanvasSpec, PyTree

Placement = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Source(NamedTuple):
    """Where a param comes from: one tensor, or several that are fused.

    Tensors are fused along their first axis, group by group: each gives `widths` rows to every group, one width a
    tensor. Kernels are (out, in) in a folder and (in, out) here, so they are transposed.
    """

    names: tuple[str, ...]
    transpose: bool
    groups: int = 1
    widths: tuple[int, ...] = ()


def tensor_table(config: TransformerConfig) -> dict[str, Source]:
    """Our params by path, and the tensors each is made of; all covered families share these names."""
    size, mlp_width = config.head_size, config.mlp_width
    # Query head h belongs to key head h // (queries a key head), so a group's query heads are neighbours there too.
    qkv_parts = (config.num_kv_heads, (config.num_heads // config.num_kv_heads * size, size, size))
    table = {
        "embed/embedding": Source(("model.embed_tokens.weight",), False),
        "norm/scale": Source(("model.norm.weight",), False),
    }
    if not config.tie_embeddings:
        table["head/kernel"] = Source(("lm_head.weight",), True)
    for i in range(config.num_layers):
        ours, theirs = f"layers/{i}", f"model.layers.{i}"
        qkv = tuple(f"{theirs}.self_attn.{x}_proj" for x in "qkv")
        gate_up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        table |= {
            f"{ours}/attention_norm/scale": Source((f"{theirs}.input_layernorm.weight",), False),
            f"{ours}/attention/qkv/kernel": Source(tuple(f"{name}.weight" for name in qkv), True, *qkv_parts),
            f"{ours}/attention/out/kernel": Source((f"{theirs}.self_attn.o_proj.weight",), True),
            f"{ours}/mlp_norm/scale": Source((f"{theirs}.post_attention_layernorm.weight",), False),
            f"{ours}/gate_up/kernel": Source(gate_up, True, 1, (mlp_width, mlp_width)),
            f"{ours}/down/kernel": Source((f"{theirs}.mlp.down_proj.weight",), True),
        }
        if config.qkv_bias:
            table[f"{ours}/attention/qkv/bias"] = Source(tuple(f"{name}.bias" for name in qkv), False, *qkv_parts)
        if config.qk_norm:
            table[f"{ours}/attention/q_norm/scale"] = Source((f"{theirs}.self_attn.q_norm.weight",), False)
            table[f"{ours}/attention/k_norm/scale"] = Source((f"{theirs}.self_attn.k_norm.weight",), False)
    return table


def tensor_shapes(source: Source, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the tensors that make a param of this shape."""
    rows, *rest = (math.prod(shape[1:]), shape[0]) if source.transpose else shape
    return [(n, *rest) for n in (source.groups * width for width in source.widths)] or [(rows, *rest)]


def fuse(source: Source, tensors: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A param of this shape from its tensors."""
    rows = tensors[0]
    if len(tensors) > 1:
        grouped = [x.reshape(source.groups, -1, *x.shape[1:]) for x in tensors]
        rows = np.concatenate(grouped, axis=1).reshape(-1, *rows.shape[1:])
    return np.ascontiguousarray(rows.T if source.transpose else rows).reshape(shape)


def unfuse(source: Source, param: np.ndarray) -> list[np.ndarray]:
    """The inverse of `fuse`."""
    rows = param.reshape(len(param), -1).T if source.transpose else param
    grouped = rows.reshape(source.groups, -1, *rows.shape[1:])
    ends = list(itertools.accumulate(source.widths))[:-1]
    return [np.ascontiguousarray(x.reshape(-1, *rows.shape[1:])) for x in np.split(grouped, ends, axis=1)]


# --------------------------------------------------------------------------------------- config.json
def config_from_hf(raw: Mapping[str, Any], name: str = "config.json") -> TransformerConfig:
    """Reads the parsed config.json of a covered family, in the form of transformers 4 or 5.

    Raises:
      ValueError: another family, a setting that the Transformer does not have, or one that is missing or no
        number; it names the setting.
    """
    try:
        return _config_from_hf(raw, name)
    except KeyError as error:
        raise ValueError(f"{name}: {error.args[0]} is missing; download the file again") from None
    except (TypeError, ZeroDivisionError, AttributeError) as error:
        raise ValueError(f"{name}: a setting has the wrong kind or size ({error}); download the file again") from None


def _config_from_hf(raw: Mapping[str, Any], name: str) -> TransformerConfig:
    def refuse(field: str, remedy: str) -> ValueError:
        return ValueError(f"{name}: {field}={raw.get(field)!r} is not supported; {remedy}")

    family = raw.get("model_type")
    if family not in FAMILIES:
        raise refuse("model_type", f"supported are {', '.join(FAMILIES)} (SmolLM2 is a llama)")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise refuse("hidden_act", "the MLP is gated by silu")
    if raw.get("mlp_bias") or (raw.get("attention_bias") and family != "qwen2"):
        raise refuse("mlp_bias" if raw.get("mlp_bias") else "attention_bias", "only Qwen2's q, k, v biases exist here")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise refuse("partial_rotary_factor", "whole heads are rotated")
    heads = raw["num_attention_heads"]
    # transformers 5 keeps both rope settings in rope_parameters, older ones in two fields
    rope = raw.get("rope_parameters") or {
        **(raw.get("rope_scaling") or {}),
        "rope_theta": raw.get("rope_theta"),
    }
    return TransformerConfig(
        vocab_size=raw["vocab_size"],
        num_layers=raw["num_hidden_layers"],
        width=raw["hidden_size"],
        mlp_width=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_length=raw.get("max_position_embeddings", 2048),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, name, raw.get("max_position_embeddings", 2048)),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(raw, name),
    )


def _rope_scaling(rope: Mapping[str, Any], name: str, max_length: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope.get("original_max_position_embeddings", max_length)),
        )
    raise ValueError(f"{name}: rope_type={kind!r} is not supported; supported are default, linear and llama3")


def _sliding_window(raw: Mapping[str, Any], name: str) -> int | None:
    """The window, where all layers have it; Qwen names one even where it is switched off."""
    window = raw.get("sliding_window")
    if raw["model_type"] != "mistral" and not raw.get("use_sliding_window", False):
        return None
    kinds = set(raw.get("layer_types") or [])
    if window is not None and (len(kinds) > 1 or (not kinds and raw["model_type"] != "mistral")):
        raise ValueError(f"{name}: sliding_window={window} on some layers only is not supported")
    return None if kinds == {"full_attention"} else window


def config_to_hf(config: TransformerConfig, eos_ids: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """A config.json that transformers and `config_from_hf` read; the family follows from the settings.

    Raises:
      ValueError: no family has these settings together, or it is an encoder-decoder.
    """
    if config.encoder_layers:
        raise ValueError(
            f"encoder_layers={config.encoder_layers}: no supported Hugging Face family is an encoder-decoder of these "
            "layers; keep the model as a folder of decoding_jax.save"
        )
    if config.qk_norm and config.qkv_bias:
        raise ValueError("no supported family has both qkv_bias and qk_norm; this model has no Hugging Face form")
    family = (
        "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "mistral" if config.sliding_window else "llama"
    )
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    raw: dict[str, Any] = {
        "architectures": [f"{names[family]}ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
    }
    if eos_ids:
        raw["eos_token_id"] = list(eos_ids)
    if config.sliding_window is not None:
        raw["sliding_window"] = config.sliding_window
        if family != "mistral":
            raw |= {"use_sliding_window": True, "layer_types": ["sliding_attention"] * config.num_layers}
    if (scaling := config.rope_scaling) is not None:
        raw["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            raw["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_length,
            }
    return raw


# ------------------------------------------------------------------------------------------- tensors
def path_of(key_path: tuple[Any, ...]) -> str:
    """A param's path as text, "layers/0/attention/qkv/kernel"."""
    names = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in key_path)
    return "/".join(str(name) for name in names if name != "value")


def sharding_for(placement: Placement, path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
    """Where one param goes."""
    return placement(path, shape) if callable(placement) else placement


@contextlib.contextmanager
def _open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Every tensor of a folder by name, as the file that holds it; nothing is read yet."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of tensors ({error!r}); download it again") from None
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no .safetensors file; download the model's weights into this folder")
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in files:
            if not file.exists():
                raise ValueError(f"{file} is named in {index.name} but does not exist; download it again")
            try:
                opened = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a whole safetensors file ({error}); download it again") from None
            tensors |= dict.fromkeys(opened.keys(), opened)
        yield tensors


def load_params(folder: Path, config: TransformerConfig, dtype: Any, placement: Placement = None) -> PyTree:
    """The params of a Transformer from a folder's safetensors, each on its device as soon as it is read.

    Args:
      folder: with one or many safetensors files.
      config: what the params must fit.
      dtype: of the params on the device.
      placement: a sharding for all params, or a function of (path, shape), or None for the default device.

    Raises:
      ValueError: one message that lists every missing, unused and wrongly shaped tensor.
    """
    _, abstract = abstract_transformer(config, dtype)
    leaves, treedef = jax.tree.flatten_with_path(abstract)
    table = tensor_table(config)
    with _open_tensors(folder) as tensors:
        problems, wanted = [], set()
        for key_path, leaf in leaves:
            path = path_of(key_path)
            source = table[path]
            wanted |= set(source.names)
            missing = [name for name in source.names if name not in tensors]
            problems += [f"missing: {name}" for name in missing]
            if missing:
                continue
            for name, expected in zip(source.names, tensor_shapes(source, leaf.shape), strict=True):
                shape = tuple(tensors[name].get_slice(name).get_shape())
                if shape != expected:
                    problems.append(f"wrong shape: {name} is {shape}, the config wants {expected}")
        # A tied head may be stored again, and old files hold rotary tables that follow from the config.
        spare = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
        spare |= {"lm_head.weight"} if config.tie_embeddings else set()
        problems += [f"unused: {name}" for name in sorted(set(tensors) - wanted - spare)]
        if problems:
            listed = "\n  ".join(problems)
            raise ValueError(f"{folder}: the tensors do not fit config.json ({len(problems)} problems):\n  {listed}")

        def read(path: str, leaf: Any) -> jax.Array:
            source = table[path]
            parts = [tensors[name].get_tensor(name).astype(dtype) for name in source.names]
            return jax.device_put(fuse(source, parts, leaf.shape), sharding_for(placement, path, leaf.shape))

        params = [read(path_of(key_path), leaf) for key_path, leaf in leaves]
    return jax.tree.unflatten(treedef, params)


def save_params(folder: Path, config: TransformerConfig, params: PyTree) -> None:
    """Writes params as model.safetensors under the names of the folder's family."""
    table = tensor_table(config)
    tensors: dict[str, np.ndarray] = {}
    for key_path, leaf in jax.tree.flatten_with_path(params)[0]:
        source = table[path_of(key_path)]
        tensors |= dict(zip(source.names, unfuse(source, np.asarray(leaf)), strict=True))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder; ValueError where there is none or it is not JSON."""
    file = folder / "config.json"
    if not file.exists():
        raise ValueError(f"{folder}: no config.json; give the folder of a model (Hugging Face or decoding_jax)")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds no JSON object; download it again")
    return raw


def config_as_dict(config: TransformerConfig) -> dict[str, Any]:
    """A config as JSON-ready values."""
    return dataclasses.asdict(config)


def config_from_dict(raw: Mapping[str, Any]) -> TransformerConfig:
    """The inverse of `config_as_dict`."""
    parts = {"rope_scaling": RopeScaling, "canvas": CanvasSpec}
    made = {name: kind(**raw[name]) if raw.get(name) else None for name, kind in parts.items()}
    return TransformerConfig(**{**raw, **made})


def dtype_of(name: Any) -> Any:
    """A params dtype by name; ValueError lists the choices."""
    choices = ("float32", "bfloat16", "float16")
    text = name if isinstance(name, str) else jnp.dtype(name).name
    if text not in choices:
        raise ValueError(f"dtype={name!r}: choose one of {', '.join(choices)}")
    return jnp.dtype(text)
