"""The one bridge from a Flax NNX module to the library's pure functions.

A module is split once into its structure (static, hashed by value) and its params (a pytree);
`apply` and `readout` merge them again inside the traced function, which costs nothing at run time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from decoding_jax.models.transformer import Transformer, TransformerConfig, View, init_cache
from decoding_jax.types import Array, Cache, Features, Inputs, Model, PyTree


def full_precision(params: PyTree) -> contextlib.AbstractContextManager[Any]:
    """Float32 params are multiplied in float32: by default a GPU may use TF32 and a TPU bfloat16."""
    exact = jax.tree.leaves(params)[0].dtype == jnp.float32
    return jax.default_matmul_precision("highest") if exact else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class ModuleApply:
    """`apply` of a module with the call signature (inputs, cache, view) -> Features."""

    graphdef: Any
    selection: View = dataclasses.field(default_factory=View)

    def __call__(self, params: PyTree, inputs: Inputs, cache: Any) -> Features:
        with full_precision(params):
            return nnx.merge(self.graphdef, params)(inputs, cache, self.selection)

    def view(self, taps: tuple[int, ...], start: int, stop: int | None, skip: tuple[int, ...]) -> ModuleApply:
        return dataclasses.replace(self, selection=View(taps, start, stop, skip))


@dataclasses.dataclass(frozen=True)
class ModuleReadout:
    """`readout` of a module: features to logits."""

    graphdef: Any

    def __call__(self, params: PyTree, hidden: Array) -> Array:
        with full_precision(params):
            return nnx.merge(self.graphdef, params).readout(hidden)


@dataclasses.dataclass(frozen=True)
class TransformerInitCache:
    """`init_cache` of a Transformer, equal for equal configs."""

    config: TransformerConfig
    dtype: Any

    def __call__(self, batch: int, capacity: int) -> Cache:
        return init_cache(self.config, batch, capacity, self.dtype)


def abstract_transformer(config: TransformerConfig, dtype: Any = jnp.float32) -> tuple[Any, PyTree]:
    """The structure and the params' shapes of a Transformer, without allocating anything."""
    module = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return nnx.split(module)


def transformer_model(config: TransformerConfig, params: PyTree, **fields: Any) -> Model:
    """A Model over existing Transformer params (as `nnx.split` gives them); `fields` are Model's."""
    dtype = jax.tree.leaves(params)[0].dtype
    graphdef, _ = abstract_transformer(config, dtype)
    return Model(
        apply=ModuleApply(graphdef),
        params=params,
        vocab_size=config.vocab_size,
        init_cache=TransformerInitCache(config, jnp.dtype(dtype)),
        readout=ModuleReadout(graphdef),
        config=config,
        max_length=config.max_length,
        **fields,
    )


def init_transformer(config: TransformerConfig, seed: int = 0, dtype: Any = jnp.float32, **fields: Any) -> Model:
    """A Transformer with random params, made by one compiled function."""

    @functools.partial(jax.jit, static_argnums=1)
    def make(seed: Array, config: TransformerConfig) -> PyTree:
        return nnx.state(Transformer(config, dtype=dtype, rngs=nnx.Rngs(jax.random.key(seed))))

    return transformer_model(config, make(jnp.uint32(seed), config), **fields)
