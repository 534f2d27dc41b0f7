"""From a config to an optax optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from decoding_jax.types import Array, PyTree


def learning_rate(settings: ConfigDict, total_steps: int) -> Callable[[Array], Array]:
    """The learning rate at a step: a linear warmup, then

    cosine    down to final_fraction of the peak at the last step (Loshchilov & Hutter 2017)
    rsqrt     peak * sqrt(warmup / step) (Vaswani et al. 2017)
    constant  the peak
    """
    peak, warmup, name = settings.learning_rate, settings.warmup_steps, settings.schedule

    def rate(step: Array) -> Array:
        at = jnp.asarray(step, jnp.float32)
        rising = jnp.minimum(at / warmup, 1.0) if warmup else jnp.float32(1.0)
        if name == "cosine":
            way = jnp.clip((at - warmup) / (total_steps - warmup), 0.0, 1.0)
            falling = settings.final_fraction + (1 - settings.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * way))
        elif name == "rsqrt":
            falling = jnp.sqrt(max(warmup, 1) / jnp.maximum(at, max(warmup, 1)))
        else:
            falling = jnp.float32(1.0)
        return peak * rising * falling

    return rate


def decayed(params: PyTree) -> PyTree:
    """Which params weight decay applies to: matrices, not norms and biases."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def make_optimizer(settings: ConfigDict, total_steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) behind clipping by the global norm."""
    adam = optax.adamw(
        learning_rate(settings, total_steps),
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )
    chain = optax.chain(optax.clip_by_global_norm(settings.clip_norm), adam) if settings.clip_norm else adam

    def update(gradients: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        # optax raises floats to the power of its int32 counts, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(gradients, state, params)

    return optax.GradientTransformation(chain.init, update)


def averaged(ema: PyTree, params: PyTree, decay: float, step: Array) -> PyTree:
    """The exponential moving average of params; young averages forget faster, so that they do not lag."""
    young = (1.0 + step.astype(jnp.float32)) / (10.0 + step.astype(jnp.float32))
    keep = jnp.minimum(decay, young)
    return jax.tree.map(lambda old, new: keep * old + (1.0 - keep) * new, ema, params)
