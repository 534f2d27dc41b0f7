"""Folders of derived files: built once, put in place whole, verified whenever they are used."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

MANIFEST = "manifest.json"

# A scratch folder this old belongs to a process that was killed, not to one that is still writing.
_ABANDONED_S = 24 * 3600

logger = logging.getLogger("decoding_jax")


def cache_dir() -> Path:
    """The default place of derived files, which need not exist yet.

    $DECODING_JAX_CACHE where that is set, else $XDG_CACHE_HOME/decoding_jax, else ~/.cache/decoding_jax.
    """
    if own := os.environ.get("DECODING_JAX_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "decoding_jax"
    return Path.home() / ".cache" / "decoding_jax"


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's content, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder` once it is whole, building it if it is absent or damaged.

    A folder counts as whole when every file its manifest lists has the size and SHA-256 written
    there. Several processes may call this at once: the first finished folder wins and the others use it.

    Args:
      folder: the final place. Its name should hold a digest of everything the content depends on.
      build: writes the files into the empty folder it is given. What it raises passes through, save OSErrors.

    Raises:
      ValueError: the files cannot be written.
    """
    while (seen := _identity(folder)) is not None:
        fault = fault_of(folder)
        if fault is None:
            return folder
        # Only what was judged may be thrown away: another process may have repaired it meanwhile.
        if seen == _identity(folder):
            logger.warning("%s is damaged (%s); it is made again", folder, fault)
            _discard(folder)
    try:
        return _build(folder, build)
    except OSError as error:
        raise ValueError(
            f"the cached folder {str(folder)!r} cannot be written ({error}); make room there, or set "
            "DECODING_JAX_CACHE to a folder that can be written"
        ) from error


def _build(folder: Path, build: Callable[[Path], None]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    scratch = _scratch(folder)
    scratch.mkdir()
    try:
        build(scratch)
        write_manifest(scratch)
        try:
            os.rename(scratch, folder)
        except OSError:
            # A folder that is not empty is never replaced, so another process may have been first.
            if fault_of(folder) is not None:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_manifest(folder: Path, unlisted: Collection[str] = ()) -> None:
    """Lists a folder's files in its manifest with their sizes and SHA-256, but for the unlisted paths."""
    files = {
        name: {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in unlisted
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def fault_of(folder: Path, within: str = "") -> str | None:
    """What is wrong with a folder that has a manifest, None when nothing is.

    Args:
      folder: files that its manifest does not list are not judged.
      within: where paths begin that are judged, such as "model/".
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        files = {name: facts for name, facts in listed.items() if name.startswith(within)}
        for name, facts in files.items():
            if (folder / name).stat().st_size != facts["bytes"]:
                return f"{name} has the wrong size"
        for name, facts in files.items():
            if sha256_of_file(folder / name) != facts["sha256"]:
                return f"{name} has the wrong content"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _discard(folder: Path) -> None:
    """Takes a folder out of sight in one step, then deletes it."""
    aside = _scratch(folder)
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(
            f"the damaged folder {str(folder)!r} cannot be removed ({error}); remove it, or set "
            "DECODING_JAX_CACHE to a folder that can be written"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all, whenever the process dies."""
    scratch = scratch_file(path)
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def scratch_file(path: Path) -> Path:
    """Where `write_atomically` writes first."""
    # In the same folder, so that the rename stays within one file system.
    return path.with_name(f".{path.name}.tmp")


def _scratch(folder: Path) -> Path:
    # In the same folder, so that a rename stays within one file system.
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}")


def _remove_abandoned(folder: Path) -> None:
    for scratch in folder.parent.glob(f".{folder.name}.*"):
        try:
            abandoned = time.time() - scratch.stat().st_mtime > _ABANDONED_S
        except OSError:
            continue
        if abandoned:
            shutil.rmtree(scratch, ignore_errors=True)
