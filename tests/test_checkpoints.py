"""Loading and saving: what is read equals what was written, wherever it goes, and errors name everything."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import decoding_jax as dj
from decoding_jax.checkpoints.huggingface import config_from_hf, config_to_hf, path_of, tensor_table, unfuse
from decoding_jax.checkpoints.tokenizer import Tokenizer
from decoding_jax.models.functional import abstract_transformer, init_transformer
from decoding_jax.models.sharding import TRAINING_RULES, check_mesh, logical_axes, place, tensor_parallel
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
    "one kv head": dataclasses.replace(CONFIG, qkv_bias=True, num_kv_heads=1),
}
SEQ2SEQ = dataclasses.replace(CONFIG, encoder_layers=1)


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


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def shapes_of(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every param by its path."""
    return {path_of(key): leaf.shape for key, leaf in jax.tree.flatten_with_path(abstract_transformer(config)[1])[0]}


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


def split_logits(model: dj.Model, mesh: Mesh | None, placed: Callable | None) -> tuple[np.ndarray, Counter[str]]:
    """Causal logits of four rows with params placed on a mesh, and the collectives of the compiled program."""
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6)
    inputs = dj.Inputs(tokens, np.tile(np.arange(6, dtype=np.int32), (4, 1)), np.tile(np.tri(6, dtype=bool), (4, 1, 1)))
    params = model.params
    if mesh is not None and placed is not None:
        rows = NamedSharding(mesh, PartitionSpec(tuple(name for name in mesh.shape if name != "tensor")))
        inputs = jax.device_put(inputs, rows)
        params = jax.tree.map_with_path(lambda key, x: jax.device_put(x, placed(path_of(key), x.shape)), params)
    run = jax.jit(lambda params, inputs: model.readout(params, model.apply(params, inputs, None).hidden))
    run = run.lower(params, inputs).compile()
    kinds = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", run.as_text())
    return np.asarray(run(params, inputs)), Counter(kinds)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_params_split_over_a_mesh_give_the_same_logits(kv_heads: int) -> None:
    """Groups whole or torn, features split too or not: the logits are those of one device."""
    model = random_model(dataclasses.replace(CONFIG, num_kv_heads=kv_heads, qkv_bias=True))
    expected, _ = split_logits(model, None, None)
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    for placed in (tensor_parallel(mesh), place(mesh, TRAINING_RULES), place(mesh, TRAINING_RULES, model.config)):
        np.testing.assert_allclose(split_logits(model, mesh, placed)[0], expected, atol=1e-4)


def test_tensor_parallel_layers_communicate_twice() -> None:
    """One sum after attention, one after the MLP (and one for the embedding); nothing else moves between devices."""
    mesh = mesh_of(data=4, tensor=2)
    _, collectives = split_logits(random_model(CONFIG), mesh, tensor_parallel(mesh))
    assert collectives == {"all-reduce": 2 * CONFIG.num_layers + 1}


def test_dtype_and_sharded_placement(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Tensors go to the asked-for dtype and straight to their parts of a mesh; the tokens stay the same."""
    model = random_model(CONFIG, tokenizer)
    dj.save_huggingface(model, tmp_path / "hf")
    dj.save(model, tmp_path / "ours")
    mesh = mesh_of(data=4, tensor=2)
    expected = dj.decode(model, [[1, 2], [4]], max_new_tokens=6).tokens
    for folder in ("hf", "ours"):
        assert jax.tree.leaves(dj.load(tmp_path / folder, dtype="bfloat16").params)[0].dtype == jnp.bfloat16
        split = dj.load(tmp_path / folder, placement=dj.tensor_parallel(mesh))
        kernel = split.params["layers"][0]["gate_up"]["kernel"].get_value()
        assert kernel.sharding.shard_shape(kernel.shape) == (24, 2, 20)
        assert (dj.decode(split, [[1, 2], [4]], max_new_tokens=6, mesh=mesh).tokens == expected).all()


def test_every_param_has_logical_axes() -> None:
    """No param of any Transformer is left out of the table; only norms are never split, and strangers."""
    for config in (*VARIANTS.values(), SEQ2SEQ, dataclasses.replace(SEQ2SEQ, qkv_bias=True, qk_norm=True)):
        for path, shape in shapes_of(config).items():
            axes = logical_axes(path, shape)
            assert len(axes) == len(shape) and any(axes) != path.endswith("norm/scale"), path
    assert logical_axes("heads/0/kernel", (24, 40)) == (None, None)
    assert logical_axes("overhead/kernel", (24, 40)) == (None, None)
    assert logical_axes("head/kernel", (4, 24, 40)) == (None, None, None)


def test_where_each_tensor_goes_in_training() -> None:
    """On a (data, fsdp, tensor) mesh of (2, 2, 2): features over fsdp, the rest over tensor, norms everywhere."""
    shapes = shapes_of(dataclasses.replace(SEQ2SEQ, qkv_bias=True))
    placed = place(mesh_of(data=2, fsdp=2, tensor=2), TRAINING_RULES)
    parts = {path: placed(path, shape).shard_shape(shape) for path, shape in shapes.items()}
    layer = {
        "attention/qkv/kernel": (12, 32),  # of (24, 64)
        "attention/qkv/bias": (32,),
        "attention/out/kernel": (16, 12),
        "gate_up/kernel": (12, 2, 20),
        "down/kernel": (20, 12),
        "attention_norm/scale": (24,),
        "mlp_norm/scale": (24,),
    }
    cross = {"q/kernel": (12, 16), "kv/kernel": (12, 16), "out/kernel": (16, 12)}
    decoder = layer | {f"cross/{name}": shape for name, shape in cross.items()} | {"cross_norm/scale": (24,)}
    want = {"embed/embedding": (20, 12), "head/kernel": (12, 20), "norm/scale": (24,), "encoder_norm/scale": (24,)}
    want |= {f"layers/{i}/{name}": shape for i in range(2) for name, shape in decoder.items()}
    want |= {f"encoder/0/{name}": shape for name, shape in layer.items()}
    assert parts == want


def test_a_part_of_the_heads_is_a_model_of_fewer_heads() -> None:
    """Each half of the columns of qkv is the fused kernel of half of the heads: no group is torn."""
    shape = shapes_of(CONFIG)["layers/0/attention/qkv/kernel"]
    kernel = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    half = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1)
    whole_source, half_source = (tensor_table(c)["layers/0/attention/qkv/kernel"] for c in (CONFIG, half))
    placement = tensor_parallel(mesh_of(tensor=2))("layers/0/attention/qkv/kernel", shape)
    parts = [np.asarray(x.data) for x in jax.device_put(kernel, placement).addressable_shards]
    for of_whole, *of_parts in zip(unfuse(whole_source, kernel), *(unfuse(half_source, x) for x in parts), strict=True):
        np.testing.assert_array_equal(np.concatenate(of_parts), of_whole)


def test_what_does_not_divide_stays_whole() -> None:
    """Odd sizes are not split; heads are not either where the config says that a group would be torn."""
    mesh, path, shape = mesh_of(tensor=4), "layers/0/attention/qkv/kernel", (24, 64)
    assert tensor_parallel(mesh)(path, shape).shard_shape(shape) == (24, 16)
    assert place(mesh, {"heads": "tensor"}, CONFIG)(path, shape).is_fully_replicated
    assert tensor_parallel(mesh)("embed/embedding", (41, 24)).is_fully_replicated
    assert place(mesh, {"heads": None})(path, shape).is_fully_replicated


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"heads": "model"}, "not 'model'"),
        ({"head": "tensor"}, "'head' is no logical axis; there are embed, heads, mlp, vocab"),
        ({"embed": "tensor", "vocab": "tensor"}, "two dimensions of embed/embedding over one mesh axis"),
    ],
)
def test_rules_that_cannot_be_followed(rules: dict[str, str], message: str) -> None:
    """Unknown axes and two dimensions on one axis are refused before any tensor is read."""
    with pytest.raises(ValueError, match=message):
        place(mesh_of(data=4, tensor=2), rules)
    with pytest.raises(ValueError, match="not 'rows'"):
        tensor_parallel(mesh_of(data=8), "rows")


def test_meshes_that_do_not_fit_are_refused() -> None:
    """The tensor axis must divide kv heads and MLP; the error names both numbers and a size that does."""
    check_mesh(CONFIG, mesh_of(fsdp=4, tensor=2))
    with pytest.raises(ValueError, match=r"'tensor' has size 4, .* num_kv_heads=2; make it 2 "):
        check_mesh(CONFIG, mesh_of(fsdp=2, tensor=4))
    with pytest.raises(ValueError, match=r"'tensor' has size 2, .* mlp_width=41; make it 1 "):
        check_mesh(dataclasses.replace(CONFIG, mlp_width=41), mesh_of(fsdp=4, tensor=2))
    with pytest.raises(ValueError, match="not 'fsdp'"):
        check_mesh(CONFIG, mesh_of(data=4, tensor=2))


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


def test_encoder_decoders_have_no_hugging_face_form() -> None:
    """Refused by the config, before anything is written."""
    with pytest.raises(ValueError, match="encoder_layers=1"):
        config_to_hf(SEQ2SEQ, (), "float32")
