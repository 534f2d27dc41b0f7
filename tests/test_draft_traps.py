"""Mistakes that drafting has been seen to make, each on the smallest model that shows it.

The laws of tests/test_laws.py hold for every decoder; here are the places where a wrong draft would still give the
right tokens (a drafter's cache that lags, a tree that is not the one asked for), and corners that they do not reach.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from test_laws import EVERYTHING, LAW_TOY, check_law

import decoding_jax as dj
from decoding_jax.decoders.prefix import Draft, Prefix
from decoding_jax.loop import ALL_STEPS, run, start
from decoding_jax.models.functional import init_transformer
from decoding_jax.prepare import prepare
from decoding_jax.registry import make_decoder, read_tree
from decoding_jax.rows import Context, start_rows
from decoding_jax.trees import most_probable
from decoding_jax.types import Array
from decoding_jax.verify import Nodes, Rejection, Rule, Typical, Verdict, verify

TOY = zoo.history_cached(5, seed=2)
TARGET = TOY.with_eos(4)
# The target's law with some noise: it agrees often and not always.
TABLE = np.asarray(TARGET.params) + np.random.default_rng(0).normal(size=TARGET.params.shape).astype(np.float32) * 0.8
DRAFT = dataclasses.replace(TARGET, params=jnp.asarray(TABLE))
PROMPTS = [[1, 2, 1, 2, 1], [3], [0, 4, 2, 1, 0, 3, 3], [2, 2]]
BUDGET = 16
WARM = dj.Sampling(temperature=1.0)

CHAIN = dj.Speculative(num_draft=3)
TREE = dj.Speculative(tree=dj.Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))))
GROWN = dj.Speculative(tree=dj.DynamicTree(size=7, depth=3, width=2), adaptive=True)
REJECTION = dj.Speculative(tree=TREE.tree, acceptance="rejection")
CAREFUL = {
    "tree": dataclasses.replace(TREE, min_confidence=0.3),
    "grown": dataclasses.replace(GROWN, min_confidence=0.3),
}

decode = functools.partial(dj.decode, TARGET, PROMPTS, max_new_tokens=BUDGET)


def context(model: dj.Model = TARGET, prompts: Any = PROMPTS, budget: int = BUDGET, **fields: Any) -> Context:
    arguments = {"sampling": dj.Sampling(), "stop": dj.Stop(), "seed": 0, "row_ids": None, "mesh": None} | fields
    return prepare(model, prompts, budget, **arguments).ctx


# ---------------------------------------------------------------------- the drafter's cache
@pytest.mark.parametrize("name", list(CAREFUL))
def test_a_drafters_cache_holds_the_committed_prefix(name: str) -> None:
    """After every round, whatever it kept and whoever has finished: all but the last two tokens, each in its place."""
    decoder = CAREFUL[name]
    ctx = context(sampling=WARM, drafter=DRAFT)
    state, length, emitted = start(decoder, ctx), np.asarray(ctx.prompt_lengths), set()
    finished = []
    while not bool(state.done.all()):
        state = run(decoder, ctx, state, jnp.int32(1))
        tokens, now, done = (np.asarray(x) for x in (state.rows.tokens, state.rows.length, state.done))
        emitted |= set((now - length).tolist())
        finished.append(int(done.sum()))
        for row in np.flatnonzero(~done):
            held = np.arange(now[row] - 2)
            slots = {leaf: np.asarray(x[row, held]) for leaf, x in state.carry.cache.slots.items()}
            assert slots["tokens"].tolist() == tokens[row, held].tolist()
            assert slots["positions"].tolist() == held.tolist()
        length = now
    assert emitted >= {1, 2, 3} and len(set(finished)) > 2
    assert [row[n:end].tolist() for row, n, end in zip(tokens, ctx.prompt_lengths, length, strict=True)] == zoo.outputs(
        decode(sampling=WARM)
    )


@pytest.mark.parametrize("decoder", [CHAIN, TREE, REJECTION], ids=["chain", "tree", "rejection"])
def test_penalties_inside_a_draft_are_those_of_the_target(decoder: dj.Speculative) -> None:
    """A drafter that is the target proposes its very draws with every processor on: it counts its own proposals."""
    out = decode(decoder=decoder, drafter=TARGET, sampling=EVERYTHING, stop=dj.Stop([2]))
    firsts = max(len(path) for path in decoder.shape.paths if not any(path))  # type: ignore[union-attr]
    assert out.stats.model_calls.tolist() == [-(-n // (firsts + 1)) for n in out.lengths.tolist()]


def test_batch_mates_change_no_draft() -> None:
    """A row's adaptive, dynamic drafts and what is kept of them are the same beside other rows."""
    call = functools.partial(
        dj.decode, TARGET, decoder=CAREFUL["grown"], drafter=DRAFT, max_new_tokens=BUDGET, sampling=WARM
    )
    one = call([PROMPTS[0], [4, 4], [0], [1, 3, 1]], row_ids=[0, 5, 6, 7])
    other = call(PROMPTS, row_ids=[0, 1, 2, 3])
    assert zoo.outputs(one)[0] == zoo.outputs(other)[0]
    for name in ("model_calls", "drafted", "accepted"):
        assert getattr(one.stats, name)[0] == getattr(other.stats, name)[0], name


@pytest.mark.parametrize(("budget", "calls"), [(0, 0), (1, 1), (2, 2)])
def test_nothing_is_drafted_behind_the_budget(budget: int, calls: int) -> None:
    """A row with one token left asks its drafter once, one without any never."""
    for decoder in (CHAIN, CAREFUL["grown"]):
        out = decode(decoder=decoder, drafter=TARGET, max_new_tokens=budget)
        assert out.stats.draft_calls.tolist() == [calls] * 4
        assert zoo.outputs(out) == zoo.outputs(decode(max_new_tokens=budget))


def test_a_mesh_splits_drafts_with_their_rows() -> None:
    """A dynamic tree on two devices: the same drafts are kept, and nothing is gathered on the way."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    decoder = CAREFUL["grown"]
    ctx = context(mesh=mesh, drafter=DRAFT, sampling=WARM)
    arguments = (decoder, ctx, start(decoder, ctx), jnp.int32(ALL_STEPS))
    compiled = run.lower(*arguments).compile()
    assert "all-gather" not in compiled.as_text()
    state = compiled(*arguments)
    assert not state.carry.cache.slots["tokens"].sharding.is_fully_replicated
    whole = decode(decoder=decoder, drafter=DRAFT, sampling=WARM)
    assert state.drafted.tolist() == whole.stats.drafted.tolist()
    assert zoo.outputs(decoder.finalize(ctx, state)) == zoo.outputs(whole)


# ---------------------------------------------------------------------- drafting in the target's cache
def test_drafting_in_the_targets_cache_leaves_no_trace() -> None:
    """What a coarser copy writes, also in places that are not the nodes' own, never stands in for the target's keys."""
    decoder = dj.SelfSpeculative(tree=GROWN.tree, min_confidence=0.3)
    out = decode(decoder=decoder, drafter=DRAFT, sampling=EVERYTHING, stop=dj.Stop([2]))
    assert zoo.outputs(out) == zoo.outputs(decode(sampling=EVERYTHING, stop=dj.Stop([2])))
    assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()


def test_a_part_of_a_model_drafts_for_it() -> None:
    """The first layer, and a window shorter than any row: the target's tokens, with some drafts kept and some not."""
    model = init_transformer(dataclasses.replace(zoo.SMALL, vocab_size=5, sliding_window=2))
    plain = dj.decode(model, PROMPTS, max_new_tokens=BUDGET)
    out = dj.decode(model, PROMPTS, dj.SelfSpeculative(exit_layer=1, num_draft=1), max_new_tokens=BUDGET)
    assert zoo.outputs(out) == zoo.outputs(plain)
    np.testing.assert_allclose(out.log_probs, plain.log_probs, atol=1e-4)
    assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()


# ---------------------------------------------------------------------- which tree is proposed
Path = tuple[int, ...]


@jax.jit
def first_draft(decoder: Prefix, ctx: Context) -> Draft:
    """What is proposed behind the prompts."""
    return decoder.propose(ctx, decoder.init(ctx))[0]


def paths_of(draft: Draft, row: int) -> list[Path]:
    """The tokens on the way to each proposal of a row that counts."""
    parents = np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[row]
    paths: list[Path] = [()]
    for token, parent in zip(draft.tokens[row].tolist(), parents, strict=True):
        paths.append((*paths[parent], token))
    return [path for path, counts in zip(paths[1:], draft.verifiable[row], strict=True) if counts]


def grow(law: zoo.LogitsOf, prefix: list[int], tree: dj.DynamicTree, depth: int, least: float) -> set[Path]:
    """The tree of EAGLE-2's paper, by sorting."""
    level: list[Path] = [()]
    found: dict[Path, float] = {(): 0.0}
    for _ in range(depth):
        children: dict[Path, tuple[float, float]] = {}
        for path in level:
            log_p = np.log(zoo.law_of_next(law([*prefix, *path]), prefix, path, {"temperature": 1.0}))
            for token in np.argsort(-log_p)[: tree.width].tolist():
                children[(*path, token)] = (found[path] + log_p[token], log_p[token])
        found |= {path: total for path, (total, _) in children.items()}
        best = sorted(children, key=lambda path: -children[path][0])[: tree.width]
        level = [path for path in best if np.exp(children[path][1]) >= least]
    del found[()]
    return set(sorted(found, key=lambda path: -found[path])[: tree.size])


@pytest.mark.parametrize("least", [0.0, 0.4])
@pytest.mark.parametrize("budget", [1, 2, BUDGET])
def test_a_tree_grows_where_it_is_probable(budget: int, least: float) -> None:
    """Law 9: the proposals are those of a plain search; those of two paths or of none are not among them."""
    decoder = dataclasses.replace(GROWN, adaptive=False, min_confidence=least)
    ctx = context(budget=budget, drafter=DRAFT)
    draft = first_draft(decoder, ctx)
    rows = {logits.tobytes(): drafted for logits, drafted in zip(np.asarray(TARGET.params), TABLE, strict=True)}
    law = lambda prefix: rows[TOY.logits_of(prefix).tobytes()]
    for row, prompt in enumerate(PROMPTS):
        paths = paths_of(draft, row)
        assert len(set(paths)) == len(paths)
        assert set(paths) == grow(law, prompt, GROWN.tree, min(budget, 3), least)


def test_a_path_is_kept_from_its_beginning_on() -> None:
    """A child that is certain is as probable as its parent; of equal ones the parent comes first."""
    log_probs = jnp.asarray([[-1.0, 0.0, 0.0, 0.0]])
    for count in (1, 2, 3):
        index, parents = most_probable(log_probs, jnp.asarray([[0, 0, 2, 3]]), count, jax.lax.top_k)
        assert index[0].tolist() == [1, 2, 3][:count]
        assert parents[0].tolist() == [0, 1, 2][:count]


def copies(row: list[int], decoder: dj.PromptLookup) -> set[Path]:
    """Every beginning of what stands behind the best matches of a row, going round where it meets the row's end."""
    matches = []
    for at in range(1, len(row)):
        same = [at >= n and row[at - n] == row[-n] for n in range(1, decoder.max_ngram + 1)]
        if (longest := [*same, False].index(False)) >= decoder.min_ngram:
            matches.append((longest, at))
    found: set[Path] = set()
    for longest, at in sorted(matches, reverse=True)[: decoder.num_matches]:
        count = decoder.num_draft if longest > 1 else decoder.weak_draft
        chain = [row[at + i % (len(row) - at)] for i in range(count)]
        found |= {tuple(chain[: i + 1]) for i in range(count)}
    return found


def test_what_several_matches_share_is_proposed_once() -> None:
    """Law 9: over rows of two letters, with more and with fewer matches than asked for, siblings always differ."""
    decoder = dj.PromptLookup(num_draft=4, num_matches=3)
    random = np.random.default_rng(0)
    rows = [random.integers(0, 2, size=n).tolist() for n in (1, 2, *range(2, 32))]
    ctx = context(prompts=rows)
    draft = first_draft(decoder, ctx)
    for at, row in enumerate(rows):
        paths = paths_of(draft, at)
        assert len(set(paths)) == len(paths) and set(paths) == copies(row, decoder), row


# ---------------------------------------------------------------------- acceptance
def test_a_careful_drafter_follows_the_law() -> None:
    """Law 2: drafts that end by the drafter's confidence and by the row's history bias no rejection."""
    drafter = zoo.trigram_cached(4, seed=6).model
    decoder = dj.Speculative(num_draft=3, acceptance="rejection", adaptive=True, min_confidence=0.35)
    law = zoo.law_of_output(LAW_TOY.logits_of, [1, 2, 1], 4, {"temperature": 1.0}, LAW_TOY.model.eos_ids)
    out = dj.decode(
        LAW_TOY.model, [[1, 2, 1]] * 2048, decoder, drafter=drafter, max_new_tokens=4, sampling=WARM, seed=3
    )
    check_law([tuple(row) for row in zoo.outputs(out)], law)
    assert len(set(out.stats.drafted.tolist())) > 2


def test_greedy_rows_beside_sampled_ones_stay_greedy() -> None:
    """Rejection at temperature 0 is equality with the best token, also where other rows of the batch are drawn."""
    sampling = dj.Sampling(temperature=[0.0, 1.2, 0.0, 0.7], repetition_penalty=1.4)
    out = decode(decoder=REJECTION, drafter=DRAFT, sampling=sampling)
    for row in (0, 2):
        want = zoo.greedy(TOY.logits_of, PROMPTS[row], BUDGET, {"repetition_penalty": 1.4}, ends=(4,))
        assert zoo.outputs(out)[row] == want
    assert 0 < out.stats.accepted[[0, 2]].sum() < out.stats.drafted[[0, 2]].sum()


@functools.partial(jax.jit, static_argnums=4)
def judge(rule: Rule, ctx: Context, nodes: Nodes, logits: Array, depth: int) -> Verdict:
    return verify(ctx, start_rows(ctx), nodes, logits, depth, rule)


def nodes_of(tokens: Sequence[Sequence[int]], parents: Sequence[int], **fields: Any) -> Nodes:
    """Proposals behind a root, all of which count."""
    batch, count = np.shape(tokens)
    return Nodes(
        tokens=jnp.pad(jnp.asarray(tokens, jnp.int32), ((0, 0), (1, 0))),
        parents=jnp.broadcast_to(jnp.asarray([0, *parents], jnp.int32), (batch, count + 1)),
        verifiable=jnp.ones((batch, count + 1), bool),
        **fields,
    )


def test_a_rejection_that_leaves_nothing_falls_back_to_the_target() -> None:
    """p = q, both certain of one token, and another that neither can give was proposed: the certain one comes out."""
    certain = jnp.log(jnp.asarray([[[0.0, 0.0, 1.0, 0.0]]]))
    nodes = nodes_of([[3]], [0], log_q=certain, siblings=1)
    model = zoo.bigram(4).model
    for seed in range(4):
        ctx = context(model, [[1]], 2, sampling=WARM, seed=seed)
        verdict = judge(Rejection(), ctx, nodes, jnp.broadcast_to(certain, (1, 2, 4)), 1)
        assert (int(verdict.rows.tokens[0, 1]), int(verdict.emitted[0]), int(verdict.accepted[0])) == (2, 1, 0)


def test_typical_acceptance_takes_the_deepest_probable_path() -> None:
    """Law 9: a plain search over random trees; the thresholds are numbers, so others compile nothing."""
    random, parents, batch, vocab = np.random.default_rng(0), [0, 0, 1, 1, 2, 4], 32, 4
    tokens = np.stack([random.permutation(vocab) for _ in range(3 * batch)])[:, :2].reshape(batch, 6)
    logits = random.normal(size=(batch, 7, vocab)).astype(np.float32) * 2
    model, epsilon, delta = zoo.bigram(vocab).model, 0.2, 0.6
    ctx = context(model, [[1]] * batch, 8, sampling=WARM)
    law = np.exp(logits - np.logaddexp.reduce(logits, axis=2, keepdims=True))
    limit = np.minimum(epsilon, delta * np.exp((law * np.log(law)).sum(axis=2)))
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], node])
    lengths = set()
    verdict = judge(Typical(epsilon, delta), ctx, nodes_of(tokens, parents), jnp.asarray(logits), 3)
    for row in range(batch):
        chance = [law[row, parent, token] for parent, token in zip(parents, tokens[row], strict=True)]
        kept = [chance[node - 1] > limit[row, parents[node - 1]] for node in range(1, 7)]
        whole = [path for path in paths if all(kept[node - 1] for node in path)]
        best = max(whole, key=lambda path: (len(path), sum(np.log(chance[node - 1]) for node in path)))
        assert verdict.path[row].tolist() == best + [7] * (3 - len(best))
        assert int(verdict.accepted[row]) == len(best) == int(verdict.emitted[row]) - 1
        lengths.add(len(best))
    assert lengths == {0, 1, 2, 3}


def test_thresholds_of_typical_acceptance_are_settings() -> None:
    """A threshold of 0 keeps every draft that can be, one above 1 none; neither compiles anything, both are lossy."""
    call = functools.partial(decode, drafter=DRAFT, sampling=WARM)
    call(decoder=dj.Speculative(num_draft=3, acceptance="typical"))
    with dj.compile_clock() as clock:
        generous = call(decoder=dj.Speculative(num_draft=3, acceptance=dj.Typical(epsilon=0.0)))
        strict = call(decoder=dj.Speculative(num_draft=3, acceptance=dj.Typical(epsilon=2.0, delta=1e9)))
    assert clock.programs == 0
    assert generous.stats.model_calls.tolist() == [-(-n // 4) for n in generous.lengths.tolist()]
    assert strict.stats.accepted.sum() == 0
    assert not generous.lossless and not strict.lossless


# ---------------------------------------------------------------------- what cannot be meant
def test_acceptance_is_a_rule_or_its_name() -> None:
    """Names are read into rules, so configs and calls make equal decoders; anything else is refused by name."""
    assert dj.Speculative(acceptance="typical") == dj.Speculative(acceptance=dj.Typical())
    assert make_decoder("speculative", {"acceptance": "rejection"}, has_drafter=True).acceptance == Rejection()  # type: ignore[attr-defined]
    for wrong in ("sure", 3, dj.Typical):
        with pytest.raises(ValueError, match="must be one of coupled, rejection, typical, or a rule such as"):
            dj.Speculative(acceptance=wrong)  # type: ignore[arg-type]


def test_dynamic_trees_of_configs() -> None:
    """Size, depth and width behind a word; impossible ones are refused as in Python."""
    assert read_tree(("dynamic", 7, 3, 2)) == read_tree(["dynamic", 7, 3, 2]) == dj.DynamicTree(7, 3, 2)
    for wrong, words in ((("dynamic", 1, 3, 2), "size=1"), (("dynamic", 7), "size, depth, width")):
        with pytest.raises(ValueError, match=words):
            read_tree(wrong)


def test_drafts_wider_than_what_there_is_are_refused() -> None:
    """More children than tokens, more matches than places, a copy in another dtype: errors before compiling."""
    short = lambda x: x.astype(jnp.int16)
    half = dataclasses.replace(DRAFT, init_cache=lambda *shape: jax.tree.map(short, TARGET.init_cache(*shape)))
    with dj.compile_clock() as clock:
        for tree in (dj.Tree.of_branches((6,)), dj.DynamicTree(6, 1, 6)):
            with pytest.raises(ValueError, match="a node has 6 children, and the vocabulary only 5 ids"):
                decode(decoder=dj.Speculative(tree=tree), drafter=DRAFT)
        with pytest.raises(ValueError, match="num_matches=65: must be from 1 to 64"):
            dj.PromptLookup(num_matches=65)
        with pytest.raises(ValueError, match="its cache is not the target's"):
            decode(decoder=dj.SelfSpeculative(), drafter=half)
    assert clock.programs == 0


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5)], ids=["padded drafter", "padded target"])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_vocabulary_may_be_padded(sizes: tuple[int, int], acceptance: str) -> None:
    """One tokenizer, tables of different sizes: ids that one of them lacks are never drafted, and law 3 or 4 holds."""
    table = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
    table[:, 5:] = -100.0  # what padding of a trained model says
    tokenizer = zoo.ByteTokenizer([b"a", b"b", b"c", b"d", b"e"])
    target, draft = (zoo.table_model(table[:n, :n], tokenizer=tokenizer).model for n in sizes)
    decoder = dj.Speculative(num_draft=3, acceptance=acceptance)
    call = functools.partial(dj.decode, target, [[0], [1]], max_new_tokens=12, sampling=dj.Sampling(temperature=1.0))
    out = call(decoder, drafter=draft)
    assert out.stats.acceptance_rate == 1.0
    assert acceptance == "rejection" or zoo.outputs(out) == zoo.outputs(call(dj.Autoregressive()))


def test_ids_that_a_drafters_table_lacks_do_not_end_its_drafts() -> None:
    """Looked up they are NaN, and a cache that holds NaN says nothing any more."""
    tokenizer = zoo.ByteTokenizer([b"a", b"b", b"c", b"d"])
    configs = [dataclasses.replace(zoo.SMALL, vocab_size=size) for size in (8, 6)]
    target, draft = (dataclasses.replace(init_transformer(each), tokenizer=tokenizer) for each in configs)
    out = dj.decode(target, [[1, 7, 2]], CHAIN, drafter=draft, max_new_tokens=6)
    assert out.stats.drafted[0] >= out.stats.model_calls[0]
