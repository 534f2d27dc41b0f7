"""Measured results as records in a JSON file: what was measured, with which command, where and when."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any, Literal

from decoding_jax.checkpoints.cache_files import write_atomically


def machine() -> dict[str, Any]:
    """The platform, the processor's name (None where the system does not tell) and the number of CPUs."""
    model = None
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE)):
        model = found[1].strip()
    return {"platform": platform.platform(), "cpu_model": model, "cpu_count": os.cpu_count()}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def read_records(file: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file; none where there is no file. Called first, it saves a measuring that cannot be recorded.

    Raises:
      ValueError: the file is not a list of records.
      OSError: it cannot be read.
    """
    path = Path(file)
    try:
        records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); move it away, or name another file of records") from None
    if not isinstance(records, list) or not all(isinstance(r, dict) and "name" in r for r in records):
        raise ValueError(f"{path} is not a JSON list of records with names; move it away, or name another file")
    return records


def record(
    file: str | os.PathLike[str],
    name: str,
    value: float,
    unit: str,
    target: float | None,
    better: Literal["higher", "lower"],
    command: str,
) -> None:
    """Writes one result into a file of records, in place of an older one of the same name.

    Args:
      file: a JSON list of records sorted by name; made if it is not there.
      name: what was measured.
      value: the result.
      unit: of value and target.
      target: what was to be reached, None where nothing was promised.
      better: "higher" or "lower".
      command: how to measure it again, from the repository's root.

    Raises:
      ValueError: `better` is neither word, or the file is not a list of records.
    """
    if better not in ("higher", "lower"):
        raise ValueError(f"better={better!r}: must be 'higher' or 'lower'")
    path = Path(file)
    new = {
        "name": name,
        "value": value,
        "unit": unit,
        "target": target,
        "better": better,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    records = sorted([r for r in read_records(path) if r["name"] != name] + [new], key=lambda r: r["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(records, indent=2, ensure_ascii=False) + "\n").encode())


def report(
    file: str | os.PathLike[str] | None,
    name: str,
    value: float,
    unit: str,
    target: float | None,
    better: Literal["higher", "lower"],
    command: str,
) -> None:
    """Prints a result, and writes it into a file of records if there is one; see `record`."""
    print(f"{name}: {value:.4g} {unit}" + (f" (target {target:g})" if target is not None else ""), flush=True)
    if file:
        record(file, name, value, unit, target, better, command)
