"""The folder of a training run: one run at a time, of one config; what it learns from stays the same."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from decoding_jax.batch_folder import lock_folder
from decoding_jax.checkpoints.cache_files import write_atomically
from decoding_jax.checkpoints.orbax import by_path, is_complete
from decoding_jax.checkpoints.workdir import CHECKPOINTS, finished_steps, form_of
from decoding_jax.types import PyTree
from train.config import default_config
from train.data.tokenizers import digest_of_tokenizer, make_tokenizer
from train.objectives import Teacher
from train.setup import Data

CONFIG, RESULTS = "train_config.json", "results.json"
# What may change between two starts of one run: none of it changes what is learnt.
_FREE = ("log_every", "checkpoint", "evaluation", "distillation", "profile", "compilation_cache", "mesh", "remat")
_FREE_DATA = ("prefetch", "data_dir")


# --- Whose the folder is


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it; the first process does so for all.

    Raises:
      ValueError: another run works in it, or it cannot be written.
    """
    descriptor = lock_folder(workdir, "workdir") if jax.process_index() == 0 else None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def has_learnt(workdir: Path) -> bool:
    """Whether a run has left a checkpoint in the folder."""
    return bool(finished_steps(workdir / CHECKPOINTS))


def saved(workdir: Path) -> str:
    """What a run that ends early leaves, as a sentence."""
    if steps := finished_steps(workdir / CHECKPOINTS):
        return f"step {steps[-1]} is saved in {workdir}; the same command goes on from there"
    return f"no step is saved in {workdir} yet; the same command starts again"


def check_workdir(workdir: Path, config: ConfigDict) -> None:
    """Compares the config with that of the run in the folder, if there is one that has learnt something.

    Raises:
      ValueError: the folder cannot be written, holds another model, or belongs to a run with another config; it names
        the differences.
    """
    nearest = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(
            f"workdir={str(workdir)!r}: {nearest} is no folder that can be written; choose another --workdir"
        )
    for folder in (workdir.absolute(), *workdir.absolute().parents):
        if folder.name == CHECKPOINTS and (folder.parent / CONFIG).exists():
            raise ValueError(
                f"workdir={str(workdir)!r} is inside the checkpoints of another run; choose another --workdir"
            )
    file = workdir / CONFIG
    if has_learnt(workdir) and not file.exists():
        raise ValueError(f"{file} is not there, but a run's checkpoints are; restore it, or choose another --workdir")
    if (workdir / "params").exists() or (is_complete(workdir) and not file.exists()):
        raise ValueError(f"workdir={str(workdir)!r} holds a model that is no run's; choose another --workdir")
    if not file.exists():
        return
    try:
        there = flattened(dict(json.loads(file.read_text(encoding="utf-8"))))
        if not there:
            raise ValueError("it is empty")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or remove the folder to start again") from None
    if not has_learnt(workdir):
        return
    here = flattened(json.loads(config.to_json()))
    # A setting that is newer than the run had its default then.
    there = flattened(json.loads(default_config().to_json())) | there
    names = sorted(there.keys() | here.keys())
    different = [name for name in names if there.get(name) != here.get(name) and not _is_free(name)]
    if different:
        listed = ", ".join(f"{name} was {there.get(name)!r}, is {here.get(name)!r}" for name in different[:5])
        listed += f" and {len(different) - 5} more" if len(different) > 5 else ""
        raise ValueError(
            f"workdir={str(workdir)!r} belongs to a run with another config ({listed}); choose another "
            "--workdir, or remove that folder"
        )


def claim_workdir(workdir: Path, config: ConfigDict) -> None:
    """Writes the resolved config into the folder, made and locked, which is the run's from then on.

    Raises:
      ValueError: as `check_workdir`; another run may have come and gone since.
    """
    check_workdir(workdir, config)
    write_atomically(workdir / CONFIG, (json.dumps(json.loads(config.to_json()), indent=2) + "\n").encode())


def _is_free(name: str) -> bool:
    free = [*_FREE, *(f"data.{part}" for part in _FREE_DATA)]
    return any(name == part or name.startswith(f"{part}.") for part in free)


def flattened(settings: Any, path: str = "") -> dict[str, Any]:
    """Nested settings by their whole names, {"data.length": 64, ...}."""
    if not isinstance(settings, dict):
        return {path: settings}
    parts = (flattened(part, f"{path}.{name}".strip(".")) for name, part in settings.items())
    return {name: value for part in parts for name, value in part.items()}


# --- What the run learns from


@dataclasses.dataclass(frozen=True)
class Origin:
    """Something that the run learns from.

    Attributes:
      name: what errors call it.
      digest: changes whenever it does.
    """

    name: str
    digest: str


def find_origins(
    config: ConfigDict, workdir: Path, data: Data, teacher: Teacher | None, made: bool
) -> dict[str, Origin]:
    """What a run learns from.

    Args:
      config, workdir, data, teacher: of the run.
      made: whether its first start made the tokenizer as data.tokenizer says. It has kept that in the folder, but a
        change behind data.tokenizer.path may not pass unseen.
    """
    origins = {
        "texts": Origin(f"data.name={config.data.name!r}: what the texts are", data.texts.digest),
        "tokenizer": Origin(f"{workdir / 'tokenizer.json'}", digest_of_tokenizer(data.tokenizer)),
    }
    given = config.data.tokenizer
    if made and given.kind == "file":
        digest = digest_of_tokenizer(make_tokenizer(given, data.texts))
        origins["tokenizer.path"] = Origin(f"data.tokenizer.path={given.path!r}", digest)
    if teacher is not None:
        origins["teacher"] = Origin(f"teacher.path={config.teacher.path!r}", digest_of_params(teacher.params))
    return origins


def check_origins(origins: Mapping[str, Origin], kept: Mapping[str, Any], step: int, workdir: Path) -> None:
    """Compares what the run learns from with the digests that a checkpoint kept; those it lacks are passed over.

    Raises:
      ValueError: something has changed.
    """
    for key, origin in origins.items():
        if kept.get(key, origin.digest) != origin.digest:
            raise ValueError(
                f"{origin.name} has changed since step {step} of the run in {workdir}; restore what was there, or "
                "choose another --workdir"
            )


def digest_of_params(params: PyTree, about: str = "") -> str:
    """SHA-256 of arrays and their paths, and of a text; every process must ask, as they may be spread over all."""
    digest = hashlib.sha256(about.encode())
    for path, leaf in by_path(params)[0].items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        digest.update(f"{path} {form_of(leaf)}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
