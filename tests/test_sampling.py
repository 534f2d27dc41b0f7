"""Processors, filters and noise against plain numpy, and the values that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import zoo

import decoding_jax as dj
from decoding_jax.sampling import SamplingArrays, draw, filter_logits, position_noise, process_logits, sampling_arrays

V = 8
BATCH = 6
filtered = jax.jit(filter_logits)
processed = jax.jit(process_logits)
drawn = jax.jit(draw)


def both(batch: int, ends: tuple[int, ...], settings: dict[str, Any]) -> Any:
    """SamplingArrays and TokenRules on the device."""
    mask = np.zeros(V, bool)
    mask[list(ends)] = True
    return jax.device_put(sampling_arrays(dj.Sampling(**settings), batch, V, mask))


def arrays(batch: int = BATCH, **settings: Any) -> SamplingArrays:
    return both(batch, (), settings)[0]


def law(filtered_logits: Any) -> np.ndarray:
    x = np.asarray(filtered_logits, np.float64)
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


RANDOM = np.random.default_rng(0).normal(size=(BATCH, V)).astype(np.float32) * 2
TIED = np.array([[1, 1, 1, 1, 0, 0, 0, 0]] * BATCH, np.float32)
FLAT = np.zeros((BATCH, V), np.float32)
HOLES = np.where(np.arange(V) % 3 == 1, -np.inf, RANDOM).astype(np.float32)
ONE = np.where(np.arange(V) == 5, RANDOM, -np.inf).astype(np.float32)
SIGNED = np.array([[-1e4, -3.0, -1e-20, 1e-20, 2.0, 2.0, 1e4, 1e4]] * BATCH, np.float32)
# With the settings of "order" below, every other order of the four stages (but top_k first) gives another law.
ORDER = np.array([[0.0, -1.2, 1.5, -0.9, 0.3, 0.2, -0.9, -0.9]] * BATCH, np.float32)
LOGITS = {"order": ORDER, "random": RANDOM, "tied": TIED, "flat": FLAT, "holes": HOLES, "one": ONE, "signed": SIGNED}

FILTERS: dict[str, dict[str, Any]] = {
    "order": {"temperature": 2.0, "top_k": 6, "top_p": 0.6, "min_p": 0.4},
    "temperature": {"temperature": [0.0, 0.1, 0.5, 1.0, 3.0, 50.0]},
    "top_k": {"temperature": 1.0, "top_k": [0, 1, 2, 5, V, V + 5]},
    "top_p": {"temperature": 1.0, "top_p": [1e-6, 0.2, 0.5, 0.9, 0.999999, 1.0]},
    "min_p": {"temperature": 1.0, "min_p": [0.0, 1e-6, 0.1, 0.4, 0.9, 1.0]},
    "all": {
        "temperature": [0.5, 1.0, 2.0, 0.0, 0.7, 1.5],
        "top_k": [3, 0, 5, 1, 2, 7],
        "top_p": [0.9, 0.6, 1.0, 0.3, 0.8, 0.95],
        "min_p": [0.0, 0.2, 0.05, 0.5, 0.1, 0.0],
    },
}


def row_of(settings: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: value[row] if isinstance(value, list) else value for name, value in settings.items()}


@pytest.mark.parametrize("logits", list(LOGITS))
@pytest.mark.parametrize("name", list(FILTERS))
def test_filters_give_the_documented_law(name: str, logits: str) -> None:
    """Law 2: stages 6 to 9 equal the plain version: ties stay together, -inf stays out, k of V and more is off."""
    settings, x = FILTERS[name], LOGITS[logits]
    got = law(filtered(arrays(**settings), jnp.asarray(x)))
    for row in range(BATCH):
        want = zoo.law_of_next(x[row], (), (), row_of(settings, row))
        np.testing.assert_allclose(got[row], want, atol=2e-6)
        assert ((got[row] > 0) == (want > 0)).all() or name == "temperature"


def test_a_tie_at_the_threshold_stays_together() -> None:
    """top_k=2 among three equal best keeps all three, and top_p takes the whole tie that crosses it."""
    x = jnp.asarray([[2.0, 2.0, 2.0, 0.0, 0.0, -1.0, -1.0, -1.0]] * 2)
    kept = np.isfinite(filtered(arrays(2, temperature=1.0, top_k=[2, 0], top_p=[1.0, 0.3]), x))
    assert kept.tolist() == [[True] * 3 + [False] * 5] * 2


def test_both_zeros_are_one_value() -> None:
    """-0.0 and 0.0 tie: top_k=1 keeps both, as greedy takes the first of them."""
    x = jnp.asarray([[-1.0, -0.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0]])
    kept = np.isfinite(filtered(arrays(1, temperature=1.0, top_k=1), x))[0]
    assert np.flatnonzero(kept).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-37, 1e-20, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Temperatures near 0 do not overflow: the law is one-hot at the best logit."""
    x = jnp.asarray([[1.0, 50.0, 60.0, 2.0, -7.0, 0.0, 59.0, 3.0]])
    assert law(filtered(arrays(1, temperature=temperature), x))[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_greedy_rows_take_the_lowest_id_of_a_tie() -> None:
    """At temperature 0 the law is one-hot, whatever noise and filters its batch mates need."""
    sampling = arrays(temperature=[0, 1, 0, 1, 0, 1], top_k=1, top_p=0.1, min_p=1.0)
    tokens = drawn(sampling, jnp.uint32(0), jnp.arange(BATCH), jnp.arange(BATCH), jnp.asarray(TIED))
    assert tokens[::2].tolist() == [0, 0, 0]


def test_a_draw_is_the_argmax_of_law_and_noise() -> None:
    """Bit for bit, and a row without any law (all NaN) still gives an id of the vocabulary."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, V)), jnp.float32).at[3].set(jnp.nan)
    settings, at = arrays(4, temperature=0.7), (jnp.arange(4), jnp.arange(4))
    tokens = drawn(settings, jnp.uint32(5), *at, logits)
    perturbed = filtered(settings, logits) + position_noise(jnp.uint32(5), *at, V)
    assert tokens[:3].tolist() == jnp.argmax(perturbed, axis=1)[:3].tolist()
    assert 0 <= int(tokens[3]) < V


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_filter_that_is_off_changes_no_bit(name: str) -> None:
    """A row whose setting is off is the same bit for bit whether or not another row's is on."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
    on = {"top_k": 2, "top_p": 0.5, "min_p": 0.3}[name]
    x = jnp.asarray(RANDOM)
    alone = np.asarray(filtered(arrays(temperature=0.9, **{name: off}), x))
    mixed = np.asarray(filtered(arrays(temperature=0.9, **{name: [on] + [off] * (BATCH - 1)}), x))
    assert (mixed[1:].view(np.int32) == alone[1:].view(np.int32)).all()
    assert (mixed[0] != alone[0]).any()


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": [1.0, 1.5, 0.5, 2.0, 1.0, 10.0]},
    "presence": {"presence_penalty": [0.0, 1.5, -0.5, 2.0, 0.0, 10.0]},
    "frequency": {"frequency_penalty": [0.0, 1.5, -0.5, 2.0, 0.0, 10.0]},
    "bias": {"logit_bias": {0: 1.5, 7: -3.0}},
    "forbidden": {"forbidden": (2, 6)},
    "min_new": {"min_new_tokens": [0, 1, 2, 3, 4, 100]},
    "all": {
        "repetition_penalty": [1.0, 1.5, 0.5, 2.0, 1.0, 10.0],
        "presence_penalty": 0.3,
        "frequency_penalty": [0.0, 1.5, -0.5, 2.0, 0.0, 10.0],
        "logit_bias": {0: 1.5, 7: -3.0},
        "forbidden": (2, 6),
        "min_new_tokens": 4,
    },
}
HISTORY = np.random.default_rng(1).integers(0, V, size=(BATCH, 10))
PROMPT_LENGTH = np.array([1, 2, 3, 4, 5, 6])
LENGTH = np.array([1, 4, 3, 9, 10, 8])  # two rows without output; what stands behind a length does not count


@pytest.mark.parametrize("name", list(PENALTIES))
def test_processors_give_the_documented_logits(name: str) -> None:
    """Stages 1 to 5: repetition counts the prompt, presence and frequency only the output up to `length`."""
    ends = (3, 5)
    settings = both(BATCH, ends, PENALTIES[name])
    mask = jnp.zeros(V, bool).at[jnp.asarray(ends)].set(True)
    places = [jnp.asarray(a, jnp.int32) for a in (HISTORY, PROMPT_LENGTH, LENGTH)]
    got = processed(*settings, jnp.asarray(RANDOM), *places, mask)
    for row in range(BATCH):
        prompt = HISTORY[row, : PROMPT_LENGTH[row]].tolist()
        output = HISTORY[row, PROMPT_LENGTH[row] : LENGTH[row]].tolist()
        alone = {**row_of(PENALTIES[name], row), "temperature": 1.0}
        want = zoo.law_of_next(RANDOM[row], prompt, output, alone, ends)
        np.testing.assert_allclose(law(got[row]), want, atol=2e-6)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "min_new"])
def test_a_processor_that_is_off_changes_no_bit(name: str) -> None:
    """A row without penalties keeps its logits bit for bit beside rows that have them; -inf stays -inf."""
    (setting,) = PENALTIES[name]
    off = {"repetition_penalty": 1.0}.get(setting, 0)
    value = PENALTIES[name][setting][5]
    settings = both(BATCH, (3, 5), {setting: [off] * (BATCH - 1) + [value]})
    places = [jnp.asarray(a, jnp.int32) for a in (HISTORY, np.ones(BATCH), LENGTH)]
    got = processed(*settings, jnp.asarray(HOLES), *places, jnp.zeros(V, bool).at[3].set(True))
    assert (np.asarray(got)[:-1].view(np.int32) == HOLES[:-1].view(np.int32)).all()
    assert not np.isnan(got).any() and (np.asarray(got)[-1] != HOLES[-1]).any()


def test_noise_depends_on_seed_row_and_position_alone() -> None:
    """Randomness: a draw's noise is the same in any batch and place, and differs in each of its keys."""
    noise = lambda seed, rows, positions: np.asarray(
        position_noise(jnp.uint32(seed), jnp.asarray(rows), jnp.asarray(positions), V)
    )
    grid = noise(3, [5, 5, 6, 0], [7, 8, 7, 0])
    assert (noise(3, [6], [7])[0] == grid[2]).all()
    everything = np.concatenate([grid, noise(4, [5], [7]), noise(3, [7], [5])])
    assert len(np.unique(everything)) == everything.size
    try:  # nor on how the process is configured
        jax.config.update("jax_default_prng_impl", "rbg")
        assert (noise(3, [6], [7])[0] == grid[2]).all()
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")


def test_noise_is_gumbel_noise() -> None:
    """Draws from a flat law over 512 tokens are flat, and the noise has a Gumbel's law, tails included."""
    rows, vocab = 8192, 512
    noise = position_noise(jnp.uint32(1), jnp.arange(rows), jnp.zeros(rows, jnp.int32), vocab)
    counts = np.bincount(np.asarray(noise.argmax(axis=1)), minlength=vocab)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4
    sample = np.asarray(noise[:, :64]).ravel()
    assert scipy.stats.kstest(sample, "gumbel_r").pvalue > 1e-4
    # float32 uniforms end at 1 - 2**-24: noise without exact tails never exceeds 16.6.
    top = np.asarray(noise).max()
    assert 12 < top < 22


def test_near_equal_bfloat16_logits_are_drawn_fairly() -> None:
    """Bf16 logits a hair apart: draws follow softmax in float32, not a coarse grid that favours low ids."""
    vocab, rows = 256, 16384
    exact = (1 + np.arange(vocab) % 3 * 2.0**-7).astype(np.float32)
    table = jnp.broadcast_to(jnp.asarray(exact, jnp.bfloat16), (vocab, vocab))
    model = dj.Model(lambda p, i, c: dj.Features(p[i.tokens], (), c), table, vocab)
    out = dj.decode(model, [[0]] * rows, max_new_tokens=1, sampling=dj.Sampling(temperature=1.0))
    p = np.exp(np.asarray(table[0], np.float64))
    p /= p.sum()
    counts = np.bincount(out.tokens[:, 0], minlength=vocab)
    assert scipy.stats.chisquare(counts, p * rows).pvalue > 1e-4
    np.testing.assert_allclose(out.log_probs[:, 0], np.log(p)[out.tokens[:, 0]], atol=1e-5)


REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, np.nan, np.inf, -np.inf, "hot", [0.5] * 3, [[0.5, 0.5]], 1e39],
    "top_k": [-1, 1.5, np.nan, [1, 2, 3]],
    "top_p": [0.0, -0.5, 1.1, np.nan, 1e-50],
    "min_p": [-0.1, 1.01, np.nan, np.inf],
    "repetition_penalty": [0.0, -1.0, np.nan, np.inf, 1e-50],
    "presence_penalty": [np.nan, np.inf, 1e300],
    "frequency_penalty": [np.nan, -np.inf, 1e300],
    "min_new_tokens": [-1, 0.5, np.nan],
    "logit_bias": [{9: 1.0}, {-1: 1.0}, {1: np.nan}, {1: np.inf}, {1: 1e300}, {1: "x"}, {1.5: 1.0}],
    "forbidden": [[4], [-1], [0, 1, 2, 3], [1.5], [True]],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values])
def test_impossible_settings_are_refused(field: str, value: Any) -> None:
    """A negative, NaN or endless value, a wrong shape or an unknown id is a ValueError that names the field."""
    toy = zoo.bigram(4)
    with pytest.raises(ValueError, match=rf"sampling\.{field}"), dj.compile_clock() as clock:
        dj.decode(toy.model, [[0], [1]], max_new_tokens=2, sampling=dj.Sampling(**{field: value}))
    assert clock.programs == 0


def test_nothing_left_to_draw_is_refused() -> None:
    """Forbidden ids and, below min_new_tokens, the ends must leave a token; else rows would draw from nothing."""
    model = zoo.bigram(4, eos_ids=(3,)).model
    call = lambda **s: dj.decode(model, [[0]], max_new_tokens=2, sampling=dj.Sampling(**s), stop=dj.Stop([2]))
    with pytest.raises(ValueError, match=r"sampling\.forbidden"):
        call(forbidden=[0, 1], min_new_tokens=1)
    assert call(forbidden=[0, 1]).lengths.tolist() == [1]


def test_settings_may_be_given_per_row() -> None:
    """A sequence, a tuple and an array of B values mean one for each row."""
    for value in ([0.0, 0.5], (0.0, 0.5), np.array([0.0, 0.5])):
        assert arrays(2, temperature=value).temperature.tolist() == [0.0, 0.5]
    assert {f.name for f in dataclasses.fields(dj.Sampling)} <= set(REFUSED)
