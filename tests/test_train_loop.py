"""Whole runs: what they leave, that stopping them changes nothing, on any mesh, and what they refuse to do."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from tiny_runs import home, logged, make_small_mesh, pairs_config, sentences, text_config, train_until

import decoding_jax as dj
import train.loop
from decoding_jax.checkpoints import Tokenizer
from decoding_jax.checkpoints.workdir import read_about
from decoding_jax.models.functional import init_transformer
from decoding_jax.models.transformer import TransformerConfig
from train.data.texts import open_texts
from train.data.tokenizers import digest_of_tokenizer, make_tokenizer
from train.loop import Trainer
from train.objectives import Teacher
from train.setup import base_model, make_objective, open_data
from train.signals import Stopped, StopSignals
from train.workdir import check_origins, check_workdir, claim_workdir, find_origins, saved

__all__ = ["home"]  # a fixture

ONE = make_small_mesh()
# Everything that a checkpoint has to bring back.
FULL = {
    "total_steps": 24,
    "model.dropout": 0.1,
    "optimizer.ema": 0.9,
    "evaluation.decode_every": 12,
    "frozen": ("layers/0/attention_norm/scale",),
}


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mesh(monkeypatch)


def use_mesh(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Trainers made from here on see only the devices of such a mesh."""
    mesh = make_small_mesh(**sizes)
    monkeypatch.setattr(train.loop, "make_mesh", lambda settings: mesh)


@pytest.fixture(scope="module")
def whole(home: Path) -> Iterator[Path]:
    """The workdir of a run that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        use_mesh(patch)
        Trainer(text_config(home, FULL), home / "whole").run()
    yield home / "whole"


def decoded(model: dj.Model, prompt: str = "the ") -> str:
    out = dj.decode(model, [prompt], max_new_tokens=8)
    assert out.text is not None
    return out.text[0]


# --- What a run leaves


def test_a_run_leaves_logs_scores_a_picture_and_a_model(whole: Path) -> None:
    """Every step and evaluation is logged, the results are those of the best checkpoint, and the folder decodes."""
    losses, validation = logged(whole, "loss"), logged(whole, "validation_loss")
    assert list(losses) == list(range(1, 25)) and list(validation) == [4, 8, 12, 16, 20, 24]
    assert losses[24] < losses[1] - 0.2
    results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    assert results["step"] == 24 and results["best_step"] == min(validation, key=lambda step: validation[step])
    assert results["best_validation_loss"] == min(validation.values())
    assert [sample["prompt"] for sample in results["samples"]] == ["the "]
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(12, "the "), (24, "the ")]
    assert len(decoded(dj.load(whole))) > 0
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["20", "24"]


def test_the_best_loss_is_that_of_the_best_checkpoint(home: Path, tmp_path: Path) -> None:
    """A lower one between two checkpoints is that of params that are gone."""
    changes = {"total_steps": 4, "checkpoint.every": 2, "evaluation.every": 1, "evaluation.prompts": ()}
    trainer = Trainer(text_config(home, changes), tmp_path / "run")
    losses = {1: 1.0, 2: 3.0, 3: 0.5, 4: 4.0}
    sums = lambda *_: {"nats_per_token": (losses[int(trainer.state.step)], 1.0), "accuracy": (0.0, 1.0)}
    trainer.evaluate_batch = sums
    results = trainer.run()
    assert logged(tmp_path / "run", "validation_loss") == losses
    found = [results[name] for name in ("best_step", "best_validation_loss", "last_validation_loss")]
    assert found == [2, 3.0, 4.0]


def test_validation_predicts_every_token_once(home: Path, whole: Path) -> None:
    """The validation loss is that of `score` over the windows of the split, by the averaged params of that step."""
    model = dj.load(whole)
    text = (home / "text.txt").read_text(encoding="utf-8")
    part = text[len(text) * 9 // 10 :]
    ids = model.tokenizer.encode(part, add_special_tokens=False)
    windows = [ids[start : start + 17] for start in range(0, len(ids) - 1, 16)]
    assert sum(len(window) - 1 for window in windows) == len(ids) - 1
    found = dj.score(model, [window[:1] for window in windows], [window[1:] for window in windows])
    loss = -found.totals.sum() / (len(ids) - 1)
    validation = logged(whole, "validation_loss")
    assert loss == pytest.approx(min(validation.values()), rel=1e-5)
    bits = logged(whole, "validation_bits_per_character")[24]
    assert bits == pytest.approx(validation[24] * (len(ids) - 1) / len(part) / np.log(2), rel=1e-6)


def test_pairs_are_trained_and_decoded_on_a_mesh(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding while training, with params split over devices, and at the end is scored; so is the test split."""
    use_mesh(monkeypatch, data=2, fsdp=2)
    changes = {"total_steps": 4, "evaluation.decode_every": 2, "evaluation.examples": 3, "evaluation.samples": 2}
    config = pairs_config(home, changes)
    with (home / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("the tree " * 9 + "\tTOO LONG\n")
    results = Trainer(config, home / "pairs").run()
    assert "train: 60 examples" in (said := capsys.readouterr().err)
    assert "1 longer than 24 tokens and left out" in said
    assert {"validation_bleu", "test_bleu", "test_chrf", "test_exact_match", "test_tokens_per_call"} < results.keys()
    written = json.loads((home / "pairs" / "results.json").read_text(encoding="utf-8"))
    assert [sample["split"] for sample in written.pop("samples")] == ["validation", "validation", "test", "test"]
    assert written == results
    assert list(logged(home / "pairs", "validation_bleu")) == [2, 4]
    samples = [json.loads(line) for line in (home / "pairs" / "samples.jsonl").read_text("utf-8").splitlines()]
    assert [sample["step"] for sample in samples] == [2, 2, 4, 4]
    assert samples[0]["source"].upper() == samples[0]["reference"]
    model = dj.load(home / "pairs")
    lines = [line.split("\t") for line in (home / "validation.tsv").read_text("utf-8").splitlines()]
    targets = [[*model.tokenizer.encode(target, add_special_tokens=False), model.eos_ids[0]] for _, target in lines]
    found = dj.score(model, [source for source, _ in lines], targets)
    assert results["best_validation_loss"] == pytest.approx(-found.totals.sum() / found.lengths.sum(), rel=1e-5)


# --- Stopping and going on


def test_stopped_and_killed_runs_have_the_losses_of_the_whole_one(
    home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM saves the step, a crash costs the steps since the last checkpoint; in the end each digit is the same.

    How often to evaluate, save, and profile may change on the way.
    """
    traced: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: traced.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append("stop"))
    workdir, handlers = home / "stopped", [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    trainer = Trainer(text_config(home, FULL), workdir)
    compute = trainer.train_step

    def with_signal(state: Any, *arguments: Any) -> Any:
        result = compute(state, *arguments)
        if int(result[0].step) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    trainer.train_step = with_signal
    with pytest.raises(Stopped) as stopped, StopSignals() as signals:
        trainer.run(signals)
    assert (stopped.value.number, stopped.value.exit_code) == (signal.SIGTERM, 0)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert list(logged(workdir, "loss")) == [1, 2, 3, 4, 5, 6]

    profiled = text_config(home, FULL | {"profile.first_step": 4, "profile.steps": 5})
    trainer = Trainer(profiled, workdir)
    assert trainer.first_step == 6
    train_until(trainer, 11)
    assert traced == ["start", "stop"]  # from step 7, the first of this start inside the window, to 9

    trainer = Trainer(text_config(home, FULL | {"checkpoint.every": 5, "evaluation.every": 12}), workdir)
    assert trainer.first_step == 8
    trainer.run()
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert logged(workdir, name) == logged(whole, name)
    validation = logged(workdir, "validation_loss")
    assert list(validation) == [4, 8, 10, 12, 15, 20, 24]
    assert all(validation[step] == loss for step, loss in logged(whole, "validation_loss").items() if step != 16)
    assert decoded(dj.load(workdir)) == decoded(dj.load(whole))


def test_a_signal_at_the_wrong_moment_is_heard(home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a validation it saves at once, and the validation is made up for; in the last one and in the final decoding
    it ends the run all the same. What is left to do is done by the same command."""
    config, workdir = text_config(home, FULL | {"log_every": 50}), home / "signalled"

    def stopped_in(method: str, at: int | None = None) -> None:
        trainer = Trainer(config, workdir)
        work = getattr(trainer, method)

        def interrupted(*arguments: Any) -> Any:
            if at is None or int(trainer.state.step) == at:
                os.kill(os.getpid(), signal.SIGINT)
            return work(*arguments)

        monkeypatch.setattr(trainer, method, interrupted)
        with pytest.raises(Stopped) as stopped, StopSignals() as signals:
            trainer.run(signals)
        assert stopped.value.exit_code == 130

    for step in (4, 24):
        stopped_in("evaluate_batch", step)
        assert saved(workdir).startswith(f"step {step} is saved in ") and step not in logged(workdir, "validation_loss")
    stopped_in("continue_prompts")
    assert not (workdir / "results.json").exists()
    Trainer(config, workdir).run()
    assert logged(workdir, "validation_loss") == logged(whole, "validation_loss")
    assert list(logged(workdir, "loss")) == [1, 24]
    # The checkpoint that was saved without its loss can still be the best one.
    assert read_about(workdir / "checkpoints/24")["metric"] == logged(whole, "validation_loss")[24]


def test_a_run_goes_on_on_other_devices(home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun on 1 device, gone on with on 8 and then on 2, it has the losses of the run on 1."""
    for sizes, stop in (({}, 5), ({"data": 8}, 13), ({"tensor": 2}, 24)):
        use_mesh(monkeypatch, **sizes)
        train_until(Trainer(text_config(home, FULL), home / "moved"), stop)
    losses, wanted = logged(home / "moved", "loss"), logged(whole, "loss")
    assert list(losses) == list(range(1, 23))
    np.testing.assert_allclose([losses[s] for s in losses], [wanted[s] for s in losses], rtol=1e-5)


def test_a_finished_run_only_makes_its_results_again(home: Path, whole: Path) -> None:
    """The same command after the end trains nothing, and writes the scores again."""
    before = (whole / "results.json").read_text(encoding="utf-8")
    (whole / "results.json").unlink()
    trainer = Trainer(text_config(home, FULL), whole)
    trainer.train_step = None  # not called
    trainer.run()
    without_time = lambda text: {k: v for k, v in json.loads(text).items() if k != "decoding_seconds"}
    assert without_time((whole / "results.json").read_text(encoding="utf-8")) == without_time(before)


def test_a_workdir_belongs_to_one_config(home: Path, tmp_path: Path) -> None:
    """Another config is refused with what differs; what changes nothing that is learnt may differ."""
    config = text_config(home)
    check_workdir(tmp_path / "new", config)
    assert not (tmp_path / "new").exists()
    claim_workdir(tmp_path, text_config(home, {"data.length": 8}))
    claim_workdir(tmp_path, config)  # nothing has been learnt with other settings yet
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    free = {"evaluation.every": 7, "checkpoint.keep_last": 9, "mesh.fsdp": 2, "log_every": 3, "data.prefetch": 0}
    check_workdir(tmp_path, text_config(home, free))
    changed = text_config(home, {"optimizer.learning_rate": 0.5, "data.length": 8, "evaluation.every": 7})
    with pytest.raises(ValueError) as refused:
        check_workdir(tmp_path, changed)
    message = str(refused.value)
    assert "data.length was 16, is 8" in message and "optimizer.learning_rate was 0.001, is 0.5" in message
    assert "evaluation" not in message and "another --workdir" in message


def test_a_workdir_has_one_run_at_a_time(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run is refused while the first is open. One that left no checkpoint may be begun with other settings,
    and the run says that it starts anew."""
    first = Trainer(text_config(home), tmp_path)
    with pytest.raises(ValueError, match=r"workdir='.*': another process is writing there; .* another --workdir"):
        Trainer(text_config(home), tmp_path)
    first.close()
    capsys.readouterr()
    Trainer(text_config(home, {"data.tokenizer.kind": "bytes"}), tmp_path).close()
    assert f"there is no checkpoint in {tmp_path}; starting at step 0" in capsys.readouterr().err
    assert Tokenizer.from_folder(tmp_path).vocab_size == 259


def test_the_folder_of_another_model_is_refused(home: Path, tmp_path: Path) -> None:
    """`dj.load` would go on giving that model."""
    folder = other_model(tmp_path / "model", "abc")
    with pytest.raises(ValueError, match=r"model' holds a model that is no run's; choose another --workdir"):
        Trainer(text_config(home), folder)
    assert not (folder / "train_config.json").exists()


def test_checkpoints_keep_their_folder(home: Path, whole: Path, tmp_path: Path) -> None:
    """Without its config a run may not go on under any other; and a run inside them would be removed with them."""
    with pytest.raises(ValueError, match=r"is inside the checkpoints of another run; choose another --workdir"):
        Trainer(text_config(home), whole / "checkpoints" / "24" / "mine")
    shutil.copytree(whole, tmp_path / "run")
    for name in ("train_config.json", "config.json"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ValueError, match=r"train_config.json is not there, but a run's checkpoints are; restore it"):
        Trainer(text_config(home, FULL), tmp_path / "run")


# --- What it learns from


def test_a_changed_tokenizer_is_refused(home: Path, whole: Path, tmp_path: Path) -> None:
    """One that was edited in the folder of the run would give the texts other ids than the params have learnt."""
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / "tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json has changed since step 24 of the run in .*run; restore"):
        Trainer(text_config(home, FULL), tmp_path / "run")


def test_changed_files_of_tokenizers_and_teachers_are_seen(home: Path, tmp_path: Path) -> None:
    """Every start compares the tokenizer behind data.tokenizer.path and the teacher's params, digit by digit."""
    letters = "".join(sorted(set("".join(sentences(60)))))
    path = other_model(tmp_path / "given", letters)
    config = text_config(home, {"data.tokenizer.kind": "file", "data.tokenizer.path": str(path)})
    config.teacher.path = "teacher"
    teacher = Teacher({"kernel": np.zeros(3, np.float32)}, np.float32(1), np.float32(1), None)
    kept = Tokenizer.from_folder(path)

    def found(teacher: Teacher = teacher) -> dict[str, Any]:
        return find_origins(config, tmp_path, open_data(config, kept), teacher, made=True)

    before = {key: origin.digest for key, origin in found().items()}
    check_origins(found(), before, 3, tmp_path)
    check_origins(found(), {}, 3, tmp_path)  # a checkpoint that kept none
    other = dataclasses.replace(teacher, params={"kernel": np.array([0, 0, 1e-30], np.float32)})
    with pytest.raises(ValueError, match=r"teacher.path='teacher' has changed since step 3"):
        check_origins(found(other), before, 3, tmp_path)
    Tokenizer.from_folder(other_model(tmp_path / "other", letters[::-1])).save(path)
    with pytest.raises(ValueError, match=r"data.tokenizer.path='.*given' has changed since step 3"):
        check_origins(found(), before, 3, tmp_path)


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_a_tokenizer_keeps_its_digest_in_the_folder(home: Path, tmp_path: Path, kind: str) -> None:
    """Made from the texts or read again, it is the same."""
    config = text_config(home, {"data.tokenizer.kind": kind, "data.tokenizer.vocab_size": 270})
    made = make_tokenizer(config.data.tokenizer, open_texts(config.data))
    made.save(tmp_path)
    assert digest_of_tokenizer(Tokenizer.from_folder(tmp_path)) == digest_of_tokenizer(made)


# --- Runs that fail


def test_a_loss_that_is_no_number_ends_the_run(home: Path) -> None:
    """It names the step and where in the data that was; nothing after it is logged or saved."""
    changes = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 10, "total_steps": 30, "checkpoint.every": 1}
    trainer = Trainer(text_config(home, changes), home / "diverging")
    compute = trainer.train_step

    def diverging(state: Any, batch: dict[str, jax.Array], objective: Any) -> Any:
        spoilt = batch | {"weights": batch["weights"] * np.float32(np.nan)} if int(state.step) == 2 else batch
        return compute(state, spoilt, objective)

    trainer.train_step = diverging
    with pytest.raises(
        RuntimeError, match=r"step 3: loss nan.*examples 0 of the training.*; try a lower learning rate"
    ):
        trainer.run()
    assert list(logged(home / "diverging", "loss")) == [1, 2]
    assert saved(home / "diverging").startswith("step 2 is saved in ")


def test_params_that_are_no_numbers_are_not_saved(home: Path) -> None:
    """They are found right after the update that spoilt them, also where no validation would look at them."""
    changes = {"optimizer.learning_rate": 1e38, "optimizer.warmup_steps": 1, "optimizer.weight_decay": 10.0}
    changes |= {"total_steps": 2, "data.files.validation": ""}
    trainer = Trainer(text_config(home, changes), home / "exploding")
    with pytest.raises(RuntimeError, match=r"step 2: loss \d.*norm of the params after it (nan|inf);.*; try a lower"):
        trainer.run()
    assert saved(home / "exploding").startswith("no step is saved in ")


def test_a_setting_newer_than_the_run_had_its_default(home: Path, tmp_path: Path) -> None:
    """A run of an older version goes on; with another value than the default it would be another run."""
    claim_workdir(tmp_path, text_config(home))
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    file = tmp_path / "train_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    del settings["data"]["markup"]
    file.write_text(json.dumps(settings), encoding="utf-8")
    check_workdir(tmp_path, text_config(home))
    with pytest.raises(ValueError, match=r"data\.markup was False, is True"):
        check_workdir(tmp_path, text_config(home, {"data.markup": True}))


def test_a_damaged_config_in_the_folder_is_named(home: Path, tmp_path: Path) -> None:
    """A config that a full disk has cut off is not a run with other settings."""
    for text in ("{", "{}", "[]", "3"):
        (tmp_path / "train_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"train_config.json is damaged"):
            Trainer(text_config(home, {}), tmp_path)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        (
            text_config,
            {"objective": "seq2seq", "model.encoder_layers": 1},
            "objective='seq2seq' learns from source and target, but data.name",
        ),
        (text_config, {"objective": "masked"}, "objective='masked': choose one of causal_lm, ctc"),
        (text_config, {"model.encoder_layers": 1}, "model.encoder_layers=1: objective='causal_lm' needs 0"),
        (pairs_config, {"model.encoder_layers": 0}, "model.encoder_layers=0: objective='seq2seq' needs at least 1"),
        (text_config, {"model.vocab_size": 5}, "model.vocab_size=5: fewer than the"),
        (text_config, {"data.length": 65}, "data.length=65 is more than the model's max_length=64"),
        (text_config, {"data.rows_per_batch": 9, "optimizer.accumulate": 2}, "rows_per_batch=9 is not a multiple of 2"),
        (text_config, {"optimizer.accumulate": 0}, "optimizer.accumulate=0: must be at least 1"),
        (text_config, {"seed": 2**32}, "seed=4294967296: must be from 0"),
        (text_config, {"model.head_size": 0}, "head_size=0: must be at least 1"),
        (text_config, {"frozen": ("[",)}, r"frozen='\[' is no regular expression"),
        (text_config, {"compute_dtype": "float16"}, "compute_dtype='float16': choose one of float32, bfloat16"),
        (text_config, {"label_smoothing": 1.0}, "label_smoothing=1.0: must be from 0 to below 1"),
        (text_config, {"optimizer.ema": 1.0}, "optimizer.ema=1.0: must be from 0"),
        (text_config, {"evaluation.prompts": ("the " * 15,)}, r"prompts\[0\] has 60 tokens and max_new_tokens=8"),
        (text_config, {"evaluation.decoder": "magic"}, "magic"),
        (pairs_config, {"evaluation.language": ""}, "evaluation.language=''"),
        (pairs_config, {"evaluation.max_new_tokens": 64}, "evaluation.max_new_tokens=64: leaves no room"),
        (pairs_config, {"model.max_length": 23, "data.length": 23}, r"source \d+ of the validation split has 24"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_at_once(
    home: Path, tmp_path: Path, kind: Any, changes: dict[str, Any], message: str
) -> None:
    """The start names the setting, and leaves no claim on the folder, so that the mended config can take it."""
    with pytest.raises(ValueError, match=message):
        Trainer(kind(home, changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- Going on from a model, and learning from one


def other_model(folder: Path, characters: str, **fields: Any) -> Path:
    """A saved random model of a vocabulary of its own."""
    named = {"eos_token": "<eos>", "bos_token": "<bos>"}
    vocabulary = {token: i for i, token in enumerate([*named.values(), *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    config = TransformerConfig(len(vocabulary), 1, 16, 32, 2, 2, 8, max_length=64, **fields)
    dj.save(init_transformer(config, tokenizer=Tokenizer(backend, named), eos_ids=(0,)), folder)
    return folder


def test_init_from_starts_where_the_model_stands(home: Path, whole: Path, tmp_path: Path) -> None:
    """Its params, shape and tokenizer take the place of random ones, so the first validation has its loss."""
    dj.save(dj.load(whole), tmp_path / "saved")
    config = text_config(home, {"init_from": str(tmp_path / "saved"), "model.width": 64, "model.dropout": 0.1})
    trainer = Trainer(config, tmp_path / "tuned")
    best = min(logged(whole, "validation_loss").values())
    assert trainer.validate(0)["validation_loss"] == pytest.approx(best, rel=1e-6)
    assert dj.load(tmp_path / "saved").config == trainer.layout.config
    trainer.close()


def test_init_from_refuses_what_the_objective_cannot_train(home: Path, tmp_path: Path) -> None:
    """A decoder alone for pairs, an encoder-decoder for text, rows longer than the model's context."""
    translator = other_model(tmp_path / "translator", "abc", encoder_layers=1, start_id=1)
    causal = other_model(tmp_path / "causal", "abc")
    with pytest.raises(ValueError, match="causal' is a decoder-only model, which objective='seq2seq' cannot train"):
        base_model(pairs_config(home, {"init_from": str(causal)}), ONE)
    with pytest.raises(ValueError, match="translator' is an encoder-decoder, which objective='causal_lm' cannot"):
        base_model(text_config(home, {"init_from": str(translator)}), ONE)
    with pytest.raises(ValueError, match="nowhere"):
        base_model(text_config(home, {"init_from": "nowhere"}), ONE)


def test_a_student_learns_from_its_teacher(home: Path, whole: Path) -> None:
    """The divergence from a teacher is logged and falls; one with another vocabulary or form is refused."""
    changes = {"teacher.path": str(whole), "teacher.weight": 1.0, "optimizer.learning_rate": 0.01, "model.width": 24}
    config = text_config(home, changes)
    trainer = Trainer(config, home / "student")
    assert make_objective(config, trainer.layout, None).teacher is not None  # as for compiling alone
    train_until(trainer, 12)
    divergence, losses = logged(home / "student", "divergence"), logged(home / "student", "loss")
    assert divergence == pytest.approx(losses)
    assert divergence[10] < divergence[1] / 2


def test_teachers_that_do_not_fit_are_refused(home: Path, whole: Path, tmp_path: Path) -> None:
    """Another vocabulary, or an encoder on one side only, cannot teach word by word; weights are checked."""
    stranger = other_model(tmp_path / "stranger", "".join(sorted(set("".join(sentences(60))))) + "z")
    for changes, message in (
        (
            {"teacher.path": str(stranger)},
            "stranger' has another vocabulary than the student; give the student its tok",
        ),
        ({"teacher.path": str(whole), "teacher.weight": 1.5}, "teacher.weight=1.5: must be from 0 to 1"),
        ({"teacher.path": str(whole), "teacher.temperature": 0.0}, "teacher.temperature=0.0: must be above 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Trainer(text_config(home, changes), tmp_path / "student")
    with pytest.raises(ValueError, match="teacher and student must both have an encoder or both none"):
        Trainer(pairs_config(home, {"teacher.path": str(whole)}), tmp_path / "student")
    assert not (tmp_path / "student").exists()
