"""One step of training: the same on every mesh and however the batch is taken apart; what an optimizer may touch."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from jax.sharding import Mesh
from ml_collections import ConfigDict

from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.types import CanvasSpec
from train.config import default_config
from train.optimizers import learning_rate
from train.setup import make_layout, make_objective
from train.state import Layout, TrainState, loss_and_gradients, make_evaluation, make_step

# Every kind of param: biases, norms of queries and keys, an output layer. Dropout, to see that meshes share its mask.
CAUSAL = TransformerConfig(
    32, 1, 16, 32, 2, 2, 8, max_length=64, qkv_bias=True, qk_norm=True, tie_embeddings=False, dropout=0.1
)
PAIRS = TransformerConfig(32, 1, 16, 32, 2, 2, 8, max_length=64, tie_embeddings=True, encoder_layers=1, start_id=1)
SMALL = TransformerConfig(32, 1, 16, 32, 2, 2, 8, max_length=64, tie_embeddings=True)
CANVASES = {
    spec.objective: dataclasses.replace(PAIRS, canvas=spec)
    for spec in (
        CanvasSpec("nonautoregressive", 2, "soft", "offsets", 9),
        CanvasSpec("mask_predict", 2, length_head="lengths", length_classes=9),
        CanvasSpec("iterative_refinement", 2, "uniform"),
        CanvasSpec("ctc", 2, "uniform", upsample=3),
        CanvasSpec("group_autoregressive", 2, group=2),
        CanvasSpec("segment_parallel", 2, group=2),
        CanvasSpec("outline_then_fill", 2, length_head="gaps", length_classes=9),
    )
}
MESHES = {
    "data=8": {"data": 8},
    "data=2,fsdp=2,tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp=8": {"fsdp": 8},
    "data=4,tensor=2": {"data": 4, "tensor": 2},
}
KEY = jax.random.key(7)


def settings(**changes: Any) -> ConfigDict:
    """A config whose learning rate is 0.01 from the first step on."""
    config = default_config()
    config.total_steps = 100
    config.optimizer.update({"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0})
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config


@functools.cache
def layout_on(mesh: Mesh, shape: TransformerConfig = CAUSAL, **changes: Any) -> Layout:
    return make_layout(settings(**changes), shape, mesh)


ONE = tiny_runs.make_small_mesh()


@functools.cache
def random_params(shape: TransformerConfig) -> dict[str, np.ndarray]:
    return jax.device_get(layout_on(ONE, shape).initialise(3).params)


def start_on(layout: Layout) -> TrainState:
    """The state before the first step with the same random params on every mesh."""
    return layout.adopt(random_params(layout.config), seed=0)


def objective(shape: TransformerConfig = CAUSAL, dtype: str = "float32", remat: bool = False) -> Any:
    name = "seq2seq" if shape.encoder_layers else "causal_lm"
    if shape.canvas is not None:
        name = shape.canvas.objective
    smoothing = 0.0 if name == "ctc" else 0.1
    config = settings(objective=name, label_smoothing=smoothing, compute_dtype=dtype, remat=remat)
    return make_objective(config, layout_on(ONE, shape), None)


def batch_on(layout: Layout, rows: int = 8, length: int = 12, seed: int = 0) -> dict[str, jax.Array]:
    """Random tokens; rows are of different lengths, one of them empty, as padding rows are."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, length + 1, rows)
    lengths[1] = 0
    real = np.arange(length) < lengths[:, None]
    batch = {"tokens": random.integers(0, 32, (rows, length)), "targets": random.integers(0, 32, (rows, length))}
    if layout.config.encoder_layers:
        batch |= {"source": random.integers(0, 32, (rows, length)), "source_lengths": np.maximum(lengths, 1)}
    else:
        batch |= {"positions": np.where(real, np.arange(length), 0), "segments": real}
    if layout.config.canvas is not None:  # its mask is never a target
        batch["targets"][batch["targets"] == layout.config.canvas.mask_id] = 3
    batch = {name: value.astype(np.int32) for name, value in batch.items()}
    return jax.device_put(batch | {"weights": real.astype(np.float32)}, layout.rows)


def gradients_of(layout: Layout, given: Any = None, accumulate: int = 1) -> tuple[dict[str, np.ndarray], Any]:
    """Of the mean loss over the whole batch, and its metrics."""
    compute = jax.jit(functools.partial(loss_and_gradients, layout, jnp.dtype("float32"), accumulate))
    given = objective(layout.config) if given is None else given
    return jax.device_get(compute(start_on(layout), batch_on(layout), given, KEY))


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    """Each array differs by at most `tolerance` of its own greatest number."""
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=path)


# --- Meshes


@functools.cache
def on_one_device(shape: TransformerConfig) -> tuple[dict[str, np.ndarray], Any]:
    return gradients_of(layout_on(ONE, shape))


@pytest.mark.parametrize(
    "sizes, shape",
    [
        *((sizes, CAUSAL) for sizes in MESHES.values()),
        *((MESHES["data=2,fsdp=2,tensor=2"], shape) for shape in (PAIRS, *CANVASES.values())),
    ],
    ids=[*MESHES, *(f"data=2,fsdp=2,tensor=2 with {what}" for what in ("an encoder", *CANVASES))],
)
def test_every_mesh_has_the_loss_and_gradients_of_one_device(sizes: dict[str, int], shape: TransformerConfig) -> None:
    """How rows, params and matrices are split over devices is no part of the result, nor of dropout's mask."""
    gradients, metrics = gradients_of(layout_on(tiny_runs.make_small_mesh(**sizes), shape))
    wanted, wanted_metrics = on_one_device(shape)
    assert metrics["loss"][1] == wanted_metrics["loss"][1]
    np.testing.assert_allclose(metrics["loss"][0], wanted_metrics["loss"][0], rtol=1e-5)
    assert_close(gradients, wanted, 1e-5)
    assert all(np.abs(value).max() > 1e-4 for path, value in wanted.items())


@pytest.mark.parametrize("sizes", list(MESHES.values())[1:3], ids=list(MESHES)[1:3])
def test_params_are_made_where_they_live_and_equal_everywhere(sizes: dict[str, int]) -> None:
    """Random params are those of one device, to the last digit, and each device holds its part of them alone."""
    params = layout_on(tiny_runs.make_small_mesh(**sizes)).initialise(3).params
    for path, wanted in random_params(CAUSAL).items():
        np.testing.assert_allclose(params[path], wanted, rtol=0, atol=1e-6, err_msg=path)
    fsdp, tensor = sizes.get("fsdp", 1), sizes.get("tensor", 1)
    for path, splits in {
        "layers/0/attention/qkv/kernel": fsdp * tensor,
        "layers/0/attention/out/kernel": fsdp * tensor,
        "layers/0/gate_up/kernel": fsdp * tensor,
        "layers/0/down/kernel": fsdp * tensor,
        "layers/0/attention/qkv/bias": tensor,
        "embed/embedding": fsdp * tensor,
        "head/kernel": fsdp * tensor,
        "layers/0/mlp_norm/scale": 1,
    }.items():
        value = params[path]
        assert {shard.data.size for shard in value.addressable_shards} == {value.size // splits}, path


def test_optimizer_and_averages_live_with_their_params() -> None:
    """Before and after a step, each moment and average is split as its param; a step leaves every array in place."""
    config = settings(optimizer__ema=0.9)
    layout = make_layout(config, SMALL, tiny_runs.make_small_mesh(2, 2, 2))
    state = start_on(layout)
    before = jax.tree.map(lambda x: x.sharding, state)
    state, _ = make_step(layout, config)(state, batch_on(layout), objective(SMALL))
    assert jax.tree.map(lambda x: x.sharding, state) == before == layout.shardings
    copies = 0
    for path, leaf in jax.tree.leaves_with_path(state):
        owner = state.params.get(getattr(path[-1], "key", ""))
        if owner is not None:
            assert leaf.sharding == owner.sharding and leaf.shape == owner.shape
            copies += 1
    assert copies == 4 * len(state.params)  # params, two moments, averages
    assert any(not x.sharding.is_fully_replicated for x in state.ema.values())


# --- Batches in parts, and what is computed again


def test_accumulated_parts_make_the_gradients_of_the_whole_batch() -> None:
    """Also where the parts have different numbers of tokens, so that the mean of their means would be wrong."""
    layout, parts = layout_on(tiny_runs.make_small_mesh(2), PAIRS), 4
    counts = np.asarray(batch_on(layout)["weights"]).sum(axis=1).reshape(-1, parts).sum(axis=0)
    assert len(set(counts.tolist())) == parts
    gradients, metrics = gradients_of(layout, accumulate=parts)
    wanted, wanted_metrics = on_one_device(PAIRS)
    assert_close(gradients, wanted, 2e-6)
    for name, (total, count) in wanted_metrics.items():
        np.testing.assert_allclose(metrics[name], (total, count), rtol=1e-6)


def test_recomputing_activations_changes_nothing() -> None:
    """`remat` is there in the program, and its gradients are those without it, dropout's mask included."""
    layout = layout_on(ONE)
    gradients, metrics = gradients_of(layout, objective(remat=True))
    wanted, wanted_metrics = on_one_device(CAUSAL)
    assert_close(gradients, wanted, 1e-6)
    np.testing.assert_allclose(metrics["loss"][0], wanted_metrics["loss"][0], rtol=1e-6)

    def program(remat: bool) -> str:
        compute = functools.partial(loss_and_gradients, layout, jnp.dtype("float32"), 1)
        batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch_on(layout).items()}
        return str(jax.make_jaxpr(compute)(layout.abstract_state, batch, objective(remat=remat), KEY))

    assert "remat" in program(True) and "remat" not in program(False)


def test_bfloat16_computes_small_and_keeps_large() -> None:
    """Activations are bfloat16, so the loss differs a little; params, moments and averages stay float32 and learn."""
    config = settings(compute_dtype="bfloat16", optimizer__ema=0.5)
    layout = make_layout(config, SMALL, ONE)
    state, batch = start_on(layout), batch_on(layout)
    exact = make_evaluation(layout, settings())(state.decoding, batch, objective(SMALL))["loss"]
    step, losses = make_step(layout, config), []
    with jax.numpy_dtype_promotion("standard"):  # Flax's norm promotes bfloat16
        for _ in range(20):
            state, metrics = step(state, batch, objective(SMALL, "bfloat16"))
            losses.append(float(metrics["loss"]))
    assert 0 < abs(losses[0] - float(exact[0] / exact[1])) < 0.02
    assert losses[-1] < losses[0] - 0.5
    assert {x.dtype.name for x in jax.tree.leaves((state.params, state.ema))} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(state.optimizer)} == {"float32", "int32"}
    assert int(state.step) == 20


# --- Optimizers


def test_the_norm_of_the_params_is_that_after_the_update() -> None:
    """What a checkpoint of this step would hold is what is looked at, not what the loss came from."""
    config = settings(frozen=("embed/.*",))
    layout = make_layout(config, SMALL, ONE)
    state, metrics = make_step(layout, config)(start_on(layout), batch_on(layout), objective(SMALL))
    wanted = math.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in state.params.values()))
    assert float(metrics["parameter_norm"]) == pytest.approx(wanted, rel=1e-6)


def test_frozen_params_stay_and_cost_no_optimizer_state() -> None:
    """Params under a pattern keep every bit and have no moments; the others move."""
    config = settings(frozen=("embed/.*", ".*scale"), optimizer__ema=0.5)
    layout = make_layout(config, SMALL, ONE)
    state = start_on(layout)
    before = jax.device_get((state.params, state.frozen))
    frozen = {path for path in layout.abstract_params if path.startswith("embed/") or path.endswith("scale")}
    assert set(state.frozen) == frozen and len(frozen) == 4
    state, _ = make_step(layout, config)(state, batch_on(layout), objective(SMALL))
    for path, value in before[1].items():
        np.testing.assert_array_equal(state.frozen[path], value)
    assert all((np.asarray(state.params[path]) != value).any() for path, value in before[0].items())
    trained = sum(value.size for value in before[0].values())
    assert sum(x.size for x in jax.tree.leaves(state.optimizer) if x.ndim) == 2 * trained
    assert set(state.ema) == set(before[0]) and set(state.decoding) == set(layout.abstract_params)


@pytest.mark.parametrize(
    "frozen, message",
    [
        (("embed/.*", "encoder/5/.*"), r"frozen='encoder/5/\.\*' matches no param; there are"),
        ((".*",), "no param to train"),
    ],
)
def test_frozen_patterns_that_cannot_be_meant_are_refused(frozen: tuple[str, ...], message: str) -> None:
    """A pattern without a param is a slip of the pen, and so is freezing everything."""
    with pytest.raises(ValueError, match=message):
        make_layout(settings(frozen=frozen), PAIRS, ONE)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05, 1e6])
def test_gradients_are_clipped_by_their_common_norm(clip_norm: float) -> None:
    """The first moment after one step is (1 - b1) times the gradient, of norm clip_norm at most; 0 is no limit."""
    config = settings(optimizer__clip_norm=clip_norm, optimizer__b1=0.75)
    layout = make_layout(config, CAUSAL, ONE)
    gradients, _ = on_one_device(CAUSAL)
    norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
    state = start_on(layout)
    _, optimizer = jax.jit(layout.optimizer.update)(gradients, state.optimizer, state.params)
    moments = {p: x for path, x in jax.tree.leaves_with_path(optimizer) if "mu" in str(path) and (p := path[-1].key)}
    scale = 0.25 * (min(1.0, clip_norm / norm) if clip_norm else 1.0)
    assert_close(jax.device_get(moments), {path: g * np.float32(scale) for path, g in gradients.items()}, 1e-5)


def test_only_matrices_decay() -> None:
    """Without a gradient, matrices shrink by the learning rate times weight_decay; norms and biases stay."""
    layout = layout_on(ONE, optimizer__weight_decay=0.5)
    params = {path: jnp.ones(x.shape) for path, x in layout.abstract_params.items()}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda: layout.optimizer.update(zero, layout.optimizer.init(params), params))()
    still = {path for path, update in updates.items() if not np.any(update)}
    assert still == {path for path in params if path.rsplit("/", 1)[1] in ("scale", "bias")}
    for path in params.keys() - still:
        np.testing.assert_allclose(updates[path], -0.01 * 0.5, rtol=1e-6)


def test_schedules_at_their_corners() -> None:
    """0 at first, the peak after the warmup, then the textbook's fall; without a warmup the peak at once."""
    optimizer = settings().optimizer
    optimizer.update({"learning_rate": 0.5, "warmup_steps": 10, "final_fraction": 0.2})
    for name, later in {
        "constant": {55: 0.5, 100: 0.5},
        "rsqrt": {40: 0.25, 90: 0.5 / 3},
        "cosine": {55: 0.5 * (0.2 + 0.8 * 0.5), 100: 0.1, 120: 0.1},
    }.items():
        optimizer.schedule, optimizer.warmup_steps = name, 10
        rate = learning_rate(optimizer, 100)
        for step, value in {0: 0.0, 5: 0.25, 10: 0.5, **later}.items():
            assert rate(jnp.int32(step)) == pytest.approx(value, abs=1e-6), (name, step)
        optimizer.warmup_steps = 0
        assert learning_rate(optimizer, 100)(jnp.int32(0)) == pytest.approx(0.5)


def test_averages_follow_their_formula() -> None:
    """ema <- d ema + (1 - d) params with d = min(decay, (1 + step) / (10 + step)); they are what decodes."""
    config = settings(optimizer__ema=0.15)
    layout = make_layout(config, SMALL, ONE)
    state, step, batch = start_on(layout), make_step(layout, config), batch_on(layout)
    average = jax.device_get(state.params)
    for decay in (1 / 10, 0.15, 0.15):  # (1 + 1) / (10 + 1) is above 0.15
        state, _ = step(state, batch, objective(SMALL))
        params = jax.device_get(state.params)
        average = {path: decay * old + (1 - decay) * params[path] for path, old in average.items()}
    for path, value in average.items():
        np.testing.assert_allclose(state.ema[path], value, rtol=1e-5, atol=1e-7)
        assert state.decoding[path] is state.ema[path]


def test_evaluation_knows_no_dropout_and_moves_nothing() -> None:
    """Evaluating twice gives the same sums, those of the model without dropout."""
    layout = layout_on(ONE)
    state = start_on(layout)
    evaluate = make_evaluation(layout, settings())
    sums = [jax.device_get(evaluate(state.decoding, batch_on(layout), objective())) for _ in range(2)]
    assert sums[0] == sums[1]
    assert sums[0]["loss"][0] != on_one_device(CAUSAL)[1]["loss"][0]
