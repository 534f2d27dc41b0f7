"""A Transformer with its weight matrices in int8, by qwix (Google's quantisation library for JAX).

Each output of a matrix has its own scale, the largest absolute weight / 127.5, and so has each row of the embedding.
Norms and biases stay as they are. `transformer.product` multiplies in integers. Structure and config are those of the
model in floats, so its spec, views, cache and checkpoints work as they do there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.types import Model, PyTree


def quantized(model: Model) -> Model:
    """A copy of a Transformer with its matrices in int8: a quarter of float32's bytes, and close to the same logits.

    A drafter for `SelfSpeculative()`. A model that is quantised already is returned as it is.

    Raises:
      ValueError: the model is no Transformer.
    """
    if not isinstance(model, Model):
        raise ValueError(f"quantized: {model!r} is no Model; give one, such as dj.load gives")
    if not isinstance(model.config, TransformerConfig):
        raise ValueError(f"quantized: {model!r} is no Transformer; only models that dj.load gives have int8 copies")
    if is_quantized(model.params):
        return model
    return dataclasses.replace(model, params=quantize_params(model.params))


def dequantized(model: Model) -> Model:
    """The inverse of `quantized`: a copy whose matrices are floats again, with the values that int8 has left them.

    A model that is not quantised is returned as it is.
    """
    return dataclasses.replace(model, params=_dequantize_params(model.params)) if is_quantized(model.params) else model


@jax.jit
def _dequantize_params(params: PyTree) -> PyTree:
    is_array = lambda x: isinstance(x, qwix.QArray)
    return jax.tree.map(lambda x: qwix.dequantize(x) if is_array(x) else x, params, is_leaf=is_array)


@jax.jit
def quantize_params(params: PyTree) -> PyTree:
    """A Transformer's params with a `qwix.QArray` (int8 values and scales) for each matrix."""

    def leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array | qwix.QArray:
        names = {getattr(key, "key", None) for key in path}
        if "embedding" in names:
            return qwix.quantize(x, jnp.int8, channelwise_axes=(0,))
        if "kernel" in names:
            return qwix.quantize(x, jnp.int8, channelwise_axes=tuple(range(1, x.ndim)))
        return x

    return jax.tree.map_with_path(leaf, params)


def is_quantized(params: PyTree) -> bool:
    """Whether params come from `quantize_params`."""
    return any(x.dtype == jnp.int8 for x in jax.tree.leaves(params))
