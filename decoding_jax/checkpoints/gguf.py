"""Turns a GGUF file into an ordinary Hugging Face folder in float32, cached on disk."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf.quants import dequantize
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from decoding_jax.checkpoints import cache_files
from decoding_jax.checkpoints.huggingface import config_from_hf
from decoding_jax.checkpoints.tokenizer import Tokenizer

# Part of the name of every converted folder: raise it when the same file would give other content.
VERSION = 1

logger = logging.getLogger("decoding_jax")

Metadata = dict[str, Any]
Tensors = dict[str, gguf.ReaderTensor]

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# How text is cut into words before merging, by the name that llama.cpp gives the tokenizer: a
# regular expression, None for GPT-2's own, and whether every digit stands alone first.
# The expressions are those of the models' tokenizer.json files.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace("{1,3}", "")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "smollm": (None, True),
    "starcoder": (None, True),
    "refact": (None, True),
    "llama-bpe": (_LLAMA3_WORDS, False),
    "llama3": (_LLAMA3_WORDS, False),
    "llama-v3": (_LLAMA3_WORDS, False),
    "qwen2": (_QWEN2_WORDS, False),
    "tekken": (_TEKKEN_WORDS, False),
}
# These look a whole word up before they merge, and start a text with <s> unless the file says otherwise.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def hf_folder_from_gguf(path: Path | str, cache_dir: Path | str | None = None) -> Path:
    """Returns a folder with the content of a GGUF file, converting it the first time.

    The folder holds config.json, model.safetensors (float32, Hugging Face names, query and key rows in
    half-split order), tokenizer.json, tokenizer_config.json and generation_config.json. It is found again
    by the SHA-256 of the file and verified before it is returned.

    Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    Args:
      path: a GGUF file of architecture llama (Mistral too), qwen2 or qwen3, in any quantization that
        `gguf.quants` knows.
      cache_dir: where converted folders are kept; None for `cache_files.cache_dir()`.

    Raises:
      ValueError: the file is absent, cut short, not GGUF, or holds something that has no equal in such a
        folder; or the cache cannot be written.
    """
    path = Path(path)
    _check_magic(path)
    root = cache_files.cache_dir() if cache_dir is None else Path(cache_dir)
    folder = root / f"gguf-{cache_files.sha256_of_file(path)}-v{VERSION}"

    def build(scratch: Path) -> None:
        logger.info("converting %s to float32 (once; cached in %s)", path, folder)
        try:
            _convert(path, scratch)
        except (ValueError, OSError, MemoryError):
            raise
        except Exception as error:
            # Metadata of the wrong type, and the tokenizers library, end in whatever exception comes first.
            raise _refusal(
                path, f"does not fit together ({type(error).__name__}: {error})", "fetch it again"
            ) from error

    return cache_files.cached_folder(folder, build)


def _convert(path: Path, folder: Path) -> None:
    metadata, tensors = _read(path)
    family = metadata.get("general.architecture")
    if family not in _FAMILIES:
        raise _refusal(path, f"has the architecture {family!r}", f"use one of {', '.join(_FAMILIES)}")
    if metadata.get("split.count", 1) > 1:
        raise _refusal(path, "is one part of several", "join the parts with `llama-gguf-split --merge`")
    names = _hf_names(path, family, int(_required(path, metadata, f"{family}.block_count")), tensors)
    config = _config(path, family, metadata, tensors)
    config_from_hf(config, str(path))  # refuses what no loader here could read, before anything is written
    tokenizer = _tokenizer(path, metadata)
    if tokenizer.vocab_size > config["vocab_size"]:
        raise _refusal(
            path,
            f"has {tokenizer.vocab_size} tokens for {config['vocab_size']} rows of embeddings",
            "convert the model to GGUF again",
        )
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def weights(name: str) -> np.ndarray:
        array = _dequantized(path, tensors[names[name]])
        part = names[name].split(".")[-2]
        return _half_split(array, heads[part]) if family == "llama" and part in heads else array

    shapes = {name: _shape(tensors[source]) for name, source in names.items()}
    _write_safetensors(folder / "model.safetensors", shapes, weights)


def _refusal(path: Path, problem: str, remedy: str) -> ValueError:
    return ValueError(f"the GGUF file {str(path)!r} {problem}; {remedy}")


def _check_magic(path: Path) -> None:
    """Cheap, so that a wrong file is refused before gigabytes of it are hashed."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error})", "check the path") from error
    if magic != b"GGUF":
        raise _refusal(path, f"is not one: it begins with {magic!r}", "pass a .gguf file, or a folder to `load`")


def _read(path: Path) -> tuple[Metadata, Tensors]:
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        # The reader has no checks of its own: at a missing byte NumPy raises whatever it comes to first.
        raise _refusal(path, f"is damaged or cut short ({type(error).__name__}: {error})", "fetch it again") from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise _refusal(path, "is big-endian", "run gguf-convert-endian on it")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _required(path: Path, metadata: Metadata, key: str) -> Any:
    if key not in metadata:
        raise _refusal(path, f"lacks the metadata {key!r}", "convert the model again with a newer llama.cpp")
    value = metadata[key]
    if isinstance(value, list) and not key.startswith("tokenizer."):
        if len(set(value)) != 1:
            raise _refusal(path, f"has layers of different sizes ({key} = {value})", "use another model")
        value = value[0]
    return value


def _hf_names(path: Path, family: str, layers: int, tensors: Iterable[str]) -> dict[str, str]:
    """Hugging Face name to GGUF name of every tensor; a ValueError unless just the right ones are there."""
    present = set(tensors) - {"rope_freqs.weight"}
    parts = [f"{name}.weight" for name in _LAYER_NAMES if family == "qwen3" or not name.endswith(("q_norm", "k_norm"))]
    if family == "qwen2":
        parts += ["attn_q.bias", "attn_k.bias", "attn_v.bias"]
    elif family == "llama" and "blk.0.attn_q.bias" in present:
        parts += ["attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"]

    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if "output.weight" in present:
        names["lm_head.weight"] = "output.weight"
    for layer in range(layers):
        for part in parts:
            ours, kind = part.split(".")
            names[f"model.layers.{layer}.{_LAYER_NAMES[ours]}.{kind}"] = f"blk.{layer}.{part}"
    if missing := sorted(set(names.values()) - present):
        raise _refusal(path, f"lacks {len(missing)} tensors, such as {missing[0]}", "fetch it again")
    if extra := sorted(present - set(names.values())):
        raise _refusal(
            path,
            f"holds {len(extra)} tensors that a dense {family} model has not, such as {extra[0]}",
            "use a model without them (mixtures of experts are not read)",
        )
    return names


def _config(path: Path, family: str, metadata: Metadata, tensors: Tensors) -> dict[str, Any]:
    def number(key: str) -> Any:
        return _required(path, metadata, f"{family}.{key}")

    heads = int(number("attention.head_count"))
    kv_heads = int(number("attention.head_count_kv")) if f"{family}.attention.head_count_kv" in metadata else heads
    q_rows, hidden = _shape(tensors["blk.0.attn_q.weight"])
    head_dim = q_rows // heads
    k_rows = _shape(tensors["blk.0.attn_k.weight"])[0]
    if (q_rows, k_rows) != (heads * head_dim, kv_heads * head_dim):
        raise _refusal(
            path,
            f"has {q_rows} query and {k_rows} key rows for {heads} and {kv_heads} heads",
            "convert the model to GGUF again",
        )
    rotated = int(metadata.get(f"{family}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise _refusal(path, f"rotates {rotated} of the {head_dim} dimensions of a head", "use another model")
    theta = _shortest(metadata.get(f"{family}.rope.freq_base", 10000.0))
    config: dict[str, Any] = {
        "architectures": [_FAMILIES[family]],
        "model_type": family,
        "vocab_size": _shape(tensors["token_embd.weight"])[0],
        "hidden_size": hidden,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": int(number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(number("context_length")),
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(path, family, metadata, tensors, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
    }
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{theirs}_token_id"] = metadata.get(f"tokenizer.ggml.{ours}_token_id")
    if family == "llama" and (window := metadata.get("llama.attention.sliding_window")):
        # llama.cpp files Mistral under llama; of the two only Mistral has a window.
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _rope_scaling(
    path: Path, family: str, metadata: Metadata, tensors: Tensors, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind in ("linear", "yarn") and "rope_freqs.weight" not in tensors:
        scaling = {
            "rope_type": kind,
            "factor": _shortest(_required(path, metadata, f"{family}.rope.scaling.factor")),
        }
        if (original := metadata.get(f"{family}.rope.scaling.original_context_length")) is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling
    if kind != "none":
        raise _refusal(path, f"scales its positions by {kind!r}", "use the model's safetensors folder")
    if "rope_freqs.weight" not in tensors:
        return None
    return _llama3_scaling(path, _dequantized(path, tensors["rope_freqs.weight"]), theta, head_dim)


def _llama3_scaling(path: Path, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The Llama 3 parameters behind the divisors [head_dim / 2] of the rotary frequencies; None for all ones.

    Source: "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783, and the rope_type llama3 of
    Hugging Face's configurations, whose parameters other than the factor have never had other values.
    """
    low, high, original = 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    # The slowest frequency is divided most, so it shows the factor best.
    slowest = 1.0 / float(divisors[-1]) - kept[-1]
    factor = round((1.0 - kept[-1]) / slowest, 3) if kept[-1] < 1.0 and slowest > 0.0 else 1.0
    expected = 1.0 / (kept + (1.0 - kept) / factor)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3, atol=0):
        raise _refusal(path, "scales its rotary frequencies unlike Llama 3", "use the model's safetensors folder")
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    """The float32 in the file as a person would have written it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    # GGUF counts dimensions from the innermost.
    return tuple(int(size) for size in reversed(tensor.shape))


def _dequantized(path: Path, tensor: gguf.ReaderTensor) -> np.ndarray:
    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(_shape(tensor))
    except (NotImplementedError, ValueError) as error:
        raise _refusal(
            path,
            f"holds {tensor.name} as {tensor.tensor_type.name}, which cannot be read ({error})",
            "use another quantization, such as Q8_0, or upgrade gguf",
        ) from error


def _half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """[heads * d, ...]: the rows of each head from the order 0, d/2, 1, d/2 + 1, ... back to 0, 1, 2, ..."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], load: Callable[[str], np.ndarray]) -> None:
    """Writes float32 arrays one at a time, so that no more than one is in memory.

    Format: https://github.com/huggingface/safetensors#format (the library itself wants all of them at once).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            file.write(np.ascontiguousarray(load(name), "<f4").data)


def _tokenizer(path: Path, metadata: Metadata) -> Tokenizer:
    kind = _required(path, metadata, "tokenizer.ggml.model")
    tokens = list(_required(path, metadata, "tokenizer.ggml.tokens"))
    types = list(metadata.get("tokenizer.ggml.token_type") or [gguf.TokenType.NORMAL] * len(tokens))
    # Filler up to the rows of the embedding is no part of the original vocabulary.
    while types and types[-1] == gguf.TokenType.UNUSED:
        tokens.pop()
        types.pop()
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise _refusal(path, "has a vocabulary with doubles or gaps", "use the model's tokenizer.json instead")
    if kind == "gpt2":
        backend = _byte_level(path, metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(path, metadata, tokens, types)
    else:
        raise _refusal(path, f"has a tokenizer of kind {kind!r}", "use one of kind gpt2 or llama")
    _add_tokens(backend, tokens, types)
    _add_ends(backend, metadata, tokens, kind)

    def token(name: str) -> str | None:
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[i] if i is not None and i < len(tokens) else None

    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        {theirs: text for theirs, ours in named.items() if (text := token(ours)) is not None},
        tuple(end for end in ends if end is not None),
        metadata.get("tokenizer.chat_template"),
    )


def _byte_level(path: Path, metadata: Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _WORDS:
        raise _refusal(
            path,
            f"cuts text into words by the rule {name!r}, which is not known",
            f"use the model's tokenizer.json; known are {', '.join(_WORDS)}",
        )
    merges = [tuple(merge.split(" ")) for merge in _required(path, metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    words, single_digits = _WORDS[name]
    steps: list[Any] = []
    if single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(words), "isolated"))
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(path: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """SentencePiece merges the pair whose joint piece scores best: the merges are listed in that order."""
    scores = _required(path, metadata, "tokenizer.ggml.scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        if types[i] in (gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED):
            token = tokens[i]
            cuts = [(token[:n], token[n:]) for n in range(1, len(token))]
            cuts = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
            merges += sorted(cuts, key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prepend = [normalizers.Prepend("▁")] if space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    special = (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN)
    for token, kind in zip(tokens, types, strict=True):
        if kind in special:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        elif kind == gguf.TokenType.USER_DEFINED:
            backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False)])


def _add_ends(backend: tokenizers.Tokenizer, metadata: Metadata, tokens: list[str], kind: str) -> None:
    """Sets the tokens put around a text; the defaults are llama.cpp's."""
    wanted = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    first = [tokens[bos]] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", wanted) else []
    last = [tokens[eos]] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B:1", *last],
            special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(first + last)],
        )
