"""Loading and saving: what is read equals what was written, wherever it goes, and errors name everything."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from jax.sharding import AxisType

import decoding_jax as dj
from decoding_jax.checkpoints.huggingface import config_from_hf, config_to_hf
from decoding_jax.checkpoints.tokenizer import Tokenizer
from decoding_jax.models.functional import init_transformer
from decoding_jax.models.transformer import RopeScaling, TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=40, num_layers=2, width=24, mlp_width=40, num_heads=4, num_kv_heads=2, head_size=8, max_length=64
)
VARIANTS = {
    "llama": CONFIG,
    "llama3": dataclasses.replace(
        CONFIG, tie_embeddings=True, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32), rope_theta=5e5
    ),
    "mistral": dataclasses.replace(CONFIG, sliding_window=5),
    "qwen2": dataclasses.replace(CONFIG, qkv_bias=True),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, tie_embeddings=True),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of 40 words."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = {f"w{i}": i for i in range(CONFIG.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def random_model(config: TransformerConfig, tokenizer: Tokenizer | None = None) -> dj.Model:
    """A Transformer whose norms and biases are random too, so that none can be mistaken for another."""
    model = init_transformer(config, seed=1, tokenizer=tokenizer, eos_ids=(3,))
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return dataclasses.replace(model, params=jax.tree.unflatten(tree, moved))


def same(a: Any, b: Any) -> bool:
    """Whether two params hold the same numbers in the same tree."""
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b)))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("save", [dj.save, dj.save_huggingface], ids=["orbax", "huggingface"])
def test_a_saved_model_loads_as_itself(name: str, save: Callable, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Both formats keep config, params, tokenizer and end-of-sequence ids, for every family."""
    model = random_model(VARIANTS[name], tokenizer)
    save(model, tmp_path / "saved")
    loaded = dj.load(tmp_path / "saved")
    assert loaded.config == model.config and loaded.eos_ids == (3,)
    assert same(loaded.params, model.params)
    assert loaded.spec == model.spec  # so it shares the model's compiled programs
    assert loaded.tokenizer.encode("w5") == [5]


def test_dtype_and_sharded_placement(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Tensors go to the asked-for dtype and straight to their parts of a mesh; the tokens stay the same."""
    model = random_model(CONFIG, tokenizer)
    dj.save_huggingface(model, tmp_path / "hf")
    dj.save(model, tmp_path / "ours")
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    expected = dj.decode(model, [[1, 2], [4]], max_new_tokens=6).tokens
    for folder in ("hf", "ours"):
        assert jax.tree.leaves(dj.load(tmp_path / folder, dtype="bfloat16").params)[0].dtype == jnp.bfloat16
        split = dj.load(tmp_path / folder, placement=dj.tensor_parallel(mesh))
        kernel = split.params["layers"][0]["gate_up"]["kernel"].get_value()
        assert kernel.sharding.shard_shape(kernel.shape) == (24, 40)
        assert (dj.decode(split, [[1, 2], [4]], max_new_tokens=6, mesh=mesh).tokens == expected).all()


def test_several_shards_and_spare_tensors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An index of several files is followed; a stored tied head and old rotary tables are no surprise."""
    model = random_model(VARIANTS["llama3"], tokenizer)
    dj.save_huggingface(model, tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[:7], names[7:])):
        name = f"model-{number}.safetensors"
        safetensors.numpy.save_file({n: tensors[n] for n in part}, tmp_path / "hf" / name)
        index |= dict.fromkeys(part, name)
    file.unlink()
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert same(dj.load(tmp_path / "hf").params, model.params)
    (tmp_path / "hf/model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1\.safetensors is named in"):
        dj.load(tmp_path / "hf")


def test_all_problems_are_listed_at_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Missing, unused and wrongly shaped tensors come in one error."""
    dj.save_huggingface(random_model(CONFIG, tokenizer), tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = np.ones((24, 39), np.float32)
    tensors["model.layers.2.extra"] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(ValueError) as caught:
        dj.load(tmp_path / "hf")
    for text in (
        "4 problems",
        "missing: model.norm.weight",
        "missing: model.layers.1.self_attn.k_proj.weight",
        "wrong shape: model.layers.0.mlp.down_proj.weight is (24, 39), the config wants (24, 40)",
        "unused: model.layers.2.extra",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), "model_type='gpt2' is not supported"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "not a whole"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 5), "not a whole"),
    ],
)
def test_damaged_folders(damage: Callable, message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Each kind of damage is one ValueError that names the file; nothing foreign escapes."""
    dj.save_huggingface(random_model(CONFIG, tokenizer), tmp_path / "hf")
    damage(tmp_path / "hf")
    with pytest.raises(ValueError, match=message):
        dj.load(tmp_path / "hf")


def test_wrong_paths_and_dtypes(tmp_path: Path) -> None:
    """A wrong path, file or dtype says what there is."""
    with pytest.raises(ValueError, match="no such folder or file, and no packaged model"):
        dj.load(tmp_path / "nowhere")
    (tmp_path / "file.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"a model is a folder or a \.gguf file"):
        dj.load(tmp_path / "file.bin")
    model = random_model(CONFIG)
    dj.save(model, tmp_path / "ours")
    with pytest.raises(ValueError, match="exists already"):
        dj.save(model, tmp_path / "ours")
    with pytest.raises(ValueError, match="dtype='int8': choose one of"):
        dj.load(tmp_path / "ours", dtype="int8")
    shutil.rmtree(tmp_path / "ours/params")
    with pytest.raises(ValueError, match="cannot be restored"):
        dj.load(tmp_path / "ours")


@pytest.mark.parametrize("name", VARIANTS)
def test_configs_survive_the_round_trip(name: str) -> None:
    """config.json and back, in the old form and in the one of transformers 5."""
    config = VARIANTS[name]
    raw = config_to_hf(config, (3,), "float32")
    assert config_from_hf(raw) == config
    rope = {**raw.pop("rope_scaling", {"rope_type": "default"}), "rope_theta": raw.pop("rope_theta")}
    assert config_from_hf({**raw, "rope_parameters": rope}) == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "some layers only"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_settings_that_do_not_exist_here_are_refused(change: dict[str, Any], message: str) -> None:
    """A setting that would change the output silently is an error that names it."""
    with pytest.raises(ValueError, match=message):
        config_from_hf({**config_to_hf(CONFIG, (), "float32"), **change})
