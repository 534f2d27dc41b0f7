"""Checkpoints of a training run: what is restored is what was saved, whatever happened to the files in between."""

from __future__ import annotations

import errno
import functools
import json
import logging
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import decoding_jax as dj
import train.checkpoints
from decoding_jax.checkpoints.orbax import write_model_files
from decoding_jax.checkpoints.tokenizer import Tokenizer
from decoding_jax.models.functional import init_transformer
from decoding_jax.models.transformer import TransformerConfig
from train.checkpoints import Checkpoints

CONFIG = TransformerConfig(
    vocab_size=16, num_layers=1, width=8, mlp_width=16, num_heads=2, num_kv_heads=1, head_size=4, max_length=16
)
STATE = {"step": jnp.int32(7)}


def params(value: float) -> dict[str, Any]:
    return {"layers": [{"kernel": jnp.full((4, 6), float(value))}, {"kernel": jnp.arange(8.0) + value}]}


def same(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure and numbers."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def like(tree: Any, sharding: Any = None) -> Any:
    """The abstract form of a tree, every array in one sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def mesh_of(data: int, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    devices = np.asarray(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def folders(workdir: Path) -> set[str]:
    return {path.name for path in (workdir / "checkpoints").iterdir()}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A workdir with the good checkpoints 10 and 20."""
    with Checkpoints(tmp_path, keep_last=2, keep_best=0) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, params(step), STATE, {"epoch": step})
    return tmp_path


def test_everything_comes_back(tmp_path: Path) -> None:
    """Optimizer states with empty nodes, None, scalars and bfloat16 keep their structure, types and numbers."""
    model = params(1.0)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adam(optax.linear_schedule(1e-3, 0.0, 5)), {"layers": [True, {"kernel": False}]}),
    )
    state = {
        "optimizer": optimizer.init(model),
        "step": jnp.int32(3),
        "scale": jnp.float32(0.25),
        "nothing": None,
        "half": jnp.ones((3,), jnp.bfloat16),
    }
    extra = {"data": {"next": 12, "order": [3, 1, 2]}, "note": "ä", "none": None}
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        assert checkpoints.restore(like(model), like(state)) is None
        checkpoints.save(3, model, state, extra, metric=2.5)
        assert checkpoints.all_steps() == [3]
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        restored = checkpoints.restore(like(model), like(state))
    assert restored is not None and restored.step == 3 and restored.extra == extra
    assert same(restored.model, model) and same(restored.state, state)
    assert jax.tree.map(lambda x: x.dtype, restored.state) == jax.tree.map(lambda x: x.dtype, state)


def test_a_state_without_arrays(tmp_path: Path) -> None:
    """Plain gradient descent has no state; that is no damage."""
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(1, params(1.0), (), {})
        restored = checkpoints.restore(like(params(0.0)), ())
    assert restored is not None and restored.state == () and same(restored.model, params(1.0))


@pytest.mark.parametrize("devices", [1, 8])
def test_arrays_may_be_donated_right_after_saving(devices: int, tmp_path: Path) -> None:
    """Steps that overwrite the saved buffers while they are still being written do not change what is restored."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(lambda x: x + 1, tree)

    mesh = mesh_of(devices)
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    tree = {"split": jax.device_put(jnp.zeros((64, 256)), split), "whole": jax.device_put(jnp.zeros((300, 7)), whole)}
    saved = {}
    with Checkpoints(tmp_path, keep_last=6, keep_best=0) as checkpoints:
        for round_ in range(6):
            saved[round_] = float(tree["whole"][0, 0])
            checkpoints.save(round_, tree, {}, {})
            for _ in range(10):
                tree = step(tree)
            jax.block_until_ready(tree)
    abstract = like(tree, whole)
    for round_ in reversed(range(6)):
        with Checkpoints(tmp_path, keep_last=6, keep_best=0) as checkpoints:
            restored = checkpoints.restore(abstract, {})
        assert restored is not None and restored.step == round_ and saved[round_] == 10 * round_
        assert all((np.asarray(x) == saved[round_]).all() for x in restored.model.values())
        shutil.rmtree(tmp_path / "checkpoints" / str(round_))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_restored_onto_any_mesh(shape: tuple[int, int, int], tmp_path: Path) -> None:
    """What eight devices saved in parts is restored to the places that another mesh names."""
    mesh = mesh_of(2, 2, 2)
    specs = {"kernel": PartitionSpec(("data", "fsdp"), "tensor"), "bias": PartitionSpec("tensor")}
    arrays = {"kernel": jnp.arange(64.0).reshape(8, 8), "bias": jnp.arange(4.0)}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    step = jax.device_put(jnp.int32(5), NamedSharding(mesh, PartitionSpec()))
    other = mesh_of(*shape)
    wanted = {
        "kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(other, PartitionSpec("fsdp"))),
        "bias": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(other, PartitionSpec())),
    }
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(1, placed, {"step": step}, {})
        restored = checkpoints.restore(wanted, like({"step": step}, NamedSharding(other, PartitionSpec())))
    assert restored is not None and same(restored.model, arrays) and int(restored.state["step"]) == 5
    for name, x in restored.model.items():
        assert x.sharding == wanted[name].sharding


@pytest.mark.parametrize(
    "keep_last, keep_best, left",
    [(1, 0, {"6"}), (2, 1, {"2", "5", "6"}), (1, 2, {"2", "4", "6"}), (3, 1, {"2", "4", "5", "6"})],
)
def test_the_last_and_the_best_are_kept(keep_last: int, keep_best: int, left: set[str], tmp_path: Path) -> None:
    """Lower metrics are better; no metric and NaN are never the best; the rest is deleted, also over a restart."""
    metrics = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan"), 6: 9.0}
    for steps in ((1, 2, 3), (4, 5, 6)):
        with Checkpoints(tmp_path, keep_last, keep_best) as checkpoints:
            for step in steps:
                checkpoints.save(step, params(step), STATE, {}, metrics[step])
            checkpoints.wait()
            assert {str(step) for step in checkpoints.all_steps()} == folders(tmp_path)
    assert folders(tmp_path) == left


def damaged_files(folder: Path) -> list[Path]:
    """One file of every kind in a checkpoint: each item's metadata, index and data, and what Orbax adds."""
    names = ["model/_METADATA", "model/manifest.ocdbt", "state/array_metadatas/process_0", "about/data.json"]
    names += ["_CHECKPOINT_METADATA", "manifest.json"]
    return [folder / name for name in names] + list(folder.glob("*/ocdbt.process_0/d/*"))


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [halve, Path.unlink, flip, lambda file: file.write_bytes(b"")])
def test_damage_is_never_restored(
    damage: Callable[[Path], None], two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever file is damaged, the numbers of a whole checkpoint come back, and a skipped one is named once."""
    for file in damaged_files(two / "checkpoints/20"):
        copy = two / "copy"
        shutil.copytree(two / "checkpoints", copy / "checkpoints")
        damage(copy / file.relative_to(two))
        capsys.readouterr()
        with Checkpoints(copy, keep_last=2, keep_best=0) as checkpoints:
            restored = checkpoints.restore(like(params(0.0)), like(STATE))
        assert restored is not None and same(restored.model, params(restored.step)), file
        assert restored.extra == {"epoch": restored.step}
        lines = capsys.readouterr().err.splitlines()
        if file.name == "_CHECKPOINT_METADATA":  # nothing that is restored depends on it
            assert restored.step == 20 and not lines
        else:
            assert restored.step == 10 and len(lines) == 1 and "checkpoint 20 is skipped" in lines[0], file
        shutil.rmtree(copy)


def test_saving_goes_on_after_damage(two: Path) -> None:
    """After falling back, the damaged step is saved again in its place and never counts as one of the kept."""
    halve(next((two / "checkpoints/20").glob("model/ocdbt.process_0/d/*")))
    with Checkpoints(two, keep_last=2, keep_best=0) as checkpoints:
        restored = checkpoints.restore(like(params(0.0)), like(STATE))
        assert restored is not None and restored.step == 10 and checkpoints.all_steps() == [10]
        checkpoints.save(15, params(15), STATE, {})  # older than the damaged one: must not be left out
        checkpoints.wait()
        assert folders(two) == {"10", "15"}
        checkpoints.save(20, params(20), STATE, {})
        restored = checkpoints.restore(like(params(0.0)), like(STATE))
    assert restored is not None and restored.step == 20 and same(restored.model, params(20))
    assert folders(two) == {"15", "20"}


def test_a_damaged_step_is_replaced(two: Path) -> None:
    """A new save at the very step of a damaged checkpoint takes its place, also if its own record is gone."""
    (two / "checkpoints/20/about/data.json").unlink()
    with Checkpoints(two, keep_last=2, keep_best=0) as checkpoints:
        checkpoints.save(20, params(21), STATE, {})
        restored = checkpoints.restore(like(params(0.0)), like(STATE))
    assert restored is not None and restored.step == 20 and same(restored.model, params(21))


def test_a_killed_save_is_skipped_and_cleared(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The half-written folder of a killed process is named, not restored, and gone after the next save."""
    unfinished = two / "checkpoints/30.orbax-checkpoint-tmp"
    shutil.copytree(two / "checkpoints/20", unfinished)
    with Checkpoints(two, keep_last=2, keep_best=0) as checkpoints:
        restored = checkpoints.restore(like(params(0.0)), like(STATE))
        assert restored is not None and restored.step == 20
        assert "checkpoint 30 is skipped: it was never finished" in capsys.readouterr().err
        checkpoints.save(30, params(30), STATE, {})
        assert checkpoints.all_steps() == [20, 30]
    assert folders(two) == {"20", "30"}


def test_never_from_the_beginning_unasked(two: Path) -> None:
    """If checkpoints exist but none can be read, that is an error and no fresh start."""
    for step in (10, 20):
        (two / f"checkpoints/{step}/manifest.json").write_text("")
    with (
        Checkpoints(two, keep_last=2, keep_best=0) as checkpoints,
        pytest.raises(ValueError, match=r"none of the checkpoints \(steps 10, 20\) can be read"),
    ):
        checkpoints.restore(like(params(0.0)), like(STATE))


def test_another_config_is_an_error_that_lists_the_differences(two: Path) -> None:
    """Missing, unknown and changed arrays are told from damage: nothing is skipped."""
    model = {"layers": [{"kernel": jnp.ones((4, 7))}, {"weight": jnp.ones(8)}]}
    state = {"step": jnp.float32(7)}
    with Checkpoints(two, keep_last=2, keep_best=0) as checkpoints:
        with pytest.raises(ValueError) as caught:
            checkpoints.restore(like(model), like(state))
        for text in (
            "20 was saved with another config (4 differences); start a new workdir or restore the config:",
            "missing: model layers/1/weight float32[8]",
            "unknown: model layers/1/kernel float32[8]",
            "differs: model layers/0/kernel is float32[4,6], the config wants float32[4,7]",
            "differs: state step is int32[], the config wants float32[]",
        ):
            assert text in str(caught.value)
        with pytest.raises(ValueError, match=r"\n  and 4 more"):
            checkpoints.restore(like({"a": [jnp.ones(1)] * 7}), like(STATE))


def test_a_full_disk_costs_nothing_that_was_saved(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that fails is one OSError at the next call that names step and newest checkpoint, and what Orbax logs of
    it is not shown; later saves work."""
    big = {"noise": jax.random.normal(jax.random.key(0), (300_000,))}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(two, keep_last=1, keep_best=0) as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limit[1]))  # files cannot grow beyond it
        try:
            with pytest.raises(OSError, match=r"step 30 .* failed .*newest good checkpoint is that of step 20"):
                checkpoints.save(30, big, STATE, {})
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        # Another thread of the failed write may still be at it: its scratch folder is no checkpoint.
        assert folders(two) - {"30.orbax-checkpoint-tmp"} == {"10", "20"} and checkpoints.all_steps() == [10, 20]
        checkpoints.wait()  # told once
        restored = checkpoints.restore(like(params(0.0)), like(STATE))
        assert restored is not None and restored.step == 20
        checkpoints.save(30, big, STATE, {})
    assert folders(two) == {"30"}


@pytest.mark.parametrize("call", ["save", "close"])
def test_a_failed_save_is_told_at_the_latest_by(call: str, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in the background is raised by the next call, whichever that is."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train.checkpoints, "write_manifest", full)
    checkpoints = Checkpoints(two, keep_last=2, keep_best=0)
    checkpoints.save(30, params(30), STATE, {})
    with pytest.raises(OSError, match=r"step 30 .*No space left on device.* step 20"):
        checkpoints.save(40, params(40), STATE, {}) if call == "save" else checkpoints.close()
    monkeypatch.undo()
    checkpoints.close()
    assert folders(two) == {"10", "20"}


def test_arguments_that_cannot_be_saved(tmp_path: Path) -> None:
    """Wrong counts, steps, leaves and extras are errors before anything is written."""
    with pytest.raises(ValueError, match="keep_last=0"):
        Checkpoints(tmp_path, keep_last=0, keep_best=1)
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(1, params(1), STATE, {})
        for step in (1, -1):
            with pytest.raises(ValueError, match=f"step={step}: .* saved once; saved are \\[1\\]"):
                checkpoints.save(step, params(1), STATE, {})
        with pytest.raises(ValueError, match="'key' is of kind key<"):
            checkpoints.save(2, params(1), {"key": jax.random.key(0)}, {})
        with pytest.raises(ValueError, match="'count' is of kind int; only jax arrays"):
            checkpoints.save(2, params(1), {"count": 3}, {})
        with pytest.raises(ValueError, match="have the path 'a/b'"):
            checkpoints.save(2, {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, {}, {})
        with pytest.raises(ValueError, match="extra holds something that JSON cannot"):
            checkpoints.save(2, params(1), {}, {"next": np.int64(3)})
        with pytest.raises(ValueError, match="extra would be read back as something else"):
            checkpoints.save(2, params(1), {}, {"order": (1, 2)})


# ------------------------------------------------------------------------------------ decoding from a workdir
@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[int, dj.Model]]:
    """The workdir of a run with three checkpoints, the second being the best, and the models in them."""
    words = {f"w{i}": i for i in range(CONFIG.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    models = {step: init_transformer(CONFIG, step, tokenizer=tokenizer, eos_ids=(3,)) for step in (1, 2, 3)}
    workdir = tmp_path / "run"
    with Checkpoints(workdir, keep_last=3, keep_best=1) as checkpoints:
        write_model_files(CONFIG, tokenizer, (3,), workdir)
        for step, metric in ((1, 4.0), (2, 2.0), (3, 3.0)):
            checkpoints.save(step, models[step].params, STATE, {}, metric)
    return workdir, models


def test_a_workdir_loads_as_its_best_model(run: tuple[Path, dict[int, dj.Model]]) -> None:
    """The lowest metric wins; config, tokenizer and end ids come along, and the compiled programs are shared."""
    workdir, models = run
    loaded = dj.load(workdir)
    with Checkpoints(workdir, keep_last=3, keep_best=1) as checkpoints:
        assert checkpoints.best_step() == 2
    assert same(loaded.params, models[2].params)
    assert loaded.spec == models[2].spec and loaded.eos_ids == (3,) and loaded.tokenizer.encode("w5") == [5]


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/2", "checkpoints/2/model"])
def test_a_part_of_a_workdir_is_no_model(run: tuple[Path, dict[int, dj.Model]], part: str) -> None:
    """The error names what can be loaded."""
    workdir, _ = run
    with pytest.raises(ValueError, match=f"{part} is a part of the training run in {workdir}; load that"):
        dj.load(workdir / part)


def test_placement_and_dtype_of_a_workdir(run: tuple[Path, dict[int, dj.Model]]) -> None:
    """Params are cast and go straight to their parts of a mesh."""
    workdir, models = run
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    whole = NamedSharding(mesh, PartitionSpec())
    loaded = dj.load(workdir, dtype="bfloat16", placement=lambda path, shape: whole)
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.bfloat16.dtype}
    assert all(x.sharding == whole for x in jax.tree.leaves(loaded.params))
    assert same(loaded.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), models[2].params))


def test_without_metrics_the_newest_is_loaded(run: tuple[Path, dict[int, dj.Model]]) -> None:
    """A run that measured nothing decodes with its newest params."""
    workdir, models = run
    shutil.rmtree(workdir / "checkpoints")
    with Checkpoints(workdir, keep_last=3, keep_best=1) as checkpoints:
        for step in (1, 3):
            checkpoints.save(step, models[step].params, STATE, {})
    assert same(dj.load(workdir).params, models[3].params)


def test_damaged_checkpoints_are_passed_over(
    run: tuple[Path, dict[int, dj.Model]], caplog: pytest.LogCaptureFixture
) -> None:
    """The next best takes the place of a damaged checkpoint, with one warning for each; none at all is an error."""
    workdir, models = run
    halve(max((workdir / "checkpoints/2").glob("model/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size))
    with caplog.at_level(logging.WARNING, logger="decoding_jax"):
        assert same(dj.load(workdir).params, models[3].params)
    assert [r.getMessage()[:23] for r in caplog.records if "skipped" in r.getMessage()] == ["checkpoint 2 is skipped"]
    for step in (1, 3):
        (workdir / f"checkpoints/{step}/about/data.json").unlink()
    with pytest.raises(ValueError, match="none of the 3 checkpoints can be read"):
        dj.load(workdir)


def test_a_workdir_without_a_checkpoint(run: tuple[Path, dict[int, dj.Model]]) -> None:
    """A run that has just begun says so; a changed config.json is told, not decoded with."""
    workdir, _ = run
    raw = json.loads((workdir / "config.json").read_text())
    raw["transformer"]["mlp_width"] = 24
    (workdir / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"another model .*\n  differs: model layers/0/down/kernel is \[16,8\]"):
        dj.load(workdir)
    for step in (1, 2, 3):
        shutil.rmtree(workdir / f"checkpoints/{step}")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        dj.load(workdir)
