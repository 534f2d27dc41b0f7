"""One Transformer: Llama 1-3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3 (dense) by configuration.

Causal, bidirectional, block-causal and tree-shaped use differ in the mask and cache that a call
brings, never in this file. Weights are stored (in, out); q, k, v and gate, up are fused.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from decoding_jax.cache import write_slots
from decoding_jax.types import Array, Cache, Features, Inputs, PyTree


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    `linear` divides every frequency by `factor`. `llama3` divides only the slow ones: those that turn less
    than `low_freq_factor` times over `original_max_length`, with a smooth passage up to `high_freq_factor`
    (Llama 3.1; Dubey et al. 2024).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a Transformer. Sizes are counts; `sliding_window` is in positions, None for no window."""

    vocab_size: int
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_length: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} is odd; rotary positions need an even size")


@dataclasses.dataclass(frozen=True)
class View:
    """Which layers run and whose outputs are returned (see `Model.view`)."""

    taps: tuple[int, ...] = ()
    start: int = 0
    stop: int | None = None
    skip: tuple[int, ...] = ()

    def layers(self, num_layers: int) -> list[int]:
        """The layers to run, in order."""
        stop = num_layers if self.stop is None else self.stop
        if not 0 <= self.start <= stop <= num_layers:
            raise ValueError(f"view(start={self.start}, stop={self.stop}): the model has layers 0..{num_layers - 1}")
        run = [i for i in range(self.start, stop) if i not in self.skip]
        if missing := [i for i in self.taps if i not in run]:
            raise ValueError(f"view(taps={self.taps}): layers {missing} are not run by this view")
        return run


def rope_frequencies(config: TransformerConfig) -> Array:
    """Radians per position of each pair of a head, f32[head_size / 2] (Su et al. 2021)."""
    exponent = jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size
    frequency = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = scaling.original_max_length * frequency / (2 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs (i, i + size/2) of x [B, T, H, size] by the angles behind cos, sin f32[B, T, size/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention whose keys and values come from wherever the caller says."""

    def __init__(self, config: TransformerConfig, dtype: Any, *, rngs: nnx.Rngs):
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self.sizes = (heads, kv_heads, size)
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.qkv = nnx.Linear(config.width, (heads + 2 * kv_heads) * size, use_bias=config.qkv_bias, **options)
        self.out = nnx.Linear(heads * size, config.width, use_bias=False, **options)
        self.q_norm = nnx.RMSNorm(size, epsilon=config.norm_eps, **options) if config.qk_norm else None
        self.k_norm = nnx.RMSNorm(size, epsilon=config.norm_eps, **options) if config.qk_norm else None

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> q [B, T, H, size], k and v [B, T, kv heads, size], normalised where the model does."""
        heads, kv_heads, size = self.sizes
        qkv = self.qkv(x).reshape(*x.shape[:2], heads + 2 * kv_heads, size)
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def attend(self, q: Array, k: Array, v: Array, mask: Array) -> Array:
        """Looks from q [B, T, H, size] at k, v [B, S, kv heads, size] where mask bool[B, T, S]: [B, T, D].

        The keys may be the cache's, this call's own, or another sequence's (cross-attention).
        """
        seen = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return self.out(seen.reshape(*seen.shape[:2], -1))


class Layer(nnx.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: TransformerConfig, dtype: Any, *, rngs: nnx.Rngs):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, **options)
        self.attention = Attention(config, dtype, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, **options)
        self.gate_up = nnx.Linear(config.width, 2 * config.mlp_width, use_bias=False, **options)
        self.down = nnx.Linear(config.mlp_width, config.width, use_bias=False, **options)

    def mlp(self, x: Array) -> Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: Any, params: PyTree, x: Array, cos: Array, sin: Array, mask: Array, slots: Array | None, kept: Any
) -> tuple[Array, Any]:
    """One layer over x [B, T, D], and its cached keys and values with this call's written to `slots`.

    Jitted by itself so that all layers, being alike, are traced and lowered once; XLA inlines it.
    """
    layer = nnx.merge(graphdef, params)
    q, k, v = layer.attention.project(layer.attention_norm(x))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if slots is not None:
        kept = {"k": write_slots(kept["k"], slots, k), "v": write_slots(kept["v"], slots, v)}
        k, v = kept["k"], kept["v"]
    x = x + layer.attention.attend(q, k, v, mask)
    return x + layer.mlp(layer.mlp_norm(x)), kept


class Transformer(nnx.Module):
    """Token ids to hidden features; `readout` turns features into logits."""

    def __init__(self, config: TransformerConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Linear(config.width, config.vocab_size, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)
        )

    def __call__(self, inputs: Inputs, cache: Cache | None, view: View = View()) -> Features:
        """Runs the layers of `view`; a cache is read and written where `inputs.slots` says.

        A view that stops early returns its last layer's output without the final norm, since another
        view may go on from there.
        """
        if inputs.time is not None or inputs.features is not None:
            raise ValueError("Inputs.time and Inputs.features: this Transformer takes neither; leave them None")
        x = self.embed(inputs.tokens) if inputs.embeds is None else inputs.embeds
        angles = inputs.positions[..., None].astype(jnp.float32) * rope_frequencies(self.config)[None, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        mask, slots, layers, key_positions = inputs.mask, inputs.slots, None, inputs.positions
        if slots is not None:
            if cache is None:
                raise ValueError("Inputs.slots are given, but there is no cache to write to")
            layers = list(cache.slots["layers"])
            key_positions = write_slots(cache.slots["positions"], slots, inputs.positions)
        if self.config.sliding_window is not None:
            distance = inputs.positions[:, :, None] - key_positions[:, None, :]
            mask = mask & (jnp.abs(distance) < self.config.sliding_window)

        taps = {}
        for index in view.layers(self.config.num_layers):
            kept = None if layers is None else layers[index]
            x, kept = _run_layer(*nnx.split(self.layers[index]), x, cos, sin, mask, slots, kept)
            if layers is not None:
                layers[index] = kept
            taps[index] = x
        if cache is not None and layers is not None:
            cache = dataclasses.replace(cache, slots={"layers": layers, "positions": key_positions})
        if view.stop is None:
            x = self.norm(x)
        return Features(x, tuple(taps[i] for i in view.taps), cache)

    def readout(self, hidden: Array) -> Array:
        """Features [..., D] to logits f32[..., V]."""
        logits = self.embed.attend(hidden) if self.head is None else self.head(hidden)
        return logits.astype(jnp.float32)


def init_cache(config: TransformerConfig, batch: int, capacity: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache: per layer k, v [B, S, kv heads, size], and the position held by each slot i32[B, S]."""
    shape = (batch, capacity, config.num_kv_heads, config.head_size)
    layers = [{"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)} for _ in range(config.num_layers)]
    return Cache(slots={"layers": layers, "positions": jnp.zeros((batch, capacity), jnp.int32)})
