"""Toy models that fill a canvas, with laws that are known exactly."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import zoo

import decoding_jax as dj
from decoding_jax.types import Array, CanvasSpec, Features, Inputs, Model, PyTree

MASK = 2
CLASSES = 9


def _hash_of_canvas(params: PyTree, inputs: Inputs, cache: Any) -> Features:
    """Each place's feature is the number of a row of the table: a hash of where it is, what it sees, and the source."""
    tokens, positions = inputs.tokens[:, None], inputs.positions[:, None]
    seen = jnp.where(inputs.mask, zoo._token_hash(tokens, positions), jnp.uint32(0)).sum(axis=2, dtype=jnp.uint32)
    place = zoo._mixed(inputs.positions.astype(jnp.uint32) + jnp.uint32(77))
    index = zoo._mixed(seen + place + cache.rows["source"][:, None]) % jnp.uint32(params["table"].shape[0])
    return Features(index.astype(jnp.float32)[..., None], (), cache)


def _readout(params: PyTree, hidden: Array) -> Array:
    return params["table"][hidden[..., 0].astype(jnp.int32)]


def _hash_length(params: PyTree, rows: PyTree) -> Array:
    return params["lengths"][(rows["source"] % jnp.uint32(params["lengths"].shape[0])).astype(jnp.int32)]


def hash_filler(objective: str, vocab: int = 7, eos_ids: tuple[int, ...] = (), seed: int = 0, **spec: Any) -> Model:
    """Fills canvases by a table that a hash of all that a place sees points into: any wrong visible token shows.

    Integers add up alike in any order, so the law is the same bit for bit in any batch. Its length head knows the
    offsets -4 ... 4.
    """
    draw = np.random.default_rng(seed).normal
    params = {
        "table": jnp.asarray(draw(size=(1021, vocab)) * 1.5, jnp.float32),
        "lengths": jnp.asarray(draw(size=(101, CLASSES)) * 1.5, jnp.float32),
    }
    given = {"length_head": "offsets", "length_classes": CLASSES} | spec
    if objective == "ctc":
        given = {"upsample": 3} | spec
    has_head = given.get("length_head", "none") != "none"
    return Model(
        _hash_of_canvas,
        params,
        vocab,
        readout=_readout,
        encode=zoo._hash_sources,
        start_id=1,
        canvas=CanvasSpec(objective, MASK, **given),
        length_logits=_hash_length if has_head else None,
        eos_ids=eos_ids,
        max_length=64,
    )


DECODERS = {
    "nonautoregressive": dj.NonAutoregressive(),
    "mask_predict": dj.MaskPredict(iterations=4),
    "mask_predict, 3 lengths": dj.MaskPredict(iterations=4, length_beam=3),
    "iterative_refinement": dj.IterativeRefinement(iterations=5),
    "ctc": dj.CTC(),
    "ctc, a beam": dj.CTC(beam=4),
}


@functools.cache
def filler_for(name: str, eos_ids: tuple[int, ...] = ()) -> Model:
    """A hash filler that the decoder called `name` in DECODERS can run."""
    objective = name.partition(",")[0]
    copy = "none" if objective == "mask_predict" else "uniform"
    return hash_filler(objective, eos_ids=eos_ids, source_copy=copy)
