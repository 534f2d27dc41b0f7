"""The batch job: lines of prompts in, parts of continuations out, nothing lost whenever it is killed.

Everything follows from the input and the settings alone, so that a job can stop at any moment and go on
later, and its parts are the same bytes as if it had never stopped:

    row id    the number of its line, counted from 0 over all files: randomness depends on nothing else
    groups    rows whose prompts have the same length bucket, in input order
    batches   `batch_size` rows of a group; its last batch is filled up with copies that are dropped
    parts     `batches_per_part` batches, in a file that appears whole or not at all

A folder's plan.json says which job its parts belong to; parts that are there, whole, are not decoded again.
"""

from __future__ import annotations

import codecs
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jax.sharding import Mesh

from decoding_jax.api import check_decoder, decode
from decoding_jax.checkpoints.cache_files import scratch_file, sha256_of_file, write_atomically
from decoding_jax.decoders.autoregressive import Autoregressive
from decoding_jax.loop import Decoder
from decoding_jax.prepare import (
    bucket,
    check_draft_length,
    check_length,
    context_left,
    encode_prompt,
    prepare,
)
from decoding_jax.sampling import Sampling
from decoding_jax.stops import Stop
from decoding_jax.types import DecodeOutput, Model

PLAN, ERRORS, SUMMARY, STDIN = "plan.json", "errors.jsonl", "summary.json", "stdin.jsonl"
PARTS = "part-*-of-*.jsonl"
_STEPS_PER_CALL = 32  # between two returns to Python, where signals are heard

logger = logging.getLogger("decoding_jax")


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
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


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
        model, [[0]], job.max_new_tokens, job.sampling, job.stop, job.seed, None, job.mesh, drafter=job.drafter
    )
    check_decoder(job.decoder, call)


# --- The input


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A good line.

    Attributes:
      number: of its line, counted from 0 over all files.
      id: as the user gave it.
      prompt: i32[T], token ids.
    """

    number: int
    id: str | int
    prompt: np.ndarray


def read_rows(
    model: Model,
    files: Sequence[tuple[str, Path]],
    max_new_tokens: int,
    decoder: Decoder = Autoregressive(),
    drafter: Model | None = None,
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Reads files of JSON lines, each {"id", and one of "prompt", "messages", "tokens"} (or "source", "tokens").

    Args:
      model: its tokenizer makes ids of text, once.
      files: the names that errors are reported under, and where the files are.
      max_new_tokens: the budget that must fit into the context behind each prompt.
      decoder: whose drafts must fit there too.
      drafter: a second model that must take the prompts as well.

    Returns:
      The good lines, and for each bad one {"file" (where there are several), "line" (counted from 1), "id"
      (where it is known), "reason"}. Blank lines are neither. Of several lines with one id the first is kept.
    """
    rows: list[Row] = []
    errors: list[dict[str, Any]] = []
    seen: set[str | int] = set()
    for number, (name, line_number, line) in enumerate(_lines(files)):
        if not line.strip():
            continue
        place: dict[str, Any] = {"line": line_number} if len(files) == 1 else {"file": name, "line": line_number}
        try:
            fields = _fields(line)
            place["id"] = identity = _identity(fields)
            if identity in seen:
                raise ValueError(f"id {identity!r} belongs to an earlier line; give every line its own")
            seen.add(identity)
            field, ids = _prompt(model, fields)
            _check_room(model, drafter, decoder, ids, max_new_tokens, field)
            rows.append(Row(number, identity, np.array(ids, np.int32)))
        except ValueError as error:
            errors.append(place | {"reason": str(error)})
    return rows, errors


def _lines(files: Sequence[tuple[str, Path]]) -> Iterator[tuple[str, int, bytes]]:
    """(name, line number from 1, line); bytes, so that one line that is not UTF-8 spoils no other."""
    for name, path in files:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                yield name, line_number, line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line


def _fields(line: bytes) -> dict[str, Any]:
    """A line as an object; ValueError says what else it is."""
    try:
        fields = json.loads(line.decode("utf-8"))
        # JSON can spell half a surrogate pair ("\ud800"), which no tokenizer and no UTF-8 file takes.
        if b"\\u" in line:
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise ValueError(f"byte {error.start + 1} (0x{byte:02x}) is not UTF-8; save the file as UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("a \\ud800-\\udfff escape stands without its partner; such a text has no UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}; give one object on each line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}; give an object with id and prompt, messages or tokens")
    return fields


def _identity(fields: dict[str, Any]) -> str | int:
    if "id" not in fields:
        raise ValueError('no "id"; give every line its own')
    identity = fields["id"]
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise ValueError(f"id {identity!r} is neither a text nor a whole number")
    return identity


_TOKENS = {"tokens": (list, "a list of ids")}
_PROMPTS = {"prompt": (str, "a text"), "messages": (list, "a list of messages")} | _TOKENS
_SOURCES = {"source": (str, "a text")} | _TOKENS  # of encoder-decoders


def _prompt(model: Model, fields: dict[str, Any]) -> tuple[str, list[int]]:
    """Which field of a line holds its prompt, and the prompt's token ids; ValueError says why there are none."""
    kinds = _PROMPTS if model.encode is None else _SOURCES
    given = [name for name in _PROMPTS | _SOURCES if name in fields]
    if len(given) != 1 or given[0] not in kinds:
        raise ValueError(f"has {' and '.join(given) or 'no prompt'}; this model takes one of {', '.join(kinds)}")
    name, value = given[0], fields[given[0]]
    kind, described = kinds[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be {described}")
    if name == "messages" and not (value and isinstance(value[0], dict)):
        raise ValueError(f"messages={value!r}: must be objects with role and content, at least one")
    if name == "tokens" and value and isinstance(value[0], dict):
        raise ValueError("tokens holds objects; chat goes into messages")
    return name, encode_prompt(model, value, name)


def _check_room(
    model: Model, drafter: Model | None, decoder: Decoder, ids: list[int], max_new_tokens: int, name: str
) -> None:
    """ValueError where a prompt, called `name`, leaves the models too little of their context."""
    budget = max_new_tokens if model.encode is None else 0
    check_length(model, ids, budget, name)
    if drafter is not None:
        check_length(drafter, ids, budget, name, "drafter")
    if model.encode is None:
        check_draft_length(decoder, context_left(model, drafter, len(ids)), name)


# --- The plan


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that are decoded together, by their place in the list of rows.

    Attributes:
      rows: whose results are kept.
      filler: the row that fills the batch up. The longest of its group: a batch that holds it compiles
        no new shape.
    """

    rows: tuple[int, ...]
    filler: int

    def filled(self, batch_size: int) -> list[int]:
        return [*self.rows, *[self.filler] * (batch_size - len(self.rows))]


def plan_parts(lengths: Sequence[int], batch_size: int, batches_per_part: int) -> list[list[Batch]]:
    """The batches of each part, from the prompts' lengths.

    >>> [[batch.rows for batch in part] for part in plan_parts([3, 70, 5, 9], 2, 1)]
    [[(0, 2)], [(3,)], [(1,)]]
    """
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(bucket(length), []).append(row)
    batches = []
    for _, group in sorted(groups.items()):
        longest = max(group, key=lambda row: lengths[row])
        for at in range(0, len(group), batch_size):
            batches.append(Batch(tuple(group[at : at + batch_size]), longest))
    return [batches[at : at + batches_per_part] for at in range(0, len(batches), batches_per_part)]


def part_names(count: int) -> list[str]:
    """The file names of a job's parts."""
    return [f"part-{k:05d}-of-{count:05d}.jsonl" for k in range(count)]


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


# --- The output folder


def lock_folder(folder: Path, flag: str) -> int:
    """Makes a folder and locks it.

    Args:
      folder: the folder.
      flag: what errors call it.

    Returns:
      A file descriptor; the lock is held until it is closed or the process ends.

    Raises:
      ValueError: the folder cannot be written, or another process works in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"{flag}={str(folder)!r} cannot be written ({error}); choose another --{flag}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"{flag}={str(folder)!r}: another process is writing there; wait for it, or choose another --{flag}"
        ) from None
    except OSError:
        pass  # some network file systems have no locks
    return descriptor


def open_folder(folder: Path) -> int:
    """Locks an output folder as `lock_folder` does, and clears away what a killed run was writing."""
    descriptor = lock_folder(folder, "output")
    for name in (PARTS, PLAN, ERRORS, SUMMARY, STDIN):
        for leftover in folder.glob(scratch_file(Path(name)).name):
            leftover.unlink(missing_ok=True)
    return descriptor


def spool(stream: BinaryIO, folder: Path) -> Path:
    """Standard input as a file in the folder, so that it can be read twice; `keep_spooled` names it."""
    path = scratch_file(folder / STDIN)
    with path.open("wb") as file:
        while block := stream.read(1 << 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return path


def keep_spooled(path: Path, folder: Path) -> Path:
    """Puts spooled input in place."""
    return path.replace(folder / STDIN)


def check_folder(folder: Path, plan: dict[str, Any]) -> None:
    """Refuses a folder that holds parts of another job.

    Args:
      folder: the output folder.
      plan: from `describe_job`; what it does not say is not compared.

    Raises:
      ValueError: what is different, and the remedy.
    """
    if not any(folder.glob(PARTS)):
        return
    try:
        old = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        changed = [key for key in sorted(plan) if old.get(key) != plan[key]]
    except (OSError, ValueError, AttributeError):
        changed = [f"there is no readable {PLAN}"]
    if changed:
        raise ValueError(
            f"output={str(folder)!r} holds parts of another job (different: {', '.join(changed)}); choose "
            "another --output, or discard them with --overwrite"
        )


def start_folder(
    folder: Path,
    plan: dict[str, Any],
    rows: Sequence[Row],
    errors: Sequence[dict[str, Any]],
    overwrite: bool = False,
) -> None:
    """Writes plan.json and errors.jsonl.

    Args:
      folder: from `open_folder`.
      plan: from `describe_job`.
      rows, errors: from `read_rows`. The plan keeps the rows' digest: a model of the same name with another
        tokenizer or chat template makes other parts of the same lines.
      overwrite: discards what another job left, instead of refusing the folder.

    Raises:
      ValueError: as `check_folder`.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.number, row.id, row.prompt.tolist()]).encode())
    plan = plan | {"token_ids_sha256": digest.hexdigest()}
    try:
        check_folder(folder, plan)
    except ValueError:
        if not overwrite:
            raise
        # The old plan goes last: a kill in between leaves what is still the old job's.
        for path in [*folder.glob(PARTS), folder / ERRORS, folder / SUMMARY, folder / PLAN]:
            path.unlink(missing_ok=True)
    write_atomically(folder / PLAN, (json.dumps(plan, indent=2) + "\n").encode())
    if errors:
        write_atomically(folder / ERRORS, _json_lines(errors))
    else:
        (folder / ERRORS).unlink(missing_ok=True)


def find_parts(folder: Path, rows: Sequence[Row], parts: Sequence[Sequence[Batch]]) -> list[bool]:
    """Which parts are in the folder, whole; one that was cut or changed since it was written is removed and named.

    Args:
      folder: from `open_folder` and `start_folder`.
      rows, parts: what the parts must hold: a line for each row, in order.

    Raises:
      OSError: a part cannot be read or removed.
    """
    return [
        _is_whole(folder / name, [rows[i].id for batch in part for i in batch.rows])
        for name, part in zip(part_names(len(parts)), parts, strict=True)
    ]


def _is_whole(file: Path, ids: Sequence[str | int]) -> bool:
    if not file.exists():
        return False
    data = file.read_bytes()
    try:
        records = [json.loads(line) for line in data.splitlines()]
        whole = [record["id"] for record in records] == ids and _json_lines(records) == data
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        logger.warning("%s is damaged (not the %d lines that were written); it is decoded again", file, len(ids))
        file.unlink()
    return whole


def _json_lines(records: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8")


# --- Decoding


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
        write_atomically(folder / name, _json_lines(records))
    return tally


def _decode_batch(model: Model, job: Job, rows: Sequence[Row]) -> DecodeOutput:
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
