"""Measures what the trainer promises on this machine; results go to benchmarks/trainer.json.

    python scripts/measure_trainer.py --what=overhead     # the loop over the bare step; with nothing else running
    python scripts/measure_trainer.py --what=resume       # killed and stopped runs, and going on on other devices
    python scripts/measure_trainer.py --what=devices      # loss and gradients on meshes of 8 devices
    python scripts/measure_trainer.py --what=processes    # two processes on this machine
    python scripts/measure_trainer.py --what=compile      # configs/llama.py for 8 devices

Each takes a few minutes on 2 cores. All run on CPUs; eight devices are simulated.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from records import report
from training_runs import finish, logged, losses, started, stop_at, tiny, train_to

from train.command import run
from train.loop import Trainer
from train.setup import make_layout, make_objective, model_config, open_data, to_devices
from train.state import AXES, TrainState, loss_and_gradients

WHAT = flags.DEFINE_enum(
    "what", None, ["overhead", "resume", "devices", "processes", "compile"], "What to measure.", required=True
)
RECORDS = flags.DEFINE_string("records", "benchmarks/trainer.json", 'Where the results go; "" writes none.')
STEPS = flags.DEFINE_integer("steps", 100, "overhead: steps of a phase, in which one checkpoint is saved.", 2)
PHASES = flags.DEFINE_integer("phases", 6, "overhead: how many phases the loop has.", lower_bound=1)
ONLY = flags.DEFINE_enum("only", None, ["30_ms", "200_ms"], "overhead: of steps of this length alone.")
SEED = flags.DEFINE_integer("seed", 0, "resume: of the moments to kill at.")
KILLS = flags.DEFINE_integer("kills", 3, "resume: how many SIGKILLs, and how many SIGTERMs.", lower_bound=1)
STEP = flags.DEFINE_string("step", None, "Used by --what=overhead for its child processes.")

ROOT = Path(__file__).resolve().parent.parent
COMPARED = 10  # steps whose losses are compared after going on, and between processes


def save(name: str, value: float, unit: str, target: float | None = None, better: Any = "lower") -> None:
    """Prints and records one result."""
    chosen = [f" --{flag.name}={flag.value}" for flag in (STEPS, PHASES, ONLY, SEED, KILLS) if flag.present]
    command = f"python scripts/measure_trainer.py --what={WHAT.value}{''.join(chosen)}"
    report(RECORDS.value and ROOT / RECORDS.value, name, value, unit, target, better, command)


def config_of(name: str, argument: str) -> ConfigDict:
    """What the command makes of --config=configs/name.py:argument."""
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](argument)


# --- The loop's overhead

SIZES = {  # the step's name, what shakespeare_char_cpu.py gets for it, and the largest ratio that was promised
    "30_ms": ({}, 1.10),
    "200_ms": ({"data.rows_per_batch": 96}, 1.05),
}


class Phases:
    """Stands in for `Trainer.train_step` and times the loop and bare steps in turns.

    After a warmup the loop's steps come in phases; before each and after the last, as many bare steps run on another
    state and a batch that stays on the device. A phase of the loop ends when its checkpoint is on disk.
    """

    def __init__(self, trainer: Trainer, steps: int):
        self.trainer, self.steps, self.step = trainer, steps, trainer.train_step
        self.batch = to_devices(trainer.data.plans["train"].batch(0), trainer.layout)
        self.loop: list[float] = []
        self.bare: list[float] = []
        self.calls, self.begun = 0, 0.0
        self.other: TrainState | None = None

    def __call__(self, state: TrainState, batch: Any, objective: Any) -> Any:
        if self.calls % self.steps == self.steps // 2:
            self._switch(state, objective)
        self.calls += 1
        return self.step(state, batch, objective)

    def _switch(self, state: TrainState, objective: Any) -> None:
        jax.block_until_ready(state)
        self.trainer.checkpoints.wait()
        if self.other is not None:
            self.loop.append(time.perf_counter() - self.begun)
        other = jax.tree.map(jnp.copy, state) if self.other is None else self.other
        begun = time.perf_counter()
        for _ in range(self.steps):
            other, _ = self.step(other, self.batch, objective)
        self.other = jax.block_until_ready(other)
        self.begun = time.perf_counter()
        self.bare.append(self.begun - begun)


def overhead_of(name: str) -> None:
    """The child of `measure_overhead`: prints the ratio of a step in the loop to a bare one, and the latter's ms."""
    steps = STEPS.value
    with tempfile.TemporaryDirectory() as folder:
        words, letters = random.Random(0), "etaoinshrdlu"
        text = " ".join("".join(words.choices(letters, k=words.randint(2, 8))) for _ in range(200_000))
        (Path(folder) / "text.txt").write_text(text, encoding="utf-8")
        config = config_of("shakespeare_char_cpu", f"{folder}/text.txt")
        config.update_from_flattened_dict(SIZES[name][0])
        config.data.files = ConfigDict({"train": f"{folder}/text.txt", "validation": "", "test": ""})
        config.data.data_dir = f"{folder}/data"
        config.total_steps = steps * PHASES.value + steps // 2 + 1
        config.optimizer.warmup_steps = 1
        config.log_every, config.checkpoint.every, config.evaluation.prompts = 10, steps, ()
        trainer = Trainer(config, Path(folder) / "workdir")
        phases = Phases(trainer, steps)
        trainer.train_step = phases
        trainer.run()
    around = [(before + after) / 2 for before, after in itertools.pairwise(phases.bare)]
    ratios = [loop / bare for loop, bare in zip(phases.loop, around, strict=True)]
    print(f"ratios {', '.join(f'{ratio:.3f}' for ratio in ratios)}", file=sys.stderr)
    print(statistics.median(ratios), statistics.median(phases.bare) / steps * 1e3)


def measure_overhead() -> None:
    """Step time in `Trainer.run`, with data, logs and checkpoints, over that of the bare jitted step."""
    # What `python -m train` tells malloc.
    malloc = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_ARENA_MAX": "1"}
    for name, (_, target) in SIZES.items():
        if ONLY.value not in (None, name):
            continue
        command = [sys.executable, __file__, "--what=overhead", f"--step={name}"]
        command += [f"--steps={STEPS.value}", f"--phases={PHASES.value}"]
        done = subprocess.run(command, env=os.environ | malloc, stdout=subprocess.PIPE, text=True, check=True)
        ratio, milliseconds = map(float, done.stdout.split()[-2:])
        save(f"loop_over_bare_step_{name}", ratio, "ratio of step times", target)
        save(f"bare_step_milliseconds_{name}", milliseconds, "ms")


# --- Runs in processes of their own


def measure_resume() -> None:
    """Losses of killed and stopped runs against an uninterrupted one's, and after going on on 1, 2 and 8 devices."""
    total, moments = 200, random.Random(SEED.value)
    settings = tiny(total)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(folder / "whole", settings)
        wanted = logged(folder / "whole")
        for number in (signal.SIGKILL, signal.SIGTERM):
            workdir = folder / number.name
            steps = sorted(moments.sample(range(2, total // 2), KILLS.value))
            for step in steps:
                stop_at(workdir, settings, step, number, moments.uniform(0, 0.05))
            if number == signal.SIGTERM:
                shutil.copytree(workdir, folder / "stopped")
            finish(workdir, settings)
            same = logged(workdir) == wanted
            unit = f"{number.name}s, losses of {total} steps to the last digit"
            save(f"same_losses_after_{number.name.lower()}", KILLS.value if same else 0, unit, KILLS.value, "higher")
        measure_moves(folder, settings, losses(folder / "whole"))


def measure_moves(folder: Path, settings: Mapping[str, Any], wanted: Mapping[int, float]) -> None:
    """Goes on from one checkpoint on other devices."""
    meshes = {1: {}, 2: {"mesh.fsdp": 2}, 8: {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}}
    first = max(losses(folder / "stopped")) + 1
    for devices, mesh in meshes.items():
        workdir = folder / f"on_{devices}"
        shutil.copytree(folder / "stopped", workdir)
        train_to(workdir, {**settings, **mesh}, first + COMPARED - 1, devices=devices)
        found = losses(workdir)
        worst = max(abs(found[step] - wanted[step]) for step in range(first, first + COMPARED))
        save(f"loss_difference_resumed_on_{devices}_devices", worst, "nats, largest of 10 steps", 1e-5)


def measure_processes() -> None:
    """The losses of two processes with a device each, against those of one."""
    settings = tiny(100)
    with tempfile.TemporaryDirectory() as name:
        one, two = Path(name) / "one", Path(name) / "two"
        train_to(one, settings, COMPARED)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
        with started(two, settings, address, "--num_processes=2", "--process_id=1"):
            train_to(two, settings, COMPARED, address, "--num_processes=2", "--process_id=0")
        found, wanted = losses(two), losses(one)
    worst = max(abs(found[step] - wanted[step]) for step in range(1, COMPARED + 1))
    save("loss_difference_of_2_processes", worst, "nats, largest of 10 steps", 1e-5)


# --- One device and eight


def measure_devices() -> None:
    """Loss and gradients of one batch on meshes of eight devices, against one device."""
    config = config_of("ui_phrases", "en-de")
    config.update_from_flattened_dict(tiny(100) | {"model.num_heads": 4, "model.num_kv_heads": 4})
    data = open_data(config, None)
    batch, shape = data.plans["train"].batch(0), model_config(config, data.tokenizer)
    params: dict[str, Any] = {}
    wanted: tuple[float, dict[str, Any]] | None = None
    worst: dict[str, float] = {"loss": 0.0, "gradients": 0.0, "relative": 0.0}
    for sizes in ((1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2)):
        devices = jax.devices()[: sizes[0] * sizes[1] * sizes[2]]
        mesh = jax.make_mesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=devices)
        layout = make_layout(config, shape, mesh)
        params = params or jax.device_get(layout.initialise(0).params)
        compute = jax.jit(functools.partial(loss_and_gradients, layout, jnp.dtype("float32"), 1))
        objective, key = make_objective(config, layout, data.tokenizer), jax.random.key(0)
        gradients, metrics = jax.device_get(compute(layout.adopt(params, 0), to_devices(batch, layout), objective, key))
        loss = float(metrics["loss"][0] / metrics["loss"][1])
        if wanted is None:
            wanted = loss, gradients
        differences = compare(loss, gradients, *wanted)
        print(f"mesh {sizes}: loss {loss:.7f}, differences {differences}", flush=True)
        worst = {name: max(worst[name], differences[name]) for name in worst}
    save("loss_difference_of_8_devices", worst["loss"], "nats, largest of 4 meshes", 1e-5)
    save("gradient_difference_of_8_devices", worst["gradients"], "largest of 4 meshes", 1e-5)
    unit = "of each param's greatest gradient, largest of 4 meshes"
    save("relative_gradient_difference_of_8_devices", worst["relative"], unit, 1e-5)


def compare(loss: float, gradients: Any, wanted_loss: float, wanted: Any) -> dict[str, float]:
    """The largest differences of the loss and of any gradient, the latter also over its param's greatest."""
    apart = {path: float(np.abs(gradients[path] - wanted[path]).max()) for path in wanted}
    relative = max(apart[path] / float(np.abs(wanted[path]).max()) for path in wanted)
    return {"loss": abs(loss - wanted_loss), "gradients": max(apart.values()), "relative": relative}


# --- Large models


def measure_compile() -> None:
    """GiB per device and seconds of configs/llama.py's steps, compiled for 8 devices on abstract values."""
    for size in ("1b", "8b"):
        command: Sequence[str] = [sys.executable, "-m", "train", f"--config=configs/llama.py:{size}", "--compile_only"]
        variables = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
        command = [*command, "--config.compilation_cache="]
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout, end="", flush=True)
        for line, name in {
            "params, optimizer, averages": "state",
            "temporary arrays": "temporary",
            "together": "together",
            "for comparison, logits in float32": "logits",
        }.items():
            save(f"llama_{size}_{name}_per_device", number_behind(line, done.stdout), "GiB")
        save(f"llama_{size}_compile_seconds", number_behind("lowered and compiled in", done.stdout), "s")


def number_behind(words: str, text: str) -> float:
    """The number that follows some words; ValueError if there is none."""
    found = re.search(re.escape(words) + r"\s+([\d.]+)", text)
    if not found:
        raise ValueError(f"{words!r} is not in the output: {text}")
    return float(found[1])


def main() -> None:
    """Measures what was asked for."""
    jax.config.update("jax_platforms", "cpu")
    if STEP.value:
        return overhead_of(STEP.value)
    if WHAT.value == "devices":
        jax.config.update("jax_num_cpu_devices", 8)
    measure = {
        "overhead": measure_overhead,
        "resume": measure_resume,
        "devices": measure_devices,
        "processes": measure_processes,
        "compile": measure_compile,
    }
    return measure[WHAT.value]()


if __name__ == "__main__":
    run(main)
