"""The command: its help, what it refuses in one line; kills, signals and several processes change nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict
from tiny_runs import home, logged, make_small_mesh, pairs_config, text_config, train_until

import train.__main__ as command
import train.loop
from decoding_jax.checkpoints.workdir import finished_steps
from train.command import run, say
from train.compile_only import report_memory
from train.loop import Trainer
from train.signals import Stopped, StopSignals

__all__ = ["home"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections

ROOT = Path(__file__).resolve().parent.parent
ENDLESS = {"total_steps": 100_000, "optimizer.schedule": "constant", "optimizer.learning_rate": 1e-4}
ENDLESS |= {"checkpoint.every": 10, "evaluation.every": 10, "model.dropout": 0.1}


def config_file(config: ConfigDict, path: Path) -> Path:
    """A config file that gives these settings."""
    path.write_text(
        f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({config.to_dict()})\n"
    )
    return path


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Ends what a failed test leaves running."""
    yield
    while _started:
        with _started.pop() as process:
            process.kill()


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own with one device."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    line = [sys.executable, "-m", "train", *arguments]
    pipe = subprocess.PIPE
    _started.append(subprocess.Popen(line, env=environment, cwd=ROOT, text=True, stderr=pipe, stdout=pipe))
    return _started[-1]


def wait_for_step(process: subprocess.Popen[str], workdir: Path, step: int) -> None:
    """Returns once the run has logged a step and finished a checkpoint before it."""
    until = time.monotonic() + 300
    while not finished_steps(workdir / "checkpoints") or max(logged(workdir, "loss")) < step:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)


# --- What it says


def test_help_tells_how_to_train() -> None:
    """--help shows the command, what pjit is called today, and each config of this repository with its first line."""
    out, _ = (process := start("--help")).communicate(timeout=300)
    assert process.returncode == 0
    assert "python -m train --config=" in out and "pjit" in out and "--compile_only" in out
    for name, line in (("shakespeare_char_cpu", "Tiny Shakespeare by characters"), ("multi30k", "Multi30k English")):
        assert any(f"configs/{name}.py" in row and line in row for row in out.splitlines())
    assert "decode_smollm2" not in out


def test_the_default_workdir_is_called_like_the_config() -> None:
    """Its argument is part of the name, so that runs on two language pairs do not share a folder; of paths the end."""
    assert command.chosen_workdir(None, "configs/x.py") == Path("workdirs/x")
    assert command.chosen_workdir(None, "some/where/x.py:en-de") == Path("workdirs/x-en-de")
    assert command.chosen_workdir(None, "x.py:llama-3.2") == Path("workdirs/x-llama-3.2")
    assert command.chosen_workdir(None, "x.py:/home/me/data/input.txt") == Path("workdirs/x-input")
    assert command.chosen_workdir("~/run", "x.py") == Path.home() / "run"
    with pytest.raises(ValueError, match="--workdir='': name a folder"):
        command.chosen_workdir("", "x.py")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs the command in this process: its exit code and what it says, on standard error if it fails."""

    def calling(*arguments: str) -> tuple[Any, list[str]]:
        monkeypatch.setattr(sys, "argv", ["train/__main__.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            run(command.main)
        said = capsys.readouterr()
        return ended.value.code, (said.out or said.err).strip().splitlines()

    yield calling
    # Flags are global, and a config defines more of them.
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:
        delattr(flags.FLAGS, name)
    for name in ("config", "workdir", "compile_only", "coordinator", "num_processes", "process_id"):
        flags.FLAGS[name].unparse()


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (text_config, ["--config.nope=1"], "config.nope: there is no such setting; there are config.canvas"),
        (text_config, ["--config.total_steps=many"], "--config.total_steps=many"),
        (text_config, ["surplus"], "'surplus' is no flag"),
        (text_config, ["--num_processes=2"], "--coordinator, --num_processes and --process_id belong together"),
        (text_config, ["--config.mesh.data=3"], "mesh.data=3, mesh.fsdp=1, mesh.tensor=1: does not fit 8 devices"),
        (text_config, ["--config.mesh.fsdp=-1"], "one of them may be -1"),
        (text_config, ["--config.data.rows_per_batch=12"], "data.rows_per_batch=12 is not a multiple of 8, the parts"),
        (text_config, ["--config.mesh.tensor=8"], "size 8, which does not divide num_kv_heads=2; make it 2"),
        (text_config, ["--config.objective=magic"], "objective='magic': choose one of causal_lm, ctc"),
        (text_config, ["--config.init_from=nowhere"], "init_from='nowhere': no such folder or file"),
        (pairs_config, ["--config.data.files.test=a.en,b.de"], "there is no file 'a.en'"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_exit_code_2(
    home: Path, tmp_path: Path, call: Any, kind: Any, arguments: list[str], message: str
) -> None:
    """What does not fit is named on the last line of standard error with its remedy; no folder is left."""
    file = config_file(kind(home), tmp_path / "tiny.py")
    code, lines = call(f"--config={file}", f"--workdir={tmp_path / 'run'}", *arguments)
    assert code == 2
    assert lines[-1].startswith("train: ") and message in lines[-1]
    assert not any("Traceback" in line or "Error" in line for line in lines)
    assert not (tmp_path / "run").exists()


def test_a_config_file_that_is_not_there_is_one_line(call: Any) -> None:
    """The name of the file is on it."""
    code, lines = call("--config=configs/nowhere.py")
    assert code == 2 and len(lines) == 1 and "configs/nowhere.py" in lines[0]


def test_parallel_files_of_different_length_are_refused(home: Path, tmp_path: Path, call: Any) -> None:
    """The line says how many lines each has."""
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    file = config_file(
        pairs_config(home, {"data.files.train": f"{tmp_path}/a.en,{tmp_path}/a.de"}), tmp_path / "tiny.py"
    )
    code, lines = call(f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert code == 2 and "a.en" in lines[-1] and "3" in lines[-1] and "2" in lines[-1]


def test_compiling_alone_counts_bytes_per_device(home: Path, tmp_path: Path, call: Any) -> None:
    """Params and moments are split over fsdp, and nothing is written or allocated; the vocabulary must be known."""
    big = {"model.vocab_size": 100_000, "model.width": 256, "mesh.fsdp": 8, "mesh.data": 1}
    report = report_memory(text_config(home, big)).splitlines()
    count = int(report[0].split(" ")[0].replace(",", ""))
    assert count > 100_000 * 256 and "on 8 devices" in report[0]
    state = next(line for line in report if "averages" in line or "moments" in line or line.startswith("state"))
    assert f"{3 * 4 * count / 8 / 2**30:.2f}" in state
    file = config_file(text_config(home, {"model.vocab_size": 32}), tmp_path / "known.py")
    code, lines = call(f"--config={file}", "--compile_only")
    assert code == 0 and lines[0].split(" ")[1] == "parameters" and len(lines) > 3
    file = config_file(text_config(home), tmp_path / "tiny.py")
    code, lines = call(f"--config={file}", "--compile_only")
    assert code == 2 and "model.vocab_size=0" in lines[-1]
    assert not list(tmp_path.glob("*/*"))


# --- Kills and signals


@pytest.mark.parametrize(
    "raised, code, line",
    [
        (ValueError("evaluation does not fit"), 1, "train: failed: evaluation does not fit"),
        (signal.SIGTERM, 0, "train: stopped; step 3 is saved in {}; the same command goes on from there"),
        (signal.SIGINT, 130, "train: stopped; step 3 is saved in {}; the same command goes on from there"),
    ],
)
@pytest.mark.parametrize("where", ["run", "__init__"])
def test_how_a_run_ends_early(
    home: Path,
    tmp_path: Path,
    call: Any,
    monkeypatch: pytest.MonkeyPatch,
    raised: Any,
    code: int,
    line: str,
    where: str,
) -> None:
    """A failure after the start is no bad usage, and signals are heard from the start on; what is saved is said."""
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)

    def end(self: Any, *_: Any) -> None:
        if isinstance(raised, Exception):
            raise raised
        os.kill(os.getpid(), raised)

    methods = {"__init__": lambda self, *_: None, where: end}
    monkeypatch.setattr(train.loop, "Trainer", type("Ending", (), methods))
    file = config_file(text_config(home), tmp_path / "tiny.py")
    found, lines = call(f"--config={file}", f"--workdir={tmp_path / 'run'}")
    if where == "__init__" and isinstance(raised, Exception):
        assert (found, lines) == (2, ["train: evaluation does not fit"])
    else:
        assert (found, lines[-1]) == (code, line.format(tmp_path / "run"))
        assert "step 3 is saved" in " ".join(lines)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_the_second_signal_is_not_caught(first: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for the end of a step and is heard in what may be cut short; the next ends the process."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    monkeypatch.setattr(signal, "SIG_IGN", None)  # as if the tests did not run under nohup
    before = [signal.getsignal(number) for number in numbers]
    ended: list[Any] = []
    with pytest.raises(Stopped), StopSignals() as signals, signals.held():
        os.kill(os.getpid(), first)
        assert signals.due(1)
        with monkeypatch.context() as patch:
            patch.setattr(signal, "raise_signal", lambda number: ended.append((number, signal.getsignal(number))))
            os.kill(os.getpid(), signal.SIGINT)
        assert ended == [(signal.SIGINT, signal.SIG_DFL)]
        with pytest.raises(Stopped), signals.heard():
            raise AssertionError
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """nohup: the run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.due(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_anywhere_else_is_one_line(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is saved yet that could be told."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "keep_freed_memory", interrupted)
    assert call("--config=configs/shakespeare_char_cpu.py") == (130, ["train: stopped"])


def test_nobody_has_to_read_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of standard error that is gone, as behind a pipe, does not end a run."""

    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    say("step 1")


def test_killed_and_terminated_processes_lose_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL the same command goes on; SIGTERM saves the step and exits with 0; the losses are those of a run in
    one go, to the last digit."""
    config = text_config(home, ENDLESS)
    workdir = tmp_path / "run"
    arguments = (f"--config={config_file(config, tmp_path / 'tiny.py')}", f"--workdir={workdir}")
    process = start(*arguments)
    wait_for_step(process, workdir, 15)
    process.kill()
    process.communicate()
    process = start(*arguments)
    wait_for_step(process, workdir, max(logged(workdir, "loss")) + 10)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "train: going on from step " in said and "Traceback" not in said
    losses = logged(workdir, "loss")
    step = max(losses)
    assert f"train: stopped; step {step} is saved in {workdir}; the same command goes on from there" in said
    assert (workdir / "checkpoints" / str(step)).is_dir()
    monkeypatch.setattr(train.loop, "make_mesh", lambda settings: make_small_mesh())
    trainer = Trainer(config, workdir)
    assert trainer.first_step == step
    train_until(trainer, step + 7)
    train_until(Trainer(config, tmp_path / "whole"), step + 7)
    assert logged(workdir, "loss") == logged(tmp_path / "whole", "loss")


def test_two_processes_are_one_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each feeds its half of the rows; a SIGTERM to one stops both after the same step; they go on together. The losses
    are those of one process with two devices."""
    config = text_config(home, ENDLESS)
    workdir = tmp_path / "run"
    file = config_file(config, tmp_path / "tiny.py")

    def start_both(*arguments: str) -> list[subprocess.Popen[str]]:
        with socket.socket() as found:
            found.bind(("localhost", 0))
            address = f"localhost:{found.getsockname()[1]}"
        shared = (f"--config={file}", f"--workdir={workdir}", f"--coordinator={address}", "--num_processes=2")
        return [start(*shared, *arguments, f"--process_id={index}") for index in range(2)]

    stops: list[int] = []
    for arguments in ([], ["--config.evaluation.decode_every=5"]):
        both = start_both(*arguments)
        wait_for_step(both[0], workdir, max(stops, default=0) + 6)
        both[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=300)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], said
        stops.append(max(logged(workdir, "loss")))
        for text in said:
            assert f"step {stops[-1]} is saved" in text and "Traceback" not in text
        assert ("going on from step" in said[0]) == (len(stops) == 2)
    monkeypatch.setattr(train.loop, "make_mesh", lambda settings: make_small_mesh(2))
    train_until(Trainer(config, tmp_path / "one"), stops[1] + 2)
    samples = map(json.loads, (workdir / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    # After the step that is stopped at, saving comes before decoding: none of it is seen, whichever step it was.
    assert [sample["step"] for sample in samples] == [s for s in range(stops[0] + 1, stops[1]) if s % 5 == 0]
    losses, wanted = logged(workdir, "loss"), logged(tmp_path / "one", "loss")
    assert list(losses) == list(range(1, stops[1] + 1)) and stops[0] < stops[1]
    np.testing.assert_allclose(list(losses.values()), [wanted[step] for step in losses], rtol=1e-6)
