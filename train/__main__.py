"""Trains a model for the decoders of decoding_jax.

    python -m train --config=configs/shakespeare_char_cpu.py
    python -m train --config=configs/ui_phrases.py:en-de --workdir=workdirs/first --config.total_steps=400
    python -m train --config=configs/llama.py:8b --compile_only

The run goes on from its newest checkpoint when the same command is given again, also after being killed. The folder is
a model: dj.load("workdirs/first"). --config.name=value changes a setting; --helpfull lists all flags.

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
import signal
import sys
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

import decoding_jax as dj
from train.command import FAILED, one_line, run, say

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


def default_workdir(config_path: str) -> Path:
    """workdirs/<name>, with the argument of the config file in the name."""
    path, _, argument = config_path.partition(":")
    return Path("workdirs") / "-".join(part for part in (Path(path).stem, argument.replace("/", "_")) if part)


def join_processes() -> None:
    """Becomes one of several processes, if the flags say so; ValueError where they contradict each other."""
    address, count, index = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    given = [value is not None for value in (address, count, index)]
    if any(given):
        if not all(given):
            raise ValueError("--coordinator, --num_processes and --process_id belong together; give all three")
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
    config = _CONFIG.value
    keep_freed_memory()
    join_processes()
    # After joining: importing Orbax or Grain may look for devices.
    from train.compile_only import report_memory
    from train.loop import Interrupted, Trainer
    from train.setup import compiled_folder

    if folder := compiled_folder(config):
        dj.enable_compilation_cache(os.path.expanduser(folder))
    if _COMPILE_ONLY.value:
        print(report_memory(config))
        return 0
    path = config_flags.get_config_filename(flags.FLAGS["config"])
    workdir = Path(_WORKDIR.value) if _WORKDIR.value else default_workdir(path)
    trainer = Trainer(config, workdir)
    try:
        results = trainer.run()
    except Interrupted as stop:
        say(f"step {stop.step} is saved in {workdir}; the same command goes on from there")
        return 130 if stop.number == signal.SIGINT else 0
    except (RuntimeError, OSError, jax.errors.JaxRuntimeError) as error:
        say(f"failed: {one_line(error)}")
        return FAILED
    say(f"done; {', '.join(f'{name} {value:.4g}' for name, value in results.items())}")
    say(f'{workdir} is a model now: dj.load("{workdir}")')
    return 0


if __name__ == "__main__":
    sys.modules["__main__"].__doc__ = f"{__doc__}{listed_configs()}\n"
    run(main)
