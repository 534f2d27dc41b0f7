"""The test zoo: toy models whose laws are known exactly, test-only drafters, and plain numpy references.

Every toy comes with `logits_of(prefix)`, the same law written for one prefix in numpy, so that a test never
has to believe the library about what the right answer is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import decoding_jax as dj
from decoding_jax.decoders.prefix import Accepted, Draft, Prefix, PrefixState
from decoding_jax.loop import ALL_STEPS, run, start
from decoding_jax.masks import causal_mask
from decoding_jax.models.functional import abstract_transformer, init_transformer, transformer_model
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.prepare import prepare
from decoding_jax.rows import Context, Rows, commit, next_token
from decoding_jax.types import Array, Cache, Features, Inputs, Model, PyTree

LogitsOf = Callable[[Sequence[int]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Toy:
    """A model and its law: `logits_of(prefix)` gives f32[V] for a whole row's tokens so far.

    Of an encoder-decoder `logits_of(source, prefix)`, where the prefix begins with `start_id`.
    """

    model: Model
    logits_of: Callable[..., np.ndarray]

    def with_eos(self, *eos_ids: int) -> Model:
        return dataclasses.replace(self.model, eos_ids=eos_ids)

    def row(self, prompt: Sequence[int]) -> tuple[LogitsOf, list[int]]:
        """The law of a prompt's row, and the tokens that its output follows."""
        if self.model.start_id is None:
            return self.logits_of, list(prompt)
        return functools.partial(self.logits_of, prompt), [self.model.start_id]


# ---------------------------------------------------------------------- models
# Functions of this module, so that two toys of equal shape share their compiled programs.


def _bigram_apply(params: PyTree, inputs: Inputs, cache: Any) -> Features:
    return Features(params[inputs.tokens], (), cache)


def bigram(vocab: int, seed: int = 0, eos_ids: tuple[int, ...] = (), scale: float = 1.5) -> Toy:
    """A table f32[V, V]: the law depends on the last token. No cache."""
    table = np.random.default_rng(seed).normal(size=(vocab, vocab)).astype(np.float32) * np.float32(scale)
    return table_model(table, eos_ids)


def table_model(table: np.ndarray, eos_ids: tuple[int, ...] = (), tokenizer: Any = None) -> Toy:
    """A bigram model with a given table of logits f32[V, V]."""
    table = np.asarray(table, np.float32)
    model = Model(_bigram_apply, jnp.asarray(table), len(table), eos_ids=eos_ids, tokenizer=tokenizer)
    return Toy(model, lambda prefix: table[prefix[-1]])


def _token_cache(batch: int, capacity: int) -> Cache:
    """Slots hold tokens and positions, with contents that no token or position has until they are written."""
    empty = jnp.full((batch, capacity), 10**6, jnp.int32)
    return Cache(slots={"tokens": empty, "positions": empty})


def _seen(inputs: Inputs, cache: Any) -> tuple[Array, Array, Any]:
    """Tokens and positions i32[B, 1, S] of the slots (of this call where nothing is kept), and the cache."""
    tokens, positions = inputs.tokens, inputs.positions
    if inputs.slots is not None:
        put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
        tokens = put(cache.slots["tokens"], inputs.slots, tokens)
        positions = put(cache.slots["positions"], inputs.slots, positions)
        cache = cache.replace(slots={"tokens": tokens, "positions": positions})
    return tokens[:, None], positions[:, None], cache


def _row_of_table(params: PyTree, hidden: Array) -> Array:
    """Readout of the cached toys: their feature is the number of a row of the table f32[R, V]."""
    return params[hidden[..., 0].astype(jnp.int32)]


def _trigram_apply(params: PyTree, inputs: Inputs, cache: Any) -> Features:
    tokens, positions, cache = _seen(inputs, cache)
    vocab = params.shape[1]
    at = inputs.positions[:, :, None]

    def attend(distance: int) -> Array:
        """One more than the token that stands `distance` back, as the mask shows it; 0 where none does."""
        found = inputs.mask & (positions == at - distance)
        return jnp.where(found, tokens + 1, 0).sum(axis=2) % (vocab + 1)

    index = attend(1) * (vocab + 1) + attend(0)
    return Features(index.astype(jnp.float32)[..., None], (), cache)


def trigram_cached(vocab: int, seed: int = 0, eos_ids: tuple[int, ...] = (), scale: float = 1.5) -> Toy:
    """The law depends on the last two tokens, which are looked up by position in a real cache.

    A slot that was not written, a position that is shown twice and a mask that hides one all change it.
    """
    table = np.random.default_rng(seed).normal(size=((vocab + 1) ** 2, vocab)).astype(np.float32)
    table *= np.float32(scale)

    def logits_of(prefix: Sequence[int]) -> np.ndarray:
        before = prefix[-2] + 1 if len(prefix) > 1 else 0
        return table[before * (vocab + 1) + prefix[-1] + 1]

    model = Model(_trigram_apply, jnp.asarray(table), vocab, _token_cache, _row_of_table, eos_ids=eos_ids)
    return Toy(model, logits_of)


def _mixed(x: Any) -> Any:
    """A mixing of u32 that numpy and jax compute alike."""
    u32 = jnp.uint32 if isinstance(x, jax.Array) else np.uint32
    x = (x ^ (x >> u32(15))) * u32(0x2C1B3C6D)
    x = (x ^ (x >> u32(12))) * u32(0x297A2D39)
    return x ^ (x >> u32(15))


def _token_hash(tokens: Any, positions: Any) -> Any:
    u32 = jnp.uint32 if isinstance(tokens, jax.Array) else np.uint32
    return _mixed(tokens.astype(u32) * u32(0x9E3779B1) + positions.astype(u32) * u32(0x85EBCA77) + u32(1))


def _history_apply(params: PyTree, inputs: Inputs, cache: Any) -> Features:
    tokens, positions, cache = _seen(inputs, cache)
    total = jnp.where(inputs.mask, _token_hash(tokens, positions), jnp.uint32(0)).sum(axis=2, dtype=jnp.uint32)
    if cache is not None and cache.rows:  # of an encoder-decoder
        total = total + cache.rows["source"][:, None]
    index = _mixed(total) % jnp.uint32(params.shape[0])
    return Features(index.astype(jnp.float32)[..., None], (), cache)


def history_cached(
    vocab: int, seed: int = 0, eos_ids: tuple[int, ...] = (), scale: float = 1.5, tokenizer: Any = None
) -> Toy:
    """The law depends on a hash of every visible token and its position, so any wrong visible slot shows.

    Integers add up alike in any order: whatever the batch or the layout, the law is the same bit for bit.
    """
    table = np.random.default_rng(seed).normal(size=(1021, vocab)).astype(np.float32) * np.float32(scale)

    def logits_of(prefix: Sequence[int]) -> np.ndarray:
        hashes = _token_hash(np.asarray(prefix), np.arange(len(prefix)))
        return table[int(_mixed(hashes.sum(dtype=np.uint32, keepdims=True))[0]) % len(table)]

    model = Model(
        _history_apply,
        jnp.asarray(table),
        vocab,
        _token_cache,
        _row_of_table,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
    )
    return Toy(model, logits_of)


def _hash_sources(params: PyTree, sources: Array, lengths: Array) -> PyTree:
    """A hash u32[B] of each source's tokens and their places; mixed, or the source would count like output."""
    del params
    at = jnp.arange(sources.shape[1])[None]
    hashes = jnp.where(at < lengths[:, None], _token_hash(sources, at), jnp.uint32(0))
    return {"source": _mixed(hashes.sum(axis=1, dtype=jnp.uint32))}


def history_translator(vocab: int, seed: int = 0, start_id: int = 0, tokenizer: Any = None) -> Toy:
    """An encoder-decoder whose law depends on a hash of its source and of every visible token, exactly too.

    A wrong row of memory, a token of padding in it or a wrong visible slot shows.
    """
    decoder = history_cached(vocab, seed)
    table = np.asarray(decoder.model.params)

    def logits_of(source: Sequence[int], prefix: Sequence[int]) -> np.ndarray:
        encoded, decoded = (
            _token_hash(np.asarray(tokens), np.arange(len(tokens))).sum(dtype=np.uint32, keepdims=True)
            for tokens in (source, prefix)
        )
        return table[int(_mixed(_mixed(encoded) + decoded)[0]) % len(table)]

    model = dataclasses.replace(decoder.model, encode=_hash_sources, start_id=start_id, tokenizer=tokenizer)
    return Toy(model, logits_of)


SMALL = TransformerConfig(
    vocab_size=64,
    num_layers=2,
    width=32,
    mlp_width=48,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_length=512,
)


@functools.cache
def small_transformer(seed: int = 0) -> Model:
    """A random 2-layer Transformer with a vocabulary of 64; its tests compare up to rounding."""
    return init_transformer(SMALL, seed)


@functools.cache
def small_translator(seed: int = 0, **fields: Any) -> Model:
    """A random encoder-decoder of two layers on each side; `fields` are its config's.

    Its params are larger than a new model's, so that the source decides what comes out, and none is 0 or 1.
    """
    sizes = {"width": 16, "mlp_width": 24, "encoder_layers": 2, "start_id": 1}
    config = dataclasses.replace(SMALL, **sizes | fields)
    draw = np.random.default_rng(seed).normal

    def leaf(x: Any) -> Array:
        values = draw(size=x.shape) * 2 / np.sqrt(x.shape[0]) if x.ndim > 1 else draw(1.0, 0.3, x.shape)
        return jnp.asarray(values, x.dtype)

    return transformer_model(config, jax.tree.map(leaf, abstract_transformer(config)[1]))


# ---------------------------------------------------------------------- a tokenizer
class ByteTokenizer:
    """Ids that stand for given bytes; what is b"" is a special token, named <0>, <1>, ..."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self.token_bytes = list(token_bytes)
        self.special_ids = {f"<{i}>": i for i, piece in enumerate(token_bytes) if not piece}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The longest piece first."""
        del add_special_tokens
        data, ids = text.encode(), []
        while data:
            fits = [i for i, piece in enumerate(self.token_bytes) if piece and data.startswith(piece)]
            ids.append(max(fits, key=lambda i: len(self.token_bytes[i])))
            data = data[len(self.token_bytes[ids[-1]]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", errors="replace")


# ---------------------------------------------------------------------- drafters
def rollout(ctx: Context, state: PrefixState, steps: int, capacity: int) -> Array:
    """The target's own next tokens i32[B, steps], drawn one by one on a copy of the rows and the cache."""

    def one(carry: tuple[Rows, Any], _: None) -> tuple[tuple[Rows, Any], Array]:
        rows, cache = carry
        at = rows.length[:, None] - 1
        out = ctx.apply(Inputs(rows.last, at, causal_mask(at, capacity), slots=at), cache)
        tokens = next_token(ctx, rows, ctx.readout(out.hidden)[:, 0])
        return (commit(ctx, rows, tokens, jnp.zeros(tokens.shape), ~rows.done), out.cache), tokens

    return jax.lax.scan(one, (state.rows, state.cache), None, length=steps)[1].T


@struct.dataclass
class Oracle(Prefix):
    """Proposes exactly what the target is about to draw, plus `shift`: with 1 it is always wrong."""

    num_draft: int = struct.field(pytree_node=False, default=4)
    shift: int | Array = 0  # a leaf, so that the oracle and its opposite share a program

    @property
    def num_nodes(self) -> int:
        return self.num_draft

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        size = state.rows.tokens.shape[1] + self.num_nodes
        tokens = (rollout(ctx, state, self.num_draft, size) + self.shift) % ctx.model.vocab_size
        return Draft(tokens, jnp.ones(tokens.shape, bool), depth=self.num_draft), state


Hostile = functools.partial(Oracle, shift=1)


@struct.dataclass
class Observed:
    """What TreeLookup saw, i32[B]: tokens emitted, and wrong entries of the cache and of `result`."""

    emitted: Array
    wrong_cache: Array
    wrong_hidden: Array


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree of proposals.

    Attributes:
      parents: as in Draft: 0 is the last committed token, i + 1 is proposal i.
      right: the proposals on the path that the target will take.
    """

    parents: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def depths(self) -> np.ndarray:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == 0 else depths[parent - 1] + 1)
        return np.array(depths)

    @property
    def shifts(self) -> np.ndarray:
        """What is added to the right token of a node's depth: 0 on the right path, siblings differ."""
        shifts = []
        for node, parent in enumerate(self.parents):
            wrong = [i for i in range(node) if self.parents[i] == parent and i not in self.right]
            shifts.append(0 if node in self.right else 1 + len(wrong))
        return np.array(shifts)


# The right path runs through slots that are not neighbours, behind and between wrong siblings.
SCATTERED = Tree(parents=(0, 0, 2, 1, 2, 5, 0), right=(1, 4, 5))
# As large and as deep, with the right path first and its wrong siblings behind.
STRAIGHT = Tree(parents=(0, 1, 2, 0, 1, 2, 0), right=(0, 1, 2))


@struct.dataclass
class TreeLookup(Prefix):
    """Proposes a tree that holds the target's next tokens up to a depth that a hash of the prefix picks.

    Rounds thus accept nothing, a part or everything, rows differ, and some rounds propose fewer nodes.

    Attributes:
      trees: equal in size and depth; a row's prompt length picks one.
      compare: whether `observe` compares every round with a fresh pass over the whole row without a cache.
    """

    trees: tuple[Tree, ...] = struct.field(pytree_node=False, default=(SCATTERED,))
    compare: bool = struct.field(pytree_node=False, default=True)

    @property
    def num_nodes(self) -> int:
        return len(self.trees[0].parents)

    def begin(self, ctx: Context) -> PyTree:
        zeros = jnp.zeros_like(ctx.prompt_lengths)
        return Observed(zeros, zeros, zeros)

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        size = state.rows.tokens.shape[1]
        depth = int(self.trees[0].depths.max())
        vocab = ctx.model.vocab_size
        own = rollout(ctx, state, depth, size + self.num_nodes)
        which = ctx.prompt_lengths % len(self.trees)
        pick = lambda name: jnp.asarray(np.stack([getattr(t, name) for t in self.trees]), jnp.int32)[which]
        depths, shifts = pick("depths"), pick("shifts")
        # Only tokens of the prefix decide what is proposed.
        at = jnp.arange(size)[None]
        hashes = _token_hash(state.rows.tokens, at) * (at < state.rows.length[:, None]).astype(jnp.uint32)
        mixed = _mixed(hashes.sum(axis=1, dtype=jnp.uint32))[:, None]
        breaks = (mixed % jnp.uint32(depth + 1)).astype(jnp.int32) + 1  # the depth that goes wrong; depth + 1: none
        fewer = (mixed >> jnp.uint32(8)) % jnp.uint32(4)
        count = jnp.where(fewer == 0, 0, jnp.where(fewer == 1, self.num_nodes // 2, self.num_nodes))
        shifts = jnp.where((shifts == 0) & (depths >= breaks), vocab - 1, shifts)
        tokens = (jnp.take_along_axis(own, depths - 1, axis=1) + shifts) % vocab
        verifiable = jnp.arange(self.num_nodes)[None] < count
        parents = jnp.asarray(self.trees[0].parents) if len(self.trees) == 1 else pick("parents")
        return Draft(tokens, verifiable, parents, depth=depth), state

    def observe(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> PyTree:
        carry = state.carry.replace(emitted=state.carry.emitted + result.emitted)
        return self._compared(ctx, state.replace(carry=carry), draft, result) if self.compare else carry

    def _compared(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> PyTree:
        rows = state.rows
        batch, size = rows.tokens.shape
        at = jnp.broadcast_to(jnp.arange(size), (batch, size))
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
        fresh = ctx.apply(Inputs(rows.tokens, at, causal), Cache(slots=(), rows=state.cache.rows)).hidden
        new = jnp.arange(draft.depth + 1)[None]
        source = (rows.length - result.emitted)[:, None] + new - 1  # the last token that each new one was drawn from
        expected = jax.vmap(lambda row, i: row.at[i].get(mode="clip"))(fresh, source)
        # The toys' features are whole numbers; a Transformer's agree up to rounding.
        differ = (jnp.abs(expected - result.hidden) > 1e-3).any(axis=2) & (new < result.emitted[:, None])
        wrong_cache = jnp.zeros_like(rows.length)
        if isinstance(state.cache.slots, dict) and "tokens" in state.cache.slots:
            held = at < rows.length[:, None] - 1
            same = (state.cache.slots["tokens"][:, :size] == rows.tokens) & (
                state.cache.slots["positions"][:, :size] == at
            )
            wrong_cache = (held & ~same & (result.emitted > 0)[:, None]).sum(axis=1, dtype=jnp.int32)
        carry = state.carry
        return Observed(
            carry.emitted,
            carry.wrong_cache + wrong_cache,
            carry.wrong_hidden + differ.sum(axis=1, dtype=jnp.int32),
        )


def final_state(
    model: Model,
    prompts: Any,
    decoder: Any,
    *,
    max_new_tokens: int = 8,
    sampling: dj.Sampling = dj.Sampling(),
    stop: dj.Stop = dj.Stop(),
    seed: int = 0,
    drafter: Model | None = None,
) -> tuple[Context, Any]:
    """The context and the last state of a decode, where a test looks at what `decode` does not return."""
    call = prepare(model, prompts, max_new_tokens, sampling, stop, seed, None, None, drafter=drafter)
    return call.ctx, run(decoder, call.ctx, start(decoder, call.ctx), jnp.int32(ALL_STEPS))


# ---------------------------------------------------------------------- plain references
def law_of_next(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    settings: Mapping[str, Any],
    ends: Sequence[int] = (),
) -> np.ndarray:
    """The law f64[V] of the next token under Sampling's documented stages, one after the other."""
    get = dj.Sampling(**settings)
    x = np.asarray(logits, np.float64).copy()
    vocab = len(x)
    for token, value in get.logit_bias.items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / get.repetition_penalty if x[token] > 0 else x[token] * get.repetition_penalty
    for token in set(output):
        x[token] -= get.presence_penalty
    for token in output:
        x[token] -= get.frequency_penalty
    x[list(get.forbidden)] = -np.inf
    if len(output) < get.min_new_tokens:
        x[list(ends)] = -np.inf
    if get.temperature == 0:
        return np.eye(vocab)[int(np.argmax(x))]
    p = np.exp((x - x.max()) / get.temperature)
    p /= p.sum()
    if 0 < get.top_k < vocab:
        p[p < np.sort(p)[-int(get.top_k)]] = 0.0
        p /= p.sum()
    if get.top_p < 1:
        falling = np.sort(p)[::-1]
        last = int(np.argmax(np.cumsum(falling) >= get.top_p))
        p[p < falling[last]] = 0.0
        p /= p.sum()
    p[p < get.min_p * p.max()] = 0.0
    return p / p.sum()


def law_of_output(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    horizon: int,
    settings: Mapping[str, Any],
    ends: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
    """The probability of every output of at most `horizon` tokens, those that end early included."""
    law: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], probability: float) -> None:
        if len(output) == horizon or (output and output[-1] in ends):
            law[output] = probability
            return
        p = law_of_next(logits_of([*prompt, *output]), prompt, output, settings, ends)
        for token in np.flatnonzero(p):
            grow((*output, int(token)), probability * p[token])

    grow((), 1.0)
    return law


def greedy(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    budget: int,
    settings: Mapping[str, Any] | None = None,
    ends: Sequence[int] = (),
) -> list[int]:
    """The greedy continuation, token by token."""
    output: list[int] = []
    while len(output) < budget and not (output and output[-1] in ends):
        p = law_of_next(logits_of([*prompt, *output]), prompt, output, dict(settings or {}), ends)
        output.append(int(np.argmax(p)))
    return output


def log_prob(logits_of: LogitsOf, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The model's own log-probability of each output token, f64[len(output)]."""
    values = []
    for at, token in enumerate(output):
        x = np.asarray(logits_of([*prompt, *output[:at]]), np.float64)
        values.append(x[token] - x.max() - np.log(np.exp(x - x.max()).sum()))
    return np.array(values)


def all_outputs(vocab: int, horizon: int, ends: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Every output of at most `horizon` tokens: full ones, and those that an end cuts short."""
    found = set()
    for full in itertools.product(range(vocab), repeat=horizon):
        first = next((i for i, token in enumerate(full) if token in ends), horizon - 1)
        found.add(full[: first + 1])
    return sorted(found)


def outputs(out: dj.DecodeOutput) -> list[list[int]]:
    """The tokens of each row, without padding."""
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
