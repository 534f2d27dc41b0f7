"""What the commands that run a batch job share: settings, signals, progress, summary, exit codes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_collections
import tqdm
from jax.sharding import Mesh

import decoding_jax as dj
from decoding_jax import batch_folder, batch_job
from decoding_jax.batch_job import Job, Tally
from decoding_jax.checkpoints.cache_files import write_atomically
from decoding_jax.registry import from_settings, make_decoder
from train.command import FAILED, one_line, say
from train.signals import Stopped, StopSignals

_SECONDS_BETWEEN_LINES = 10.0


# --- Settings


def load_as(setting: str, path: str | os.PathLike[str], **options: Any) -> dj.Model:
    """`dj.load`, with the setting's name in what it refuses.

    Args:
      setting: that named the model.
      path, options: of `dj.load`.

    Raises:
      ValueError: it cannot be loaded.
    """
    try:
        return dj.load(path, **options)
    except ValueError as error:
        reason = str(error).removeprefix(f"model={os.fspath(path)!r}").removeprefix(": ")
        raise ValueError(f"{setting}={os.fspath(path)!r}: {reason}") from None


@contextlib.contextmanager
def every_setting() -> Iterator[None]:
    """Turns the AttributeError of a setting that the config file lacks into a ValueError."""
    try:
        yield
    except AttributeError as error:
        raise ValueError(f"the config file lacks a setting: {one_line(error)}") from None


def read_job(
    settings: ml_collections.ConfigDict, mesh: Mesh | None, stop: dj.Stop = dj.Stop(), *, has_drafter: bool = False
) -> Job:
    """The job that settings describe: `decoder` and the part of its name, `sampling`, `seed` and the sizes.

    Args:
      settings: a config, or the part of it that is about the job.
      mesh: the devices that share each batch; None: one.
      stop: what ends a row.
      has_drafter: whether the job gets a drafter before it runs.

    Raises:
      ValueError: a setting has no meaning.
      AttributeError: a setting is missing; see `every_setting`.
    """
    return Job(
        decoder=make_decoder(settings.decoder, settings.get(settings.decoder, {}), has_drafter=has_drafter),
        max_new_tokens=settings.max_new_tokens,
        sampling=from_settings(dj.Sampling, "sampling", settings.sampling),
        stop=stop,
        seed=settings.seed,
        batch_size=settings.batch_size,
        batches_per_part=settings.batches_per_part,
        mesh=mesh,
    )


def load_drafter(name: str, model: dj.Model, **options: Any) -> dj.Model | None:
    """The drafter that a setting names.

    Args:
      name: "" for none, "int8" for a copy of the model with coarser weights, else what `dj.load` takes.
      model: the target.
      options: of `dj.load`.

    Raises:
      ValueError: it cannot be loaded, or the model cannot be quantised.
    """
    if not name:
        return None
    if name == "int8":
        return dj.quantized(model)
    return load_as("drafter", name, **options)


# --- Signals


def run_stoppable(work: Callable[[StopSignals], int], folder: Path) -> int:
    """Runs a job's work, which returns the exit code; a signal and a failure while decoding get theirs here.

    Args:
      work: gets the signals for its RowProgress.
      folder: where the job's parts are.
    """
    try:
        with StopSignals() as signals:
            return work(signals)
    except Stopped as stop:
        parts = len(list(folder.glob(batch_folder.PARTS)))
        say(f"{parts} complete parts are saved in {folder}")
        say("stopped; run the same command again to continue")
        return stop.exit_code
    except (OSError, jax.errors.JaxRuntimeError) as error:
        say(f"failed: {one_line(error)}; what is complete is saved, the same command goes on from there")
        return FAILED


# --- Progress


class RowProgress:
    """A bar on a terminal, a line now and then elsewhere. Rates and the time left leave compiling out."""

    def __init__(self, total: int, signals: StopSignals) -> None:
        self._total, self._signals = total, signals
        self._shown = time.monotonic()
        self._bar = tqdm.tqdm(total=total, unit="row", smoothing=0, disable=not sys.stderr.isatty())

    def __call__(self, tally: Tally) -> None:
        self._signals.check()
        done = tally.kept_rows + tally.rows
        if not self._bar.disable:
            self._bar.initial = tally.kept_rows  # rows of an earlier run say nothing about the time left
            self._bar.n = done
            self._bar.set_postfix_str(f"{tally.tokens / tally.seconds:.1f} tokens/s" if tally.seconds else "starting")
        elif tally.rows and done < self._total and time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            rate = tally.rows / tally.seconds
            speed = f"{rate:.3g} rows/s, {tally.tokens / tally.seconds:.1f} tokens/s"
            say(f"{done} of {self._total} rows, {speed}, about {(self._total - done) / rate:.0f} s left")

    def close(self) -> None:
        self._bar.close()


# --- Summary


def write_summary(folder: Path, job: Job, tally: Tally, more: dict[str, Any], begun: float) -> None:
    """Writes summary.json (`batch_job.measures` defines its numbers) and says the gist of it.

    Args:
      folder: of the job.
      job, tally: what was done.
      more: what else the summary holds.
      begun: when the command began, in seconds of time.monotonic.
    """
    numbers = batch_job.measures(folder, tally)
    summary = {
        **numbers,
        **more,
        "wall_seconds": time.monotonic() - begun,
        "peak_memory_bytes": _peak_memory(),
        "decoder": repr(job.decoder),
        **_surroundings(),
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    write_atomically(folder / batch_folder.SUMMARY, text.encode())
    speed, per_call = numbers["tokens_per_second"], numbers["tokens_per_model_call"]
    say(
        f"{numbers['rows']} rows, {numbers['new_tokens']} new tokens in {folder}"
        + (f"; {speed:.1f} tokens/s" if speed else "")
        + (f", {per_call:.2f} tokens per model call" if per_call else "")
    )


def _peak_memory() -> dict[str, int | None]:
    """Bytes: of this process at its largest, and of the fullest device where it keeps count."""
    unit = 1 if sys.platform == "darwin" else 1024
    devices = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return {
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device": max((peak for peak in devices if peak is not None), default=None),
    }


def _surroundings() -> dict[str, Any]:
    """The versions and the hardware that the measurements depend on."""
    packages = ("jax", "jaxlib", "flax", "decoding_jax")
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "hardware": {
            "platform": platform.platform(),
            "backend": device.platform,
            "device_kind": device.device_kind,
            "devices": len(jax.devices()),
            "cpu_count": os.cpu_count(),
        },
    }
