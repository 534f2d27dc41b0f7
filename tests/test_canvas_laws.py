"""The laws of the decoders that fill a canvas: each test names the law of the design that it holds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import canvas_zoo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

import decoding_jax as dj
from decoding_jax.analysis.toys import posterior_model
from decoding_jax.decoders.canvas import canvas_widths
from decoding_jax.loop import run, start
from decoding_jax.prepare import prepare
from decoding_jax.types import identity_readout

SOURCES = [[3], [4, 5, 6, 3, 4, 1], [5, 5], [6, 1, 0, 4, 3, 3, 5, 4, 6, 0]]
SAMPLED = dj.Sampling(temperature=1.0)

SEARCHES = ("ctc, a beam",)  # these do not draw

every_decoder = pytest.mark.parametrize("name", canvas_zoo.DECODERS)
with_lengths = pytest.mark.parametrize(  # neither CTC, which has none, nor a beam of them
    "name", [name for name in canvas_zoo.DECODERS if not name.startswith("ctc") and "lengths" not in name]
)


def drawn(name: str) -> dj.Sampling:
    """Sampling where the decoder draws at all."""
    return dj.Sampling() if name in SEARCHES else SAMPLED


def decode(name: str, sources: Any, eos: tuple[int, ...] = (), **settings: Any) -> dj.DecodeOutput:
    given = {"max_new_tokens": 16, "seed": 5} | settings
    return dj.decode(canvas_zoo.filler_for(name, eos), sources, canvas_zoo.DECODERS[name], **given)


def same(a: dj.DecodeOutput, b: dj.DecodeOutput) -> None:
    assert zoo.outputs(a) == zoo.outputs(b) and a.finish_reason == b.finish_reason
    np.testing.assert_array_equal(a.stats.model_calls, b.stats.model_calls)
    np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=1e-6)


@pytest.mark.parametrize("sampling", [dj.Sampling(), SAMPLED], ids=["greedy", "sampled"])
@every_decoder
def test_a_row_in_a_batch_equals_the_row_alone(name: str, sampling: dj.Sampling) -> None:
    """Law 5: batch mates, their order and padding change nothing."""
    if sampling is SAMPLED and name in SEARCHES:
        pytest.skip("a search does not draw")
    whole = decode(name, SOURCES, sampling=sampling)
    for row, source in enumerate(SOURCES):
        alone = decode(name, [source], sampling=sampling, row_ids=[row])
        assert zoo.outputs(alone)[0] == zoo.outputs(whole)[row]
        assert alone.stats.model_calls[0] == whole.stats.model_calls[row]
    turned = decode(name, SOURCES[::-1], sampling=sampling, row_ids=range(len(SOURCES))[::-1])
    assert zoo.outputs(turned)[::-1] == zoo.outputs(whole)


@every_decoder
def test_eight_devices_change_nothing(name: str) -> None:
    """Law 5: rows on eight devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    same(decode(name, SOURCES, sampling=drawn(name), mesh=mesh), decode(name, SOURCES, sampling=drawn(name)))


@every_decoder
def test_steps_may_be_cut_anywhere(name: str) -> None:
    """Law 6: one step per call, and a trace, give the same; the trace ends in what comes out."""
    whole = decode(name, SOURCES, sampling=drawn(name))
    same(decode(name, SOURCES, sampling=drawn(name), steps_per_call=1), whole)
    traced = decode(name, SOURCES, sampling=drawn(name), trace=True)
    same(traced, whole)
    assert traced.trace is not None
    if "," not in name:  # else the best may not be the one that is shown
        for row, tokens in enumerate(zoo.outputs(whole)):
            last = [step for step in traced.trace if step.row == row][-1]
            assert last.canvas is not None and list(last.canvas[: len(tokens)]) == tokens


@every_decoder
def test_no_mask_comes_out_and_the_loop_is_bounded(name: str) -> None:
    """Law 7: also where the hidden id has by far the largest logit."""
    model, decoder = canvas_zoo.filler_for(name), canvas_zoo.DECODERS[name]
    boost = 3.0 if name.startswith("ctc") else 100.0  # CTC's blank is drawn, and dropped
    table = model.params["table"].at[:, canvas_zoo.MASK].add(boost)
    biased = dataclasses.replace(model, params=model.params | {"table": table})
    for sampling in (dj.Sampling(), drawn(name)):
        out = dj.decode(biased, SOURCES, decoder, max_new_tokens=16, sampling=sampling)
        assert all(canvas_zoo.MASK not in row for row in zoo.outputs(out)) and out.lengths.any()
        assert (out.stats.model_calls <= getattr(decoder, "iterations", 1)).all()


@pytest.mark.parametrize("name", ["nonautoregressive", "mask_predict", "iterative_refinement"])
def test_what_a_model_gives_to_its_mask_is_no_doubt(name: str) -> None:
    """Confidence is among the tokens that can stand at a place, so the hidden id's logits change nothing."""
    model, decoder = canvas_zoo.filler_for(name), canvas_zoo.DECODERS[name]
    table = model.params["table"].at[:, canvas_zoo.MASK].add(100.0)
    biased = dataclasses.replace(model, params=model.params | {"table": table})
    same(*(dj.decode(each, SOURCES, decoder, max_new_tokens=16) for each in (model, biased)))


@pytest.mark.parametrize("name", ["nonautoregressive", "mask_predict", "iterative_refinement", "ctc, a beam"])
def test_candidates_that_are_one_text_count_once(name: str) -> None:
    """Canvases of several lengths that end at once, or texts of a search: one is left, the other places are empty."""
    decoder = canvas_zoo.DECODERS[name]
    if name != "ctc, a beam":
        decoder = dataclasses.replace(decoder, length_beam=3)
    model, sampling = canvas_zoo.filler_for(name, (5,)), dj.Sampling(logit_bias={5: 100.0})
    best = dj.decode(model, SOURCES, decoder, max_new_tokens=16, sampling=sampling).candidates
    assert best is not None and (best.lengths[:, 0] == 1).all() and (best.tokens[:, 0, 0] == 5).all()
    assert (best.lengths[:, 1:] != 1).all() and (np.isfinite(best.scores) == (best.lengths > 0)).all()


@every_decoder
def test_forbidden_and_biased_tokens(name: str) -> None:
    """Processors that need no history hold for every place."""
    out = decode(name, SOURCES, sampling=dj.Sampling(forbidden=(3, 4), logit_bias={5: 50.0}))
    assert all(set(row) == {5} for row in zoo.outputs(out))


@every_decoder
def test_a_row_ends_behind_its_first_eos(name: str) -> None:
    """The token that ends a row is its last one; without one the canvas's length ends it."""
    plain, ended = decode(name, SOURCES), decode(name, SOURCES, eos=(5,))
    if "," in name:
        pytest.skip("the candidates are ranked by what is left of them")
    for before, after, reason in zip(zoo.outputs(plain), zoo.outputs(ended), ended.finish_reason, strict=True):
        end = before.index(5) + 1 if 5 in before else len(before)
        assert after == before[:end] and reason == ("eos" if 5 in before else "length")


@every_decoder
def test_budgets(name: str) -> None:
    """No row is longer than its budget; one without a budget is empty and costs no call."""
    for budget in (0, 1, 3):
        out = decode(name, SOURCES, max_new_tokens=budget)
        assert (out.lengths <= budget).all() and (out.lengths > 0).all() == (budget > 0)
        assert out.tokens.shape == (len(SOURCES), budget)
        assert (out.stats.model_calls > 0).all() == (budget > 0)


@with_lengths
def test_lengths_may_be_given(name: str) -> None:
    """Rows have the lengths that they are told, whatever the model's head says, and need no head."""
    model = canvas_zoo.hash_filler(name.partition(",")[0], length_head="none", length_classes=0)
    out = dj.decode(model, SOURCES, canvas_zoo.DECODERS[name], max_new_tokens=16, lengths=[1, 16, 2, 9])
    assert out.lengths.tolist() == [1, 16, 2, 9]


def test_the_length_head_is_obeyed() -> None:
    """The length is the best class of those that a canvas can have."""
    model = canvas_zoo.filler_for("nonautoregressive")
    out = decode("nonautoregressive", SOURCES)
    for source, length in zip(SOURCES, out.lengths, strict=True):
        logits = _length_logits(model, source)
        possible = [offset for offset in range(9) if len(source) + offset - 4 >= 1]
        assert length == len(source) + max(possible, key=lambda offset: logits[offset]) - 4


@pytest.mark.parametrize("beam", [2, 5, 80])
def test_candidates_have_different_lengths_and_the_best_wins(beam: int) -> None:
    """Law 9: a length beam is the best of as many decodes with given lengths; a beam wider than the lengths is cut."""
    model = canvas_zoo.filler_for("nonautoregressive")
    out = dj.decode(model, SOURCES, dj.NonAutoregressive(length_beam=beam), max_new_tokens=7)
    assert out.candidates is not None
    for row, source in enumerate(SOURCES):
        logits = _length_logits(model, source)
        lengths = [n for n in range(1, 8) if abs(n - len(source)) <= 4]
        lengths = sorted(lengths, key=lambda n: -logits[n - len(source) + 4])[:beam]
        alone = [
            dj.decode(model, [source], dj.NonAutoregressive(), max_new_tokens=7, lengths=[n], row_ids=[row])
            for n in lengths
        ]
        scores = [float(each.log_probs[0].sum() / n) for each, n in zip(alone, lengths, strict=True)]
        order = sorted(range(len(lengths)), key=lambda i: -scores[i])
        assert [n for n in out.candidates.lengths[row].tolist() if n] == [lengths[i] for i in order]
        assert zoo.outputs(out)[row] == zoo.outputs(alone[order[0]])[0]


@functools.cache
def _length_logits_of(seed: int, source: tuple[int, ...]) -> np.ndarray:
    model = canvas_zoo.filler_for("nonautoregressive")
    assert model.encode is not None and model.length_logits is not None
    memory = model.encode(model.params, jnp.asarray([source], jnp.int32), jnp.asarray([len(source)], jnp.int32))
    return np.asarray(model.length_logits(model.params, memory))[0]


def _length_logits(model: dj.Model, source: list[int]) -> np.ndarray:
    return _length_logits_of(0, tuple(source))


def test_a_scorer_ranks_the_candidates() -> None:
    """The output is the candidate that the second model, or an n-gram model, finds most probable per token."""
    model, scorer = canvas_zoo.filler_for("nonautoregressive"), zoo.history_translator(7, start_id=1).model
    decoder = dj.NonAutoregressive(length_beam=4)
    ngram = dj.NGram.train([[3, 4, 5], [5, 5, 3, 6]], order=2, vocab_size=7)
    for given in (scorer, ngram):
        out = dj.decode(model, SOURCES, decoder, max_new_tokens=16, scorer=given)
        assert out.candidates is not None
        for row, source in enumerate(SOURCES):
            kept = [out.candidates.tokens[row, n, :k].tolist() for n, k in enumerate(out.candidates.lengths[row]) if k]
            if given is scorer:
                totals = dj.score(scorer, [source] * len(kept), kept).totals
            else:
                one = lambda ids, at: ngram.log_prob(jnp.asarray(ids), jnp.asarray(at), jnp.asarray(ids[at : at + 1]))
                totals = np.array([sum(float(one(ids, at)[0]) for at in range(len(ids))) for ids in kept])
            means = totals / np.array([len(each) for each in kept])
            np.testing.assert_allclose(out.candidates.scores[row, : len(kept)], means, rtol=1e-4)
            assert zoo.outputs(out)[row] == kept[int(np.argmax(means))]


@pytest.mark.parametrize(
    ("scorer", "decoder", "message"),
    [
        (zoo.history_translator(7, start_id=1).model, dj.NonAutoregressive(), "has one candidate and leaves nothing"),
        (zoo.history_translator(5, start_id=1).model, dj.NonAutoregressive(2), "scorer: its vocabulary has 5 ids"),
        (zoo.bigram(7).model, dj.NonAutoregressive(2), "scorer: it and the target must both be"),
        (canvas_zoo.filler_for("nonautoregressive"), dj.NonAutoregressive(2), "scorer: it was trained with nonauto"),
        ("teacher", dj.NonAutoregressive(2), "scorer='teacher': give a Model"),
        (dj.NGram.train([[1]], 2, 5), dj.NonAutoregressive(2), "scorer: its vocabulary has 5 ids"),
    ],
)
def test_scorers_that_do_not_fit_are_refused(scorer: Any, decoder: Any, message: str) -> None:
    """Before anything is compiled."""
    with dj.compile_clock() as clock, pytest.raises(ValueError, match=message):
        dj.decode(canvas_zoo.filler_for("nonautoregressive"), SOURCES, decoder, scorer=scorer, max_new_tokens=16)
    assert clock.programs == 0


def test_a_language_model_steers_a_search() -> None:
    """With all weight on it the best text is the one that it likes; stop ids end a text of CTC as any other."""
    model = canvas_zoo.filler_for("ctc")
    ngram = dj.NGram.train([[3, 5, 3, 5, 3, 5, 3, 5]] * 4, order=2, vocab_size=7)
    decoder = dj.CTC(beam=8, language_model=ngram, language_model_weight=100.0, length_bonus=200.0)
    out = dj.decode(model, SOURCES, decoder, max_new_tokens=16)
    plain = dj.decode(model, SOURCES, dj.CTC(beam=8), max_new_tokens=16)
    liked = lambda tokens: sum({(3, 5), (5, 3)} >= {pair} for pair in itertools.pairwise(tokens)) / max(len(tokens), 1)
    assert np.mean([liked(row) for row in zoo.outputs(out)]) > np.mean([liked(row) for row in zoo.outputs(plain)])
    ended = dj.decode(model, SOURCES, dj.CTC(), max_new_tokens=16, stop=dj.Stop(token_ids=(5,)))
    whole = dj.decode(model, SOURCES, dj.CTC(), max_new_tokens=16)
    for row, tokens in enumerate(zoo.outputs(whole)):
        assert zoo.outputs(ended)[row] == (tokens[: tokens.index(5) + 1] if 5 in tokens else tokens)
    for bad in (dj.CTC(language_model=ngram), dj.CTC(length_bonus=1.0)):
        with pytest.raises(ValueError, match="beam=1 takes the best path"):
            dj.decode(model, SOURCES, bad, max_new_tokens=16)


def plain_mask_predict(model: dj.Model, source: list[int], length: int, iterations: int) -> tuple[list[int], int]:
    """Mask-predict of one row, written plainly: tokens and rounds."""
    assert model.encode is not None
    memory = model.encode(model.params, jnp.asarray([source], jnp.int32), jnp.asarray([len(source)], jnp.int32))
    canvas, sure = [canvas_zoo.MASK] * length, [0.0] * length
    for t in range(1, iterations + 1):
        inputs = dj.Inputs(
            jnp.asarray([canvas], jnp.int32), jnp.arange(length)[None], jnp.ones((1, length, length), bool)
        )
        hidden = model.apply(model.params, inputs, dj.Cache((), memory)).hidden
        logits = np.asarray(model.readout(model.params, hidden), np.float64)[0]
        logits[:, canvas_zoo.MASK] = -np.inf
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for at in range(length):
            if canvas[at] == canvas_zoo.MASK:
                canvas[at] = int(logits[at].argmax())
                sure[at] = log_p[at, canvas[at]]
        again = length * (iterations - t) // iterations
        if not again:
            return canvas, t
        for at in sorted(range(length), key=lambda i: (sure[i], -i))[:again]:
            canvas[at] = canvas_zoo.MASK
    raise AssertionError("the last round hides nothing")


@pytest.mark.parametrize("iterations", [1, 2, 4, 10, 30])
def test_mask_predict_is_what_the_paper_says(iterations: int) -> None:
    """Laws 8 and 9: against a version for one row; more rounds than places end early."""
    model = canvas_zoo.filler_for("mask_predict")
    lengths = [1, 16, 2, 9]
    out = dj.decode(model, SOURCES, dj.MaskPredict(iterations), max_new_tokens=16, lengths=lengths)
    for row, (source, length) in enumerate(zip(SOURCES, lengths, strict=True)):
        tokens, rounds = plain_mask_predict(model, source, length, iterations)
        assert zoo.outputs(out)[row] == tokens and out.stats.model_calls[row] == rounds


def test_refinement_stops_when_nothing_changes() -> None:
    """Law 8: a row that ends before its last round stands at a fixed point; one round is one-shot decoding."""
    model = canvas_zoo.hash_filler("iterative_refinement", source_copy="uniform")
    lengths = [1, 1, 1, 2]
    once, less, most = (
        dj.decode(model, SOURCES, dj.IterativeRefinement(k), max_new_tokens=16, lengths=lengths) for k in (1, 11, 12)
    )
    calls = most.stats.model_calls
    assert calls.min() < 11  # canvases of one place come to a fixed point or a cycle soon
    for row in np.flatnonzero(calls < 11):
        assert less.stats.model_calls[row] == calls[row] and zoo.outputs(less)[row] == zoo.outputs(most)[row]
    assert model.canvas is not None
    plain = dataclasses.replace(model, canvas=dataclasses.replace(model.canvas, objective="nonautoregressive"))
    one_shot = dj.decode(plain, SOURCES, dj.NonAutoregressive(), max_new_tokens=16, lengths=lengths)
    assert zoo.outputs(one_shot) == zoo.outputs(once)


@pytest.mark.parametrize("rounds", [1, 2, 4, 8])
def test_two_modes_are_mixed_as_often_as_independence_says(rounds: int) -> None:
    """n tokens in T equal rounds: of two modes, 2^-(n/T - 1) of the rows come out whole."""
    size, rows = 8, 400
    model = posterior_model([[3, 4] * (size // 2), [4, 3] * (size // 2)], 6, canvas_zoo.MASK)
    out = dj.decode(
        model, [[3]] * rows, dj.MaskPredict(rounds), max_new_tokens=size, lengths=[size] * rows, sampling=SAMPLED
    )
    whole = sum(row in ([3, 4] * 4, [4, 3] * 4) for row in zoo.outputs(out)) / rows
    wanted = 2.0 ** -(size / rounds - 1)
    assert abs(whole - wanted) <= 3.5 * np.sqrt(wanted * (1 - wanted) / rows)


ONE_PROGRAM: dict[str, Any] = {name: decoder for name, decoder in canvas_zoo.DECODERS.items() if "lengths" not in name}
ONE_PROGRAM |= {"group": dj.GroupAutoregressive(), "segments": dj.SegmentParallel(), "outline": dj.OutlineThenFill()}


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_a_decode_is_one_program(name: str) -> None:
    """Law 10: one `while` with no callback or transfer inside, which lowers for every platform."""
    models = {
        "group": lambda: of_objective("group_autoregressive", 2),
        "segments": lambda: of_objective("segment_parallel", 2, (4,)),
        "outline": outline_model,
    }
    model = models[name]() if name in models else canvas_zoo.filler_for(name)
    call = prepare(model, SOURCES, 16, dj.Sampling(), dj.Stop(), 0, None, None)
    arguments = ONE_PROGRAM[name], call.ctx, jax.eval_shape(start, ONE_PROGRAM[name], call.ctx), jnp.int32(1)
    closed = jax.make_jaxpr(run)(*arguments)
    (inner,) = closed.jaxpr.eqns
    assert [e.primitive.name for e in inner.params["jaxpr"].jaxpr.eqns].count("while") == 1
    assert not [bad for bad in ("callback", "infeed", "outfeed", "device_put") if bad in str(closed)]
    exported = jax.export.export(run, platforms=("cpu", "cuda", "tpu"))(*arguments)
    assert exported.platforms == ("cpu", "cuda", "tpu")


@every_decoder
def test_other_values_compile_nothing(name: str) -> None:
    """Law 10: other sources, settings and budgets of the same sizes find their programs, those of the end too."""
    decode(name, SOURCES)
    with dj.compile_clock() as clock:
        other = {"sampling": drawn(name), "seed": 9, "max_new_tokens": 11}
        decode(name, [[4], [5, 5, 5], [6], [1, 1]], **other)
        if hasattr(decoder := canvas_zoo.DECODERS[name], "iterations"):
            dj.decode(canvas_zoo.filler_for(name), SOURCES, dataclasses.replace(decoder, iterations=2), **other)
    assert clock.programs == 0


# ---------------------------------------------------------------------- several places at once, in order
def of_objective(objective: str, group: int, eos: tuple[int, ...] = (), **fields: Any) -> dj.Model:
    """An encoder-decoder with a real cache whose law depends on every visible token and its position."""
    spec = dj.CanvasSpec(objective, canvas_zoo.MASK, group=group)
    return dataclasses.replace(zoo.history_translator(7, start_id=1).model, canvas=spec, eos_ids=eos, **fields)


def laws_of(model: dj.Model, source: list[int], fed: list[tuple[int, int]]) -> np.ndarray:
    """Logits f64[V] of a place that sees these (token, position) and itself; of all of them the law is the same."""
    assert model.encode is not None
    memory = model.encode(model.params, jnp.asarray([source], jnp.int32), jnp.asarray([len(source)], jnp.int32))
    tokens, positions = (jnp.asarray([each], jnp.int32) for each in zip(*fed, strict=True))
    mask = jnp.ones((1, len(fed), len(fed)), bool)
    hidden = model.apply(model.params, dj.Inputs(tokens, positions, mask), dj.Cache((), memory)).hidden
    return np.asarray(model.readout(model.params, hidden), np.float64)[0, -1]


@pytest.mark.parametrize("sampling", [dj.Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_group_of_one_is_autoregressive(sampling: dj.Sampling) -> None:
    """Law 8: the same tokens, draws, log-probabilities and calls."""
    plain = zoo.history_translator(7, start_id=1).with_eos(4)
    settings: dict[str, Any] = {"max_new_tokens": 12, "sampling": sampling, "seed": 3}
    want = dj.decode(
        plain, SOURCES, **settings | {"sampling": dataclasses.replace(sampling, forbidden=(canvas_zoo.MASK,))}
    )
    same(dj.decode(of_objective("group_autoregressive", 1, (4,)), SOURCES, dj.GroupAutoregressive(), **settings), want)


@pytest.mark.parametrize("group", [2, 3, 5])
def test_a_group_knows_all_groups_before_it_and_none_of_its_own(group: int) -> None:
    """Against a version for one row; ends within a group are met."""
    model = of_objective("group_autoregressive", group, (4,))
    out = dj.decode(model, SOURCES, dj.GroupAutoregressive(), max_new_tokens=13)
    for row, source in enumerate(SOURCES):
        wanted: list[int] = []
        while len(wanted) < 13 and 4 not in wanted:
            fed = ([1] * group + wanted)[: len(wanted) + group]
            law = laws_of(model, source, [(token, at) for at, token in enumerate(fed)])
            law[canvas_zoo.MASK] = -np.inf
            wanted += [int(np.argmax(law))] * group  # nothing tells the places of a group apart in this model
        wanted = wanted[:13]
        wanted = wanted[: wanted.index(4) + 1] if 4 in wanted else wanted
        assert zoo.outputs(out)[row] == wanted
        assert out.stats.model_calls[row] == -(-len(wanted) // group)


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_segments_know_what_all_of_them_hold(segments: int) -> None:
    """Against a version for one row: ends, deleted segments, budgets."""
    model = of_objective("segment_parallel", segments, (4,))
    out = dj.decode(model, SOURCES, dj.SegmentParallel(), max_new_tokens=9)
    kinds = set()
    for row, source in enumerate(SOURCES):
        texts: list[list[int]] = [[] for _ in range(segments)]
        fed: list[tuple[int, int]] = []
        for time in range(9):
            going = [s for s in range(segments) if not texts[s] or texts[s][-1] not in (4, canvas_zoo.MASK)]
            if not going:
                break
            fed += [(texts[s][-1] if time else 1, s * 64 + time) for s in going]
            token = int(np.argmax(laws_of(model, source, fed)))
            for s in going:
                texts[s].append(token)
        kept = [text for text in texts if text[-1] != canvas_zoo.MASK]
        wanted = [token for text in kept for token in text if token != 4]
        if all(text[-1] in (4, canvas_zoo.MASK) for text in texts):
            wanted.append(4)
        kinds.add((len(kept) < segments, wanted[-1:] == [4]))
        assert zoo.outputs(out)[row] == wanted[:9]
    assert len(kinds) > 1  # rows that end, that are cut, that delete


def _gaps(params: Any, hidden: Any) -> Any:
    return params[hidden[..., 0].astype(jnp.int32)][..., :3]


def outline_model(eos: tuple[int, ...] = (4,)) -> dj.Model:
    spec = dj.CanvasSpec("outline_then_fill", canvas_zoo.MASK, length_head="gaps", length_classes=3)
    model = zoo.history_translator(7, start_id=1).model
    return dataclasses.replace(model, canvas=spec, gap_logits=_gaps, eos_ids=eos)


@pytest.mark.parametrize(("budget", "ends"), [(13, True), (3, False)])
def test_an_outline_is_written_and_filled(budget: int, ends: bool) -> None:
    """Against a version for one row: gaps, ends, budgets, one call more for what is between."""
    model = outline_model()
    out = dj.decode(model, SOURCES, dj.OutlineThenFill(), max_new_tokens=budget)
    kinds = set()
    for row, source in enumerate(SOURCES):
        canvas, fed, calls = [canvas_zoo.MASK] * budget, [(1, 0)], 0
        length, whole = 0, False
        while not whole:
            law = laws_of(model, source, fed)
            calls += 1
            place = length + int(np.argmax(law[:3]))
            law[canvas_zoo.MASK] = -np.inf
            token = int(np.argmax(law))
            if place >= budget:
                break
            canvas[place], length, whole = token, place + 1, token == 4
            fed.append((token, len(fed)))
        canvas = canvas[:length] if whole else canvas
        if canvas_zoo.MASK in canvas:
            law = laws_of(model, source, [(token, at) for at, token in enumerate(canvas)])
            law[canvas_zoo.MASK] = -np.inf
            canvas = [int(np.argmax(law)) if token == canvas_zoo.MASK else token for token in canvas]
            calls += 1
        kinds.add(whole)
        wanted = canvas[: canvas.index(4) + 1] if 4 in canvas else canvas
        assert zoo.outputs(out)[row] == wanted and out.stats.model_calls[row] == calls
    assert ends in kinds


@pytest.mark.parametrize(
    "decoder",
    [dj.GroupAutoregressive(), dj.SegmentParallel(), dj.OutlineThenFill()],
    ids=lambda decoder: type(decoder).__name__,
)
def test_rows_in_order_obey_the_laws_too(decoder: Any) -> None:
    """Laws 5 to 7: batch, steps one by one, eight devices, no mask."""
    objective = {"GroupAutoregressive": "group_autoregressive", "SegmentParallel": "segment_parallel"}
    outline = isinstance(decoder, dj.OutlineThenFill)
    model = outline_model() if outline else of_objective(objective[type(decoder).__name__], 3, (4,))
    settings: dict[str, Any] = {"max_new_tokens": 9, "sampling": SAMPLED, "seed": 1}
    whole = dj.decode(model, SOURCES, decoder, **settings)
    assert all(canvas_zoo.MASK not in row for row in zoo.outputs(whole))
    for row, source in enumerate(SOURCES):
        alone = dj.decode(model, [source], decoder, row_ids=[row], **settings)
        assert zoo.outputs(alone)[0] == zoo.outputs(whole)[row]
    for budget in (0, 1, 2, 4):
        cut = dj.decode(model, SOURCES, decoder, **settings | {"max_new_tokens": budget})
        assert (cut.lengths <= budget).all() and (cut.stats.model_calls > 0).all() == (budget > 0)
    same(dj.decode(model, SOURCES, decoder, steps_per_call=1, **settings), whole)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    same(dj.decode(model, SOURCES, decoder, mesh=mesh, **settings), whole)


@pytest.mark.parametrize("draft", ["nonautoregressive", "mask_predict", "ctc"])
@pytest.mark.parametrize("sampling", [dj.Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_verified_draft_is_lossless(draft: str, sampling: dj.Sampling) -> None:
    """Laws 1 and 3: whatever is drafted, the tokens are those of plain decoding."""
    target = zoo.history_translator(7, start_id=1).with_eos(4)
    settings: dict[str, Any] = {"max_new_tokens": 12, "sampling": sampling, "seed": 3}
    want = dj.decode(target, SOURCES, **settings)
    decoder = dj.DraftThenVerify(draft=canvas_zoo.DECODERS[draft], num_draft=5)
    out = dj.decode(target, SOURCES, decoder, drafter=canvas_zoo.filler_for(draft), **settings)
    assert zoo.outputs(out) == zoo.outputs(want) and out.finish_reason == want.finish_reason
    assert out.lossless and (out.stats.draft_calls >= 1).all()
    for budget in (0, 1, 5, 6):
        cut = dj.decode(
            target, SOURCES, decoder, drafter=canvas_zoo.filler_for(draft), **settings | {"max_new_tokens": budget}
        )
        assert zoo.outputs(cut) == [row[:budget] for row in zoo.outputs(want)]


@dataclasses.dataclass(frozen=True)
class _Says:
    """`apply` and `length_logits` of a drafter that writes the same text whatever the source."""

    text: tuple[int, ...]

    def __call__(self, params: Any, inputs: dj.Inputs, cache: Any) -> dj.Features:
        said = jnp.asarray((*self.text, *[0] * 99)[: inputs.tokens.shape[1]], jnp.int32)
        hidden = jax.nn.one_hot(said, 7) * 9.0
        return dj.Features(jnp.broadcast_to(hidden[None], (len(inputs.tokens), *hidden.shape)), (), cache)

    def length(self, params: Any, rows: Any) -> jax.Array:
        return jax.nn.one_hot(jnp.full(rows["source"].shape, len(self.text)), 20) * 9.0


def test_a_draft_is_followed_behind_words_left_out_put_in_and_changed() -> None:
    """A right draft takes ceil(n / (K + 1)) calls; one that lacks, adds or changes a token costs two more at most."""
    target = zoo.history_translator(7, start_id=1).model
    settings: dict[str, Any] = {"max_new_tokens": 12, "sampling": dj.Sampling(forbidden=(canvas_zoo.MASK,))}
    right = zoo.outputs(dj.decode(target, [[3, 5]], **settings))[0]
    other = next(token for token in range(7) if token not in (canvas_zoo.MASK, *right[2:8]))
    drafts = {
        "right": right,
        "changed": [*right[:4], other, *right[5:]],
        "left out": [*right[:4], *right[5:]],
        "put in": [*right[:4], other, *right[4:11]],
    }
    spec = dj.CanvasSpec("nonautoregressive", canvas_zoo.MASK, length_head="lengths", length_classes=20)
    base = dataclasses.replace(canvas_zoo.filler_for("nonautoregressive"), canvas=spec, readout=identity_readout)
    calls = {}
    for name, text in drafts.items():
        says = _Says(tuple(text))
        drafter = dataclasses.replace(base, apply=says, length_logits=says.length)
        out = dj.decode(target, [[3, 5]], dj.DraftThenVerify(num_draft=5), drafter=drafter, **settings)
        assert zoo.outputs(out)[0] == right
        calls[name] = int(out.stats.model_calls[0])
    assert calls["right"] == 2 and max(calls.values()) <= 4


def test_widths_of_a_round() -> None:
    """The whole canvas is among them, and none is wasted on less than eight places."""
    assert canvas_widths(96) == (12, 24, 48, 96) and canvas_widths(5) == (5,)


LETTERS = zoo.ByteTokenizer([b"a", b"b", b"", b"ab", b"ca", b"d", b"e"])
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a model that writes from left to right": (
        (zoo.history_translator(7).model, dj.MaskPredict()),
        {},
        "MaskPredict fills a whole canvas, and this model writes from left to right",
    ),
    "a one-shot model refined": (
        (canvas_zoo.filler_for("nonautoregressive"), dj.IterativeRefinement()),
        {},
        "runs models trained with iterative_refinement, and this one was trained with nonautoregressive",
    ),
    "a prefix decoder": (
        (canvas_zoo.filler_for("nonautoregressive"), dj.Autoregressive()),
        {},
        "Autoregressive writes token by token, and this model was trained with nonautoregressive",
    ),
    "no length head and no lengths": (
        (posterior_model([[3, 4]], 7, canvas_zoo.MASK), dj.MaskPredict()),
        {},
        "the model has no length head",
    ),
    "a length of 0": (
        (canvas_zoo.filler_for("nonautoregressive"), dj.NonAutoregressive()),
        {"lengths": [0] * 4},
        "lengths",
    ),
    "a length beyond the budget": (
        (canvas_zoo.filler_for("nonautoregressive"), dj.NonAutoregressive()),
        {"lengths": [17] * 4},
        "from 1 to max_new_tokens=16",
    ),
    "too few lengths": (
        (canvas_zoo.filler_for("nonautoregressive"), dj.NonAutoregressive()),
        {"lengths": [3]},
        "each of the 4",
    ),
    "lengths for a prefix decoder": (
        (zoo.history_translator(7).model, dj.Autoregressive()),
        {"lengths": [3] * 4},
        "writes until the text ends",
    ),
    "a length beam beside lengths": (
        (canvas_zoo.filler_for("mask_predict"), dj.MaskPredict(length_beam=3)),
        {"lengths": [3] * 4},
        "length_beam=3: the lengths are given",
    ),
    "a source of only hidden places": (
        (canvas_zoo.filler_for("nonautoregressive", (5,)), dj.NonAutoregressive()),
        {"prompts": [[3], [canvas_zoo.MASK, 5, canvas_zoo.MASK]]},
        r"prompts\[1\]=\[\d, 5, \d\]: only hidden places",
    ),
    "no round": (
        (canvas_zoo.filler_for("mask_predict"), dj.MaskPredict(iterations=0)),
        {},
        "iterations=0: must be at least 1",
    ),
    "rounds without end": (
        (canvas_zoo.filler_for("mask_predict"), dj.MaskPredict(iterations=10**8)),
        {},
        "iterations=100000000: must be at most 10,000",
    ),
    "half a round": (
        (canvas_zoo.filler_for("iterative_refinement"), dj.IterativeRefinement(iterations=1.5)),
        {},
        "iterations=1.5: must be a whole number",
    ),
    "a penalty": (
        (canvas_zoo.filler_for("nonautoregressive"), dj.NonAutoregressive()),
        {"sampling": dj.Sampling(repetition_penalty=1.2)},
        "sampling.repetition_penalty: NonAutoregressive writes many places at once",
    ),
    "a drafter that writes several tokens at once": (
        (zoo.history_translator(7, start_id=1).model, dj.Speculative()),
        {"drafter": canvas_zoo.filler_for("nonautoregressive")},
        "Speculative drafts token by token, and this drafter writes several at once; use DraftThenVerify",
    ),
    "a drafter that its decoder cannot run": (
        (zoo.history_translator(7, start_id=1).model, dj.DraftThenVerify(draft=dj.CTC())),
        {"drafter": canvas_zoo.filler_for("nonautoregressive")},
        r"draft=CTC\(\): decoder: CTC runs models trained with ctc, and this one was trained with nonautoregressive",
    ),
    "a drafter that writes token by token": (
        (zoo.history_translator(7, start_id=1).model, dj.DraftThenVerify()),
        {"drafter": zoo.history_translator(7, start_id=1).model},
        "drafter: it writes token by token; use Speculative",
    ),
    "a drafter of a padded vocabulary": (
        (dataclasses.replace(zoo.history_translator(7, start_id=1).model, tokenizer=LETTERS), dj.DraftThenVerify()),
        {"drafter": dataclasses.replace(canvas_zoo.hash_filler("nonautoregressive", vocab=8), tokenizer=LETTERS)},
        "drafter: its vocabulary is padded to 8 ids and the target's to 7",
    ),
    "a drafter without a length head": (
        (zoo.history_translator(7, start_id=2).model, dj.DraftThenVerify(draft=dj.MaskPredict())),
        {"drafter": posterior_model([[3, 4]], 7, canvas_zoo.MASK)},
        "drafter: it has no length head",
    ),
    "a budget longer than a segment": (
        (dataclasses.replace(of_objective("segment_parallel", 2, (4,)), max_length=None), dj.SegmentParallel()),
        {"max_new_tokens": 65},
        "max_new_tokens=65: segments have room for 64 tokens each",
    ),
    "segments without an end": (
        (of_objective("segment_parallel", 2), dj.SegmentParallel()),
        {},
        "eos_ids: SegmentParallel ends its segments with one",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_impossible_calls_are_refused(name: str) -> None:
    """Bad input gets an error that names the setting, before anything is compiled."""
    (model, decoder), settings, message = BAD[name]
    with dj.compile_clock() as clock, pytest.raises(ValueError, match=message):
        dj.decode(model, decoder=decoder, **{"prompts": SOURCES, "max_new_tokens": 16} | settings)
    assert clock.programs == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dj.NonAutoregressive(length_beam=0), "length_beam=0: must be at least 1"),
        (lambda: dj.DraftThenVerify(draft=dj.NonAutoregressive(length_beam=2)), "a draft is one output"),
        (lambda: dj.DraftThenVerify(draft="ctc"), "draft='ctc': give the decoder"),
        (lambda: dj.CTC(beam=0), "beam=0: must be at least 1"),
        (lambda: dj.CanvasSpec("ctc", 2), "upsample=0: ctc need at least 1"),
        (lambda: dj.CanvasSpec("x", 2, source_copy="hard"), "source_copy='hard'"),
        (lambda: dj.CanvasSpec("x", 2, length_head="offsets"), "length_classes=0"),
        (lambda: dj.CanvasSpec("mask_predict", 2, source_copy="soft"), "sees its own tokens in later rounds"),
        (lambda: dataclasses.replace(canvas_zoo.filler_for("mask_predict"), vocab_size=2), "canvas.mask_id=2: outside"),
        (lambda: dataclasses.replace(outline_model(), gap_logits=None), "the model needs gap_logits for it"),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    """Each names the setting and its value."""
    with pytest.raises(ValueError, match=message):
        make()
