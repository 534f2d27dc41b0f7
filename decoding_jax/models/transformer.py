"""One Transformer: Llama 1-3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3 (dense), and encoder-decoders of the same layers.

Causal, bidirectional, block-causal and tree-shaped use differ in the mask and cache that a call
brings, never in this file. Weights are stored (in, out). q, k, v and gate, up are fused, and laid out so
that a split over devices cuts between groups of heads and never inside one:

    qkv/kernel      [D, KV * (G + 2) * size]   for each key head its G query heads, its key, its value
    kv/kernel       [D, KV * 2 * size]         for each key head its key, its value (cross-attention)
    gate_up/kernel  [D, 2, F]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from decoding_jax.cache import write_slots
from decoding_jax.types import Array, Cache, CanvasSpec, Features, Inputs, PyTree


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
    """The shape of a Transformer. Sizes are counts; `sliding_window` is in positions, None for no window.

    With `encoder_layers` it is an encoder-decoder: `num_layers` counts the decoder's layers, which also look at
    the encoded source, and its output begins behind `start_id`; both sides share the embedding. `dropout` is the
    rate at which features are zeroed in calls that bring a key for it (training); other calls know no dropout.
    With `canvas` it fills a whole canvas at once: sinusoids of the positions are added to what enters it, since
    hidden positions, being alike, could not be told apart by rotated keys, and its encoder may have a length head.
    """

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
    encoder_layers: int = 0
    start_id: int | None = None
    dropout: float = 0.0
    canvas: CanvasSpec | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "num_layers",
            "width",
            "mlp_width",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_length",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.encoder_layers < 0:
            raise ValueError(
                f"encoder_layers={self.encoder_layers}: must be at least 0; 0 is a model without an encoder"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: must be from 0 to below 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} is odd; rotary positions need an even size")


@dataclasses.dataclass(frozen=True)
class View:
    """Which layers run, whose outputs are returned, and what a gradient recomputes (see `Model.view`)."""

    taps: tuple[int, ...] = ()
    start: int = 0
    stop: int | None = None
    exit: int | None = None
    skip: tuple[int, ...] = ()
    remat: bool = False

    def layers(self, num_layers: int) -> list[int]:
        """The layers to run, in order."""
        ends = {name: end for name in ("stop", "exit") if (end := getattr(self, name)) is not None}
        stop = min([num_layers, *ends.values()])
        bad = [i for i in (self.start, *ends.values()) if not 0 <= i <= num_layers]
        if bad or self.start > stop or any(not 0 <= i < num_layers for i in self.skip):
            given = {"start": self.start, **ends, "skip": self.skip}
            named = ", ".join(f"{name}={value}" for name, value in given.items() if value)
            raise ValueError(f"view({named}): the model has layers 0..{num_layers - 1}")
        run = [i for i in range(self.start, stop) if i not in self.skip]
        if self.skip and not run:
            raise ValueError(f"view(skip={self.skip}): nothing is left of the layers 0..{num_layers - 1}")
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


def sinusoids(positions: Array, width: int) -> Array:
    """Positions i32[...] as sines and cosines f32[..., D] of wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017).

    Their length is 1, that of a new embedding. A width that is odd leaves its last feature 0.
    """
    half = width // 2
    frequency = 10000.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.multiply.outer(positions.astype(jnp.float32), frequency)
    both = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1) * half**-0.5
    return jnp.pad(both, [(0, 0)] * positions.ndim + [(0, width % 2)])


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs (i, i + size/2) of x [B, T, H, size] by the angles behind cos, sin f32[B, T, size/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def dropout(x: Array, key: Array | None, rate: float) -> Array:
    """Zeroes features at the given rate (to 1/256) and scales the rest up; without a key nothing happens.

    A byte decides each, since 32 random bits for every feature of every layer would cost a CPU more than they are
    worth.
    """
    dropped = min(round(rate * 256), 255)
    if key is None or not dropped:
        return x
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= dropped
    return jnp.where(keep, x * jnp.asarray(256 / (256 - dropped), x.dtype), jnp.zeros((), x.dtype))


def product(x: Array, weights: Array | qwix.QArray, axis: int = 0) -> Array:
    """x [N, D] times weights [D, *outputs] (or [outputs, D] with axis=1), in integers where the weights are int8.

    Then each row of x becomes two of int8, the second for what the first left: 15 bits together. With the first alone
    SmolLM2 chooses another token at one place in eight, with both at one in thirty, as with rows in floats. Those
    would need the weights in floats too, which XLA's CPU backend writes out in memory, slower than no quantisation.
    """
    contracted = (((1,), (axis,)), ((), ()))
    if not isinstance(weights, qwix.QArray):
        return jax.lax.dot_general(x, weights, contracted)
    rounded = qwix.quantize(x, jnp.int8, channelwise_axes=(0,))
    rest = qwix.quantize(x - qwix.dequantize(rounded), jnp.int8, channelwise_axes=(0,))
    rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), rounded, rest)
    with jax.numpy_dtype_promotion("standard"):  # qwix multiplies integers by floats
        both = qwix.dot_general(rows, weights, contracted)
    return jnp.add(*jnp.split(both, 2))


class Linear(nnx.Module):
    """x [..., D] times a kernel [D, *outputs], plus a bias [*outputs] where there is one.

    Not nnx.Linear: in a gradient XLA's CPU backend takes twice as long over several batch axes as over one.
    Random kernels have variance scale / D.
    """

    def __init__(
        self, inputs: int, *outputs: int, dtype: Any, rngs: nnx.Rngs, scale: float = 1.0, use_bias: bool = False
    ):
        init = nnx.initializers.variance_scaling(scale, "fan_in", "truncated_normal", in_axis=0, out_axis=-1)
        kernel = init(rngs.params(), (inputs, math.prod(outputs)), dtype)
        self.kernel = nnx.Param(kernel.reshape(inputs, *outputs))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if use_bias else None

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel.get_value()
        y = product(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], *kernel.shape[1:])
        return y if self.bias is None else y + jnp.broadcast_to(self.bias.get_value(), y.shape)


class Embedding(nnx.Embed):
    """A table [V, D] to look tokens up in, and to read features out with; in int8 too."""

    def __call__(self, tokens: Array, out_sharding: Any = None) -> Array:
        table = self.embedding.get_value()
        if not isinstance(table, qwix.QArray):
            return super().__call__(tokens, out_sharding)
        return qwix.dequantize(jax.tree.map(lambda x: jnp.take(x, tokens, axis=0), table))

    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        # Not nnx.Embed's product with the transposed table: in a branch XLA's CPU backend writes it out in every call.
        del out_sharding
        return product(query, self.embedding.get_value(), axis=1)


def look(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Attention from q [B, T, H, size] to k, v [B, S, kv heads, size] where mask bool[B, T, S]: [B, T, H, size]."""
    by_products = lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
    if q.shape[1] > 1:
        return by_products(q, k, v, mask)
    return jax.lax.platform_dependent(q, k, v, mask, cpu=_look_by_sums, default=by_products)


def _look_by_sums(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """`look` from one place, T = 1, as sums that read the cache as it lies.

    For products by heads, XLA's CPU backend writes the whole cache out in another order at every step.
    """
    (batch, _, heads, size), kv_heads = q.shape, k.shape[2]
    # Heads that share keys have an axis of their own; where none do, an axis of length 1 would take ten times as long.
    axes = (heads,) if heads == kv_heads else (kv_heads, heads // kv_heads)
    shared = tuple(range(3, 2 + len(axes)))
    keys, values = (jnp.expand_dims(x.astype(jnp.float32), shared) for x in (k, v))
    scores = (q.astype(jnp.float32).reshape(batch, 1, *axes, size) * keys).sum(axis=-1) * size**-0.5
    seen = jnp.expand_dims(mask[:, 0], (2, *shared))
    unseen = jnp.finfo(jnp.float32).min  # not -inf: a place that sees nothing must not become NaN
    weights = jax.nn.softmax(jnp.where(seen, scores, unseen), axis=1)
    weights = weights.astype(v.dtype).astype(jnp.float32)  # rounded as in products
    return (weights[..., None] * values).sum(axis=1).astype(v.dtype).reshape(q.shape)


class Attention(nnx.Module):
    """Grouped-query attention whose keys and values come from wherever the caller says."""

    def __init__(self, config: TransformerConfig, dtype: Any, *, rngs: nnx.Rngs):
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self.sizes = (kv_heads, heads // kv_heads, size)
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        fused = (heads + 2 * kv_heads) * size
        self.qkv = Linear(config.width, fused, use_bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(heads * size, config.width, scale=_residual_scale(config), dtype=dtype, rngs=rngs)
        self.q_norm = nnx.RMSNorm(size, epsilon=config.norm_eps, **options) if config.qk_norm else None
        self.k_norm = nnx.RMSNorm(size, epsilon=config.norm_eps, **options) if config.qk_norm else None

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> q [B, T, H, size], k and v [B, T, kv heads, size], normalised where the model does."""
        kv_heads, group, size = self.sizes
        grouped = self.qkv(x).reshape(*x.shape[:2], kv_heads, group + 2, size)
        q = grouped[..., :group, :].reshape(*x.shape[:2], kv_heads * group, size)
        k, v = grouped[..., group, :], grouped[..., group + 1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def attend(self, q: Array, k: Array, v: Array, mask: Array) -> Array:
        """Looks from q [B, T, H, size] at k, v [B, S, kv heads, size] where mask bool[B, T, S]: [B, T, D]."""
        return self.out(look(q, k, v, mask).reshape(*q.shape[:2], -1))


class CrossAttention(nnx.Module):
    """Attention to an encoded source, whose keys and values are made once."""

    def __init__(self, config: TransformerConfig, dtype: Any, *, rngs: nnx.Rngs):
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self.sizes = (kv_heads, heads // kv_heads, size)
        self.q = Linear(config.width, heads * size, dtype=dtype, rngs=rngs)
        self.kv = Linear(config.width, kv_heads * 2 * size, dtype=dtype, rngs=rngs)
        self.out = Linear(heads * size, config.width, scale=_residual_scale(config), dtype=dtype, rngs=rngs)

    def remember(self, encoded: Array) -> dict[str, Array]:
        """Keys and values [B, M, kv heads, size] of an encoded source [B, M, D]."""
        kv_heads, _, size = self.sizes
        both = self.kv(encoded).reshape(*encoded.shape[:2], kv_heads, 2, size)
        return {"k": both[..., 0, :], "v": both[..., 1, :]}

    def attend(self, x: Array, memory: dict[str, Array], mask: Array) -> Array:
        """Looks from x [B, T, D] at the remembered source where mask bool[B, M]: [B, T, D]."""
        kv_heads, group, size = self.sizes
        q = self.q(x).reshape(*x.shape[:2], kv_heads * group, size)
        mask = jnp.broadcast_to(mask[:, None], (*x.shape[:2], mask.shape[1]))
        return self.out(look(q, memory["k"], memory["v"], mask).reshape(*x.shape[:2], -1))


def _residual_scale(config: TransformerConfig) -> float:
    """Variance of what writes to the residual stream, so that its size does not grow with depth (GPT-2, 2019)."""
    return 1.0 / (2 * max(config.num_layers, config.encoder_layers))


class Layer(nnx.Module):
    """Pre-norm attention, to the source too where there is one, and a gated MLP."""

    def __init__(self, config: TransformerConfig, dtype: Any, *, cross: bool = False, rngs: nnx.Rngs):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        norm = functools.partial(nnx.RMSNorm, config.width, epsilon=config.norm_eps, **options)
        self.dropout = config.dropout
        self.attention_norm = norm()
        self.attention = Attention(config, dtype, rngs=rngs)
        self.cross_norm = norm() if cross else None
        self.cross = CrossAttention(config, dtype, rngs=rngs) if cross else None
        self.mlp_norm = norm()
        self.gate_up = Linear(config.width, 2, config.mlp_width, dtype=dtype, rngs=rngs)
        self.down = Linear(config.mlp_width, config.width, scale=_residual_scale(config), dtype=dtype, rngs=rngs)

    def mlp(self, x: Array, key: Array | None) -> Array:
        """x [B, T, D] -> [B, T, D]."""
        both = self.gate_up(x)
        return self.down(dropout(jax.nn.silu(both[..., 0, :]) * both[..., 1, :], key, self.dropout))


class _LayerInputs(NamedTuple):
    """What a layer reads besides the features: angles f32[B, T, size / 2], the mask, where keys go, the source."""

    cos: Array
    sin: Array
    mask: Array
    slots: Array | None = None
    kept: Any = None
    memory: Any = None
    memory_mask: Array | None = None
    key: Array | None = None


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(graphdef: Any, params: PyTree, x: Array, given: _LayerInputs) -> tuple[Array, Any]:
    """One layer over x [B, T, D], and its cached keys and values with this call's written to the slots.

    Jitted by itself so that all layers, being alike, are traced and lowered once; XLA inlines it.
    """
    layer = nnx.merge(graphdef, params)
    keys = [None] * 4 if given.key is None else list(jax.random.split(given.key, 4))
    q, k, v = layer.attention.project(layer.attention_norm(x))
    q, k = rotate(q, given.cos, given.sin), rotate(k, given.cos, given.sin)
    kept = given.kept
    if given.slots is not None:
        kept = {"k": write_slots(kept["k"], given.slots, k), "v": write_slots(kept["v"], given.slots, v)}
        k, v = kept["k"], kept["v"]
    x = x + dropout(layer.attention.attend(q, k, v, given.mask), keys[0], layer.dropout)
    if layer.cross is not None:
        seen = layer.cross.attend(layer.cross_norm(x), given.memory, given.memory_mask)
        x = x + dropout(seen, keys[1], layer.dropout)
    return x + dropout(layer.mlp(layer.mlp_norm(x), keys[2]), keys[3], layer.dropout), kept


_rematerialised_layer = jax.checkpoint(_run_layer, static_argnums=0)


class Transformer(nnx.Module):
    """Token ids to hidden features; `readout` turns features into logits, `encode` a source into memory."""

    def __init__(self, config: TransformerConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        norm = functools.partial(nnx.RMSNorm, config.width, epsilon=config.norm_eps, **options)
        cross = config.encoder_layers > 0
        self.config = config
        self.embed = Embedding(config.vocab_size, config.width, **options)
        self.encoder = nnx.List([Layer(config, dtype, rngs=rngs) for _ in range(config.encoder_layers)])
        self.encoder_norm = norm() if cross else None
        self.layers = nnx.List([Layer(config, dtype, cross=cross, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = norm()
        classes = 0 if config.canvas is None else config.canvas.length_classes
        self.length_head = Linear(config.width, classes, dtype=dtype, use_bias=True, rngs=rngs) if classes else None
        self.head = None if config.tie_embeddings else Linear(config.width, config.vocab_size, dtype=dtype, rngs=rngs)

    def _angles(self, positions: Array) -> tuple[Array, Array]:
        angles = positions[..., None].astype(jnp.float32) * rope_frequencies(self.config)[None, None]
        return jnp.cos(angles), jnp.sin(angles)

    def encode(
        self, tokens: Array, lengths: Array, dropout_key: Array | None = None, view: View = View()
    ) -> dict[str, Any]:
        """The memory that the decoder's layers look at: `Cache.rows` of an encoder-decoder.

        Args:
          tokens: i32[B, M], sources.
          lengths: i32[B], at least 1.
          dropout_key: for training.
          view: its `remat` applies.
        """
        if self.encoder_norm is None:
            raise ValueError("encode: this Transformer has no encoder (encoder_layers=0)")
        batch, size = tokens.shape
        inside = jnp.arange(size)[None] < lengths[:, None]
        positions = jnp.broadcast_to(jnp.arange(size)[None], (batch, size))
        cos, sin = self._angles(positions)
        given = _LayerInputs(cos, sin, jnp.broadcast_to(inside[:, None], (batch, size, size)))
        keys = _layer_keys(dropout_key, len(self.encoder))
        run = _rematerialised_layer if view.remat else _run_layer
        x = dropout(self._placed(self.embed(tokens), positions), keys[-1], self.config.dropout)
        for layer, key in zip(self.encoder, keys, strict=False):
            x, _ = run(*nnx.split(layer), x, given._replace(key=key))
        x = self.encoder_norm(x)
        memories = [layer.cross.remember(x) for layer in self.layers if layer.cross is not None]
        rows = {"layers": memories, "mask": inside}
        if self.length_head is None or (self.config.canvas is not None and self.config.canvas.length_head == "gaps"):
            return rows
        mean = jnp.where(inside[:, :, None], x, 0).sum(axis=1) / lengths[:, None].astype(x.dtype)
        return rows | {"length_logits": self.length_head(mean).astype(jnp.float32)}

    def _placed(self, x: Array, positions: Array) -> Array:
        """Embeddings [B, T, D] that know where they stand, in models that fill canvases."""
        if self.config.canvas is None:
            return x
        return x + sinusoids(positions, self.config.width).astype(x.dtype)

    def __call__(self, inputs: Inputs, cache: Cache | None, view: View = View()) -> Features:
        """Runs the layers of `view`; a cache is read and written where `inputs.slots` says.

        A view that stops early returns its last layer's output without the final norm, since another
        view may go on from there.
        """
        if inputs.time is not None or inputs.features is not None:
            raise ValueError("Inputs.time and Inputs.features: this Transformer takes neither; leave them None")
        keys = _layer_keys(inputs.dropout_key, self.config.num_layers)
        x = self.embed(inputs.tokens) if inputs.embeds is None else inputs.embeds
        if view.start == 0:
            x = dropout(self._placed(x, inputs.positions), keys[-1], self.config.dropout)
        mask, slots, kept, key_positions = inputs.mask, inputs.slots, None, inputs.positions
        if slots is not None:
            if cache is None:
                raise ValueError("Inputs.slots are given, but there is no cache to write to")
            kept = list(cache.slots["layers"])
            key_positions = write_slots(cache.slots["positions"], slots, inputs.positions)
        if self.config.sliding_window is not None:
            distance = inputs.positions[:, :, None] - key_positions[:, None, :]
            mask = mask & (jnp.abs(distance) < self.config.sliding_window)
        given = _LayerInputs(*self._angles(inputs.positions), mask, slots)
        memory: list[Any] = [None] * self.config.num_layers
        if self.encoder_norm is not None:
            if cache is None or not cache.rows:
                raise ValueError("an encoder-decoder looks at a source: put encode's memory into Cache.rows")
            memory, given = cache.rows["layers"], given._replace(memory_mask=cache.rows["mask"])

        run, taps = _rematerialised_layer if view.remat else _run_layer, {}
        for i in view.layers(self.config.num_layers):
            given = given._replace(kept=None if kept is None else kept[i], memory=memory[i], key=keys[i])
            x, new = run(*nnx.split(self.layers[i]), x, given)
            if kept is not None:
                kept[i] = new
            taps[i] = x
        if cache is not None and kept is not None:
            cache = dataclasses.replace(cache, slots={"layers": kept, "positions": key_positions})
        if view.stop is None:
            x = self.norm(x)
        return Features(x, tuple(taps[i] for i in view.taps), cache)

    def gap_logits(self, hidden: Array) -> Array:
        """Features [..., D] of an outline to logits f32[..., C] of the gap before the next token."""
        assert self.length_head is not None  # of a model with this head
        return self.length_head(hidden).astype(jnp.float32)

    def readout(self, hidden: Array) -> Array:
        """Features [..., D] to logits f32[..., V]."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = self.embed.attend(rows) if self.head is None else self.head(rows)
        return logits.astype(jnp.float32).reshape(*hidden.shape[:-1], -1)


def _layer_keys(key: Array | None, layers: int) -> list[Array | None]:
    """A key for each layer, and one for the embedding behind them."""
    return [None] * (layers + 1) if key is None else list(jax.random.split(key, layers + 1))


def init_cache(config: TransformerConfig, batch: int, capacity: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache: per layer k, v [B, S, kv heads, size], and the position held by each slot i32[B, S]."""
    shape = (batch, capacity, config.num_kv_heads, config.head_size)
    layers = [{"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)} for _ in range(config.num_layers)]
    return Cache(slots={"layers": layers, "positions": jnp.zeros((batch, capacity), jnp.int32)})
