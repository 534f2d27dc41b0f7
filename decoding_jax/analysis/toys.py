"""Models whose laws are known exactly, to measure what a decoder does to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from decoding_jax.types import Array, CanvasSpec, Features, Inputs, Model, PyTree


def _posterior(params: PyTree, inputs: Inputs, cache: Any) -> Features:
    """Logits f32[B, T, V], the log of the law of every place given the places that are not hidden."""
    rows = params["rows"]  # [R, n]
    size = rows.shape[1]
    tokens = inputs.tokens[:, None, :size]
    fits = ((tokens == params["mask_id"]) | (tokens == rows[None])).all(axis=2)  # [B, R]
    spread = jnp.where(fits[:, :, None, None], params["one_hot"][None], 0.0).sum(axis=1)  # [B, n, V]
    total = fits.sum(axis=1).astype(jnp.float32)[:, None, None]
    nothing = jnp.zeros_like(spread).at[:, :, -1].set(1.0)
    law = jnp.where(total > 0, spread / jnp.maximum(total, 1.0), nothing)
    return Features(jnp.log(jnp.pad(law, ((0, 0), (0, inputs.tokens.shape[1] - size), (0, 0)))), (), cache)


def _no_memory(params: PyTree, sources: Array, lengths: Array) -> PyTree:
    """The source says nothing; a leaf with a row axis is all that is remembered."""
    del params, sources
    return {"lengths": lengths}


def posterior_model(rows: Sequence[Sequence[int]], vocab_size: int, mask_id: int) -> Model:
    """The exact posterior over a set of equally probable rows, given the tokens that are not hidden.

    It is what a model trained with mask_predict on these rows comes to; its outputs have the rows' length, which a call
    gives. Where no row fits the visible tokens, the last id of the vocabulary has all the probability.

    Args:
      rows: i32[R, n], of ids below vocab_size - 1.
      vocab_size: V.
      mask_id: stands at hidden places.

    Raises:
      ValueError: the rows differ in length, or an id is not below vocab_size - 1.
    """
    if len({len(row) for row in rows}) != 1 or not 0 <= np.min(rows) <= np.max(rows) < vocab_size - 1:
        raise ValueError(f"rows: give rows of one length, of ids from 0 to {vocab_size - 2}")
    table = np.asarray(rows, np.int32)
    params = {
        "rows": jnp.asarray(table),
        "one_hot": jnp.asarray(np.eye(vocab_size, dtype=np.float32)[table]),
        "mask_id": jnp.int32(mask_id),
    }
    return Model(
        _posterior,
        params,
        vocab_size,
        encode=_no_memory,
        start_id=mask_id,
        canvas=CanvasSpec("mask_predict", mask_id),
    )
