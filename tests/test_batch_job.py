"""The batch job: what is planned, what is written, and that no interruption changes a byte of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import absl.flags
import jax
import numpy as np
import pytest
import tokenizers
import zoo
from ml_collections import ConfigDict, config_flags
from tokenizers import decoders, models, pre_tokenizers

import decoding_jax as dj
from decoding_jax import batch_folder, batch_job, batch_rows
from decoding_jax.batch_job import Job, Tally
from decoding_jax.batch_rows import Batch, plan_parts, read_rows
from decoding_jax.checkpoints import Tokenizer, cache_files
from decoding_jax.models.functional import init_transformer
from decoding_jax.registry import DECODERS, OBJECTS, make_decoder
from train.jobs import load_drafter

ROOT = Path(__file__).parent.parent
CONTEXT, BUDGET = 96, 6


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """One id for each byte, 256 of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template=chat_template)


# Its law hashes the whole visible row, so a wrong row, slot or row id changes what follows.
MODEL = dataclasses.replace(
    zoo.history_cached(256, seed=7, eos_ids=(3, 77)).model,
    tokenizer=byte_tokenizer("{% for m in messages %}{{ m.content }}|{% endfor %}"),
    max_length=CONTEXT,
)
# The encoder-decoder of the same kind.
TRANSLATOR = dataclasses.replace(
    zoo.history_translator(256, seed=7, start_id=1, tokenizer=byte_tokenizer()).with_eos(3, 77), max_length=CONTEXT
)
JOB = Job(max_new_tokens=BUDGET, sampling=dj.Sampling(temperature=1.0), batch_size=3, batches_per_part=2, seed=5)
# Of another law, near enough for some of its drafts to be kept.
DRAFT = dataclasses.replace(MODEL, params=MODEL.params * np.float32(0.7))
DRAFTING = dataclasses.replace(JOB, decoder=dj.Speculative(num_draft=2), drafter=DRAFT, batches_per_part=1)

GOOD = [
    *({"id": f"short {n}", "prompt": "x" * (n % 5 + 1)} for n in range(11)),
    {"id": 7, "tokens": [5] * 70},
    {"id": "chat", "messages": [{"role": "user", "content": "hello"}]},
    *({"id": f"long {n}", "prompt": "y" * (66 + n)} for n in range(4)),
]


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    """Objects as JSON lines, bytes as they are."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def run_all(
    source: Path,
    folder: Path,
    job: Job = JOB,
    model: dj.Model = MODEL,
    overwrite: bool = False,
    on_batch: Callable[[Tally], None] = lambda tally: None,
    drafter_name: str | None = None,
) -> Tally:
    """What scripts/decode.py does between its flags and its summary."""
    lock = batch_folder.open_folder(folder)
    try:
        files = [(source.name, source)]
        plan = batch_job.describe_job(files, job, "toy", "float32", drafter_name)
        if not overwrite:
            batch_folder.check_folder(folder, plan)
        rows, errors = read_rows(model, files, job.max_new_tokens, job.decoder, job.drafter)
        parts = plan_parts([len(row.prompt) for row in rows], job.batch_size, job.batches_per_part)
        batch_folder.start_folder(folder, plan, rows, errors, overwrite)
        return batch_job.run_job(model, job, rows, parts, folder, on_batch)
    finally:
        os.close(lock)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(folder: Path) -> dict[str | int, dict[str, Any]]:
    """All lines of all parts by id; an id that is there twice fails."""
    parts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("part-*"))]
    lines = [json.loads(line) for part in parts for line in part.split("\n")[:-1]]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """An input with a bad line, and what an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_lines(folder / "in.jsonl", [*GOOD[:4], b"no JSON", *GOOD[4:]])
    run_all(source, folder / "out")
    return source, contents(folder / "out")


# ---------------------------------------------------------------------- the plan


def test_plan_holds_every_row_once_in_groups_of_like_length() -> None:
    """Each row is in one batch, batches are full but the last of a group, and groups share a bucket."""
    lengths = np.random.default_rng(0).integers(1, 200, size=100).tolist()
    parts = plan_parts(lengths, 8, 3)
    batches = [batch for part in parts for batch in part]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(100))
    assert all(len(part) == 3 for part in parts[:-1])
    of = lambda row: batch_rows.bucket(lengths[row])
    for bucket, group in itertools.groupby(batches, key=lambda batch: of(batch.rows[0])):
        group = list(group)
        assert all(of(row) == bucket for batch in group for row in batch.rows)
        assert all(len(batch.rows) == 8 for batch in group[:-1])
        rows = [row for batch in group for row in batch.rows]
        assert rows == sorted(rows)
        assert all(lengths[batch.filler] == max(lengths[row] for row in rows) for batch in group)
    assert plan_parts(lengths, 8, 3) == parts


def test_plan_of_nothing() -> None:
    """An input without good lines has no parts."""
    assert plan_parts([], 8, 4) == []
    assert Batch((4,), 2).filled(3) == [4, 2, 2]


@pytest.mark.parametrize("name", ["batch_size", "batches_per_part"])
def test_sizes_below_one_are_refused(name: str) -> None:
    """A size of 0 would plan forever or divide by nothing."""
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        Job(**{name: 0})


# ---------------------------------------------------------------------- reading

BAD = {
    "invalid UTF-8": (b'{"id": "x", "prompt": "caf\xe9"}', r"byte 27 \(0xe9\) is not UTF-8"),
    "not JSON": (b"{'id': 1}", "not JSON"),
    "nested too deep": (b"[" * 100_000, "not JSON"),
    "not an object": (b'["x"]', "a JSON list; give an object"),
    "half a character": (rb'{"id": "x", "prompt": "\ud800"}', "without its partner"),
    "no id": ({"prompt": "x"}, 'no "id"'),
    "id of another type": ({"id": 1.5, "prompt": "x"}, "id 1.5 is neither"),
    "duplicate id": ({"id": "first", "prompt": "x"}, "id 'first' belongs to an earlier line"),
    "no prompt": ({"id": "x"}, "has no prompt; this model takes one of prompt, messages, tokens"),
    "two prompts": ({"id": "x", "prompt": "a", "tokens": [1]}, "has prompt and tokens; this model takes one of"),
    "a source": ({"id": "x", "source": "a"}, "has source; this model takes one of prompt, messages, tokens"),
    "empty prompt": ({"id": "x", "prompt": ""}, "prompt is empty"),
    "empty tokens": ({"id": "x", "tokens": []}, "tokens is empty"),
    "empty chat": ({"id": "x", "messages": []}, "at least one"),
    "prompt of another type": ({"id": "x", "prompt": 3}, "prompt is a int; it must be a text"),
    "messages of another type": ({"id": "x", "messages": ["hi"]}, "must be objects"),
    "tokens that are messages": ({"id": "x", "tokens": [{"role": "user", "content": "a"}]}, "into messages"),
    "message without content": ({"id": "x", "messages": [{"role": "user"}]}, "messages"),
    "id out of vocabulary": ({"id": "x", "tokens": [0, 256]}, "256 is not a token id"),
    "negative id": ({"id": "x", "tokens": [-1]}, "-1 is not a token id"),
    "word among ids": ({"id": "x", "tokens": [1, "a"]}, "'a' is not a token id"),
    "too long": ({"id": "x", "prompt": "a" * (CONTEXT - BUDGET + 1)}, "91 tokens and max_new_tokens=6"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_line_is_reported_and_the_rest_is_read(case: str, tmp_path: Path) -> None:
    """A bad line costs itself only, and its report has its number, its id where it is known, and why."""
    line, reason = BAD[case]
    first, last = {"id": "first", "prompt": "a"}, {"id": "last", "prompt": "a" * (CONTEXT - BUDGET)}
    source = write_lines(tmp_path / "in", [first, line, last])
    rows, errors = read_rows(MODEL, [("in", source)], BUDGET)
    assert [(row.number, row.id) for row in rows] == [(0, "first"), (2, "last")]
    assert len(errors) == 1 and errors[0]["line"] == 2 and "file" not in errors[0]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(errors[0]["reason"])
    known = isinstance(line, dict) and isinstance(line.get("id"), str)
    assert errors[0].get("id") == (line["id"] if known else None)


BAD_FOR_TRANSLATORS = {
    "a prompt": ({"id": "x", "prompt": "a"}, "has prompt; this model takes one of source, tokens"),
    "a chat": ({"id": "x", "messages": [{"role": "user", "content": "a"}]}, "has messages; this model takes one of"),
    "no source": ({"id": "x"}, "has no prompt; this model takes one of source, tokens"),
    "two sources": ({"id": "x", "source": "a", "tokens": [1]}, "has tokens and source; this model takes one of"),
    "empty source": ({"id": "x", "source": ""}, "source is empty"),
    "source of another type": ({"id": "x", "source": ["a"]}, "source is a list; it must be a text"),
    "too long": (
        {"id": "x", "source": "a" * CONTEXT},
        f"source has 97 tokens, more than the model's context of {CONTEXT}",
    ),
}


@pytest.mark.parametrize("case", BAD_FOR_TRANSLATORS)
def test_bad_line_for_an_encoder_decoder_is_reported(case: str, tmp_path: Path) -> None:
    """An encoder-decoder takes sources and says so; a source has the whole context, whatever the budget is."""
    line, reason = BAD_FOR_TRANSLATORS[case]
    rest = [{"id": "first", "source": "a" * (CONTEXT - 1)}, {"id": "last", "tokens": [64] * CONTEXT}]
    source = write_lines(tmp_path / "in", [rest[0], line, rest[1]])
    rows, errors = read_rows(TRANSLATOR, [("in", source)], BUDGET)
    assert [row.prompt.tolist() for row in rows] == [[64] * (CONTEXT - 1) + [3], [64] * CONTEXT]  # an "a", and the end
    assert [(e["line"], e["id"]) for e in errors] == [(2, "x")] and reason in errors[0]["reason"]


def test_chat_without_template_is_a_bad_line(tmp_path: Path) -> None:
    """A base model's tokenizer cannot lay out a conversation; its texts still decode."""
    model = dataclasses.replace(MODEL, tokenizer=byte_tokenizer())
    chat = {"id": 1, "messages": [{"role": "user", "content": "hi"}]}
    source = write_lines(tmp_path / "in", [chat, {"id": 2, "prompt": "hi"}])
    rows, errors = read_rows(model, [("in", source)], BUDGET)
    assert [row.id for row in rows] == [2]
    assert errors[0]["id"] == 1 and "no chat template" in errors[0]["reason"]


def test_lines_are_numbered_over_all_files(tmp_path: Path) -> None:
    """Row ids go on from file to file; blank lines have a number and no report; errors name the file.

    A byte order mark, Windows line ends and a missing last line end are no errors.
    """
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b'\xef\xbb\xbf{"id": 1, "prompt": "x"}\r\n\r\n   \n{"id": "1", "prompt": "x"}')
    b.write_bytes(b'nope\n{"id": 1, "prompt": "x"}\n{"id": 2, "prompt": "x"}')
    rows, errors = read_rows(MODEL, [("a", a), ("b", b)], BUDGET)
    assert [(row.number, row.id) for row in rows] == [(0, 1), (3, "1"), (6, 2)]
    assert [(e["file"], e["line"], e.get("id")) for e in errors] == [("b", 1, None), ("b", 2, 1)]


# ---------------------------------------------------------------------- decoding


def test_parts_hold_what_decode_gives_each_row_alone(whole: tuple[Path, dict[str, bytes]]) -> None:
    """Batch mates, the copies that fill a batch, and the order of decoding change no row."""
    source, _ = whole
    found = records(source.parent / "out")
    assert len(found) == len(GOOD)
    rows, _ = read_rows(MODEL, [("in", source)], BUDGET)
    for row in rows:
        out = dj.decode(
            MODEL,
            [row.prompt],
            max_new_tokens=BUDGET,
            sampling=JOB.sampling,
            seed=JOB.seed,
            row_ids=[row.number],
        )
        assert found[row.id] == {
            "id": row.id,
            "text": out.text[0] if out.text else None,
            "tokens": out.tokens[0, : out.lengths[0]].tolist(),
            "finish_reason": out.finish_reason[0],
            "stats": {
                "model_calls": int(out.lengths[0]),
                "drafted": 0,
                "accepted": 0,
                "tokens": int(out.lengths[0]),
            },
        }


def test_sizes_and_devices_change_only_where_rows_stand(whole: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """Other batches, other parts or two devices give every id the same line."""
    source, _ = whole
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[:2])
    run_all(source, tmp_path / "other", dataclasses.replace(JOB, batch_size=5, batches_per_part=1))
    run_all(source, tmp_path / "mesh", dataclasses.replace(JOB, mesh=mesh))
    assert records(tmp_path / "other") == records(source.parent / "out")
    assert contents(tmp_path / "mesh") == contents(source.parent / "out")


def test_last_batch_compiles_nothing(tmp_path: Path) -> None:
    """The last batch of a group is filled up with the group's longest row, so its shape is not a new one."""
    lines = [{"id": n, "tokens": [9] * (60 if n == 0 else 2)} for n in range(7)]
    source = write_lines(tmp_path / "in", lines)
    counts: list[int] = []
    job = dataclasses.replace(JOB, batch_size=4)
    with dj.compile_clock() as clock:
        run_all(source, tmp_path / "out", job, on_batch=lambda tally: counts.append(clock.programs))
    assert len(counts) == 3 and counts[1] == counts[2]
    assert len(records(tmp_path / "out")) == 7


def test_lookup_and_beam_records(tmp_path: Path) -> None:
    """Drafts are counted per row, and a search for several writes them best first."""
    source = write_lines(tmp_path / "in", [{"id": 1, "tokens": [4, 4, 4, 4]}])
    run_all(source, tmp_path / "lookup", Job(make_decoder("prompt_lookup", {"num_draft": 2}), BUDGET))
    stats = records(tmp_path / "lookup")[1]["stats"]
    assert 0 <= stats["accepted"] <= stats["drafted"] and stats["drafted"] > 0
    run_all(source, tmp_path / "beam", Job(make_decoder("beam", {"num_beams": 3, "n_best": 2}), BUDGET))
    found = records(tmp_path / "beam")[1]
    assert len(found["candidates"]) == 2
    assert found["candidates"][0]["tokens"] == found["tokens"]
    assert found["candidates"][0]["score"] >= found["candidates"][1]["score"]


def test_empty_input_and_no_budget(tmp_path: Path) -> None:
    """No lines make no parts; a budget of 0 makes rows without tokens."""
    run_all(write_lines(tmp_path / "none", []), tmp_path / "a")
    assert set(contents(tmp_path / "a")) == {"plan.json"}
    assert batch_job.measures(tmp_path / "a", Tally())["tokens_per_second"] is None
    job = dataclasses.replace(JOB, max_new_tokens=0)
    run_all(write_lines(tmp_path / "one", GOOD[:1]), tmp_path / "b", job)
    assert records(tmp_path / "b")["short 0"]["tokens"] == []


def test_job_that_does_not_fit_the_model_is_refused() -> None:
    """Bad settings are found before a line is read, not in the middle of a long job."""
    refused = [
        (Job(max_new_tokens=CONTEXT), f"max_new_tokens={CONTEXT}: leaves no room"),
        (Job(max_new_tokens=1, sampling=dj.Sampling(temperature=float("nan"))), "temperature=nan"),
        (Job(max_new_tokens=1, stop=dj.Stop(token_ids=[999])), "stop.token_ids: 999"),
        (Job(dj.Beam(num_beams=0), max_new_tokens=1), "num_beams=0"),
        (Job(dj.Speculative(), max_new_tokens=1), "drafter: Speculative needs a second model"),
        (Job(max_new_tokens=1, drafter=DRAFT), "drafter: Autoregressive takes none"),
        (Job(dj.Speculative(), max_new_tokens=1, drafter=zoo.bigram(4).model), "its vocabulary has 4 ids"),
        (Job(dj.Speculative(num_draft=CONTEXT), 1, drafter=DRAFT), f"num_draft={CONTEXT}: a draft has {CONTEXT}"),
        (Job(dj.Speculative(), 9, drafter=dataclasses.replace(DRAFT, max_length=9)), "its context is 9"),
    ]
    for job, message in refused:
        with pytest.raises(ValueError, match=message):
            batch_job.check_job(MODEL, job)
    batch_job.check_job(MODEL, JOB)


def test_lines_that_leave_no_room_for_drafting_are_bad(tmp_path: Path) -> None:
    """A prompt too long for the drafter, or for any draft, costs itself and not, in the middle of the job, the rest."""
    prompts = ["a" * 60, "a" * 65, "a" * 59]  # the drafter's context of 70 has 10, 5 and 11 places behind them
    source = write_lines(tmp_path / "in", [{"id": n, "prompt": text} for n, text in enumerate(prompts)])
    drafter = dataclasses.replace(DRAFT, max_length=70)
    rows, errors = read_rows(MODEL, [("in", source)], BUDGET, dj.Speculative(num_draft=11), drafter)
    assert [row.id for row in rows] == [2]
    assert "num_draft=11: a draft has 11 tokens, and behind prompt the context has only 10 left" in errors[0]["reason"]
    assert "prompt has 65 tokens and max_new_tokens=6: together more than the drafter's" in errors[1]["reason"]


# ---------------------------------------------------------------------- interruptions


class Interrupted(BaseException):
    """Stands for a signal."""


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 5])
def test_stop_after_any_batch_and_go_on(batches: int, whole: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """A job stopped at any batch has only whole parts, keeps them, and ends with the same bytes."""
    source, expected = whole
    calls = itertools.count()

    def stop(tally: Tally) -> None:
        if next(calls) == batches:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_all(source, tmp_path, on_batch=stop)
    kept = contents(tmp_path)
    assert kept.items() <= expected.items()
    parts = {path: path.stat().st_ino for path in tmp_path.glob("part-*")}
    assert len(parts) == max(batches - 1, 0) // JOB.batches_per_part
    tally = run_all(source, tmp_path)
    assert contents(tmp_path) == expected
    assert {path: path.stat().st_ino for path in parts} == parts  # not written again
    assert (tally.kept_parts, tally.kept_rows + tally.rows) == (len(parts), len(GOOD))


def test_sources_are_decoded_and_a_stopped_job_goes_on(tmp_path: Path) -> None:
    """Lines of sources give what `decode` gives them, and an interruption changes no byte of it."""
    lines = [{"id": n, "source": "ab" * (n + 1)} for n in range(6)] + [{"id": "ids", "tokens": [5, 6]}]
    source = write_lines(tmp_path / "in", [*lines, {"id": "no source", "prompt": "x"}])
    job = dataclasses.replace(JOB, batches_per_part=1)
    run_all(source, tmp_path / "whole", job, TRANSLATOR)
    expected, found = contents(tmp_path / "whole"), records(tmp_path / "whole")
    assert list(found) == [*range(6), "ids"] and json.loads(expected["errors.jsonl"])["id"] == "no source"
    for first in (0, 3):
        given: Any = [line["source"] for line in lines[first : first + 3]]
        options: dict[str, Any] = {"sampling": JOB.sampling, "seed": JOB.seed, "row_ids": range(first, first + 3)}
        out = dj.decode(TRANSLATOR, given, max_new_tokens=BUDGET, **options)
        assert zoo.outputs(out) == [found[n]["tokens"] for n in range(first, first + 3)]
        assert out.text == [found[n]["text"] for n in range(first, first + 3)]

    def stop(tally: Tally) -> None:
        if tally.rows == 6:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_all(source, tmp_path / "stopped", job, TRANSLATOR, on_batch=stop)
    assert len(list((tmp_path / "stopped").glob("part-*"))) == 1
    assert run_all(source, tmp_path / "stopped", job, TRANSLATOR).kept_parts == 1
    assert contents(tmp_path / "stopped") == expected


def test_a_drafter_changes_no_token_and_a_stopped_job_goes_on(tmp_path: Path) -> None:
    """Drafting gives every row what it has without, in fewer calls; an interruption changes no byte of the parts."""
    source = write_lines(tmp_path / "in", GOOD[:7])
    run_all(source, tmp_path / "plain", dataclasses.replace(JOB, batches_per_part=1))
    run_all(source, tmp_path / "whole", DRAFTING, drafter_name="draft")
    plain, whole = records(tmp_path / "plain"), records(tmp_path / "whole")
    text_of = lambda found: {name: line | {"stats": None} for name, line in found.items()}
    assert text_of(plain) == text_of(whole)
    calls = lambda found: sum(line["stats"]["model_calls"] for line in found.values())
    assert calls(whole) < calls(plain) == sum(len(line["tokens"]) for line in plain.values())

    def stop(tally: Tally) -> None:
        if tally.rows == 6:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_all(source, tmp_path / "stopped", DRAFTING, on_batch=stop, drafter_name="draft")
    assert run_all(source, tmp_path / "stopped", DRAFTING, drafter_name="draft").kept_parts == 1
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"different: drafter\).*--overwrite"):
        run_all(source, tmp_path / "stopped", DRAFTING, drafter_name="another")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_kill_leaves(seed: int, whole: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """Any set of finished files, with half-written ones beside them, leads to the same bytes."""
    source, expected = whole
    rng = np.random.default_rng(seed)
    for name, data in expected.items():
        if name == "plan.json" or rng.random() < 0.5:
            (tmp_path / name).write_bytes(data)
        if rng.random() < 0.7:
            (tmp_path / f".{name}.tmp").write_bytes(data[: int(rng.integers(len(data)))])
    run_all(source, tmp_path)
    assert contents(tmp_path) == expected


def test_kill_before_anything_is_complete(whole: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """A plan without parts holds nobody back: settings may be put right after a first failure."""
    source, expected = whole
    (tmp_path / "plan.json").write_text('{"seed": 99')
    run_all(source, tmp_path)
    assert contents(tmp_path) == expected


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a failed rename neither harms what is there nor leaves scratch files."""
    path = tmp_path / "file"
    cache_files.write_atomically(path, b"old")

    def fail(*paths: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache_files.write_atomically(path, b"new")
    assert contents(tmp_path) == {"file": b"old"}


# ---------------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"max_new_tokens": 7},
        {"batch_size": 4},
        {"batches_per_part": 1},
        {"decoder": dj.PromptLookup()},
        {"sampling": dj.Sampling(temperature=0.5)},
        {"stop": dj.Stop(strings=("x",))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_folder_of_another_job_is_refused(change: dict[str, Any], whole: tuple[Path, dict[str, bytes]]) -> None:
    """Every setting that changes the parts is part of the plan; the refusal names it and changes nothing."""
    source, expected = whole
    folder = source.parent / "out"
    with pytest.raises(ValueError, match=rf"different: {next(iter(change))}\).*--overwrite"):
        run_all(source, folder, dataclasses.replace(JOB, **change))
    assert contents(folder) == expected


def test_other_input_is_refused_or_replaces(tmp_path: Path) -> None:
    """Other bytes are another job; overwrite discards its parts, its errors and its summary, and no more."""
    old, new, out = tmp_path / "old", tmp_path / "new", tmp_path / "out"
    write_lines(old, [*GOOD, b"bad"])
    write_lines(new, GOOD[:2])
    run_all(old, out)
    (out / "summary.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="different: input_sha256"):
        run_all(new, out)
    run_all(new, out, overwrite=True)
    assert set(contents(out)) == {"plan.json", "part-00000-of-00001.jsonl", "notes.txt"}
    assert list(records(out)) == ["short 0", "short 1"]
    before = (out / "part-00000-of-00001.jsonl").stat().st_ino
    assert run_all(new, out, overwrite=True).kept_parts == 1  # the same job: nothing is discarded
    assert (out / "part-00000-of-00001.jsonl").stat().st_ino == before


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"".join(data.splitlines(keepends=True)[:-1]),
        lambda data: data[:-9],
        lambda data: b"".join(data.splitlines(keepends=True)[::-1]),
        lambda data: data[:-1],
        lambda data: bytes(len(data)),
        lambda data: b"",
    ],
    ids=["a line less", "cut in a line", "other order", "no last line end", "zeros", "empty"],
)
def test_damaged_part_is_named_and_decoded_again(
    harm: Callable[[bytes], bytes], whole: tuple[Path, dict[str, bytes]], tmp_path: Path, caplog: Any
) -> None:
    """A full disk or an editor may have cut a part: its rows are neither lost nor do they end the job."""
    source, expected = whole
    for name, data in expected.items():
        (tmp_path / name).write_bytes(data)
    parts = sorted(tmp_path.glob("part-*"))
    parts[0].write_bytes(harm(parts[0].read_bytes()))
    tally = run_all(source, tmp_path)
    assert (tally.kept_parts, tally.rows) == (len(parts) - 1, 6)
    assert contents(tmp_path) == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"] and str(parts[0]) in caplog.text


def test_moved_input_is_the_same_job(whole: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """The bytes of a single input count, not its name: standard input is kept and can be given as a file."""
    source, expected = whole
    out = tmp_path / "out"
    out.mkdir()
    for name, data in expected.items():
        (out / name).write_bytes(data)
    spooled = batch_folder.spool(io.BytesIO(source.read_bytes()), out)
    kept = batch_folder.keep_spooled(spooled, out)
    assert kept.name == "stdin.jsonl" and kept.read_bytes() == source.read_bytes()
    assert run_all(kept, out).rows == 0


def test_parts_without_plan_or_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    """Parts that nobody can vouch for are not taken for this job's."""
    source, out = write_lines(tmp_path / "in", [{"id": 1, "prompt": "ab"}]), tmp_path / "out"
    model = dataclasses.replace(MODEL, tokenizer=byte_tokenizer())
    run_all(source, out, model=model)

    class Other:
        def __init__(self) -> None:
            self.token_bytes, self.decode = model.tokenizer.token_bytes, model.tokenizer.decode

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return model.tokenizer.encode(text)[::-1]

    with pytest.raises(ValueError, match="different: token_ids_sha256"):
        run_all(source, out, model=dataclasses.replace(model, tokenizer=Other()))
    (out / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"no readable plan\.json"):
        run_all(source, out, model=model)


def test_folder_in_use_or_unwritable_is_refused(tmp_path: Path) -> None:
    """Two processes in one folder would throw away each other's scratch files."""
    lock = batch_folder.open_folder(tmp_path / "new" / "folder")
    with pytest.raises(ValueError, match="another process is writing there"):
        batch_folder.open_folder(tmp_path / "new" / "folder")
    os.close(lock)
    os.close(batch_folder.open_folder(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        batch_folder.open_folder(tmp_path / "file")


def test_measures_of_a_resumed_run(whole: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """Counts are of all parts; times are of the rows that this run decoded, and it says how many."""
    source, expected = whole
    (tmp_path / "plan.json").write_bytes(expected["plan.json"])
    first = next(name for name in sorted(expected) if name.startswith("part-00000"))
    (tmp_path / first).write_bytes(expected[first])
    tally = run_all(source, tmp_path)
    measured = batch_job.measures(tmp_path, tally)
    lines = records(tmp_path).values()
    tokens = sum(len(line["tokens"]) for line in lines)
    assert (measured["rows"], measured["new_tokens"]) == (len(GOOD), tokens)
    assert measured["resumed_parts"] == 1 and measured["timed_rows"] == len(GOOD) - 6
    resumed = sum(len(json.loads(line)["tokens"]) for line in expected[first].splitlines())
    assert measured["timed_tokens"] == tokens - resumed
    assert measured["tokens_per_model_call"] == 1.0
    for name in ("tokens_per_second", "time_to_first_token_seconds", "time_per_token_seconds"):
        assert measured[name] > 0


# ---------------------------------------------------------------------- decoders by name, records


def test_decoders_by_name() -> None:
    """Names and settings from a config become decoders; what does not exist is named, with what does."""
    assert make_decoder("autoregressive", {}) == dj.Autoregressive()
    assert make_decoder("prompt_lookup", {"num_draft": 3}) == dj.PromptLookup(num_draft=3)
    with pytest.raises(ValueError, match=r"decoder='greedy': must be one of autoregressive, beam, ctc"):
        make_decoder("greedy", {})
    with pytest.raises(ValueError, match=r"no settings called \['draft'\]; known: num_draft, max_ngram"):
        make_decoder("prompt_lookup", {"draft": 3})


def test_drafters_by_name(tmp_path: Path) -> None:
    """ "int8" is a coarser copy of the model, nothing is none, and what cannot be loaded is called the drafter."""
    model = zoo.small_transformer()
    copy = load_drafter("int8", model)
    assert copy is not None and copy.config == model.config
    assert any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(copy.params))
    assert load_drafter("", model) is None
    with pytest.raises(ValueError, match=r"drafter='.*none': .*no such folder or file"):
        load_drafter(str(tmp_path / "none"), model)


def module_of(file: Path) -> ModuleType:
    """A file that is no part of a package, imported."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode_config(*flags: str) -> ConfigDict:
    """configs/decode_smollm2.py, changed by flags as on a command line."""
    config, line = module_of(ROOT / "configs" / "decode_smollm2.py").get_config(), ["decode", *flags]
    own = absl.flags.FlagValues()
    holder = config_flags.DEFINE_config_dict("config", config, "", own, sys_argv=line)
    own(line)
    return holder.value


def test_config_has_every_setting_of_every_decoder() -> None:
    """What the config says of a decoder is that decoder's defaults, all of them."""
    config = decode_config()
    for name, decoder in DECODERS.items():
        assert set(config[name]) == {field.name for field in dataclasses.fields(decoder)} - set(OBJECTS), name
        assert make_decoder(name, config[name], has_drafter=True) == decoder(), name


def test_settings_of_drafting_from_the_command_line() -> None:
    """Nested settings, and those that are none by default, can be set by flags, trees in either form."""
    config = decode_config(
        "--config.speculative.num_draft=4",
        "--config.speculative.acceptance=rejection",
        "--config.speculative.tree=(2,1,1)",
        "--config.self_speculative.tree=((0,),(1,),(0,0))",
        "--config.self_speculative.exit_layer=3",
    )
    tree = dj.Tree.of_branches((2, 1, 1))
    speculative = dj.Speculative(num_draft=4, acceptance="rejection", tree=tree)
    assert make_decoder("speculative", config.speculative, has_drafter=True) == speculative
    early = dj.SelfSpeculative(exit_layer=3, tree=dj.Tree(((0,), (1,), (0, 0))))
    assert make_decoder("self_speculative", config.self_speculative) == early
    skipping = decode_config("--config.self_speculative.skip_layers=(1,3)").self_speculative
    assert make_decoder("self_speculative", skipping) == dj.SelfSpeculative(skip_layers=(1, 3))


def test_record_replaces_its_namesake(tmp_path: Path) -> None:
    """A file of records has one of each name, in the order of the names."""
    module = module_of(ROOT / "scripts" / "records.py")
    file = tmp_path / "folder" / "topic.json"
    for name, value in (("b", 1.0), ("a", 2.0), ("b", 3.0)):
        module.record(file, name, value, "s", None, "lower", "command")
    found = json.loads(file.read_text())
    assert [(r["name"], r["value"]) for r in found] == [("a", 2.0), ("b", 3.0)]
    fields = ["name", "value", "unit", "target", "better", "command", "date", "machine", "versions"]
    assert list(found[0]) == fields
    with pytest.raises(ValueError, match="must be 'higher' or 'lower'"):
        module.record(file, "c", 1.0, "s", None, "more", "command")
    for text, message in (("nope", "topic.json is not JSON"), ("[1]", "topic.json is not a JSON list of records")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            module.read_records(file)


# ---------------------------------------------------------------------- the command


def command(*flags: Any) -> list[str]:
    script, config = ROOT / "scripts" / "decode.py", ROOT / "configs" / "decode_smollm2.py"
    return [sys.executable, str(script), f"--config={config}", *map(str, flags)]


def start(*flags: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command(*flags), stderr=subprocess.PIPE, text=True, env=environment)


def test_command_survives_kills(tmp_path: Path) -> None:
    """SIGKILL, then SIGTERM, then a full run: exit codes -9, 0 and 1, and the bytes of an untouched run."""
    config = dataclasses.replace(zoo.SMALL, vocab_size=256)
    dj.save(init_transformer(config, tokenizer=byte_tokenizer()), tmp_path / "model")
    lines = [{"id": n, "prompt": "ab" * (n % 7 + 1)} for n in range(120)]
    source = write_lines(tmp_path / "in.jsonl", [*lines, b"\xff"])
    flags = (
        f"--input={source}",
        f"--config.model={tmp_path / 'model'}",
        f"--config.compilation_cache={tmp_path / 'cache'}",
        "--config.max_new_tokens=48",
        "--config.sampling.temperature=0.8",
        "--config.batch_size=1",
        "--config.batches_per_part=2",
    )

    untouched, stopped = tmp_path / "untouched", tmp_path / "stopped"
    process = start(f"--output={untouched}", *flags)
    text = process.communicate(timeout=300)[1]
    assert process.returncode == 1, text
    assert text.splitlines()[-1].startswith("decode: 1 of 121 lines were not decoded"), text
    for parts, number, code in ((2, signal.SIGKILL, -9), (5, signal.SIGTERM, 0)):
        process = start(f"--output={stopped}", *flags)
        while len(list(stopped.glob("part-*"))) < parts:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        text = process.communicate(timeout=300)[1]
        assert process.returncode == code, text
        assert (number == signal.SIGKILL) or "run the same command again" in text
    process = start(f"--output={stopped}", *flags)
    assert process.communicate(timeout=300) and process.returncode == 1
    one, other = contents(untouched), contents(stopped)
    assert json.loads(other.pop("summary.json"))["resumed_parts"] >= 5
    assert json.loads(one.pop("summary.json"))["resumed_parts"] == 0
    assert one == other and len(one) == 62


def test_command_drafts_with_a_second_model(tmp_path: Path) -> None:
    """Flags name the drafter and its settings; a target that drafts for itself keeps every draft."""
    model = tmp_path / "model"
    dj.save(init_transformer(dataclasses.replace(zoo.SMALL, vocab_size=256, num_layers=1)), model)
    source = write_lines(tmp_path / "in.jsonl", [{"id": n, "tokens": [n + 1] * (n + 1)} for n in range(2)])
    process = start(
        f"--input={source}",
        f"--output={tmp_path / 'out'}",
        f"--config.model={model}",
        f"--config.drafter={model}",
        "--config.compilation_cache=",
        "--config.max_new_tokens=4",
        "--config.batch_size=2",
        "--config.decoder=speculative",
        "--config.speculative.num_draft=2",
    )
    text = process.communicate(timeout=300)[1]
    assert process.returncode == 0, text
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["drafter"] == str(model)
    for line in records(tmp_path / "out").values():
        stats = line["stats"]
        assert stats["tokens"] == 4 and stats["model_calls"] == 2 and stats["accepted"] == stats["drafted"] == 3


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--help"], 0, "The output folder gets"),
        (
            ["--input=in", "--output=o", "--config.nope=1"],
            2,
            "config.nope: there is no such setting; there are config.",
        ),
        (["--input=/none.jsonl", "--output=o"], 2, "input='/none.jsonl' cannot be read"),
        (["--input=in", "--output=o", "--config.decoder=speculative"], 2, "and none is given; give a smaller model"),
    ],
    ids=["help", "setting", "input", "drafter"],
)
def test_command_line_errors(flags: list[str], code: int, message: str, tmp_path: Path) -> None:
    """Bad usage is one line on standard error and exit code 2; --help is no error."""
    done = subprocess.run(command(*flags), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code
    assert message in (done.stderr if code else done.stdout)
    assert len(done.stderr.splitlines()) == (1 if code else 0)
