"""The output folder of a batch job: its lock, which job its parts belong to, and which of them are whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from decoding_jax.batch_rows import Batch, Row, part_names
from decoding_jax.checkpoints.cache_files import scratch_file, write_atomically

PLAN, ERRORS, SUMMARY, STDIN = "plan.json", "errors.jsonl", "summary.json", "stdin.jsonl"
PARTS = "part-*-of-*.jsonl"

logger = logging.getLogger("decoding_jax")


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
    """Refuses a folder that holds a model or parts of another job.

    Args:
      folder: the output folder.
      plan: from `describe_job`; what it does not say is not compared.

    Raises:
      ValueError: what is different, and the remedy.
    """
    if (folder / "config.json").exists():
        raise ValueError(f"output={str(folder)!r} holds a model; choose another --output")
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
        write_atomically(folder / ERRORS, json_lines(errors))
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
        whole = [record["id"] for record in records] == ids and json_lines(records) == data
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        logger.warning("%s is damaged (not the %d lines that were written); it is decoded again", file, len(ids))
        file.unlink()
    return whole


def json_lines(records: Sequence[dict[str, Any]]) -> bytes:
    """One JSON object a line, in UTF-8."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8")
