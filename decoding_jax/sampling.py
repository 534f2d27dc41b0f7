"""From logits to the next token: processors, filters and keyed noise.

The order is the same everywhere, and each stage sees what the one before left:

    1. logit_bias           added to the logits
    2. repetition_penalty   logits of tokens in prompt or output: divided if positive, multiplied if not
    3. presence_penalty     subtracted once from tokens of the output
    4. frequency_penalty    subtracted per occurrence in the output
    5. forbidden, min_new_tokens    to -inf
    6. temperature, 7. top_k, 8. top_p, 9. min_p    only where temperature > 0

Stages 1 to 5 are processors: greedy decoding and beam search obey them too. Stages 6 to 9 shape the law
that is drawn from; at temperature 0 the law is one-hot at the best processed logit (the lowest id of a tie).
Stages that are off change nothing, bit for bit, and cost nothing unless some row of the batch needs them.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.types import Array

Number = float | Sequence[float] | np.ndarray
TopK = Callable[[Array, int], tuple[Array, Array]]

# The settings that count the text before a token, and what turns them off.
HISTORY_OFF: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
}

# What a draw is for; part of its key, so that two uses of one position never share noise.
TARGET, ACCEPTANCE, RESIDUAL = range(3)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Each number is one for all rows, or one per row.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k most probable tokens (ties with the k-th too); 0, or V and more: all.
      top_p: keep the smallest set of most probable tokens with at least this mass (Holtzman et al.
        2020), of the law that top_k left; 1: all.
      min_p: drop tokens less probable than this times the most probable one (Nguyen et al. 2024); 0: none.
      repetition_penalty: 1 is off (Keskar et al. 2019). Counts the prompt.
      presence_penalty, frequency_penalty: 0 is off. Count the output only.
      min_new_tokens: before that many new tokens, no end-of-sequence and no stop id can be drawn.
      logit_bias: token id -> a finite number added to its logit.
      forbidden: ids that are never drawn.
    """

    temperature: Number = 0.0
    top_k: Number = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    min_new_tokens: Number = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    forbidden: Sequence[int] = ()


@struct.dataclass
class SamplingArrays:
    """The numbers of a checked Sampling, f32[B] and i32[B]."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    min_new_tokens: Array


@struct.dataclass
class TokenRules:
    """What a checked Sampling says of tokens, for all rows: bias f32[V], forbidden bool[V]."""

    bias: Array
    forbidden: Array


_RANGES = {  # name: (lowest, lowest allowed too, highest, dtype, how to turn it off)
    "temperature": (0.0, True, np.inf, np.float32, "0 is greedy"),
    "top_k": (0, True, np.inf, np.int32, "0 keeps all tokens"),
    "top_p": (0.0, False, 1.0, np.float32, "1 keeps all tokens"),
    "min_p": (0.0, True, 1.0, np.float32, "0 keeps all tokens"),
    "repetition_penalty": (0.0, False, np.inf, np.float32, "1 is off"),
    "presence_penalty": (-np.inf, False, np.inf, np.float32, "0 is off"),
    "frequency_penalty": (-np.inf, False, np.inf, np.float32, "0 is off"),
    "min_new_tokens": (0, True, np.inf, np.int32, "0 is off"),
}


def _per_row(name: str, value: Number, batch: int) -> np.ndarray:
    low, closed, high, dtype, off = _RANGES[name]
    whole = np.issubdtype(dtype, np.integer)
    try:
        exact = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"sampling.{name}={value!r} is not a number or a sequence of numbers") from None
    if exact.shape not in ((), (batch,)):
        raise ValueError(f"sampling.{name} has shape {exact.shape}; give one number, or one for each of {batch} rows")
    # The range holds for the value that is used: 1e-50 is above 0, but not in float32.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        used = np.minimum(exact, np.iinfo(np.int32).max) if whole else exact.astype(np.float32)
    tiny = np.finfo(np.float32).tiny  # devices may flush what is smaller
    used = np.where(np.abs(used) < tiny, 0, used)
    within = np.isfinite(exact) & np.isfinite(used) & (used >= low if closed else used > low) & (used <= high)
    if whole:
        within &= exact == np.floor(exact)
    if not within.all():
        wrong = exact[~within].flat[0] if exact.ndim else exact.item()
        kind = "a whole number" if whole else "a finite number"
        lowest = "" if low == -np.inf else f" {'of at least' if closed else 'above'} {low:g}"
        highest = "" if high == np.inf else f" and at most {high:g}"
        raise ValueError(f"sampling.{name}={wrong:g}: must be {kind}{lowest}{highest} ({off})")
    return np.broadcast_to(used.astype(dtype), (batch,))


def _ids(name: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids checked against the vocabulary."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(f"{name}={ids!r}: give a list of token ids")
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
            raise ValueError(f"{name}: {i!r} is not a token id; ids are whole numbers from 0 to {vocab_size - 1}")
    return [int(i) for i in ids]


def id_mask(name: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Token ids as bool[V], checked; ValueError names `name` and the id."""
    mask = np.zeros((vocab_size,), bool)
    mask[_ids(name, ids, vocab_size)] = True
    return mask


def sampling_arrays(
    sampling: Sampling, batch: int, vocab_size: int, ends: np.ndarray
) -> tuple[SamplingArrays, TokenRules]:
    """Checks a Sampling and lays it out per row and per token (numpy).

    Args:
      sampling: the settings.
      batch: B.
      vocab_size: V.
      ends: bool[V], ids that end a row (they are forbidden below min_new_tokens).

    Raises:
      ValueError: a setting is out of range, NaN or of the wrong length, an id does not exist, or nothing
        is left to draw.
    """
    rows: dict[str, Any] = {name: _per_row(name, getattr(sampling, name), batch) for name in _RANGES}
    if not isinstance(sampling.logit_bias, Mapping):
        raise ValueError(f"sampling.logit_bias={sampling.logit_bias!r}: give a dict of token id to number")
    bias: Any = np.zeros((vocab_size,), np.float32)
    for token, value in sampling.logit_bias.items():
        if not isinstance(value, numbers.Real) or not abs(value) <= float(np.finfo(np.float32).max):
            raise ValueError(
                f"sampling.logit_bias[{token}]={value!r}: must be a finite number; use forbidden to rule an id out"
            )
        bias[_ids("sampling.logit_bias", [token], vocab_size)] = value
    forbidden: Any = id_mask("sampling.forbidden", sampling.forbidden, vocab_size)
    if (forbidden | (ends & bool((rows["min_new_tokens"] > 0).any()))).all():
        raise ValueError("sampling.forbidden: no token is left to draw; allow at least one id that does not end a row")
    return SamplingArrays(**rows), TokenRules(bias, forbidden)


def process_logits(
    sampling: SamplingArrays,
    rules: TokenRules,
    logits: Array,
    tokens: Array,
    prompt_length: Array,
    length: Array,
    ends: Array,
) -> Array:
    """Stages 1 to 5. The history is read off the token buffer, so it is the accepted prefix and nothing else.

    Args:
      sampling, rules: the settings.
      logits: f32[B, V].
      tokens: i32[B, N], prompt then output.
      prompt_length, length: i32[B], where the prompt ends and where the output ends so far.
      ends: bool[V], ids that end a row.

    Returns:
      f32[B, V], -inf where a token may not be drawn.
    """
    logits = logits + rules.bias[None]
    repeat = sampling.repetition_penalty[:, None]
    presence, frequency = sampling.presence_penalty[:, None], sampling.frequency_penalty[:, None]

    def penalise(logits: Array) -> Array:
        at = jnp.arange(tokens.shape[1])[None]
        new = (at >= prompt_length[:, None]) & (at < length[:, None])
        tally = jax.vmap(lambda row, ids, weight: row.at[ids].add(weight, mode="drop"))
        zeros = jnp.zeros(logits.shape, jnp.int32)
        counts = tally(zeros, tokens, new.astype(jnp.int32))
        seen = tally(zeros, tokens, (at < length[:, None]).astype(jnp.int32)) > 0
        repeated = jnp.where(logits > 0, logits / repeat, logits * repeat)
        logits = jnp.where(seen & (repeat != 1.0), repeated, logits)
        return logits - jnp.where(counts > 0, presence, 0.0) - counts.astype(jnp.float32) * frequency

    needed = (repeat != 1.0).any() | (presence != 0.0).any() | (frequency != 0.0).any()
    logits = jax.lax.cond(needed, penalise, lambda x: x, logits)
    early = length - prompt_length < sampling.min_new_tokens
    return jnp.where(rules.forbidden[None] | (early[:, None] & ends[None]), -jnp.inf, logits)


def _ordered(values: Array) -> Array:
    """int32 keys in the order of f32 values (the sign's bit pattern turned round)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.int32)  # -0.0 is 0.0
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _keep_top(values: Array, weights: Array, mass: Array) -> Array:
    """The smallest set {v : v >= t} whose weights reach `mass`: bool[B, V].

    Bisection over the 32 bits of the threshold instead of a sort of V (25 times faster at V = 49k).

    Args:
      values: f32[B, V] that order the tokens.
      weights: f32[B, V], not negative.
      mass: f32[B]; where even all weights do not reach it, everything is kept.
    """
    keys = _ordered(values)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # low is reached, high is not
        middle = (low & high) + ((low ^ high) >> 1)
        reached = jnp.where(keys >= middle[:, None], weights, 0.0).sum(axis=-1) >= mass
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    lowest = jnp.full(mass.shape, jnp.iinfo(jnp.int32).min)
    highest = jnp.full(mass.shape, jnp.iinfo(jnp.int32).max)
    threshold, _ = jax.lax.fori_loop(0, 32, halve, (lowest, highest))
    return keys >= threshold[:, None]


def filter_logits(sampling: SamplingArrays, logits: Array) -> Array:
    """Stages 6 to 9: the log of the law that is drawn from, up to a constant per row.

    Args:
      sampling: settings of the rows.
      logits: processed, f32[B, V].

    Returns:
      f32[B, V], -inf for dropped tokens; at temperature 0 all but the best are dropped.
    """
    greedy = sampling.temperature <= 0.0
    vocab_size = logits.shape[-1]
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    # The best logit becomes 0 first, so that no temperature, however small, overflows.
    scaled = logits - logits.max(axis=-1, keepdims=True)
    scaled = scaled / jnp.where(greedy, 1.0, sampling.temperature)[:, None]

    def when(needed: Array, keep: Array, logits: Array) -> Array:
        return jnp.where(~needed[:, None] | keep, logits, -jnp.inf)

    def by_count(logits: Array) -> Array:
        keep = _keep_top(logits, jnp.ones_like(logits), top_k.astype(jnp.float32))
        return when(use_k, keep, logits)

    def by_mass(logits: Array) -> Array:
        return when(use_p, _keep_top(logits, jax.nn.softmax(logits), top_p), logits)

    def by_ratio(logits: Array) -> Array:
        least = logits.max(axis=-1) + jnp.log(jnp.where(use_m, min_p, 1.0))
        return when(use_m, logits >= least[:, None], logits)

    use_k = ~greedy & (top_k > 0) & (top_k < vocab_size)
    use_p = ~greedy & (top_p < 1.0)
    use_m = ~greedy & (min_p > 0.0)
    for needed, stage in ((use_k, by_count), (use_p, by_mass), (use_m, by_ratio)):
        scaled = jax.lax.cond(needed.any(), stage, lambda x: x, scaled)
    best = jnp.arange(vocab_size)[None] == jnp.argmax(logits, axis=-1)[:, None]
    return jnp.where(greedy[:, None], jnp.where(best, 0.0, -jnp.inf), scaled)


def noise_key(
    seed: Array, row: Array, position: Array, purpose: int = TARGET, candidate: Array | int = 0, step: Array | int = 0
) -> Array:
    """The key of one draw: (seed, row id, candidate, position in the row, purpose, step) and nothing else.

    The step counts where a place is drawn more than once, as canvas methods do; elsewhere it is 0.
    So what a row draws does not depend on its batch mates, on padding, on devices or on how many drafts
    were tried. The generator is named, since the default one can be changed globally.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    for part in (row, candidate, position, purpose, step):
        key = jax.random.fold_in(key, part)
    return key


def position_noise(
    seed: Array,
    rows: Array,
    positions: Array,
    vocab_size: int,
    purpose: int = TARGET,
    candidates: Array | None = None,
    steps: Array | None = None,
) -> Array:
    """Gumbel noise f32[B, V] of a draw, for row ids i32[B] at positions i32[B], of candidates and steps i32[B].

    -log of an exponential variable. All 32 random bits go where draws are decided, into its smallest values (the right
    tail, up to 22.9), so that a token's probability is exact to 2**-32. jax.random.gumbel(mode="low") has 23 bits and
    coarse tails, and mode="high" takes twice as long.
    """

    def one(row: Array, position: Array, candidate: Array, step: Array) -> Array:
        key = noise_key(seed, row, position, purpose, candidate, step)
        bits = jax.random.bits(key, (vocab_size,), jnp.uint32)
        uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
        return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))

    zeros = jnp.zeros_like(rows)
    parts = (zeros if part is None else part for part in (candidates, steps))
    return jax.vmap(one)(rows, positions, *parts)


def _best(values: Array) -> Array:
    """argmax over the last axis of values f32[B, V] that are made of noise: i32[B], the lowest index of a tie.

    Two plain reductions, since XLA's CPU backend makes the noise inside of an argmax, without vector instructions and
    several times slower. A row of NaN gives the last index, which is a token too.
    """
    index = jnp.arange(values.shape[-1], dtype=jnp.int32)[None]
    at_best = jnp.where(values == values.max(axis=-1, keepdims=True), index, values.shape[-1] - 1)
    return at_best.min(axis=-1)


def draw(
    sampling: SamplingArrays,
    seed: Array,
    rows: Array,
    positions: Array,
    logits: Array,
    candidates: Array | None = None,
    steps: Array | None = None,
) -> Array:
    """Draws each row's token at its position: argmax of log p + noise (Gumbel-max), argmax where greedy.

    Args:
      sampling: settings of the rows.
      seed: u32[].
      rows, positions: i32[B], row ids and the positions that are filled.
      logits: processed, f32[B, V].
      candidates, steps: i32[B], what else keys the noise where a row has several candidates, or draws a place again.

    Returns:
      i32[B].
    """

    def sample(logits: Array) -> Array:
        noise = position_noise(seed, rows, positions, logits.shape[-1], candidates=candidates, steps=steps)
        return _best(filter_logits(sampling, logits) + noise)

    greedy_for_all = (sampling.temperature <= 0.0).all()
    return jax.lax.cond(greedy_for_all, lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32), sample, logits)


def draw_siblings(
    sampling: SamplingArrays, seed: Array, rows: Array, positions: Array, logits: Array, count: int, top_k: TopK
) -> tuple[Array, Array, Array]:
    """Draws several different tokens for one place: the children of a node of a draft tree.

    They are the best of log q + noise (Gumbel-top-k, Kool et al. 2019), so they are drawn without replacement, and
    the noise is that of the target's own draw there: a draft of the target's law proposes the target's token first.
    At temperature 0 they are the best tokens of the draft.

    Args:
      sampling: settings of the rows.
      seed: u32[].
      rows, positions: i32[B], row ids and the positions that are filled.
      logits: the draft's, processed, f32[B, V].
      count: how many, at most V.
      top_k: finds the best of f32[B, V].

    Returns:
      Tokens i32[B, count]; which of them the law can give, bool[B, count]; and the log of the law up to a constant
      per row, f32[B, V], which means something only where some row's temperature is above 0.
    """

    def sample(logits: Array) -> tuple[Array, Array]:
        law = filter_logits(sampling, logits)
        noise = position_noise(seed, rows, positions, logits.shape[-1])
        greedy = (sampling.temperature <= 0.0)[:, None]
        return jnp.where(greedy, logits, law + noise), law

    greedy_for_all = (sampling.temperature <= 0.0).all()
    ranked, law = jax.lax.cond(greedy_for_all, lambda logits: (logits, logits), sample, logits)
    if count == 1:
        tokens = jnp.argmax(ranked, axis=-1)[:, None]
        values = jnp.take_along_axis(ranked, tokens, axis=1)
    else:
        values, tokens = top_k(ranked, count)
    return tokens.astype(jnp.int32), values > -jnp.inf, law


def acceptance_uniforms(seed: Array, rows: Array, positions: Array, count: int) -> Array:
    """Uniforms f32[B, count] in [0, 1), one for each sibling that may be tried at a position; used nowhere else."""

    def one(row: Array, position: Array) -> Array:
        return jax.random.uniform(noise_key(seed, row, position, ACCEPTANCE), (count,), jnp.float32)

    return jax.vmap(one)(rows, positions)


def draw_residual(sampling: SamplingArrays, seed: Array, rows: Array, positions: Array, law: Array) -> Array:
    """Draws i32[B] from what a rejection left of the law f32[B, V], with noise that no other draw has used.

    Tokens of probability 0 are never drawn. At temperature 0 the law is one-hot.
    """
    noise = position_noise(seed, rows, positions, law.shape[-1], RESIDUAL)
    noise = jnp.where((sampling.temperature <= 0.0)[:, None], 0.0, noise)
    return _best(jnp.log(law) + noise)
