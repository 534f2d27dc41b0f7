"""How long a canvas is and what stands in it at first; training and decoding share every line of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from decoding_jax.types import Array, CanvasSpec, Inputs, ModelSpec, PyTree

UNKNOWN = -1e9  # the score of a length that no class stands for, or less; no log-probability is as low
_SOFTNESS = 0.3  # of a soft copy, in tokens of the source


def length_class(spec: CanvasSpec, lengths: Array, source_lengths: Array) -> Array:
    """The length head's class of each canvas length i32[...], the nearest one where there is none.

    >>> spec = CanvasSpec("mask_predict", mask_id=2, length_head="offsets", length_classes=5)
    >>> length_class(spec, jnp.asarray([3, 4, 9]), jnp.asarray([4, 4, 4])).tolist()
    [1, 2, 4]
    """
    return jnp.clip(unclipped_class(spec, lengths, source_lengths), 0, spec.length_classes - 1)


def unclipped_class(spec: CanvasSpec, lengths: Array, source_lengths: Array) -> Array:
    """Which class a canvas length would be of a head with classes for all lengths, negative ones too."""
    return lengths if spec.length_head == "lengths" else lengths - source_lengths + spec.length_classes // 2


def length_scores(spec: CanvasSpec, logits: Array, source_lengths: Array, limits: Array, longest: int) -> Array:
    """What the head says of the lengths 1 ... longest.

    Args:
      spec: of the model.
      logits: f32[B, C], of the classes.
      source_lengths: i32[B].
      limits: i32[B], the longest canvas that each row may have.
      longest: how many lengths.

    Returns:
      f32[B, longest]: log-probabilities; for lengths that no class stands for numbers far below all of these, higher
      the nearer a class; -inf above the limit. So a row whose limit lies below all classes takes its limit.
    """
    lengths = jnp.arange(1, longest + 1)[None]
    wanted = unclipped_class(spec, lengths, source_lengths[:, None])
    nearest = jnp.clip(wanted, 0, spec.length_classes - 1)
    known = jnp.take_along_axis(jax.nn.log_softmax(logits), nearest, axis=1)
    far = UNKNOWN * (1.0 + jnp.abs(wanted - nearest).astype(jnp.float32))
    return jnp.where(lengths > limits[:, None], -jnp.inf, jnp.where(wanted == nearest, known, far))


def copied_places(lengths: Array, source_lengths: Array, size: int) -> Array:
    """Where in the source each place of a canvas looks, f32[B, size]: j (m - 1) / (n - 1), the ends on the ends.

    >>> copied_places(jnp.asarray([5]), jnp.asarray([3]), 5)[0].tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    last = (source_lengths - 1).astype(jnp.float32)
    ratio = last / jnp.maximum(lengths - 1, 1).astype(jnp.float32)
    return jnp.minimum(jnp.arange(size, dtype=jnp.float32)[None] * ratio[:, None], last[:, None])


def first_canvas(spec: CanvasSpec, sources: Array, source_lengths: Array, lengths: Array, size: int) -> Array:
    """The tokens i32[B, size] that enter the model first; where `source_copy` is soft, `soft_copy` goes before them.

    Args:
      spec: of the model.
      sources: i32[B, M].
      source_lengths: i32[B].
      lengths: i32[B], of the canvases.
      size: of the buffer.
    """
    if spec.source_copy == "none":
        return jnp.full((sources.shape[0], size), spec.mask_id, jnp.int32)
    # In integers, so that a half is rounded alike everywhere.
    last, steps = (source_lengths - 1)[:, None], jnp.maximum(lengths - 1, 1)[:, None]
    places = (2 * jnp.arange(size)[None] * last + steps) // (2 * steps)
    return jnp.take_along_axis(sources, jnp.minimum(places, last), axis=1)


def soft_copy(
    model: ModelSpec, params: PyTree, sources: Array, source_lengths: Array, lengths: Array, size: int
) -> Array | None:
    """The embeddings [B, size, D] that enter the model first; None where `source_copy` is not soft."""
    if model.canvas is None or model.canvas.source_copy != "soft":
        return None
    assert model.embed is not None  # `Model` has seen it
    places = copied_places(lengths, source_lengths, size)
    at = jnp.arange(sources.shape[1])[None, None]
    distance = jnp.abs(places[:, :, None] - at.astype(jnp.float32)) / _SOFTNESS
    weights = jax.nn.softmax(jnp.where(at < source_lengths[:, None, None], -distance, -jnp.inf))
    embedded = model.embed(params, sources)
    return jnp.einsum("bjm,bmd->bjd", weights.astype(embedded.dtype), embedded)


def canvas_inputs(tokens: Array, inside: Array, embeds: Array | None = None, key: Array | None = None) -> Inputs:
    """One call over canvases i32[B, T] whose places inside bool[B, T] all see each other."""
    batch, size = tokens.shape
    return Inputs(
        tokens=tokens,
        positions=jnp.broadcast_to(jnp.arange(size)[None], (batch, size)),
        mask=jnp.broadcast_to(inside[:, None], (batch, size, size)),
        embeds=embeds,
        dropout_key=key,
    )
