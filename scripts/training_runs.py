"""Small training runs in processes of their own, and ways to end them: what measure_trainer.py watches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def tiny(total_steps: int) -> dict[str, Any]:
    """Settings over configs/ui_phrases.py: steps of milliseconds, with dropout."""
    return {
        "total_steps": total_steps,
        "data.files.validation": "validation[:32]",
        "data.files.test": "",
        "data.tokenizer.kind": "characters",
        "data.length": 48,
        "data.tokens_per_batch": 768,
        "model.num_layers": 1,
        "model.encoder_layers": 1,
        "model.width": 32,
        "model.mlp_width": 64,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_size": 16,
        "optimizer.warmup_steps": 5,
        "log_every": 1,
        "checkpoint.every": 10,
        "evaluation.every": 25,
        "evaluation.max_new_tokens": 4,
    }


@contextlib.contextmanager
def started(
    workdir: Path, settings: Mapping[str, Any], *arguments: str, devices: int = 1
) -> Iterator[subprocess.Popen[bytes]]:
    """A run as users start it, killed in the end; what it says is appended to a file beside the workdir."""
    command = [sys.executable, "-m", "train", "--config=configs/ui_phrases.py:en-de", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    command += [f"--config.compilation_cache={workdir.parent / 'compiled'}", *arguments]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    with workdir.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def logged(workdir: Path) -> dict[int, str]:
    """The whole lines of metrics.jsonl that training steps wrote, by step."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith("\n") and '"loss":' in line]
    return {json.loads(line)["step"]: line for line in whole}


def losses(workdir: Path) -> dict[int, float]:
    """The training losses by step."""
    return {step: json.loads(line)["loss"] for step, line in logged(workdir).items()}


def wait_for_step(process: subprocess.Popen[bytes], workdir: Path, step: int) -> None:
    """Returns when a step is in the log; ValueError if the process ended before."""
    while True:
        ended = process.poll() is not None
        if step in logged(workdir):
            return
        if ended:
            tail = workdir.with_suffix(".log").read_text(encoding="utf-8").splitlines()[-3:]
            raise ValueError(f"the run in {workdir} ended with code {process.returncode}: {' '.join(tail)}")
        time.sleep(0.005)


def train_to(workdir: Path, settings: Mapping[str, Any], step: int, *arguments: str, devices: int = 1) -> None:
    """Trains until a step is in the log, then kills the process."""
    with started(workdir, settings, *arguments, devices=devices) as process:
        wait_for_step(process, workdir, step)


def finish(workdir: Path, settings: Mapping[str, Any]) -> None:
    """Trains to the end; ValueError if the process fails."""
    with started(workdir, settings) as process:
        wait_for_step(process, workdir, settings["total_steps"])
        if process.wait():
            raise ValueError(f"the run in {workdir} ended with code {process.returncode}")


def stop_at(workdir: Path, settings: Mapping[str, Any], step: int, number: signal.Signals, delay: float) -> None:
    """Sends a signal some moments after a step, or after the first new one if that was done before.

    Raises:
      ValueError: the process ended in another way than it should.
    """
    there = max(logged(workdir), default=0)
    with started(workdir, settings) as process:
        wait_for_step(process, workdir, max(step, there + 1))
        time.sleep(delay)
        process.send_signal(number)
        code, last = process.wait(), max(logged(workdir))
    print(f"{number.name} after step {last}, exit code {code}", flush=True)
    if code != (0 if number == signal.SIGTERM else -number) or last >= settings["total_steps"]:
        raise ValueError(f"{number.name} after step {last} of {workdir} gave exit code {code}")
