"""Sequence-level distillation (Kim & Rush 2016): a teacher's own outputs become the targets of a student.

The decoding is a batch job (`decoding_jax.batch_job`), a row for each source: it can stop at any moment and goes on
where its last complete part ended. When all parts are there, the good outputs become distilled.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from decoding_jax import batch_folder, batch_job, batch_rows
from decoding_jax.batch_job import Job, Tally
from decoding_jax.batch_rows import Batch, Row
from decoding_jax.checkpoints.cache_files import write_atomically
from decoding_jax.checks import check_whole
from decoding_jax.models.sharding import TRAINING_RULES, place
from decoding_jax.prepare import least_bucket
from decoding_jax.types import Model
from train.data.texts import DISTILLED, Split
from train.jobs import every_setting, read_job
from train.settings import naming
from train.state import make_mesh
from train.translation import digest_of, encode_sources, load_translator, open_pairs

_BROKEN = "\ufffd"  # what bytes that are no character become


@dataclasses.dataclass(frozen=True, eq=False)
class Distillation:
    """A job that is ready to run, or to go on, in its folder.

    Attributes:
      model: the teacher.
      job: how it decodes.
      pairs: the split whose sources it is given.
      rows, parts: the sources and the order they are decoded in; a row's id is its place in the split.
      folder: where the parts and distilled.jsonl go.
      left_out: how many sources are not decoded, by the reason.
      lock: a file descriptor; the folder is this process's until it is closed.
    """

    model: Model
    job: Job
    pairs: Split
    rows: list[Row]
    parts: list[list[Batch]]
    folder: Path
    left_out: dict[str, int]
    lock: int


def default_folder(config: ConfigDict, teacher: str) -> Path:
    """distilled-<decoder> in the teacher's own folder."""
    with every_setting():
        return Path(teacher).expanduser() / f"distilled-{config.distillation.decoder}"


def prepare(config: ConfigDict, teacher: str, folder: Path, overwrite: bool = False) -> Distillation:
    """Loads the teacher, reads the sources and claims the folder.

    Args:
      config: its parts `data`, `distillation` and `mesh` are read.
      teacher: what `dj.load` takes.
      folder: made if it is not there.
      overwrite: discards what another job left in the folder, instead of refusing it.

    Raises:
      ValueError: a setting, the teacher or the data cannot be used, or the folder is another job's.
    """
    with every_setting():
        settings, data = config.distillation, config.data
        if data.distilled:
            raise ValueError(
                f"data.distilled={data.distilled!r} would replace the sources to be translated; leave it empty here "
                "and set it for the student"
            )
        mesh = make_mesh(config.mesh)
        check_whole("distillation.max_new_tokens", settings.max_new_tokens, 1)
        with naming("distillation", settings):
            job = read_job(settings, mesh if mesh.size > 1 else None)
        split, longest = settings.split, data.length
    model = load_translator("teacher", teacher, place(mesh, TRAINING_RULES) if job.mesh else None)
    with naming("distillation", settings):
        batch_job.check_job(model, job)
    pairs = open_pairs(data, split)
    longest = min(longest, model.max_length or longest)
    sources = encode_sources(pairs, split, model, longest)
    numbers = sources.places.tolist()
    rows = [Row(n, n, np.asarray(sources.fields["text"][i])) for i, n in enumerate(numbers)]
    left_out = {f"sources longer than {longest} tokens": sources.dropped, "empty sources": sources.empty}
    lengths = [len(row.prompt) for row in rows]
    parts = batch_rows.plan_parts(lengths, job.batch_size, job.batches_per_part, least=least_bucket(model))
    # A teacher that was trained further, or other texts, make other pairs.
    dtype = jax.tree.leaves(model.params)[0].dtype.name
    plan = batch_job.describe_job([], job, Path(teacher).resolve().name, dtype)
    plan |= {"teacher_sha256": digest_of(model), "texts_sha256": pairs.digest}
    lock = batch_folder.open_folder(folder)
    try:
        batch_folder.start_folder(folder, plan, rows, [], overwrite)
    except BaseException:
        os.close(lock)
        raise
    return Distillation(model, job, pairs, rows, parts, folder, left_out, lock)


def perform(work: Distillation, on_batch: Callable[[Tally], None] = lambda tally: None) -> tuple[Tally, dict[str, int]]:
    """Decodes what is not decoded yet and writes distilled.jsonl, which is there only when all parts are.

    Args:
      work: from `prepare`.
      on_batch: called at the start and after every batch; what it raises stops the job.

    Returns:
      What was decoded here, and counts: "pairs" written, and by the reason what was left out. Without any pair
      there is no file.

    Raises:
      OSError: a file cannot be written.
    """
    file = work.folder / DISTILLED
    if not all(batch_folder.find_parts(work.folder, work.rows, work.parts)):
        file.unlink(missing_ok=True)  # of another job that was overwritten, or with a part that is damaged now
    tally = batch_job.run_job(work.model, work.job, work.rows, work.parts, work.folder, on_batch)
    lines, left_out = _pairs(work)
    if lines:
        write_atomically(file, "".join(lines).encode())
    return tally, {"pairs": len(lines)} | work.left_out | left_out


def _pairs(work: Distillation) -> tuple[list[str], dict[str, int]]:
    """The lines of distilled.jsonl in the order of the sources, and how many outputs were left out, by the reason."""
    unfinished = f"outputs without <eos> in {work.job.max_new_tokens} tokens"
    left_out = dict.fromkeys((unfinished, "empty outputs", "outputs with broken characters"), 0)
    outputs = _outputs(work.folder, len(work.parts))
    lines = []
    for number, pair in enumerate(work.pairs):
        if number not in outputs:
            continue
        text, finish_reason = outputs[number]
        if finish_reason != "eos":
            left_out[unfinished] += 1
        elif not text:
            left_out["empty outputs"] += 1
        elif _BROKEN in text:
            left_out["outputs with broken characters"] += 1
        else:
            lines.append(json.dumps({"source": pair["source"], "target": text}, ensure_ascii=False) + "\n")
    return lines, left_out


def _outputs(folder: Path, parts: int) -> dict[int, tuple[str, str]]:
    """The text of each decoded source, without surrounding whitespace, and what it ended with; by its place."""
    outputs = {}
    for name in batch_rows.part_names(parts):
        with (folder / name).open(encoding="utf-8") as lines:
            for line in lines:
                record: dict[str, Any] = json.loads(line)
                outputs[record["id"]] = record["text"].strip(), record["finish_reason"]
    return outputs
