"""Checkpoints of a training run: saved in the background, kept by recency and by metric, restored onto any mesh.

The layout of the folder, and how a model for decoding comes out of it, is decoding_jax/checkpoints/workdir.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from decoding_jax.checkpoints.cache_files import write_atomically, write_manifest
from decoding_jax.checkpoints.orbax import by_path, reason
from decoding_jax.checkpoints.workdir import (
    ABOUT,
    CHECKPOINTS,
    LATE_METRIC,
    MODEL,
    STATE,
    check_whole,
    differences,
    form_of,
    orbax_context,
    rank,
    read_about,
    shortened,
)
from decoding_jax.types import PyTree
from train.command import say

T = TypeVar("T")

_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint as it was passed to `save`."""

    step: int
    model: PyTree
    state: PyTree
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one training run, which is their only writer.

    In a run of several processes every process makes the same calls.

    Args:
      workdir: the folder of the run; checkpoints go to its folder "checkpoints", which is made.
      keep_last: how many of the newest checkpoints are kept, at least 1.
      keep_best: how many of those with the lowest metrics are kept besides.

    Raises:
      ValueError: a count is too small.
    """

    def __init__(self, workdir: str | os.PathLike[str], keep_last: int, keep_best: int) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last={keep_last}, keep_best={keep_best}: keep at least 1 and 0 checkpoints")
        logging.getLogger("absl").addFilter(_not_orbaxs_error)
        self._folder = Path(workdir).absolute() / CHECKPOINTS
        self._metrics: dict[int, float | None] = {}
        self._broken: dict[int, str] = {}
        self._saving: int | None = None
        policies = ocp.training.preservation_policies
        # BestN keeps the end of the sorted list, hence reverse; without the last setting it would also keep every
        # checkpoint that has no metric.
        best = policies.BestN(
            get_metric_fn=lambda metric: metric, reverse=True, n=keep_best, keep_checkpoints_without_metrics=False
        )
        context = orbax_context()
        # A function, since Orbax copies its settings deeply, and a method with its object.
        context.asynchronous.post_finalization_callback = lambda: self._seal()
        # Within a process, cutting replicated arrays into one slice a device only compiles and copies more.
        context.array.saving.use_replica_parallel = jax.process_count() > 1
        keep = policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])
        self._checkpointer = ocp.training.Checkpointer(
            self._folder,
            context=context,
            preservation_policy=_OfWhole(keep, self._metrics, self._broken),
        )
        for checkpoint in self._checkpointer.checkpoints:
            try:
                self._metrics[checkpoint.step] = self._about(checkpoint.step)["metric"]
            except _Unreadable as error:
                self._broken[checkpoint.step] = str(error)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, model: PyTree, state: PyTree, extra: Mapping[str, Any], metric: float | None = None
    ) -> None:
        """Starts to save a step, after the save before it has ended; the arrays may be donated right after.

        Args:
          step: at least 0, and not saved yet.
          model: the params that decode, as `nnx.split` gives them.
          state: arrays of numbers that training needs besides; None and empty nodes are kept by the tree given to
            `restore`.
          extra: anything that JSON can hold.
          metric: what the best checkpoints are chosen by, lower is better; NaN and infinities count as no metric.

        Raises:
          ValueError: the step is saved already, or something cannot be saved.
          OSError: this save or the one before it failed, as on a full disk; it names the newest good checkpoint.
        """
        self.wait()
        if step < 0 or step in self.all_steps():
            raise ValueError(f"step={step}: steps start at 0 and are saved once; saved are {self.all_steps()}")
        arrays = {MODEL: _arrays(model), STATE: _arrays(state)}
        metric = float(metric) if metric is not None and math.isfinite(metric) else None
        about = {
            "metric": metric,
            "arrays": {item: {path: form_of(x) for path, x in leaves.items()} for item, leaves in arrays.items()},
            "extra": _checked_json(extra),
        }
        items = {item: leaves for item, leaves in arrays.items() if leaves}  # Orbax refuses an item without arrays
        self._remove_unfinished()
        self._saving = step
        try:
            if step in self._broken:
                self._checkpointer.delete(step, missing_ok=True)  # gone if a save came between
                del self._broken[step]
            self._metrics[step] = metric
            # Forced: by itself Orbax skips, without a word, every step that is not newer than all others.
            self._checkpointer.save_checkpointables_async(step, {**items, ABOUT: about}, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, model: PyTree, state: PyTree) -> Restored | None:
        """The newest checkpoint that can be read, on the devices that the given trees name; None if there is none.

        Checkpoints that were cut short, damaged or never finished are skipped with a line each on standard error.

        Args:
          model: `model` of `save` with a ShapeDtypeStruct for every array; its sharding says where the array goes,
            none means the first device. The mesh need not be the one it was saved from.
          state: likewise.

        Raises:
          ValueError: the newest checkpoint holds other arrays, or there are checkpoints but none can be read.
        """
        self.wait()
        for path in self._unfinished():
            say(f"checkpoint {path.name.split('.')[0]} is skipped: it was never finished ({path})")
        items = {MODEL: by_path(model), STATE: by_path(state)}
        wanted = {item: _abstract(leaves) for item, (leaves, _) in items.items()}
        for step in reversed([checkpoint.step for checkpoint in self._checkpointer.checkpoints]):
            if step not in self._broken:
                try:
                    about, arrays = self._read(step, wanted)
                    trees = {
                        item: jax.tree.unflatten(treedef, [arrays[item][path] for path in leaves])
                        for item, (leaves, treedef) in items.items()
                    }
                    return Restored(step, trees[MODEL], trees[STATE], about["extra"])
                except _Unreadable as error:
                    self._broken[step] = str(error)
            say(f"checkpoint {step} is skipped: {self._broken[step]}")
        if self._broken:
            listed = ", ".join(map(str, sorted(self._broken)))
            raise ValueError(
                f"{self._folder}: none of the checkpoints (steps {listed}) can be read; restore them from a copy, or "
                "remove the folder to start from the beginning"
            )
        return None

    def metric(self, step: int) -> float | None:
        """The metric of a saved step; None if it has none."""
        return self._metrics.get(step)

    def add_metric(self, step: int, metric: float) -> None:
        """Gives a saved step the metric that it was saved without; OSError where it cannot be written."""
        self.wait()
        if jax.process_index() == 0:
            write_atomically(self._folder / str(step) / LATE_METRIC, json.dumps(metric).encode())
        self._metrics[step] = metric

    def all_steps(self) -> list[int]:
        """The saved steps, ascending, with the one being saved and without those known to be damaged."""
        return sorted({checkpoint.step for checkpoint in self._checkpointer.checkpoints} - set(self._broken))

    def best_step(self) -> int:
        """The saved step that `dj.load` takes from the workdir: of the lowest metric, without metrics the newest."""
        return min(self.all_steps(), key=lambda step: rank(step, self.metric(step)))

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
          OSError: it failed; it names the step and the newest good checkpoint. Raised once.
        """
        try:
            self._checkpointer.wait()
        except Exception as error:
            raise self._failed(error) from error
        self._saving = None

    def close(self) -> None:
        """Waits as `wait` does, then frees what Orbax holds."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _about(self, step: int) -> dict[str, Any]:
        """What a checkpoint says about itself."""
        return _together(lambda: read_about(self._folder / str(step)))

    def _read(self, step: int, wanted: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint says about itself, and its arrays by item and path."""
        folder = self._folder / str(step)

        def check() -> None:
            if jax.process_index() == 0:  # once is enough: all processes read the same files
                check_whole(folder)

        def load() -> dict[str, Any]:
            return {
                item: ocp.load(folder, leaves, checkpointable_name=item) if leaves else {}
                for item, leaves in wanted.items()
            }

        # One after another: reading has barriers, which a process that has failed alone would never reach.
        _together(check)
        about = self._about(step)
        problems = [line for item in wanted for line in differences(item, about["arrays"][item], wanted[item])]
        if problems:
            raise ValueError(
                f"{folder} was saved with another config ({len(problems)} differences); start a new workdir or restore "
                f"the config:\n  {shortened(problems)}"
            )
        return about, _together(load)

    def _seal(self) -> None:
        """Lists the files of the step being saved; Orbax calls it in one process, before the folder gets its name."""
        unfinished = sorted(self._folder.glob(f"{self._saving}{_UNFINISHED}*"))
        # Orbax adds the time of the commit to the unlisted file later.
        write_manifest(unfinished[0] if unfinished else self._folder / str(self._saving), ["_CHECKPOINT_METADATA"])

    def _failed(self, error: Exception) -> OSError:
        step, self._saving = self._saving, None
        self._checkpointer.reload()
        self._remove_unfinished()
        steps = self.all_steps()
        newest = f"the newest good checkpoint is that of step {steps[-1]}" if steps else "there is no good checkpoint"
        return OSError(
            f"saving the checkpoint of step {step} in {self._folder} failed ({reason(error)}); {newest}; make room "
            "there, then run the same command again to go on from it"
        )

    def _unfinished(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_UNFINISHED}*"))

    def _remove_unfinished(self) -> None:
        """Removes what a failed or killed save left; nothing of this run is being written."""
        if jax.process_index() == 0:
            for path in self._unfinished():
                shutil.rmtree(path, ignore_errors=True)


def _not_orbaxs_error(record: logging.LogRecord) -> bool:
    """Whether to show a log record: what Orbax logs of an error, over many screens, it raises as well."""
    return record.levelno < logging.ERROR or f"{os.sep}orbax{os.sep}checkpoint{os.sep}" not in record.pathname


class _Unreadable(Exception):
    """A checkpoint is damaged."""


@dataclasses.dataclass(frozen=True)
class _Info:
    """What Orbax's policies look at."""

    step: int
    time: datetime.datetime
    metrics: float | None


@dataclasses.dataclass(frozen=True)
class _OfWhole:
    """Applies a policy to the checkpoints that are whole: a damaged one must not take the place of a good one."""

    policy: Any
    metrics: Mapping[int, float | None]
    broken: Mapping[int, str]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        whole = [_Info(c.step, c.time, self.metrics.get(c.step)) for c in checkpoints if c.step not in self.broken]
        whole.sort(key=lambda info: info.step)
        flags = self.policy.should_preserve(whole, context=context)
        kept = {info.step for info, flag in zip(whole, flags, strict=True) if flag}
        return [c.step in kept for c in checkpoints]


def _arrays(tree: PyTree) -> dict[str, jax.Array]:
    """The arrays of a tree by path; ValueError where a leaf is none, or is a random key."""
    leaves, _ = by_path(tree)
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            kind = leaf.dtype if isinstance(leaf, jax.Array) else type(leaf).__name__
            raise ValueError(f"{path!r} is of kind {kind}; only jax arrays of numbers can be saved")
    return leaves


def _abstract(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here) for path, x in leaves.items()}


def _checked_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What will be read again; ValueError where JSON would not give the same back."""
    try:
        text = json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra holds something that JSON cannot ({error}); convert it to numbers and text") from None
    if (again := json.loads(text)) != extra:
        raise ValueError(
            "extra would be read back as something else (tuples, or keys that are no text); use JSON's own"
        )
    return again


def _together(read: Callable[[], T]) -> T:
    """The same outcome in every process: what `read` gives, or _Unreadable if it failed in any of them."""
    fault = None
    try:
        result = read()
    except Exception as error:  # Orbax and TensorStore raise many kinds
        fault = reason(error)
    good = fault is None
    if jax.process_count() > 1:
        good = bool(np.all(multihost_utils.process_allgather(np.asarray(good))))
    if not good:
        raise _Unreadable(fault or "another process cannot read it")
    return result
