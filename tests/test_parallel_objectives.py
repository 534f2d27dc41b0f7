"""What the objectives of parallel decoders learn is what these decoders say: the same law in training and decoding."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

import decoding_jax as dj
from decoding_jax.canvas_layout import first_canvas, soft_copy
from decoding_jax.types import CanvasSpec
from train.config import default_config
from train.data.examples import Examples, Ragged
from train.objectives import OBJECTIVES, Seq2Seq, Teacher
from train.objectives.parallel import choose_places
from train.objectives.segment_parallel import cut_segments
from train.settings import check_settings
from train.setup import canvas_spec

MASK, EOS = 2, 0
SOURCES = [[7, 9, 4, 0], [5, 0], [30, 12, 8, 8, 41, 17, 0]]
SPECS: dict[str, CanvasSpec] = {
    "nonautoregressive": CanvasSpec("nonautoregressive", MASK, "uniform", "offsets", 9),
    "nonautoregressive, soft": CanvasSpec("nonautoregressive", MASK, "soft", "lengths", 20),
    "mask_predict": CanvasSpec("mask_predict", MASK, length_head="offsets", length_classes=9),
    "iterative_refinement": CanvasSpec("iterative_refinement", MASK, "uniform", "offsets", 9),
    "ctc": CanvasSpec("ctc", MASK, "uniform", upsample=3),
    "ctc, soft": CanvasSpec("ctc", MASK, "soft", upsample=2),
    "group_autoregressive": CanvasSpec("group_autoregressive", MASK, group=3),
    "segment_parallel": CanvasSpec("segment_parallel", MASK, group=3),
    "outline_then_fill": CanvasSpec("outline_then_fill", MASK, length_head="gaps", length_classes=9),
}
every_spec = pytest.mark.parametrize("name", SPECS)


def model_for(name: str) -> dj.Model:
    """A random Transformer whose sources and positions decide what comes out."""
    model = zoo.small_translator(canvas=SPECS[name])
    return dataclasses.replace(model, eos_ids=(EOS,))


def objective_for(name: str, **settings: Any) -> Any:
    config = default_config()
    config.objective = SPECS[name].objective
    config.canvas.update(settings)
    return OBJECTIVES[config.objective].make(config, model_for(name).spec, None)


def batch_of(targets: list[list[int]], width: int = 0, extra: int = 0) -> dict[str, jax.Array]:
    """SOURCES with these targets; `width` columns and `extra` rows of padding."""
    rows, size = len(targets) + extra, max(map(len, targets)) + width
    long = max(map(len, SOURCES)) + width
    batch = {
        "source": np.zeros((rows, long), np.int32),
        "source_lengths": np.ones((rows,), np.int32),
        "tokens": np.ones((rows, size), np.int32),
        "targets": np.zeros((rows, size), np.int32),
        "weights": np.zeros((rows, size), np.float32),
    }
    for row, (source, target) in enumerate(zip(SOURCES, targets, strict=True)):
        batch["source"][row, : len(source)], batch["source_lengths"][row] = source, len(source)
        batch["targets"][row, : len(target)], batch["weights"][row, : len(target)] = target, 1
        batch["tokens"][row, 1 : len(target)] = target[:-1]
    return {name: jnp.asarray(value) for name, value in batch.items()}


@dataclasses.dataclass(frozen=True)
class _Few:
    """A readout that leaves few tokens."""

    readout: Any
    bias: tuple[float, ...]

    def __call__(self, params: Any, hidden: Any) -> Any:
        logits = self.readout(params, hidden)
        return logits + jnp.broadcast_to(jnp.asarray(self.bias, jnp.float32), logits.shape)


def leaving(model: dj.Model, tokens: list[int]) -> dj.Model:
    """The model with all probability on these tokens."""
    bias = np.full((model.vocab_size,), -1e9, np.float32)
    bias[tokens] = 0.0
    return dataclasses.replace(model, readout=_Few(model.readout, tuple(bias.tolist())))


evaluate = jax.jit(lambda objective, params, batch, key=None: objective.loss(params, batch, key))
TARGETS = [[11, 33, 20, 0], [50, 7, 7, 0], [9, 0]]


@pytest.mark.parametrize("name", ["nonautoregressive", "nonautoregressive, soft", "group_autoregressive"])
def test_the_loss_of_what_is_decoded_is_its_log_probability(name: str) -> None:
    """Canvas, copies, masks and groups are the same in training and decoding.

    The model gives nothing to its hidden id: decoding leaves out what it gives to it, and training does not.
    """
    whole = model_for(name)
    model = leaving(whole, [token for token in range(whole.vocab_size) if token != MASK])
    decoder: Any = dj.GroupAutoregressive() if name.startswith("group") else dj.NonAutoregressive()
    lengths = None if name.startswith("group") else [6, 3, 9]
    out = dj.decode(model, SOURCES, decoder, max_new_tokens=9, lengths=lengths)
    objective = dataclasses.replace(objective_for(name), model=model.spec)
    _, metrics = evaluate(objective, model.params, batch_of(zoo.outputs(out)))
    np.testing.assert_allclose(metrics["nats_per_token"][0], -out.log_probs.sum(), rtol=1e-5)
    assert float(metrics["accuracy"][0]) == float(metrics["accuracy"][1]) == out.lengths.sum()


def test_the_loss_of_ctc_is_the_log_probability_of_a_text() -> None:
    """That of a wide prefix beam, which sums over all paths."""
    model = model_for("ctc, soft")
    sources = [[7, 0], [5, 0], [9, 0]]  # 4 frames
    forbidden = tuple(i for i in range(model.vocab_size) if i not in (MASK, 3, 4))
    few = leaving(model, [MASK, 3, 4])
    out = dj.decode(few, sources, dj.CTC(beam=40), max_new_tokens=9, sampling=dj.Sampling(forbidden=forbidden))
    assert out.candidates is not None
    for best in (0, 1, 3):
        texts = [out.candidates.tokens[row, best, : out.candidates.lengths[row, best]].tolist() for row in range(3)]
        batch = batch_of([text or [3] for text in texts])
        batch |= {"source": jnp.asarray(sources), "source_lengths": jnp.full((3,), 2)}
        objective = dataclasses.replace(objective_for("ctc, soft"), model=few.spec)
        for row, text in enumerate(texts):
            alone = {key: value[row : row + 1] for key, value in batch.items()}
            if text:
                loss = evaluate(objective, few.params, alone)[1]["loss"][0]
                np.testing.assert_allclose(loss, -out.candidates.scores[row, best], rtol=1e-4)


def test_a_group_of_one_has_the_loss_of_seq2seq() -> None:
    """The same params in both, but for the sinusoids, which the plain model is given as well."""
    spec = CanvasSpec("group_autoregressive", MASK, group=1)
    model = zoo.small_translator(canvas=spec)
    grouped = OBJECTIVES["group_autoregressive"](model.spec, jnp.float32(0.0))
    plain = Seq2Seq(model.spec, jnp.float32(0.0))
    batch = batch_of(TARGETS)
    np.testing.assert_allclose(
        evaluate(grouped, model.params, batch)[0], evaluate(plain, model.params, batch)[0], rtol=1e-6
    )


@every_spec
def test_padding_changes_nothing(name: str) -> None:
    """Padded columns and rows add neither loss nor count."""
    objective, params = objective_for(name), model_for(name).params
    value, metrics = evaluate(objective, params, batch_of(TARGETS))
    padded, padded_metrics = evaluate(objective, params, batch_of(TARGETS, extra=2))
    np.testing.assert_allclose(padded, value, rtol=1e-5)
    assert all(padded_metrics[each][1] == metrics[each][1] for each in metrics)
    if name != "mask_predict":  # which hides others in another shape
        np.testing.assert_allclose(evaluate(objective, params, batch_of(TARGETS, width=3))[0], value, rtol=1e-5)


@every_spec
def test_a_step_of_training_has_a_gradient_everywhere(name: str) -> None:
    """With everything random turned on: finite, and no param is left out but where it has no use."""
    glancing = {"glancing": 0.5} if "glancing" in OBJECTIVES[SPECS[name].objective].settings else {}
    objective, model = objective_for(name, **glancing), model_for(name)
    gradient = jax.jit(jax.grad(lambda params, key: objective.loss(params, batch_of(TARGETS), key)[0]))
    leaves = jax.tree.leaves_with_path(gradient(model.params, jax.random.key(0)))
    assert all(np.isfinite(leaf).all() for _, leaf in leaves)
    assert not [path for path, leaf in leaves if not np.asarray(leaf).any()]


@pytest.mark.parametrize("name", ["nonautoregressive", "mask_predict", "iterative_refinement"])
def test_words_of_a_teacher_are_learnt_place_by_place(name: str) -> None:
    """The divergence is from the teacher's law of each target token given those before it."""
    model, teacher = model_for(name), zoo.small_translator(seed=1)
    own = Teacher(teacher.params, jnp.float32(1.0), jnp.float32(1.0), teacher.spec)
    batch = batch_of(TARGETS)
    objective = objective_for(name)
    value, metrics = evaluate(
        dataclasses.replace(objective, teacher=own, length_weight=jnp.float32(0)), model.params, batch
    )
    found = objective.predict(model.params, _memory(model, batch), batch, None)
    taught = jax.nn.log_softmax(Seq2Seq.logits(teacher.spec, teacher.params, batch, None))
    given = jax.nn.log_softmax(found.logits).reshape(-1, *taught.shape)
    each = (jnp.exp(taught)[None] * (taught[None] - given)).sum(axis=2).reshape(-1)
    weights = found.weights.reshape(-1)
    np.testing.assert_allclose(value, (each * weights).sum() / weights.sum(), rtol=1e-4)
    assert float(metrics["divergence"][1]) == float(weights.sum())


def _memory(model: dj.Model, batch: dict[str, jax.Array]) -> Any:
    assert model.encode is not None
    return model.encode(model.params, batch["source"], batch["source_lengths"])


def test_glancing_shows_a_share_of_what_is_wrong() -> None:
    """As many places as the ratio times the wrong ones are shown, and have no loss."""
    model = model_for("nonautoregressive")
    batch, inside = batch_of(TARGETS), batch_of(TARGETS)["weights"].sum()
    plain = evaluate(objective_for("nonautoregressive"), model.params, batch)[1]
    wrong = float(plain["accuracy"][1] - plain["accuracy"][0])
    assert wrong == inside  # a random model is right nowhere, so that the counts below are exact
    for ratio, shown in ((0.0, 0), (0.5, 2 + 2 + 1), (0.8, 3 + 3 + 1)):
        objective = objective_for("nonautoregressive", glancing=ratio)
        count = evaluate(objective, model.params, batch, jax.random.key(1))[1]["accuracy"][1]
        assert count == inside - shown


def test_mask_predict_hides_every_number_of_places_alike_often() -> None:
    """Uniform from 1 to all."""
    objective, model = objective_for("mask_predict"), model_for("mask_predict")
    batch = batch_of([[11, 33, 20, 0]] * 3)
    counts = [
        float(evaluate(objective, model.params, batch, jax.random.key(seed))[1]["accuracy"][1]) for seed in range(60)
    ]
    assert min(counts) >= 3 and max(counts) <= 12 and abs(np.mean(counts) / 3 - 2.5) < 0.4


def test_places_are_chosen_without_repeats() -> None:
    """As many as asked for, only inside, each as often as the others."""
    inside = jnp.asarray([[True] * 5 + [False] * 3] * 400)
    chosen = choose_places(jax.random.key(0), inside, jnp.full((400,), 2))
    assert (chosen.sum(axis=1) == 2).all() and not chosen[:, 5:].any()
    assert (jnp.abs(chosen[:, :5].mean(axis=0) - 0.4) < 0.1).all()


@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_segments_say_the_target(segments: int, training: bool) -> None:
    """Joined, without those that are deleted, they are it; a deleted one says what the one before it says."""
    targets = [[11, 33, 20, 14, 15, 16, 17, 0], [50, 7, 0], [0]]
    key, deleted = (jax.random.key(5) if training else None), 0
    for _ in range(6):
        key = None if key is None else jax.random.split(key)[0]
        tokens, weights = cut_segments(batch_of(targets, extra=1), segments, MASK, key)
        assert not weights[3].any()
        for row, target in enumerate(targets):
            grid = np.where(weights[row] > 0, tokens[row], -1).reshape(-1, segments)
            texts = [[int(t) for t in grid[:, s] if t >= 0] for s in range(segments)]
            assert all(text[-1] in (EOS, MASK) for text in texts)
            kept = [text for text in texts if text[-1] == EOS]
            assert [token for text in kept for token in text[:-1]] == target[:-1]
            for before, text in itertools.pairwise(texts):
                if text[-1] == MASK:
                    deleted += 1
                    assert text[:-1] == before[:-1]
    assert (deleted > 0) == (training and segments > 1)


@pytest.mark.parametrize("rule", ["every", "rare"])
def test_an_outline_and_its_gaps_are_the_target(rule: str) -> None:
    """Each target has one loss, in the outline or in the fill; <eos> is in the outline, and what is rare."""
    model = model_for("outline_then_fill")
    objective = objective_for("outline_then_fill", outline=rule, outline_share=0.5)
    targets = [[11, 33, 11, 14, 11, 0], [50, 33, 0], [0]]
    batch = batch_of(targets)
    ragged = Ragged(np.concatenate(targets).astype(np.int32), np.cumsum([0, *map(len, targets)]))
    examples = Examples("train", {"target": ragged}, np.arange(3), 0, 0, 0, 0, 0, 0, 1)
    objective = objective.fit(examples)
    chosen = objective.outline(batch["targets"], batch["weights"] > 0)
    wanted = {
        "every": [[0, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
        "rare": [[0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
    }
    assert chosen.astype(int).tolist() == wanted[rule]
    metrics = evaluate(objective, model.params, batch)[1]
    assert float(metrics["loss"][1]) == 10 and float(metrics["outline"][0]) == sum(map(sum, wanted[rule]))
    assert objective.examine(examples) is None
    one = dataclasses.replace(objective.spec, length_classes=1)
    few = dataclasses.replace(objective, model=dataclasses.replace(objective.model, canvas=one))
    assert (few.examine(examples) or "").startswith("4 of 6 gaps" if rule == "every" else "3 of 7 gaps")


def test_copies_of_the_source() -> None:
    """The ends of a canvas are those of the source, and a soft copy is one that mixes neighbours."""
    sources, source_lengths = jnp.asarray([[7, 9, 4, 0, 0]]), jnp.asarray([4])
    spec = SPECS["nonautoregressive"]
    assert first_canvas(spec, sources, source_lengths, jnp.asarray([7]), 7)[0].tolist() == [7, 9, 9, 4, 4, 0, 0]
    assert first_canvas(spec, sources, source_lengths, jnp.asarray([1]), 1)[0].tolist() == [7]
    model = model_for("nonautoregressive, soft")
    copy = soft_copy(model.spec, model.params, sources, source_lengths, jnp.asarray([4]), 4)
    assert copy is not None and model.embed is not None
    exact = model.embed(model.params, sources[:, :4])
    near = np.linalg.norm(copy - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert (near < 0.2).all() and (near > 0).all()


def test_targets_that_need_more_frames_are_reported() -> None:
    """Their share is said before training; too many are refused; the loss leaves them out."""
    ragged = lambda rows: Ragged(np.concatenate(rows).astype(np.int32), np.cumsum([0, *map(len, rows)]))
    source, short, long = [5, 0], [7, 7, 8, 0], [1, 2, 3, 4, 5, 6, 0]
    rows = [short] * 9 + [long]
    fields = {"source": ragged([source] * 10), "target": ragged(rows)}
    examples = Examples("train", fields, np.arange(10), 0, 0, 0, 0, 0, 0, 1)
    objective = objective_for("ctc")
    assert objective.examine(examples) == "1 of 10 targets (10.0%) need more frames and are left out"
    narrow = dataclasses.replace(objective, model=model_for("ctc, soft").spec)
    with pytest.raises(ValueError, match=r"canvas.upsample=2: 100% of the 10 targets .* raise it"):
        narrow.examine(examples)
    batch = batch_of([short, long, [3, 0]]) | {"source_lengths": jnp.asarray([2, 2, 2])}
    metrics = evaluate(objective, model_for("ctc").params, batch)[1]
    assert metrics["infeasible"][0] == 1 and metrics["loss"][1] == 6 and np.isfinite(metrics["loss"][0])


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("seq2seq", {"canvas.glancing": 0.5}, "canvas.glancing=0.5: objective='seq2seq' has no use for it"),
        (
            "mask_predict",
            {"canvas.source_copy": "uniform"},
            "canvas.source_copy='uniform': objective='mask_predict' takes",
        ),
        ("mask_predict", {"canvas.group": 3}, "canvas.group=3: objective='mask_predict' has no use for it"),
        ("ctc", {"canvas.length_head": "lengths"}, "canvas.length_head='lengths': objective='ctc' has no use for it"),
        ("ctc", {"canvas.upsample": 0}, "canvas.upsample=0: must be"),
        ("nonautoregressive", {"canvas.glancing": 1.5}, "canvas.glancing=1.5: must be"),
    ],
)
def test_settings_without_a_meaning_are_refused(objective: str, changes: dict[str, Any], message: str) -> None:
    """Each error names the setting."""
    config = default_config()
    config.objective = objective
    config.data.batching = "bucketed"
    config.model.encoder_layers = 1
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        check_settings(config)


def test_a_length_head_may_be_left_out() -> None:
    """Then there are no classes, whatever the config says of their number."""
    config = default_config()
    config.objective, config.canvas.length_head = "mask_predict", "none"
    assert canvas_spec(config, MASK) == CanvasSpec("mask_predict", MASK)


@pytest.mark.parametrize("name", ["ctc", "outline_then_fill", "segment_parallel"])
def test_a_teachers_words_are_refused_where_targets_stand_elsewhere(name: str) -> None:
    """Its probabilities belong to the places of a text from left to right."""
    with pytest.raises(ValueError, match=f"teacher.path: {name} cannot learn a teacher's words"):
        OBJECTIVES[name].make(default_config(), None, object())
