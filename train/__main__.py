"""Trains a model for the decoders of decoding_jax.

    python -m train --config=configs/ui_phrases.py:en-de
    python -m train --config=configs/ui_phrases.py:en-de --workdir=workdirs/first --config.total_steps=400
    python -m train --config=configs/llama.py:8b --compile_only

The run goes on from its newest checkpoint when the same command is given again, also after being killed. The folder is
a model: dj.load("workdirs/first"). --config.name=value changes a setting: train/config.py lists all settings with their
meaning. --helpfull lists all flags.

A mesh (data, fsdp, tensor) splits the rows, the params and optimizer, and the matrices over all devices of all
processes (--config.mesh.data=2 --config.mesh.fsdp=2 ...). This is what pjit was: today it is jax.jit with
NamedShardings. On several hosts start the same command on each with --distributed (a cluster that JAX knows), or with
--coordinator, --num_processes and --process_id.

Configs, with the first line of what each says of itself:
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

import decoding_jax as dj
from train.command import FAILED, one_line, run, say

if TYPE_CHECKING:
    from train.signals import StopSignals

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run: a file in configs, and its argument behind a colon."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the run; default: workdirs/<name of the config>.")
_COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Compile the step on abstract values and print its memory.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other processes of the cluster that JAX finds.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, where JAX finds no cluster.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are, with --coordinator.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
flags.mark_flag_as_required("config")

ROOT = Path(__file__).resolve().parent.parent


def listed_configs(folder: Path = ROOT / "configs") -> str:
    """One line for each training config of the folder."""
    lines = []
    for file in sorted(folder.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        if "python -m train " in source:
            lines.append(f"    configs/{file.name:28} {(ast.get_docstring(ast.parse(source)) or '').splitlines()[0]}")
    return "\n".join(lines)


def chosen_workdir(flag: str | None, config_path: str) -> Path:
    """The folder of --workdir; without one workdirs/<name>, with the argument of the config file in the name.

    Of an argument that is a path only the last part counts, without its ending.

    Raises:
      ValueError: --workdir is empty.
    """
    if flag == "":
        raise ValueError("--workdir='': name a folder, or leave the flag out for workdirs/<name of the config>")
    if flag is not None:
        return Path(flag).expanduser()
    path, _, argument = config_path.partition(":")
    last = Path(argument).stem if "/" in argument else argument
    return Path("workdirs") / "-".join(part for part in (Path(path).stem, last) if part)


def join_processes() -> None:
    """Becomes one of several processes, if the flags say so; ValueError where they contradict each other."""
    address, count, index = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    if any(value is not None for value in (address, count, index)):
        if address is None or count is None or index is None:
            raise ValueError("--coordinator, --num_processes and --process_id belong together; give all three")
        if not re.fullmatch(r".+:\d+", address) or not 0 < int(address.rpartition(":")[2]) < 2**16:
            raise ValueError(f"--coordinator={address!r}: give host:port of process 0, such as localhost:1234")
        if not 0 <= index < count:
            raise ValueError(f"--process_id={index}: must be from 0 to below --num_processes={count}")
        jax.distributed.initialize(address, count, index)
    elif _DISTRIBUTED.value:
        jax.distributed.initialize()


def keep_freed_memory() -> None:
    """Tells glibc's malloc not to give freed memory back to the system; other systems are left alone.

    On a CPU every step frees and allocates its large arrays anew. Handed back and forth they are zeroed page by page,
    which took a third of the time of training small models. To be called before the devices are looked for: threads
    that run by then have arenas of their own, which do give memory back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        no_mmap, trim_threshold, arenas = -4, -1, -8  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX of malloc.h
        for parameter, value in ((no_mmap, 0), (trim_threshold, 2**31 - 1), (arenas, 1)):
            mallopt(parameter, value)


def main() -> int:
    """Trains, or only compiles."""
    keep_freed_memory()
    workdir = chosen_workdir(_WORKDIR.value, config_flags.get_config_filename(flags.FLAGS["config"]))
    join_processes()
    # After joining: importing these may look for devices.
    from train.signals import Stopped, StopSignals
    from train.workdir import saved

    try:
        with StopSignals(jax.process_count()) as signals:
            return train(_CONFIG.value, workdir, signals)
    except Stopped as stop:
        say(f"stopped; {saved(workdir)}")
        return stop.exit_code


def train(config: ConfigDict, workdir: Path, signals: StopSignals) -> int:
    """What `main` does between its signals; the exit code."""
    from train.compile_only import report_memory
    from train.loop import Trainer
    from train.settings import check_settings
    from train.setup import compiled_folder
    from train.workdir import saved

    check_settings(config)
    if folder := compiled_folder(config):
        dj.enable_compilation_cache(os.path.expanduser(folder))
    if _COMPILE_ONLY.value:
        print(report_memory(config))
        return 0
    trainer = Trainer(config, workdir)
    try:
        results = trainer.run(signals)
    except (ValueError, RuntimeError, OSError) as error:  # once it trains, none of them is bad usage
        say(saved(workdir))
        say(f"failed: {one_line(error)}")
        return FAILED
    numbers = [f"{name} {value if isinstance(value, int) else f'{value:.4g}'}" for name, value in results.items()]
    say(f"done; {', '.join(numbers)}")
    say(f'{workdir} is a model now, that of step {results["best_step"]}: dj.load("{workdir}")')
    return 0


if __name__ == "__main__":
    sys.modules["__main__"].__doc__ = f"{__doc__}{listed_configs()}\n"
    run(main)
