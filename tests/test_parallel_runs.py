"""Runs whose models write several tokens at once: trained, stored, loaded, evaluated and decoded in bulk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import home, logged, make_small_mesh, pairs_config, sentences

import decoding_jax as dj
import train.loop
from decoding_jax.batch_folder import open_folder, start_folder
from decoding_jax.batch_job import Job, describe_job, run_job
from decoding_jax.batch_rows import plan_parts, read_rows
from decoding_jax.checkpoints.orbax import by_path
from decoding_jax.models.quantized import dequantized, quantized
from decoding_jax.registry import DECODERS
from train.loop import Trainer
from train.objectives import OBJECTIVES

__all__ = ["home"]  # a fixture

PARALLEL = [name for name, objective in OBJECTIVES.items() if objective.has_canvas]


def trained(objective: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> dj.Model:
    """The model of a run with the objective; trained once."""
    if not (home / objective / "results.json").exists():
        monkeypatch.setattr(train.loop, "make_mesh", lambda settings: make_small_mesh())
        changes = {"objective": objective, "evaluation.decoder": objective, "evaluation.max_new_tokens": 25}
        if "glancing" in OBJECTIVES[objective].settings:
            changes |= {"canvas.source_copy": "uniform", "canvas.glancing": 0.3}
        Trainer(pairs_config(home, changes), home / objective).run()
    return dj.load(home / objective)


@pytest.mark.parametrize("objective", PARALLEL)
def test_a_run_trains_stores_and_decodes(objective: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls; what the workdir's files say is enough to decode with the decoder of the objective's name."""
    model = trained(objective, home, monkeypatch)
    losses = logged(home / objective, "loss")
    assert losses[max(losses)] < losses[1]
    results = json.loads((home / objective / "results.json").read_text(encoding="utf-8"))
    assert results["test_bleu"] >= 0 and len(results["samples"]) > 0
    assert model.canvas is not None and model.canvas.objective == objective
    assert model.canvas.mask_id == 2  # <mask>
    out = dj.decode(model, sentences(2), DECODERS[objective](), max_new_tokens=25)
    assert out.text is not None and (out.lengths > 0).any()
    dj.save(model, home / f"{objective}-saved")
    again = dj.decode(dj.load(home / f"{objective}-saved"), sentences(2), DECODERS[objective](), max_new_tokens=25)
    assert again.text == out.text


def test_a_student_may_start_from_its_teacher(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its params are those of a model that writes from left to right, here an int8 one; only the length head is new."""
    monkeypatch.setattr(train.loop, "make_mesh", lambda settings: make_small_mesh())
    teacher = Trainer(pairs_config(home, {"seed": 1}), tmp_path / "teacher")
    dj.save(quantized(teacher.model()), tmp_path / "saved")
    teacher.close()
    changes = {"objective": "mask_predict", "evaluation.decoder": "mask_predict", "init_from": str(tmp_path / "saved")}
    student = Trainer(pairs_config(home, changes), tmp_path / "student")
    start = dequantized(dj.load(tmp_path / "saved"))
    given, made = (by_path(each.params)[0] for each in (start, student.model()))
    assert {path.split("/")[0] for path in made.keys() - given.keys()} == {"length_head"}
    assert all(np.array_equal(made[path], given[path]) for path in given)
    assert student.layout.config.canvas is not None and student.layout.config.canvas.mask_id == 2
    student.close()


def test_lengths_of_references_serve_where_there_is_no_head(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without a head is evaluated with them, at the end and before."""
    monkeypatch.setattr(train.loop, "make_mesh", lambda settings: make_small_mesh())
    changes = {"objective": "mask_predict", "evaluation.decoder": "mask_predict", "canvas.length_head": "none"}
    changes |= {"total_steps": 4, "evaluation.decode_every": 2, "evaluation.max_new_tokens": 25}
    results = Trainer(pairs_config(home, changes), tmp_path / "headless").run()
    assert {"validation_bleu", "test_bleu"} < results.keys() and dj.load(tmp_path / "headless").needs_lengths


def test_lines_of_a_batch_job_may_have_lengths(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with a length have it, the others choose theirs; wrong lengths are bad lines."""
    model = trained("nonautoregressive", home, monkeypatch)
    lines = [{"id": i, "source": text} for i, text in enumerate(sentences(6))]
    lines[1]["length"], lines[4]["length"] = 3, 25
    lines += [{"id": "long", "source": "a", "length": 26}, {"id": "odd", "source": "a", "length": "3"}]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    job = Job(dj.NonAutoregressive(), max_new_tokens=25, batch_size=2)
    files = [("in.jsonl", tmp_path / "in.jsonl")]
    rows, errors = read_rows(model, files, 25, job.decoder)
    assert [error["id"] for error in errors] == ["long", "odd"] and all("length=" in e["reason"] for e in errors)
    parts = plan_parts([len(r.prompt) for r in rows], 2, 4, [r.length is not None for r in rows])
    plan = describe_job(files, job, "model", "float32")
    os.close(open_folder(tmp_path / "out"))
    start_folder(tmp_path / "out", plan, rows, errors)
    run_job(model, job, rows, parts, tmp_path / "out")
    texts = [part.read_text(encoding="utf-8") for part in (tmp_path / "out").glob("part-*")]
    found = [json.loads(line) for text in texts for line in text.splitlines()]
    counts = {line["id"]: len(line["tokens"]) for line in found}
    assert sorted(counts) == list(range(6))
    eos = model.eos_ids[0]
    tokens = {line["id"]: line["tokens"] for line in found}
    assert all(counts[i] == want or tokens[i][-1] == eos for i, want in ((1, 3), (4, 25)))
