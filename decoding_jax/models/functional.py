"""The one bridge from a Flax NNX module to the library's pure functions.

A module is split once into its structure (static, hashed by value) and its params (a pytree);
`apply` and `readout` merge them again inside the traced function, which costs nothing at run time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from decoding_jax.models.transformer import Transformer, TransformerConfig, View, init_cache
from decoding_jax.types import Array, Cache, Features, Inputs, Model, ModelSpec, PyTree


def float_dtype(params: PyTree) -> Any:
    """What a model computes in: the dtype of its params, those in int8 left out."""
    return next(x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating))


def full_precision(params: PyTree) -> contextlib.AbstractContextManager[Any]:
    """Float32 params are multiplied in float32: by default a GPU may use TF32 and a TPU bfloat16."""
    exact = float_dtype(params) == jnp.float32
    return jax.default_matmul_precision("highest") if exact else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class ModuleApply:
    """`apply` of a module with the call signature (inputs, cache, view) -> Features."""

    graphdef: Any
    num_layers: int
    selection: View = dataclasses.field(default_factory=View)

    def __call__(self, params: PyTree, inputs: Inputs, cache: Any) -> Features:
        with full_precision(params):
            return nnx.merge(self.graphdef, params)(inputs, cache, self.selection)

    def view(self, *selection: Any) -> ModuleApply:
        """The same with other layers run; the fields of `View`. ValueError where there is no such layer."""
        view = View(*selection)
        view.layers(self.num_layers)
        return dataclasses.replace(self, selection=view)


@dataclasses.dataclass(frozen=True)
class ModuleEncode:
    """`encode` of a module with the call signature (tokens, lengths, dropout_key, view) -> rows of a cache."""

    graphdef: Any
    selection: View = dataclasses.field(default_factory=View)

    def __call__(self, params: PyTree, tokens: Array, lengths: Array, dropout_key: Array | None = None) -> PyTree:
        with full_precision(params):
            return nnx.merge(self.graphdef, params).encode(tokens, lengths, dropout_key, self.selection)

    def view(self, *selection: Any) -> ModuleEncode:
        """The same with other layers run; the fields of `View`."""
        return dataclasses.replace(self, selection=View(*selection))


@dataclasses.dataclass(frozen=True)
class ModuleReadout:
    """`readout` of a module: features to logits."""

    graphdef: Any

    def __call__(self, params: PyTree, hidden: Array) -> Array:
        with full_precision(params):
            return nnx.merge(self.graphdef, params).readout(hidden)


@dataclasses.dataclass(frozen=True)
class ModuleGaps:
    """`gap_logits` of a module: features to logits of the gap before the next token."""

    graphdef: Any

    def __call__(self, params: PyTree, hidden: Array) -> Array:
        with full_precision(params):
            return nnx.merge(self.graphdef, params).gap_logits(hidden)


@dataclasses.dataclass(frozen=True)
class ModuleEmbed:
    """`embed` of a module: tokens to the embeddings that enter it."""

    graphdef: Any

    def __call__(self, params: PyTree, tokens: Array) -> Array:
        embedded: Array = nnx.merge(self.graphdef, params).embed(tokens)
        return embedded


def remembered_length_logits(params: PyTree, rows: PyTree) -> Array:
    """`length_logits` of a Transformer with a length head: `encode` has made them."""
    del params
    logits: Array = rows["length_logits"]
    return logits


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


def transformer_spec(config: TransformerConfig, dtype: Any = jnp.float32, view: View = View()) -> ModelSpec:
    """The static part of a Transformer that computes in `dtype`."""
    graphdef, _ = abstract_transformer(config, dtype)
    head = "none" if config.canvas is None else config.canvas.length_head
    return ModelSpec(
        apply=ModuleApply(graphdef, config.num_layers, view),
        readout=ModuleReadout(graphdef),
        init_cache=TransformerInitCache(config, jnp.dtype(dtype)),
        vocab_size=config.vocab_size,
        encode=ModuleEncode(graphdef, view) if config.encoder_layers else None,
        canvas=config.canvas,
        embed=ModuleEmbed(graphdef),
        length_logits=remembered_length_logits if head in ("lengths", "offsets") else None,
        gap_logits=ModuleGaps(graphdef) if head == "gaps" else None,
    )


def transformer_model(config: TransformerConfig, params: PyTree, **fields: Any) -> Model:
    """A Model over existing Transformer params (as `nnx.split` gives them); `fields` are Model's."""
    spec = transformer_spec(config, float_dtype(params))
    return Model(
        **{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)},
        params=params,
        start_id=config.start_id,
        config=config,
        max_length=config.max_length,
        **fields,
    )


def initial_params(config: TransformerConfig, seed: Array, dtype: Any = jnp.float32) -> PyTree:
    """Random params of a Transformer, for use inside a jitted function; seed u32[]."""
    return nnx.state(Transformer(config, dtype=dtype, rngs=nnx.Rngs(jax.random.key(seed))))


def init_transformer(config: TransformerConfig, seed: int = 0, dtype: Any = jnp.float32, **fields: Any) -> Model:
    """A Transformer with random params, made by one compiled function."""
    params = jax.jit(initial_params, static_argnums=(0, 2))(config, jnp.uint32(seed), dtype)
    return transformer_model(config, params, **fields)
