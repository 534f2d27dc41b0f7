"""The state of a training run, where it lives on a mesh, and one step of training.

What used to be `pjit` is today `jax.jit` with shardings: the state goes in and comes out split as `Layout` says,
and XLA puts in the communication.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from decoding_jax.checkpoints.orbax import by_path
from decoding_jax.models.functional import abstract_transformer, initial_params
from decoding_jax.models.sharding import TRAINING_RULES, check_mesh, place
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.types import Array, PyTree
from train.optimizers import averaged

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # the axes that the rows of a batch are split over
_TRAINING = 2**31  # what the keys of the steps are for
Params = dict[str, Array]  # by path, "layers/0/attention/qkv/kernel"


@struct.dataclass
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
      step: i32[], how many steps are done. With the seed it is all that randomness depends on.
      params: those that are trained, f32.
      frozen: those that are not.
      optimizer: optax's state.
      ema: averaged params, None where that is off.
    """

    step: Array
    params: Params
    frozen: Params
    optimizer: PyTree
    ema: Params | None

    @property
    def decoding(self) -> Params:
        """The params that decode: the averaged ones where there are any."""
        return (self.params if self.ema is None else self.ema) | self.frozen

    @property
    def rest(self) -> dict[str, Any]:
        """What training needs beside `decoding`."""
        rest = {"step": self.step, "optimizer": self.optimizer}
        return rest if self.ema is None else rest | {"params": self.params}


def make_mesh(settings: ConfigDict) -> Mesh:
    """The mesh (data, fsdp, tensor) over all devices of all processes.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    sizes = [settings[axis] for axis in AXES]
    count = len(jax.devices())
    known = 1
    for size in sizes:
        known *= size if size != -1 else 1
    text = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"{text}: every size must be at least 1, and one of them may be -1 for what is left")
    if count % known or (-1 not in sizes and known != count):
        raise ValueError(
            f"{text}: does not fit {count} devices; the sizes must multiply to that (one CPU counts as N devices "
            "with JAX_NUM_CPU_DEVICES=N)"
        )
    sizes = [count // known if size == -1 else size for size in sizes]
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of the state and where each part of it lives.

    Attributes:
      config: of the model.
      mesh: from `make_mesh`.
      optimizer: optax's functions.
      frozen: patterns of the paths of params that are not trained.
      with_ema: whether params are averaged.
    """

    config: TransformerConfig
    mesh: Mesh
    optimizer: optax.GradientTransformation
    frozen: tuple[str, ...] = ()
    with_ema: bool = False

    def __post_init__(self) -> None:
        check_mesh(self.config, self.mesh)
        paths = self.abstract_params
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"frozen={pattern!r} is no regular expression: {error}") from None
            if not any(re.fullmatch(pattern, path) for path in paths):
                raise ValueError(f"frozen={pattern!r} matches no param; there are {', '.join(list(paths)[:8])}, ...")
        if all(map(self.is_frozen, paths)):
            raise ValueError(f"frozen={self.frozen}: leaves no param to train")

    @functools.cached_property
    def _abstract(self) -> tuple[dict[str, Any], Any]:
        return by_path(abstract_transformer(self.config)[1])

    @functools.cached_property
    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape of every param, in the order of the model's tree."""
        return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in self._abstract[0].items()}

    def as_tree(self, params: Mapping[str, Any]) -> PyTree:
        """Params by path as the tree that the model takes."""
        return jax.tree.unflatten(self._abstract[1], [params[path] for path in self.abstract_params])

    def is_frozen(self, path: str) -> bool:
        """Whether a param is not trained."""
        return any(re.fullmatch(pattern, path) for pattern in self.frozen)

    @property
    def whole(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """The rows of a batch, over data and fsdp."""
        return NamedSharding(self.mesh, PartitionSpec(ROWS))

    @property
    def row_shards(self) -> int:
        """How many parts a batch is split into."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    @functools.cached_property
    def share(self) -> tuple[int, int]:
        """Which share of a batch's rows this process's devices hold, and how many shares there are.

        Raises:
          ValueError: the devices of this process hold rows that do not lie together.
        """
        parts = self.row_shards
        places = self.rows.addressable_devices_indices_map((parts,)).values()
        held = sorted({place[0].start or 0 for place in places if place})
        if held != list(range(held[0], held[0] + len(held))) or held[0] % len(held) or parts % len(held):
            raise ValueError(
                f"mesh {dict(self.mesh.shape)}: process {jax.process_index()} holds the parts {held} of {parts} of a "
                "batch, which do not lie together; make data times fsdp a multiple of the number of processes"
            )
        return held[0] // len(held), parts // len(held)

    def create(self, params: Params) -> TrainState:
        """The state before the first step."""
        trained, frozen = self._split(params)
        return TrainState(
            step=jnp.int32(0),
            params=trained,
            frozen=frozen,
            optimizer=self.optimizer.init(trained),
            ema=jax.tree.map(jnp.copy, trained) if self.with_ema else None,
        )

    def rejoin(self, decoding: Params, rest: Mapping[str, Any]) -> TrainState:
        """The state that has these two halves."""
        trained, frozen = self._split(decoding)
        params, ema = (rest["params"], trained) if self.with_ema else (trained, None)
        return TrainState(step=rest["step"], params=params, frozen=frozen, optimizer=rest["optimizer"], ema=ema)

    def _split(self, params: Params) -> tuple[Params, Params]:
        """Params that are trained, and those that are not."""
        trained = {path: x for path, x in params.items() if not self.is_frozen(path)}
        return trained, {path: x for path, x in params.items() if path not in trained}

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where each array of the state lives: optimizer and averages as the params they belong to."""
        placed = place(self.mesh, TRAINING_RULES, self.config)
        shapes = self.abstract_params

        def of(path: str, leaf: Any) -> NamedSharding:
            # optax keeps copies of the params' tree, so the path of such a copy ends with the param's.
            owners = [name for name in shapes if path.endswith(f"/{name}") and shapes[name].shape == leaf.shape]
            return placed(max(owners, key=len), leaf.shape) if owners else self.whole

        leaves, treedef = by_path(jax.eval_shape(self.create, shapes))
        return jax.tree.unflatten(treedef, [of(path, leaf) for path, leaf in leaves.items()])

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The state's shapes with their shardings, for restoring and for compiling without data."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(self.create, self.abstract_params),
            self.shardings,
        )

    def initialise(self, seed: int) -> TrainState:
        """A state with random params, each made where it lives."""

        def make(seed: Array) -> TrainState:
            leaves, _ = by_path(initial_params(self.config, seed))
            return self.create(leaves)

        return jax.jit(make, out_shardings=self.shardings)(jnp.uint32(seed))

    def adopt(self, params: Mapping[str, Any], seed: int) -> TrainState:
        """A state with given params, by path; those that are missing, such as a canvas's heads, are random."""

        def make(given: Params, seed: Array) -> TrainState:
            drawn, _ = by_path(initial_params(self.config, seed))
            return self.create(drawn | given)

        return jax.jit(make, out_shardings=self.shardings)(dict(params), jnp.uint32(seed))


def _in_dtype(params: Params, dtype: Any) -> Params:
    return {path: x.astype(dtype) for path, x in params.items()}


def _means(metrics: PyTree) -> dict[str, Array]:
    """Means f32[] of metrics given as sums and counts; "tokens" is the count of the loss."""
    means = {name: total / jnp.maximum(count, 1.0) for name, (total, count) in metrics.items()}
    return means | {"tokens": metrics["loss"][1]}


def loss_and_gradients(
    layout: Layout, dtype: Any, accumulate: int, state: TrainState, batch: dict[str, Array], objective: Any, key: Array
) -> tuple[Params, PyTree]:
    """Gradients of the mean loss over the whole batch, and its metrics as sums and counts.

    With `accumulate` above 1 the batch is taken in that many parts, one after the other; their gradients are weighted
    by their tokens, so the result is that of the whole batch.
    """

    def loss(trained: Params, part: dict[str, Array], key: Array) -> tuple[Array, PyTree]:
        params = layout.as_tree(_in_dtype(trained | state.frozen, dtype))
        return objective.loss(params, part, key)

    gradient = jax.grad(loss, has_aux=True)
    if accumulate == 1:
        return gradient(state.params, batch, key)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        index, rows = part
        gradients, metrics = gradient(state.params, rows, jax.random.fold_in(key, index))
        count = metrics["loss"][1]
        weighted = jax.tree.map(lambda g: g * count, gradients)
        return jax.tree.map(jnp.add, total, (weighted, metrics)), None

    # Rows i, i + n, i + 2n, ... make part i, so that every device has its share of every part.
    parts = {name: jnp.swapaxes(x.reshape(-1, accumulate, *x.shape[1:]), 0, 1) for name, x in batch.items()}
    parts = jax.lax.with_sharding_constraint(parts, NamedSharding(layout.mesh, PartitionSpec(None, ROWS)))
    first = jax.tree.map(lambda x: x[0], parts)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, state.params, first, key))
    (gradients, metrics), _ = jax.lax.scan(add, zero, (jnp.arange(accumulate), parts))
    count = jnp.maximum(metrics["loss"][1], 1.0)
    return jax.tree.map(lambda g: g / count, gradients), metrics


def make_step(layout: Layout, config: ConfigDict) -> Any:
    """One step of training, jitted: (state, batch, objective) -> (state, metrics f32[] by name). The state is donated.

    Metrics are the batch's means, "tokens" (how many had weight), "gradient_norm" (before clipping) and
    "parameter_norm" (of what is trained, after the update).
    """
    dtype, accumulate, decay = jnp.dtype(config.compute_dtype), config.optimizer.accumulate, config.optimizer.ema
    seed = config.seed

    def step(state: TrainState, batch: dict[str, Array], objective: Any) -> tuple[TrainState, dict[str, Array]]:
        # The params' initial values were drawn by the plain seed.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _TRAINING), state.step)
        gradients, metrics = loss_and_gradients(layout, dtype, accumulate, state, batch, objective, key)
        updates, optimizer = layout.optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            optimizer=optimizer,
            ema=None if state.ema is None else averaged(state.ema, params, decay, state.step),
        )
        norms = {"gradient_norm": optax.tree.norm(gradients), "parameter_norm": optax.tree.norm(params)}
        return new, _means(metrics) | norms

    return jax.jit(step, donate_argnums=0, out_shardings=(layout.shardings, layout.whole))


def make_evaluation(layout: Layout, config: ConfigDict) -> Any:
    """The metrics of a batch as sums and counts, jitted: (params by path, batch, objective) -> metrics."""
    dtype = jnp.dtype(config.compute_dtype)

    def evaluate(params: Params, batch: dict[str, Array], objective: Any) -> PyTree:
        return objective.loss(layout.as_tree(_in_dtype(params, dtype)), batch, None)[1]

    return jax.jit(evaluate, out_shardings=layout.whole)
