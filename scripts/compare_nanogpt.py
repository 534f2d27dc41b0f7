"""Compares training tiny Shakespeare by characters with nanoGPT: the same size, steps and machine, whole processes.

    git clone https://github.com/karpathy/nanoGPT
    python -m venv torch && torch/bin/pip install torch numpy requests
    python scripts/compare_nanogpt.py --nanogpt=nanoGPT --python=torch/bin/python --data=input.txt

nanoGPT runs with the setting that its README gives for a CPU, then configs/shakespeare_char_cpu.py runs, with nothing
kept from earlier runs: its time holds reading the text, compiling and two validations over the whole part; nanoGPT's
holds its nine estimates of the losses, and not its data/shakespeare_char/prepare.py. Neither makes samples. The two
take turns --repeats times and the medians count. At last ours runs with a third of the steps, which is what it needs
to be as good as nanoGPT. Ten minutes on two cores, with nothing else running. Results go to benchmarks/trainer.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from records import report

from train.command import run

NANOGPT = flags.DEFINE_string("nanogpt", None, "A checkout of nanoGPT; it is copied, not changed.", required=True)
DATA = flags.DEFINE_string("data", None, "The text: tiny Shakespeare's input.txt.", required=True)
PYTHON = flags.DEFINE_string("python", sys.executable, "A Python that has torch, numpy and requests, for nanoGPT.")
MAX_ITERS = flags.DEFINE_integer("max_iters", 2000, "Steps of both; fewer only to try this script.", lower_bound=20)
REPEATS = flags.DEFINE_integer("repeats", 2, "How often each runs.", lower_bound=1)
RECORDS = flags.DEFINE_string("records", "benchmarks/trainer.json", 'Where the results go; "" writes none.')

ROOT = Path(__file__).resolve().parent.parent
# The README's command for a CPU; max_iters and lr_decay_iters are added.
CPU_SETTING = [
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile=False",
    "--eval_iters=20",
    "--log_interval=1",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--dropout=0.0",
]


def save(name: str, value: float, unit: str, target: float | None = None, better: Any = "lower") -> None:
    """Prints and records one result."""
    command = "python scripts/compare_nanogpt.py --nanogpt=nanoGPT --python=torch/bin/python --data=input.txt"
    command += "".join(f" --{flag.name}={flag.value}" for flag in (MAX_ITERS, REPEATS) if flag.value != flag.default)
    report(RECORDS.value and ROOT / RECORDS.value, name, value, unit, target, better, command)


def seconds(command: Sequence[str], folder: Path, log: Path, variables: Mapping[str, str] | None = None) -> float:
    """Wall-clock time of a whole process, whose output goes to a file; ValueError with its last lines if it fails."""
    with log.open("w", encoding="utf-8") as output:
        begun = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=os.environ | (variables or {}), stdout=output, stderr=subprocess.STDOUT
        )
        took = time.perf_counter() - begun
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise ValueError(f"{' '.join(command)} failed: {' '.join(lines[-3:])}")
    return took


def prepared_nanogpt(folder: Path, text: Path) -> Path:
    """A copy of nanoGPT with the text in the form that its own script makes."""
    source = Path(NANOGPT.value)
    if not (source / "train.py").exists():
        raise ValueError(f"--nanogpt={NANOGPT.value}: there is no train.py; give a checkout of nanoGPT")
    copy = folder / "nanoGPT"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git", "*.bin", "*.pkl", "out*"))
    shutil.copy(text, copy / "data" / "shakespeare_char" / "input.txt")
    seconds([PYTHON.value, "data/shakespeare_char/prepare.py"], copy, folder / "prepare.log")
    return copy


def run_nanogpt(folder: Path, copy: Path) -> tuple[float, float]:
    """Seconds of nanoGPT's training, and its last estimate of the validation loss."""
    log = folder / "nanogpt.log"
    steps = [f"--max_iters={MAX_ITERS.value}", f"--lr_decay_iters={MAX_ITERS.value}"]
    took = seconds([PYTHON.value, "train.py", *CPU_SETTING, *steps], copy, log)
    losses = re.findall(r"^step \d+: train loss .*, val loss ([\d.]+)", log.read_text(encoding="utf-8"), re.MULTILINE)
    return took, float(losses[-1])


def run_ours(folder: Path, text: Path, steps: int) -> tuple[float, float]:
    """Seconds of our training, with empty caches, and the loss over the whole validation part."""
    workdir = folder / "workdir"
    command = [sys.executable, "-m", "train", f"--config=configs/shakespeare_char_cpu.py:{text}"]
    command += [f"--workdir={workdir}", "--config.compilation_cache=", "--config.evaluation.prompts=()"]
    command += [f"--config.total_steps={steps}", f"--config.optimizer.warmup_steps={steps // 20}"]
    caches = {"DECODING_JAX_CACHE": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    took = seconds(command, ROOT, folder / "ours.log", caches)
    loss = json.loads((workdir / "results.json").read_text(encoding="utf-8"))["last_validation_loss"]
    shutil.rmtree(workdir)
    return took, loss


def main() -> None:
    """Runs both by turns, nanoGPT first."""
    text, steps = Path(DATA.value).resolve(), MAX_ITERS.value
    if not text.is_file():
        raise ValueError(f"--data={DATA.value}: there is no such file; give tiny Shakespeare's input.txt")
    theirs, ours = [], []
    with tempfile.TemporaryDirectory() as name:
        copy = prepared_nanogpt(Path(name), text)
        for _ in range(REPEATS.value):
            theirs.append(run_nanogpt(Path(name), copy))
            print("nanoGPT: {:.1f} s, validation loss {:.4f} over 20 random batches".format(*theirs[-1]), flush=True)
            ours.append(run_ours(Path(name), text, steps))
            print("ours: {:.1f} s, validation loss {:.4f}".format(*ours[-1]), flush=True)
        short, short_loss = run_ours(Path(name), text, steps // 3)
    their_seconds, our_seconds = (statistics.median(took for took, _ in runs) for runs in (theirs, ours))
    save("shakespeare_validation_loss", ours[-1][1], "nats per character", 1.88)
    save("shakespeare_validation_loss_nanogpt", theirs[-1][1], "nats per character, over 20 batches")
    save("shakespeare_seconds", our_seconds, "s")
    save("shakespeare_seconds_nanogpt", their_seconds, "s")
    save("shakespeare_speedup_vs_nanogpt", their_seconds / our_seconds, "ratio of seconds", 1.0, "higher")
    save("shakespeare_validation_loss_a_third_of_the_steps", short_loss, "nats per character", 1.88)
    save("shakespeare_speedup_a_third_of_the_steps", their_seconds / short, "ratio of seconds", 1.0, "higher")


if __name__ == "__main__":
    run(main)
