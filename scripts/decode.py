"""Decodes a file of prompts: JSON lines in, JSON lines out, in parts that survive any interruption.

    python scripts/decode.py --config=configs/decode_smollm2.py --input=prompts.jsonl --output=outputs/first
    python scripts/decode.py --config=... --input=a.jsonl,b.jsonl --output=outputs/both
    cat prompts.jsonl | python scripts/decode.py --config=... --input=- --output=outputs/piped

Settings of the config file are changed with --config.name=value:

    ... --config.max_new_tokens=64 --config.sampling.temperature=0.7 --config.decoder=prompt_lookup

Each input line has an id of its own and one prompt:

    {"id": "a", "prompt": "The capital of France is"}
    {"id": "b", "messages": [{"role": "user", "content": "Name three colours."}]}
    {"id": 3, "tokens": [504, 3575, 282]}

The output folder gets

    part-00000-of-00007.jsonl, ...  {"id", "text", "tokens", "finish_reason", "stats"} of each good line;
                                    a search with --config.beam.n_best above 1 adds "candidates"
    errors.jsonl                    {"line", "id", "reason"} of each bad line, where there are any
    summary.json                    speed, memory, versions, hardware; when all is done
    plan.json                       which job this is
    stdin.jsonl                     what came through --input=-

After any interruption the same command goes on where the last complete part ended, and the parts are
byte for byte those of a run that was never stopped.

Exit code: 0 all lines are decoded, or stopped by SIGTERM; 1 some lines were bad, or the job failed;
2 bad usage; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import ml_collections
import tqdm
from absl import flags
from ml_collections import config_flags

import decoding_jax as dj
from decoding_jax import batch_job
from decoding_jax.batch_job import Job, Tally
from decoding_jax.registry import from_settings, make_decoder
from train.command import one_line, run, say

_CONFIG = config_flags.DEFINE_config_file("config", None, "The settings, such as configs/decode_smollm2.py.")
_INPUT = flags.DEFINE_list(
    "input", None, "Files of JSON lines, separated by commas; - is standard input.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write to; made if it is not there.", required=True)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Discard what another job left in the output folder. Parts of the same job are kept."
)
flags.mark_flag_as_required("config")

_SECONDS_BETWEEN_LINES = 10.0


class Stopped(BaseException):
    """A signal asked to stop. No Exception: nothing on the way out may take it for an error of its own."""


class Signals:
    """Turns the first SIGTERM or SIGINT into Stopped; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._handle(self._receive)

    def _handle(self, handler: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> NoReturn:
        self.received = number
        self._handle(signal.SIG_DFL)
        raise Stopped

    def check(self) -> None:
        """Raises Stopped again if it got lost, as exceptions in destructors and callbacks do."""
        if self.received is not None:
            raise Stopped


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, signals: Signals) -> None:
        self._total, self._signals = total, signals
        self._begun = self._shown = time.monotonic()
        self._bar = tqdm.tqdm(total=total, unit="row", smoothing=0, disable=not sys.stderr.isatty())

    def __call__(self, tally: Tally) -> None:
        self._signals.check()
        done = tally.kept_rows + tally.rows
        speed = f"{tally.tokens / tally.seconds:.1f} tokens/s" if tally.seconds else "starting"
        if not self._bar.disable:
            self._bar.initial = tally.kept_rows  # rows of an earlier run say nothing about the time left
            self._bar.n = done
            self._bar.set_postfix_str(speed)
        elif done < self._total and time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            left = (self._shown - self._begun) / max(tally.rows, 1) * (self._total - done)
            say(f"{done} of {self._total} rows, {speed}, about {left:.0f} s left")

    def close(self) -> None:
        self._bar.close()


def read_job(config: ml_collections.ConfigDict) -> Job:
    """The job that a config describes; ValueError where a setting has no meaning."""
    try:
        count = config.data_parallel
        if not 1 <= count <= len(jax.devices()):
            raise ValueError(
                f"data_parallel={count}: must be from 1 to {len(jax.devices())}, the number of devices (one "
                "CPU counts as N with XLA_FLAGS=--xla_force_host_platform_device_count=N)"
            )
        auto = (jax.sharding.AxisType.Auto,)
        return Job(
            decoder=make_decoder(config.decoder, config.get(config.decoder, {})),
            max_new_tokens=config.max_new_tokens,
            sampling=from_settings(dj.Sampling, "sampling", config.sampling),
            stop=dj.Stop(tuple(config.stop_token_ids), tuple(config.stop_strings)),
            seed=config.seed,
            batch_size=config.batch_size,
            batches_per_part=config.batches_per_part,
            mesh=jax.make_mesh((count,), ("data",), axis_types=auto) if count > 1 else None,
        )
    except AttributeError as error:
        raise ValueError(f"the config file lacks a setting: {one_line(error)}") from None


def find_inputs(names: Sequence[str]) -> None:
    """ValueError names the first file that cannot be read."""
    for name in names:
        if name == "-":
            continue
        try:
            with open(name, "rb"):
                pass
        except OSError as error:
            raise ValueError(f"input={name!r} cannot be read ({error.strerror}); give a file of JSON lines") from None


def claim_output(job: Job, config: ml_collections.ConfigDict) -> tuple[list[tuple[str, Path]], dict[str, Any]]:
    """Opens the output folder for this job: the input files, and the plan."""
    folder = Path(_OUTPUT.value)
    batch_job.open_folder(folder)
    spooled = batch_job.spool(sys.stdin.buffer, folder) if "-" in _INPUT.value else None
    files = [(name, spooled if name == "-" and spooled else Path(name)) for name in _INPUT.value]
    plan = batch_job.describe_job(files, job, config.model, config.dtype)
    try:
        if not _OVERWRITE.value:
            batch_job.check_folder(folder, plan)
    except ValueError:
        if spooled:
            spooled.unlink()
        raise
    if spooled:
        kept = batch_job.keep_spooled(spooled, folder)
        files = [(name, kept if name == "-" else path) for name, path in files]
    return files, plan


def load_model(config: ml_collections.ConfigDict, job: Job) -> dj.Model:
    """The model, on every device of the job; ValueError where it or the job's settings cannot be used."""
    if config.compilation_cache:
        dj.enable_compilation_cache(os.path.expanduser(config.compilation_cache))
    whole = jax.sharding.NamedSharding(job.mesh, jax.sharding.PartitionSpec()) if job.mesh else None
    model = dj.load(config.model, dtype=config.dtype, placement=whole)
    batch_job.check_job(model, job)
    return model


def peak_memory() -> dict[str, int | None]:
    """Bytes: of this process at its largest, and of the fullest device where it keeps count."""
    unit = 1 if sys.platform == "darwin" else 1024
    devices = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return {
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device": max((peak for peak in devices if peak is not None), default=None),
    }


def surroundings() -> dict[str, Any]:
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


def summarise(
    folder: Path, errors: int, tally: Tally, job: Job, config: ml_collections.ConfigDict, begun: float
) -> None:
    """Writes summary.json (`batch_job.measures` defines its numbers) and says the gist of it."""
    numbers = batch_job.measures(folder, tally)
    summary = {
        **numbers,
        "errors": errors,
        "wall_seconds": time.monotonic() - begun,
        "peak_memory_bytes": peak_memory(),
        "decoder": repr(job.decoder),
        "config": config.to_dict(),
        **surroundings(),
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    batch_job.write_atomically(folder / batch_job.SUMMARY, text.encode())
    speed, per_call = numbers["tokens_per_second"], numbers["tokens_per_model_call"]
    say(
        f"{numbers['rows']} rows, {numbers['new_tokens']} new tokens in {folder}"
        + (f"; {speed:.1f} tokens/s" if speed else "")
        + (f", {per_call:.2f} tokens per model call" if per_call else "")
    )


def decode_all(signals: Signals, begun: float) -> int:
    """The whole job; returns the exit code."""
    folder = Path(_OUTPUT.value)
    try:
        config = _CONFIG.value
        job = read_job(config)
        find_inputs(_INPUT.value)
        files, plan = claim_output(job, config)
        model = load_model(config, job)
        rows, errors = batch_job.read_rows(model, files, job.max_new_tokens)
        parts = batch_job.plan_parts([len(row.prompt) for row in rows], job.batch_size, job.batches_per_part)
        batch_job.start_folder(folder, plan, rows, errors, _OVERWRITE.value)
    except (ValueError, OSError) as error:
        say(one_line(error))
        return 2
    say(f"{len(rows)} rows in {len(parts)} parts, and {len(errors)} bad lines")
    progress = Progress(len(rows), signals)
    try:
        tally = batch_job.run_job(model, job, rows, parts, folder, progress)
    finally:
        progress.close()
    if tally.rows or not (folder / batch_job.SUMMARY).exists():
        summarise(folder, len(errors), tally, job, config, begun)
    else:
        say(f"all {len(rows)} rows are in {folder} already")
    if errors:
        lines = len(rows) + len(errors)
        say(f"{len(errors)} of {lines} lines were not decoded; {folder / batch_job.ERRORS} says why")
    return 1 if errors else 0


def main() -> int:
    begun = time.monotonic()
    signals = Signals()
    try:
        return decode_all(signals, begun)
    except Stopped:
        parts = len(list(Path(_OUTPUT.value).glob(batch_job.PARTS)))
        say(f"{parts} complete parts are saved in {_OUTPUT.value}")
        say("stopped; run the same command again to continue")
        return 130 if signals.received == signal.SIGINT else 0
    except (OSError, jax.errors.JaxRuntimeError) as error:
        say(f"failed: {one_line(error)}; what is complete is saved, the same command goes on from there")
        return 1


if __name__ == "__main__":
    run(main)
