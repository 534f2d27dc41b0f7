"""The laws that every decoder obeys, each over every decoder it applies to.

     1  At temperature 0 a lossless method gives the greedy tokens exactly, for every draft length, batch, ragged
        prompt, end-of-sequence place and budget.
     2  At temperature > 0 it follows the target's law, with every processor switched on (exact enumeration).
     3  With coupled acceptance its tokens equal Autoregressive's with the same seed, at any temperature.
     4  A draft equal to the target is accepted every time; a hostile one still gains a token a step.
     5  A row decoded in a batch equals the row alone; padding, order and devices change nothing.
     6  All steps in one call, one step per call and a traced decode give the same.
     7  Prompts never change, nothing is written past a row's end, the loop is bounded.
     8  Limits agree: no draft, one draft, a draft longer than the budget.
     9  What is clever agrees with a brute-force version written plainly (here and in the modules' own tests).
    10  One program: a `while`, no callback, nothing transferred inside; it lowers for cpu, cuda and tpu.

A decoder that is added gets a row in DECODERS; what does not draft is `plain`, what knows the target's next
token is `oracle`. `decode` here gives a draft model to decoders that take one. Laws about decoders hold on a
decoder-only model and on an encoder-decoder, `translator`, whose prompts are sources. Compiling is most of the
time, so tests share models and shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import zoo

import decoding_jax as dj
from decoding_jax.decoders.prefix import Prefix
from decoding_jax.loop import run, start
from decoding_jax.prepare import prepare

TRIGRAM = zoo.trigram_cached(5, seed=1)
HISTORY = zoo.history_cached(5, seed=2)
TRANSLATOR = zoo.history_translator(5, seed=4, start_id=3)
TOYS = {"bigram": zoo.bigram(5, seed=3), "trigram": TRIGRAM, "history": HISTORY, "translator": TRANSLATOR}

PLAIN = dj.Autoregressive()
LOOKUP = dj.PromptLookup(num_draft=4)
TREE = zoo.TreeLookup((zoo.SCATTERED, zoo.STRAIGHT))
LEAN_TREE = zoo.TreeLookup(compare=False)
ORACLE = zoo.Oracle(4)
HOSTILE = zoo.Hostile(4)
SPECULATIVE = dj.Speculative(num_draft=3)
BRANCHING = dj.Speculative(tree=dj.Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))))
ADAPTIVE = dj.Speculative(num_draft=4, adaptive=True, min_confidence=0.2)
GROWN = dj.Speculative(tree=dj.DynamicTree(size=7, depth=3, width=2))
REJECTION = dj.Speculative(num_draft=3, acceptance="rejection")
REJECTION_TREE = dj.Speculative(tree=BRANCHING.tree, acceptance="rejection")
LOOKAHEAD = dj.Lookahead(window=3, ngram=3, candidates=2, pool_size=8)
JACOBI = dj.Jacobi(block_length=3)
LOOKUPS = dj.PromptLookup(num_draft=3, num_matches=2)
DECODERS = {
    "plain": PLAIN,
    "lookup": LOOKUP,
    "tree": TREE,
    "oracle": ORACLE,
    "hostile": HOSTILE,
    "branching": BRANCHING,
    "grown": GROWN,
    "lookahead": LOOKAHEAD,
    "jacobi": JACOBI,
}
# More ways to draft, which the laws of exactness are shown for too.
EXACT = {
    "speculative": SPECULATIVE,
    "adaptive": ADAPTIVE,
    "lookups": LOOKUPS,
    "lookahead from the prompt": dj.Lookahead(2, 2, 2, 8, prompt_ngrams=True),
    "jacobi in blocks": dj.Jacobi(3, sliding=False),
}
DRAFTING = {name: decoder for name, decoder in DECODERS.items() if name != "plain"}

# Ragged, one of a single token, one that repeats itself.
PROMPTS = [[1, 2, 1, 2, 1], [3], [0, 4, 2, 1, 0, 3, 3], [2, 2]]
BUDGET = 12

EVERYTHING = dj.Sampling(
    temperature=0.9,
    top_k=4,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    min_new_tokens=3,
    logit_bias={1: 0.7, 3: -0.4},
    forbidden=[0],
)


@functools.cache
def draft_model(vocab: int, encoder: bool) -> dj.Model:
    """A model whose law is another, so that some of its drafts are kept and some are not."""
    if encoder:
        return zoo.history_translator(vocab, seed=77, start_id=3).model
    return zoo.trigram_cached(vocab, seed=5, scale=0.7).model


def with_drafter(model: dj.Model, decoder: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with a draft model where the decoder takes one and none is given."""
    if getattr(decoder, "takes_drafter", False):
        return {"drafter": draft_model(model.vocab_size, model.encode is not None)} | arguments
    return arguments


def decode(model: dj.Model, prompts: Any, decoder: Any = PLAIN, **arguments: Any) -> dj.DecodeOutput:
    return dj.decode(model, prompts, decoder, **with_drafter(model, decoder, arguments))


def pairs(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("decoder", list(table.values()), ids=list(table))


# The laws of prompts hold for sources.
both = pytest.mark.parametrize("toy", [HISTORY, TRANSLATOR], ids=["history", "translator"])


def cases(table: dict[str, Any]) -> Any:
    """Each decoder on the decoder-only toy, and on the encoder-decoder but for those that roll the target out."""
    rows = [(name, "history") for name in table]
    rows += [(name, "translator") for name in table if name not in ("oracle", "hostile")]
    ids = [f"{name}-{toy}" for name, toy in rows]
    return pytest.mark.parametrize(("decoder", "toy"), [(table[name], TOYS[toy]) for name, toy in rows], ids=ids)


def same_output(one: dj.DecodeOutput, other: dj.DecodeOutput) -> None:
    """Equal tokens, lengths, reasons and, for the toys' exact logits, log-probabilities."""
    assert zoo.outputs(one) == zoo.outputs(other)
    assert one.finish_reason == other.finish_reason
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


# ---------------------------------------------------------------------- law 1
def check_greedy(toy: zoo.Toy, prompts: list[list[int]], decoder: Any, budget: int, eos: tuple[int, ...]) -> None:
    """Tokens, reasons and log-probabilities are those of the plain reference."""
    out = decode(toy.with_eos(*eos), prompts, decoder, max_new_tokens=budget)
    want = [zoo.greedy(*toy.row(p), budget, ends=eos) for p in prompts]
    assert zoo.outputs(out) == want
    assert out.finish_reason == ["eos" if w and w[-1] in eos else "length" for w in want]
    assert out.tokens.shape == out.log_probs.shape == (len(prompts), budget)
    for row, (prompt, tokens) in enumerate(zip(prompts, want, strict=True)):
        expected = zoo.log_prob(*toy.row(prompt), tokens)
        np.testing.assert_allclose(out.log_probs[row, : len(tokens)], expected, atol=1e-5)
        assert not out.log_probs[row, len(tokens) :].any() and not out.tokens[row, len(tokens) :].any()


LAW_1 = [("trigram", dj.PromptLookup(num_draft=k), k) for k in range(1, 9)]
LAW_1 += [("history", decoder, max(decoder.num_nodes, 1)) for decoder in DECODERS.values()]
LAW_1 += [("history", decoder, decoder.num_nodes) for decoder in EXACT.values()]
LAW_1 += [("translator", decoder, max(decoder.num_nodes, 1)) for decoder in (PLAIN, LOOKUP, TREE, BRANCHING, GROWN)]
LAW_1 += [("bigram", PLAIN, 1), ("bigram", LOOKUP, 4)]


@pytest.mark.parametrize(("toy", "decoder", "k"), LAW_1, ids=[f"{toy}-{type(d).__name__}-{k}" for toy, d, k in LAW_1])
def test_greedy_is_exact(toy: str, decoder: Any, k: int) -> None:
    """Law 1: at temperature 0 any draft gives the greedy tokens, for budgets 0, 1, k-1, k, k+1 and more."""
    for budget in sorted({0, 1, k - 1, k, k + 1, BUDGET}):
        check_greedy(TOYS[toy], PROMPTS, decoder, budget, eos=())


@pytest.mark.parametrize(("batch", "decoder"), [(1, LOOKUP), (1, TREE), (2, LOOKUP), (3, LEAN_TREE)])
def test_greedy_is_exact_in_any_batch(batch: int, decoder: Any) -> None:
    """Law 1: ragged rollback; rows that accept all, some and none do not disturb each other."""
    for first in range(0, 4, batch):
        check_greedy(HISTORY, (PROMPTS * 2)[first : first + batch], decoder, BUDGET, eos=(4,))


@pytest.mark.parametrize(
    ("toy", "decoder"),
    [("history", LOOKUP), ("history", TREE), ("history", ORACLE), ("trigram", LOOKUP), ("translator", TREE)],
    ids=["lookup", "tree", "oracle", "lookup that repeats", "tree on an encoder-decoder"],
)
def test_end_of_sequence_ends_a_row_wherever_it_is_accepted(toy: str, decoder: Any) -> None:
    """Law 1: an EOS inside an accepted block ends the row there; every single and double id set."""
    for eos in [(i,) for i in range(5)] + [(1, 3), (0, 4), (2, 3, 4)]:
        check_greedy(TOYS[toy], PROMPTS, decoder, BUDGET, eos)


def test_end_of_sequence_is_met_at_every_place_of_an_accepted_block() -> None:
    """The test above meets EOS as each of the 5 tokens of the oracle's first block: no gap is left."""
    places = set()
    for prompt in PROMPTS:
        tokens = zoo.greedy(HISTORY.logits_of, prompt, BUDGET)
        places |= {tokens.index(i) for i in set(tokens)}
    assert places >= {0, 1, 2, 3, 4}


@cases(DRAFTING)
def test_greedy_obeys_processors(decoder: Any, toy: zoo.Toy) -> None:
    """Law 1: penalties see exactly the accepted prefix at every node of the draft."""
    settings = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
        "min_new_tokens": 4,
        "logit_bias": {2: 1.0},
        "forbidden": [0],
    }
    out = decode(toy.with_eos(4), PROMPTS, decoder, max_new_tokens=BUDGET, sampling=dj.Sampling(**settings))
    assert zoo.outputs(out) == [zoo.greedy(*toy.row(p), BUDGET, settings, (4,)) for p in PROMPTS]
    for row, tokens in enumerate(zoo.outputs(out)):  # and log_probs stay those of the model itself
        own = zoo.log_prob(*toy.row(PROMPTS[row]), tokens)
        np.testing.assert_allclose(out.log_probs[row, : len(tokens)], own, atol=1e-5)


TRANSFORMER_PROMPTS = [[1, 2, 1, 2, 1], [3], [60, 4, 2, 17, 0, 33, 3], [2, 2]]


@pytest.mark.parametrize(
    ("decoder", "small"),
    [
        (dj.PromptLookup(num_draft=1), zoo.small_transformer),
        (LEAN_TREE, zoo.small_transformer),
        (dj.PromptLookup(num_draft=1), zoo.small_translator),
    ],
    ids=["lookup", "tree", "lookup on an encoder-decoder"],
)
def test_greedy_is_exact_on_a_transformer(decoder: Any, small: Any) -> None:
    """Law 1: attention's own keys, values and positions survive rollback and compaction."""
    model = small()
    plain = decode(model, TRANSFORMER_PROMPTS, max_new_tokens=40)
    fast = decode(model, TRANSFORMER_PROMPTS, decoder, max_new_tokens=40)
    assert zoo.outputs(fast) == zoo.outputs(plain)
    np.testing.assert_allclose(fast.log_probs, plain.log_probs, atol=1e-4)
    assert fast.stats.accepted.sum() > 0


# ---------------------------------------------------------------------- law 2
LAW_TOY = zoo.trigram_cached(4, seed=5, eos_ids=(3,), scale=1.0)
LAW_ROWS = 4096
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.7},
    "min_new": {"min_new_tokens": 2},
    "bias": {"logit_bias": {0: 1.2, 2: -0.8}},
    "forbidden": {"forbidden": [1]},
}
PROCESSORS["all"] = functools.reduce(lambda a, b: a | b, PROCESSORS.values()) | {
    "temperature": 1.2,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
}


def check_law(rows: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Pearson's chi-square with rare outcomes pooled; what has no probability never occurs."""
    n = len(rows)
    assert abs(sum(law.values()) - 1) < 1e-9
    assert not (stray := set(rows) - set(law)), f"outputs of probability 0: {stray}"
    common = [o for o, p in law.items() if n * p >= 5]
    counts = np.array([rows.count(o) for o in common] + [0.0])
    expected = np.array([n * law[o] for o in common] + [0.0])
    counts[-1], expected[-1] = n - counts.sum(), n - expected.sum()
    if expected[-1] < 1:
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert freedom == 0 or scipy.stats.chi2.sf(statistic, freedom) > 1e-4, (statistic, freedom)


@pytest.mark.parametrize("setting", list(PROCESSORS))
@pytest.mark.parametrize(
    "decoder",
    [PLAIN, LOOKUP, LEAN_TREE, REJECTION, REJECTION_TREE],
    ids=["plain", "lookup", "tree", "rejection", "rejection of siblings"],
)
def test_samples_follow_the_enumerated_law(decoder: Any, setting: str) -> None:
    """Law 2: each processor alone and all together; rows of one prompt are independent draws."""
    settings = {"temperature": 1.0, **PROCESSORS[setting]}
    prompt = [1, 2, 1]
    law = zoo.law_of_output(LAW_TOY.logits_of, prompt, 3, settings, LAW_TOY.model.eos_ids)
    out = decode(
        LAW_TOY.model,
        [prompt] * LAW_ROWS,
        decoder,
        max_new_tokens=3,
        sampling=dj.Sampling(**settings),
        seed=7,
    )
    check_law([tuple(row) for row in zoo.outputs(out)], law)


def test_the_law_test_notices_a_small_bias() -> None:
    """Law 2: the test has the power to find the law of another temperature (it can fail)."""
    law = zoo.law_of_output(LAW_TOY.logits_of, [1, 2, 1], 3, {"temperature": 1.0}, LAW_TOY.model.eos_ids)
    out = decode(LAW_TOY.model, [[1, 2, 1]] * LAW_ROWS, max_new_tokens=3, sampling=dj.Sampling(temperature=1.3), seed=7)
    with pytest.raises(AssertionError):
        check_law([tuple(row) for row in zoo.outputs(out)], law)


# ---------------------------------------------------------------------- law 3
@pytest.mark.parametrize("temperature", [0.7, 1.3])
@cases(DRAFTING | EXACT)
def test_coupled_tokens_are_those_of_plain_decoding(decoder: Any, temperature: float, toy: zoo.Toy) -> None:
    """Law 3: any draft gives the tokens of plain decoding with the same seed, every setting on."""
    sampling = dataclasses.replace(EVERYTHING, temperature=temperature)
    model = toy.with_eos(4)
    for seed in range(4):
        call = functools.partial(
            decode, model, PROMPTS, max_new_tokens=BUDGET, sampling=sampling, stop=dj.Stop([2]), seed=seed
        )
        same_output(call(decoder=decoder), call(decoder=PLAIN))


def test_rows_may_differ_in_every_setting() -> None:
    """Law 3: each row keeps its own parameters; a greedy row among sampled ones stays greedy."""
    sampling = dj.Sampling(
        temperature=[0.0, 0.7, 1.3, 1.0],
        top_k=[0, 2, 0, 3],
        top_p=[0.5, 1.0, 0.8, 1.0],
        min_p=[0.9, 0.0, 0.0, 0.2],
        repetition_penalty=[1.0, 1.5, 1.0, 1.2],
        frequency_penalty=[0.0, 0.0, 0.5, 0.1],
        min_new_tokens=[0, 3, 0, 5],
    )
    model = HISTORY.with_eos(4)
    together = decode(model, PROMPTS, TREE, max_new_tokens=BUDGET, sampling=sampling)
    for row in range(4):
        alone = dataclasses.replace(
            sampling,
            **{
                f.name: value[row]
                for f in dataclasses.fields(sampling)
                if isinstance(value := getattr(sampling, f.name), list)
            },
        )
        uniform = decode(model, PROMPTS, TREE, max_new_tokens=BUDGET, sampling=alone)
        assert zoo.outputs(together)[row] == zoo.outputs(uniform)[row]
    assert zoo.outputs(together)[0] == zoo.greedy(HISTORY.logits_of, PROMPTS[0], BUDGET, ends=(4,))


# ---------------------------------------------------------------------- law 4
@pytest.mark.parametrize("sampling", [dj.Sampling(), EVERYTHING], ids=["greedy", "everything"])
def test_a_draft_equal_to_the_target_is_always_accepted(sampling: dj.Sampling) -> None:
    """Law 4: acceptance stays 100% round after round, so both caches index the same prefix."""
    out = decode(HISTORY.model, PROMPTS, ORACLE, max_new_tokens=BUDGET, sampling=sampling)
    assert out.stats.model_calls.tolist() == [3] * 4  # 5 + 5 + 2 tokens
    assert out.stats.drafted.tolist() == [4 + 4 + 2] * 4
    assert out.stats.accepted.tolist() == out.stats.drafted.tolist()
    assert out.stats.acceptance_rate == 1.0


SAME = {
    "chain": SPECULATIVE,
    "tree": BRANCHING,
    "rejection": REJECTION,
    "rejection of siblings": REJECTION_TREE,
}


def test_a_pool_begins_with_each_ngram_of_the_prompt_once() -> None:
    """A prompt that repeats itself does not fill the candidates with copies; the newest place counts."""
    decoder = dj.Lookahead(window=2, ngram=2, candidates=2, pool_size=8, prompt_ngrams=True)
    call = prepare(HISTORY.model, [[1, 2, 1, 2, 1, 2, 3]], BUDGET, dj.Sampling(), dj.Stop(), 0, None, None)
    pool = jax.device_get(decoder.begin(call.ctx).pool)
    found = {tuple(ngram): int(met) for ngram, met in zip(pool.ngrams[0].tolist(), pool.met[0], strict=True) if met}
    assert found == {(2, 3): 6, (1, 2): 5, (2, 1): 4}
    assert (pool.met[0] > 0).sum() == 3


@pairs(SAME)
@pytest.mark.parametrize("sampling", [dj.Sampling(), dj.Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_drafter_equal_to_the_target_is_always_accepted(decoder: Any, sampling: dj.Sampling) -> None:
    """Law 4: over 200 tokens of ragged rows all first siblings are kept: the drafter's cache keeps step."""
    out = decode(HISTORY.model, PROMPTS, decoder, drafter=HISTORY.model, max_new_tokens=200, sampling=sampling)
    firsts = max(len(path) for path in decoder.shape.paths if not any(path))
    assert out.stats.model_calls.tolist() == [-(-200 // (firsts + 1))] * 4


def test_a_sure_drafter_that_grows_its_tree_is_always_accepted() -> None:
    """Law 4 for trees by probability: where the best token is nearly certain, the best path is always in the tree."""
    sure = zoo.history_cached(5, seed=2, scale=30.0).model
    out = decode(sure, PROMPTS, GROWN, drafter=sure, max_new_tokens=200)
    assert out.stats.model_calls.tolist() == [-(-200 // (GROWN.shape.depth + 1))] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_typical_acceptance_keeps_what_is_probable(temperature: float) -> None:
    """Greedy rows stay exact; hot ones keep more drafts than the coupled rule; lossless is False."""
    call = functools.partial(decode, HISTORY.model, PROMPTS, max_new_tokens=BUDGET, seed=1)
    out = call(dj.Speculative(num_draft=3, acceptance="typical"), sampling=dj.Sampling(temperature=temperature))
    plain = call(PLAIN, sampling=dj.Sampling(temperature=temperature))
    assert not out.lossless and plain.lossless
    if temperature == 0.0:
        assert zoo.outputs(out) == zoo.outputs(plain)
    else:
        strict = call(SPECULATIVE, sampling=dj.Sampling(temperature=temperature))
        assert out.stats.acceptance_rate > strict.stats.acceptance_rate


def test_accepted_counts_the_draft_that_ends_a_row() -> None:
    """Law 4: `accepted` is the proposed tokens that were emitted, also where EOS is one of them."""
    tokens = zoo.greedy(HISTORY.logits_of, PROMPTS[0], BUDGET)
    out = decode(HISTORY.with_eos(tokens[0]), [PROMPTS[0]] * 4, ORACLE, max_new_tokens=BUDGET)
    assert out.lengths.tolist() == [1] * 4 and out.stats.accepted.tolist() == [1] * 4


@pytest.mark.parametrize("sampling", [dj.Sampling(), EVERYTHING], ids=["greedy", "everything"])
def test_a_hostile_draft_gains_one_token_a_step(sampling: dj.Sampling) -> None:
    """Law 4: nothing wrong is accepted, and every call of the model still emits a token."""
    out = decode(HISTORY.model, PROMPTS, HOSTILE, max_new_tokens=BUDGET, sampling=sampling)
    assert out.stats.accepted.sum() == 0
    assert out.stats.model_calls.tolist() == out.stats.tokens.tolist() == [BUDGET] * 4


@both
@pytest.mark.parametrize("eos", [(), (4,)], ids=["full", "eos"])
def test_caches_and_features_follow_the_accepted_path(eos: tuple[int, ...], toy: zoo.Toy) -> None:
    """After every round the cache holds the committed prefix, and `observe` gets its features."""
    for temperature in (0.0, 1.0):
        ctx, state = zoo.final_state(
            toy.with_eos(*eos),
            PROMPTS,
            TREE,
            max_new_tokens=BUDGET,
            sampling=dj.Sampling(temperature=temperature),
        )
        seen: zoo.Observed = state.carry
        assert seen.emitted.tolist() == (state.rows.length - ctx.prompt_lengths).tolist()
        assert seen.wrong_cache.tolist() == seen.wrong_hidden.tolist() == [0] * 4


def test_trees_are_accepted_to_every_depth() -> None:
    """The tree drafter meets no, part and full acceptance, so that the laws above are not vacuous."""
    counts = set()
    for seed in range(3):
        out = decode(
            HISTORY.model,
            PROMPTS,
            TREE,
            max_new_tokens=BUDGET,
            sampling=dj.Sampling(temperature=1.0),
            seed=seed,
            trace=True,
        )
        counts |= {len(step.emitted) for step in out.trace or ()}
    assert counts == {1, 2, 3, 4}


# ---------------------------------------------------------------------- law 5
@pytest.mark.parametrize(
    ("decoder", "toy"),
    [
        (PLAIN, HISTORY),
        (LOOKUP, HISTORY),
        (TREE, HISTORY),
        (PLAIN, TRANSLATOR),
        (REJECTION_TREE, HISTORY),
        (ADAPTIVE, HISTORY),
    ],
    ids=["plain", "lookup", "tree", "plain on an encoder-decoder", "rejection of siblings", "adaptive"],
)
def test_a_row_in_a_batch_equals_the_row_alone(decoder: Any, toy: zoo.Toy) -> None:
    """Law 5: batch mates and their lengths change nothing, given the row's id."""
    call = functools.partial(
        decode, toy.with_eos(4), decoder=decoder, max_new_tokens=BUDGET, sampling=EVERYTHING, seed=3
    )
    together = call(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone = call([prompt], row_ids=[row])
        assert zoo.outputs(alone)[0] == zoo.outputs(together)[row]
        assert alone.stats.model_calls[0] == together.stats.model_calls[row]
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[row], atol=1e-5)


@cases(DECODERS)
def test_the_order_of_a_batch_changes_nothing(decoder: Any, toy: zoo.Toy) -> None:
    """Law 5: rows that change places and keep their ids keep their tokens."""
    call = functools.partial(decode, toy.with_eos(4), decoder=decoder, max_new_tokens=BUDGET, sampling=EVERYTHING)
    order = [2, 0, 3, 1]
    moved = call([PROMPTS[i] for i in order], row_ids=[10 + i for i in order])
    straight = call(PROMPTS, row_ids=[10, 11, 12, 13])
    assert zoo.outputs(moved) == [zoo.outputs(straight)[i] for i in order]
    assert len({tuple(row) for row in zoo.outputs(call([PROMPTS[0]] * 4))}) > 1  # and other ids draw otherwise


@both
def test_padding_changes_nothing(toy: zoo.Toy) -> None:
    """Law 5: a long batch mate moves everyone into larger buffers and more prefill chunks, no token."""
    call = functools.partial(decode, toy.with_eos(4), decoder=PLAIN, max_new_tokens=BUDGET, sampling=EVERYTHING)
    long = np.random.default_rng(0).integers(0, 5, size=200).tolist()
    padded, tight = call([*PROMPTS[:3], long]), call(PROMPTS)
    assert zoo.outputs(padded)[:3] == zoo.outputs(tight)[:3]
    # The long row itself crosses the borders of its prefill chunks.
    greedy = decode(toy.model, [*PROMPTS[:3], long], max_new_tokens=BUDGET)
    assert zoo.outputs(greedy)[3] == zoo.greedy(*toy.row(long), BUDGET)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


MESH_PROMPTS = [*PROMPTS, [4], [0, 1], [3, 2, 1]]  # seven rows: one device holds only padding


def test_eight_devices_change_nothing(mesh: jax.sharding.Mesh) -> None:
    """Law 5: split over devices, rows keep their tokens and their own parameters."""
    sampling = dataclasses.replace(EVERYTHING, temperature=[0.0, 0.7, 1.3, 1.0, 0.0, 0.5, 2.0])
    model = HISTORY.with_eos(4)
    split = decode(model, MESH_PROMPTS, TREE, max_new_tokens=BUDGET, sampling=sampling, mesh=mesh)
    assert len(split.finish_reason) == len(split.stats.tokens) == 7
    for first in (0, 3):  # rows 3 to 6 are the second half
        rows = slice(first, first + 4)
        part = dataclasses.replace(sampling, temperature=sampling.temperature[rows])
        whole = decode(
            model,
            MESH_PROMPTS[rows],
            TREE,
            max_new_tokens=BUDGET,
            sampling=part,
            row_ids=range(7)[rows],
        )
        assert zoo.outputs(split)[rows] == zoo.outputs(whole)
        assert split.stats.model_calls[rows].tolist() == whole.stats.model_calls.tolist()


@pytest.mark.parametrize(
    "small", [zoo.small_transformer, zoo.small_translator], ids=["decoder-only", "encoder-decoder"]
)
def test_a_mesh_compiles_one_loop(mesh: jax.sharding.Mesh, small: Any) -> None:
    """Law 5, law 10: the first state is split like all later ones, so the loop is compiled once."""
    model, prompts = small(), TRANSFORMER_PROMPTS * 2
    with dj.compile_clock() as clock:
        split = decode(model, prompts, max_new_tokens=40, mesh=mesh)
    whole = decode(model, TRANSFORMER_PROMPTS, max_new_tokens=40)
    assert zoo.outputs(split) == zoo.outputs(whole) * 2
    assert clock.programs == 2


@pytest.mark.parametrize(
    "small",
    [None, zoo.small_transformer, zoo.small_translator],
    ids=["tree on a toy", "plain on a transformer", "plain on an encoder-decoder"],
)
def test_rows_stay_on_their_devices(mesh: jax.sharding.Mesh, small: Any) -> None:
    """Law 5: a data mesh's program, a tree's or plain decoding's, has no all-gather; the state stays split."""
    model = HISTORY.model if small is None else small()
    decoder, prompts = (TREE, MESH_PROMPTS) if small is None else (PLAIN, TRANSFORMER_PROMPTS * 2)
    call = prepare(model, prompts, BUDGET if small is None else 40, dj.Sampling(), dj.Stop(), 0, None, mesh)
    state = start(decoder, call.ctx)
    compiled = run.lower(decoder, call.ctx, state, jnp.int32(1)).compile()
    assert "all-gather" not in compiled.as_text()
    out = run(decoder, call.ctx, state, jnp.int32(1))
    assert not out.rows.tokens.sharding.is_fully_replicated
    assert not any(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(out.cache))


# ---------------------------------------------------------------------- law 6
@cases(DECODERS)
def test_steps_may_be_cut_anywhere(decoder: Any, toy: zoo.Toy) -> None:
    """Law 6: all steps in one call, one a call, three a call, traced and streamed give the same output."""
    arguments = {"max_new_tokens": BUDGET, "sampling": EVERYTHING, "stop": dj.Stop([2]), "seed": 1}
    model = toy.with_eos(4)
    whole = decode(model, PROMPTS, decoder, **arguments)
    for steps in (1, 3):
        same_output(decode(model, PROMPTS, decoder, steps_per_call=steps, **arguments), whole)
    traced = decode(model, PROMPTS, decoder, trace=True, **arguments)
    same_output(traced, whole)
    assert traced.trace is not None and whole.trace is None
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    reasons: list[list[str | None]] = [[] for _ in PROMPTS]
    for chunk in dj.stream(model, PROMPTS, decoder, **with_drafter(model, decoder, arguments)):
        streamed[chunk.row] += chunk.tokens
        reasons[chunk.row].append(chunk.finish_reason)
    assert streamed == zoo.outputs(whole)
    assert [r[-1] for r in reasons] == whole.finish_reason and not any(any(r[:-1]) for r in reasons)


@cases(DECODERS)
def test_a_trace_tells_what_happened(decoder: Any, toy: zoo.Toy) -> None:
    """Law 6: the steps of a row add up to its output and its counters; what was kept was proposed."""
    out = decode(toy.with_eos(4), PROMPTS, decoder, max_new_tokens=BUDGET, trace=True)
    for row, tokens in enumerate(zoo.outputs(out)):
        steps = [step for step in out.trace or () if step.row == row]
        assert [t for step in steps for t in step.emitted] == tokens
        assert [step.step for step in steps] == list(range(out.stats.model_calls[row]))
        assert sum(len(step.proposed) for step in steps) == out.stats.drafted[row]
        assert all(set(step.emitted[:-1]) <= set(step.proposed) for step in steps)


def test_a_stream_without_a_budget_says_so() -> None:
    """Law 6: a row that is done from the start is one empty last chunk, as `decode` gives an empty row."""
    chunks = list(dj.stream(HISTORY.model, PROMPTS, PLAIN, max_new_tokens=0))
    assert [(c.row, c.tokens, c.finish_reason) for c in chunks] == [(i, (), "length") for i in range(4)]


# ---------------------------------------------------------------------- law 7
@cases(DECODERS)
def test_prompts_stay_and_the_loop_is_bounded(decoder: Any, toy: zoo.Toy) -> None:
    """Law 7: prompts stay, nothing is written past a row's end, every call emits a token."""
    ctx, state = zoo.final_state(
        toy.with_eos(4),
        PROMPTS,
        decoder,
        **with_drafter(toy.model, decoder, {"max_new_tokens": BUDGET, "sampling": EVERYTHING}),
    )
    tokens, length = np.asarray(state.rows.tokens), np.asarray(state.rows.length)
    assert bool(state.done.all()) and (length <= np.asarray(ctx.limits)).all()
    assert (np.asarray(state.model_calls) <= length - np.asarray(ctx.prompt_lengths)).all()
    assert (np.asarray(state.accepted) <= np.asarray(state.drafted)).all()
    for row, prompt in enumerate(PROMPTS):
        first = toy.row(prompt)[1]
        assert tokens[row, : len(first)].tolist() == first
        assert not tokens[row, length[row] :].any()
        assert 0 not in tokens[row, len(first) : length[row]]  # the forbidden id, which padding shares


@pytest.mark.parametrize("full", [64 - 7], ids=["to the last slot"])
@pairs({"lookup": LOOKUP, "tree": TREE, "oracle": ORACLE})
def test_a_row_may_fill_its_buffer(decoder: Any, full: int) -> None:
    """Prompt and budget fill the buffer of 64; drafts that reach past the end overwrite nothing."""
    check_greedy(HISTORY, PROMPTS, decoder, full, eos=())


# ---------------------------------------------------------------------- law 8
def test_a_lookup_that_never_matches_is_plain_decoding() -> None:
    """Law 8: with an n-gram that is longer than any row, lookup drafts nothing and calls once a token."""
    decoder = dj.PromptLookup(num_draft=1, max_ngram=40, min_ngram=40)
    out = decode(HISTORY.model, PROMPTS, decoder, max_new_tokens=BUDGET, sampling=EVERYTHING)
    same_output(out, decode(HISTORY.model, PROMPTS, max_new_tokens=BUDGET, sampling=EVERYTHING))
    assert out.stats.drafted.sum() == 0 and out.stats.model_calls.tolist() == [BUDGET] * 4


# ---------------------------------------------------------------------- law 10
def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def program(decoder: Prefix, toy: zoo.Toy) -> tuple[Any, ...]:
    second = with_drafter(toy.model, decoder, {})
    call = prepare(toy.model, PROMPTS, BUDGET, dj.Sampling(), dj.Stop(), 0, None, None, **second)
    return decoder, call.ctx, start(decoder, call.ctx), jnp.int32(1)


LOOPS = {name: DECODERS[name] for name in ("plain", "lookup", "tree", "branching", "lookahead", "jacobi")}
LOOPS |= {"beam": dj.Beam(num_beams=3), "rejection": REJECTION_TREE}


@cases(LOOPS)
def test_a_decode_is_one_program(decoder: Any, toy: zoo.Toy) -> None:
    """Law 10: one `while`, no callback or transfer inside, and no params in what the loop carries."""
    closed = jax.make_jaxpr(run)(*program(decoder, toy))
    (call,) = closed.jaxpr.eqns
    (loop,) = [e for e in call.params["jaxpr"].jaxpr.eqns if e.primitive.name == "while"]
    names = {e.primitive.name for e in equations(closed.jaxpr)}
    assert names & {"scan", "top_k"}  # the search for names does look inside
    assert not [n for n in names if any(bad in n for bad in ("callback", "infeed", "outfeed", "device_put"))]
    params = toy.model.params.shape
    assert params in [v.aval.shape for v in loop.invars]
    assert params not in [v.aval.shape for v in loop.outvars]


@pytest.mark.parametrize(
    ("decoder", "toy"),
    [*((decoder, HISTORY) for decoder in LOOPS.values()), (PLAIN, TRANSLATOR)],
    ids=[*LOOPS, "plain on an encoder-decoder"],
)
def test_nothing_is_transferred_inside(decoder: Any, toy: zoo.Toy) -> None:
    """Law 10: no infeed, outfeed or host callback is compiled, and the old state's buffers are reused."""
    arguments = program(decoder, toy)
    text = run.lower(*arguments).compile().as_text()
    assert "while(" in text
    assert not [bad for bad in ("infeed", "outfeed", "callback", "send(", "recv(") if bad in text]
    run(*arguments)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arguments[2]))


@cases(LOOPS)
def test_the_program_lowers_for_every_platform(decoder: Any, toy: zoo.Toy) -> None:
    """Law 10: `jax.export` lowers the loop for cpu, cuda and tpu."""
    exported = jax.export.export(run, platforms=("cpu", "cuda", "tpu"))(*program(decoder, toy))
    assert exported.platforms == ("cpu", "cuda", "tpu")


@cases({"plain": PLAIN, "lookup": LOOKUP, "speculative": SPECULATIVE})
def test_other_values_compile_nothing(decoder: Any, toy: zoo.Toy) -> None:
    """Law 10: settings, seeds, ids, budgets within a bucket and other weights run the same program."""
    call = functools.partial(decode, toy.model, PROMPTS, decoder)
    call(max_new_tokens=BUDGET)
    other = dataclasses.replace(toy.with_eos(1), params=zoo.history_cached(5, seed=99).model.params)
    with dj.compile_clock() as clock:
        call(max_new_tokens=5)
        call(max_new_tokens=BUDGET, sampling=EVERYTHING, seed=5, row_ids=[9, 8, 7, 6])
        call(max_new_tokens=BUDGET, sampling=dj.Sampling(temperature=0.3, top_p=0.4), stop=dj.Stop([1, 2]))
        call(max_new_tokens=BUDGET, steps_per_call=2, trace=True)
        streamed = with_drafter(toy.model, decoder, {"max_new_tokens": 7})
        list(dj.stream(toy.with_eos(2), [[1], [2], [3], [4]], decoder, **streamed))
        changed = decode(other, PROMPTS, decoder, max_new_tokens=BUDGET)
    assert clock.programs == 0
    assert changed.stats.compile_seconds == 0.0
    assert zoo.outputs(changed) != zoo.outputs(call(max_new_tokens=BUDGET))


def test_the_clock_counts_new_programs() -> None:
    """Law 10: the counter that the test above trusts does count, one prefill and one loop."""
    with dj.compile_clock() as clock:
        out = decode(TOYS["bigram"].model, [[1]] * 5, max_new_tokens=2)
    assert clock.programs == 2 and clock.seconds > 0
    assert out.stats.compile_seconds == pytest.approx(clock.seconds)


# ---------------------------------------------------------------------- what cannot be meant
REFUSED: list[tuple[str, Any]] = [
    ("max_new_tokens", -1),
    ("max_new_tokens", 2.0),
    ("seed", -1),
    ("seed", 2**32),
    ("row_ids", [1, 2]),
    ("row_ids", [-1]),
    ("steps_per_call", 0),
    ("steps_per_call", 2**31),
    ("prompts", []),
    ("prompts", [[]]),
    ("prompts", [[1], []]),
    ("prompts", [[5]]),
    ("prompts", [[-1]]),
    ("prompts", [[True]]),
    ("prompts", [1.5]),
    ("prompts", [[1.5]]),
    ("prompts", "text"),
    ("prompts", [{"role": "user", "content": "text"}]),
    ("prompts", None),
    ("prompts", 3),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_impossible_calls_are_refused(name: str, value: Any) -> None:
    """Errors: a ValueError names the argument, before anything is compiled."""
    arguments: dict[str, Any] = {"prompts": [[1]], "max_new_tokens": 2, name: value}
    with pytest.raises(ValueError, match=name), dj.compile_clock() as clock:
        decode(HISTORY.model, **arguments)
    assert clock.programs == 0


def test_a_mesh_needs_a_data_axis() -> None:
    """Errors: rows are split over an axis named "data"; a mesh without it is refused."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="mesh"):
        decode(HISTORY.model, PROMPTS, max_new_tokens=2, mesh=mesh)
