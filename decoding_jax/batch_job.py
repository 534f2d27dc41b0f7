"""The batch job: lines of prompts in, parts of continuations out, nothing lost whenever it is killed.

Everything follows from the input and the settings alone, so that a job can stop at any moment and go on
later, and its parts are the same bytes as if it had never stopped:

    row id    the number of its line, counted from 0 over all files: randomness depends on nothing else
    groups    rows whose prompts have the same length bucket, in input order; those told their output's length apart
    batches   `batch_size` rows of a group; its last batch is filled up with copies that are dropped
    parts     `batches_per_part` batches, in a file that appears whole or not at all

A folder's plan.json says which job its parts belong to; parts that are there, whole, are not decoded again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from decoding_jax.api import check_decoder, decode
from decoding_jax.batch_folder import PARTS, find_parts, json_lines
from decoding_jax.batch_rows import Batch, Row, part_names
from decoding_jax.checkpoints.cache_files import sha256_of_file, write_atomically
from decoding_jax.checks import check_whole
from decoding_jax.decoders.autoregressive import Autoregressive
from decoding_jax.loop import Decoder
from decoding_jax.prepare import prepare
from decoding_jax.sampling import Sampling
from decoding_jax.stops import Stop
from decoding_jax.types import DecodeOutput, Model

_STEPS_PER_CALL = 32  # between two returns to Python, where signals are heard


@dataclasses.dataclass(frozen=True)
class Job:
    """How rows are decoded; see `decode`. All but `mesh` decides what the parts hold.

    Attributes:
      drafter: a second model that drafts, for decoders that take one.
      batch_size: rows decoded together.
      batches_per_part: batches whose rows are written at once.
    """

    decoder: Decoder = dataclasses.field(default_factory=Autoregressive)
    max_new_tokens: int = 128
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop: Stop = dataclasses.field(default_factory=Stop)
    seed: int = 0
    batch_size: int = 8
    batches_per_part: int = 4
    mesh: Mesh | None = None
    drafter: Model | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "batches_per_part"):
            check_whole(name, getattr(self, name), 1)


def check_job(model: Model, job: Job) -> None:
    """Refuses settings that do not fit the model, before any line is read.

    Raises:
      ValueError: which, and the remedy.
    """
    if model.max_length is not None and job.max_new_tokens >= model.max_length:
        raise ValueError(
            f"max_new_tokens={job.max_new_tokens}: leaves no room for a prompt in the model's context of "
            f"{model.max_length}; choose a smaller budget"
        )
    call = prepare(
        model,
        [[0]],
        job.max_new_tokens,
        job.sampling,
        job.stop,
        job.seed,
        None,
        job.mesh,
        drafter=job.drafter,
        # The lines must have lengths where the model has no head for them.
        lengths=[1] if model.needs_lengths and job.max_new_tokens else None,
    )
    check_decoder(job.decoder, call)


def describe_job(
    files: Sequence[tuple[str, Path]], job: Job, model_name: str, dtype: str, drafter_name: str | None = None
) -> dict[str, Any]:
    """What plan.json holds: the input's digests and every setting that decides what the parts hold.

    Another drafter may change no token, but it changes what the parts say of the drafts.
    """
    described = {
        "input_sha256": [sha256_of_file(path) for _, path in files],
        "input_names": [name for name, _ in files] if len(files) > 1 else [],  # errors.jsonl has them
        "model": model_name,
        "drafter": drafter_name,
        "dtype": dtype,
        "decoder": repr(job.decoder),
        "max_new_tokens": job.max_new_tokens,
        "sampling": dataclasses.asdict(job.sampling),
        "stop": dataclasses.asdict(job.stop),
        "seed": job.seed,
        "batch_size": job.batch_size,
        "batches_per_part": job.batches_per_part,
    }
    plan: dict[str, Any] = json.loads(json.dumps(described))
    return plan


@dataclasses.dataclass
class Tally:
    """What this process has decoded; no time includes compiling.

    Attributes:
      kept_parts, kept_rows: found in the folder and not decoded again.
      rows, tokens: decoded here, and their new tokens.
      seconds: in `decode`.
      compile_seconds: tracing and compiling.
      first_token_seconds: summed over rows, from the start of a row's batch to the batch's first tokens.
      later_seconds, later_tokens: after the first tokens, summed over batches; the tokens are those of
        each batch's longest row.
    """

    kept_parts: int = 0
    kept_rows: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    later_seconds: float = 0.0
    later_tokens: int = 0

    def add(self, output: DecodeOutput, rows: int) -> None:
        """Counts a batch whose first `rows` rows are kept."""
        stats = output.stats
        self.rows += rows
        self.tokens += int(stats.tokens[:rows].sum())
        self.seconds += stats.total_seconds
        self.compile_seconds += stats.compile_seconds
        self.first_token_seconds += stats.first_token_seconds * rows
        self.later_seconds += stats.total_seconds - stats.first_token_seconds
        self.later_tokens += max(int(stats.tokens.max()) - 1, 0)


def run_job(
    model: Model,
    job: Job,
    rows: Sequence[Row],
    parts: Sequence[Sequence[Batch]],
    folder: Path,
    on_batch: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Decodes the parts that are not in the folder yet, or not whole, and writes each when it is complete.

    Args:
      model: the model.
      job: how to decode.
      rows: from `read_rows`.
      parts: from `plan_parts`.
      folder: from `open_folder` and `start_folder`.
      on_batch: called at the start and after every batch; what it raises stops the job.

    Raises:
      OSError: a part cannot be read or written.
    """
    names = part_names(len(parts))
    there = find_parts(folder, rows, parts)
    kept = sum(len(batch.rows) for part, done in zip(parts, there, strict=True) if done for batch in part)
    tally = Tally(kept_parts=sum(there), kept_rows=kept)
    on_batch(tally)
    for part, name, done in zip(parts, names, there, strict=True):
        if done:
            continue
        records: list[dict[str, Any]] = []
        for batch in part:
            output = _decode_batch(model, job, [rows[i] for i in batch.filled(job.batch_size)])
            records += [_record(rows[i], output, at) for at, i in enumerate(batch.rows)]
            tally.add(output, len(batch.rows))
            on_batch(tally)
        write_atomically(folder / name, json_lines(records))
    return tally


def _decode_batch(model: Model, job: Job, rows: Sequence[Row]) -> DecodeOutput:
    told = [row.length for row in rows if row.length is not None]
    return decode(
        model,
        [row.prompt for row in rows],
        job.decoder,
        drafter=job.drafter,
        max_new_tokens=job.max_new_tokens,
        sampling=job.sampling,
        stop=job.stop,
        seed=job.seed,
        row_ids=[row.number for row in rows],
        lengths=told or None,
        mesh=job.mesh,
        steps_per_call=_STEPS_PER_CALL,
    )


def _record(row: Row, output: DecodeOutput, at: int) -> dict[str, Any]:
    """One line of a part. No times: they would make two runs differ."""
    stats = ("model_calls", "drafted", "accepted", "tokens")
    record = {
        "id": row.id,
        "text": None if output.text is None else output.text[at],
        "tokens": output.tokens[at, : output.lengths[at]].tolist(),
        "finish_reason": output.finish_reason[at],
        "stats": {name: int(getattr(output.stats, name)[at]) for name in stats},
    }
    found = output.candidates
    if found is not None and found.scores.shape[1] > 1:
        record["candidates"] = [
            {
                "text": None if found.text is None else found.text[at][n],
                "tokens": found.tokens[at, n, : found.lengths[at, n]].tolist(),
                "score": float(found.scores[at, n]),
            }
            for n in range(found.scores.shape[1])
            if np.isfinite(found.scores[at, n])
        ]
    return record


def measures(folder: Path, tally: Tally) -> dict[str, Any]:
    """The numbers of summary.json: what all parts hold, and how long the rows decoded by this run took.

    rows, new_tokens, tokens_per_model_call: over all parts.
    resumed_parts: parts that were there already. The times are only about the other rows, `timed_rows`
      and `timed_tokens`; None where there are none.
    tokens_per_second: new tokens over the time in `decode` without compiling.
    time_to_first_token_seconds: mean over rows, from the start of a row's batch to its first tokens.
    time_per_token_seconds: time after the first tokens, over the tokens of each batch's longest row after
      its first: how long a reader of one row waits for each.
    compile_seconds: tracing and compiling, or reading compiled programs from the cache.
    """
    count = tokens = calls = 0
    for path in folder.glob(PARTS):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                stats = json.loads(line)["stats"]
                count, tokens, calls = count + 1, tokens + stats["tokens"], calls + stats["model_calls"]
    ratio = lambda amount, over: amount / over if over else None
    return {
        "rows": count,
        "new_tokens": tokens,
        "tokens_per_model_call": ratio(tokens, calls),
        "resumed_parts": tally.kept_parts,
        "timed_rows": tally.rows,
        "timed_tokens": tally.tokens,
        "tokens_per_second": ratio(tally.tokens, tally.seconds),
        "time_to_first_token_seconds": ratio(tally.first_token_seconds, tally.rows),
        "time_per_token_seconds": ratio(tally.later_seconds, tally.later_tokens),
        "compile_seconds": tally.compile_seconds,
    }
