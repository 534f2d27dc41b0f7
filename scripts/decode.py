"""Decodes a file of prompts: JSON lines in, JSON lines out, in parts that survive any interruption.

    python scripts/decode.py --config=configs/decode_smollm2.py --input=prompts.jsonl --output=outputs/first
    python scripts/decode.py --config=... --input=a.jsonl,b.jsonl --output=outputs/both
    cat prompts.jsonl | python scripts/decode.py --config=... --input=- --output=outputs/piped

Settings of the config file are changed with --config.name=value:

    ... --config.max_new_tokens=64 --config.sampling.temperature=0.7 --config.decoder=prompt_lookup

Speculative decoding drafts with a second model of the same vocabulary:

    ... --config.decoder=speculative --config.drafter=path/to/small --config.speculative.num_draft=4

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

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
from absl import flags
from ml_collections import config_flags

import decoding_jax as dj
from decoding_jax import batch_folder, batch_job, batch_rows
from decoding_jax.batch_job import Job
from decoding_jax.prepare import least_bucket
from train.command import FAILED, one_line, run, say
from train.jobs import (
    RowProgress,
    StopSignals,
    every_setting,
    load_drafter,
    read_job,
    run_stoppable,
    write_summary,
)

_CONFIG = config_flags.DEFINE_config_file("config", None, "The settings, such as configs/decode_smollm2.py.")
_INPUT = flags.DEFINE_list(
    "input", None, "Files of JSON lines, separated by commas; - is standard input.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write to; made if it is not there.", required=True)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Discard what another job left in the output folder. Parts of the same job are kept."
)
flags.mark_flag_as_required("config")


def read_config(config: ml_collections.ConfigDict) -> Job:
    """The job that a config describes, still without its drafter; ValueError where a setting has no meaning."""
    with every_setting():
        count = config.data_parallel
        if not 1 <= count <= len(jax.devices()):
            raise ValueError(
                f"data_parallel={count}: must be from 1 to {len(jax.devices())}, the number of devices (one "
                "CPU counts as N with XLA_FLAGS=--xla_force_host_platform_device_count=N)"
            )
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((count,), ("data",), axis_types=auto) if count > 1 else None
        stop = dj.Stop(tuple(config.stop_token_ids), tuple(config.stop_strings))
        return read_job(config, mesh, stop, has_drafter=bool(config.drafter))


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
    batch_folder.open_folder(folder)
    spooled = batch_folder.spool(sys.stdin.buffer, folder) if "-" in _INPUT.value else None
    files = [(name, spooled if name == "-" and spooled else Path(name)) for name in _INPUT.value]
    plan = batch_job.describe_job(files, job, config.model, config.dtype, config.drafter or None)
    try:
        if not _OVERWRITE.value:
            batch_folder.check_folder(folder, plan)
    except ValueError:
        if spooled:
            spooled.unlink()
        raise
    if spooled:
        kept = batch_folder.keep_spooled(spooled, folder)
        files = [(name, kept if name == "-" else path) for name, path in files]
    return files, plan


def load_models(config: ml_collections.ConfigDict, job: Job) -> tuple[dj.Model, Job]:
    """The model, and the job with its drafter, on every device; ValueError where they or a setting cannot be used."""
    if config.compilation_cache:
        dj.enable_compilation_cache(os.path.expanduser(config.compilation_cache))
    whole = jax.sharding.NamedSharding(job.mesh, jax.sharding.PartitionSpec()) if job.mesh else None
    model = dj.load(config.model, dtype=config.dtype, placement=whole)
    drafter = load_drafter(config.drafter, model, dtype=config.dtype, placement=whole)
    job = dataclasses.replace(job, drafter=drafter)
    batch_job.check_job(model, job)
    return model, job


def decode_all(signals: StopSignals, begun: float) -> int:
    """The whole job; returns the exit code."""
    folder = Path(_OUTPUT.value)
    try:
        config = _CONFIG.value
        job = read_config(config)
        find_inputs(_INPUT.value)
        files, plan = claim_output(job, config)
        model, job = load_models(config, job)
        rows, errors = batch_rows.read_rows(model, files, job.max_new_tokens, job.decoder, job.drafter)
        parts = batch_rows.plan_parts(
            [len(row.prompt) for row in rows],
            job.batch_size,
            job.batches_per_part,
            [row.length is not None for row in rows],
            least_bucket(model),
        )
        batch_folder.start_folder(folder, plan, rows, errors, _OVERWRITE.value)
    except (ValueError, OSError) as error:
        say(one_line(error))
        return 2
    say(f"{len(rows)} rows in {len(parts)} parts, and {len(errors)} bad lines")
    progress = RowProgress(len(rows), signals)
    try:
        tally = batch_job.run_job(model, job, rows, parts, folder, progress)
    finally:
        progress.close()
    if tally.rows or not (folder / batch_folder.SUMMARY).exists():
        more = {"errors": len(errors), "config": config.to_dict()}
        write_summary(folder, job, tally, more, begun)
    else:
        say(f"all {len(rows)} rows are in {folder} already")
    if errors:
        lines = len(rows) + len(errors)
        say(f"{len(errors)} of {lines} lines were not decoded; {folder / batch_folder.ERRORS} says why")
    return FAILED if errors else 0


def main() -> int:
    begun = time.monotonic()
    return run_stoppable(lambda signals: decode_all(signals, begun), Path(_OUTPUT.value))


if __name__ == "__main__":
    run(main)
