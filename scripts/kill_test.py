"""Kills the batch job (SIGKILL) at random moments and compares its output with an uninterrupted run's.

    python scripts/kill_test.py                # 200 rows, five kills, a few minutes on two cores
    python scripts/kill_test.py --seed=1       # other moments

Both runs start with an empty cache of compiled programs, so that kills land in loading, compiling,
decoding and writing. The result is a record in benchmarks/foundation.json. Exit code: 0 the same bytes,
1 not, or a run failed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from records import record

from train.command import run

_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
_KILLS = flags.DEFINE_integer("kills", 5, "How many.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 200, "Good input lines; there are two bad ones besides.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 32, "The budget of each row.", lower_bound=1)
_RECORDS = flags.DEFINE_string("records", "benchmarks/foundation.json", 'The file of records; "" writes none.')

_ROOT = Path(__file__).resolve().parent.parent


def write_input(path: Path, rows: int) -> None:
    """Short prompts of several lengths, a line that is not UTF-8, and an id that is there twice."""
    forms = (
        "The number {n} is",
        "Q: What is {n} plus {m}?\nA:",
        "Chapter {n}. It was a quiet morning in the village, and nobody had expected that",
        "Write a short note to a friend about the {n} things you did today and the {m} you left for later.\n",
    )
    lines = [
        json.dumps({"id": f"row {n}", "prompt": forms[n % len(forms)].format(n=n, m=n * 7 % 31)}).encode()
        for n in range(rows)
    ]
    lines.insert(rows // 3, b'{"id": "broken", "prompt": "caf\xe9"}')
    lines.append(lines[0])
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def start(source: Path, output: Path) -> subprocess.Popen[bytes]:
    """The batch job as users start it."""
    return subprocess.Popen(
        [
            sys.executable,
            str(_ROOT / "scripts" / "decode.py"),
            f"--config={_ROOT / 'configs' / 'decode_smollm2.py'}",
            f"--input={source}",
            f"--output={output}",
            f"--config.max_new_tokens={_TOKENS.value}",
            "--config.sampling.temperature=0.8",
            "--config.batches_per_part=1",
            f"--config.compilation_cache={output}.compiled",
        ],
        cwd=_ROOT,
    )


def finish(source: Path, output: Path) -> None:
    """Runs the job to its end; the two bad lines make that exit code 1."""
    code = start(source, output).wait()
    if code != 1 or not (output / "summary.json").exists():
        sys.exit(f"kill_test: the batch job ended with exit code {code}")


def results(folder: Path) -> dict[str, bytes]:
    """Every file of an output folder but the summary, which has times in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "summary.json"}


def kill_moments(rng: random.Random, wall: float, summary: Path) -> list[float]:
    """Seconds after each start: at any point of the start-up, or of a share of the decoding.

    The shares are so small that no run comes to its end.
    """
    measured = json.loads(summary.read_text(encoding="utf-8"))
    decoding = measured["timed_tokens"] / measured["tokens_per_second"]
    starting = wall - decoding - measured["compile_seconds"]
    latest = starting + decoding / (_KILLS.value + 1)
    return [
        rng.uniform(0.0, latest + (measured["compile_seconds"] if kill == 0 else 0.0)) for kill in range(_KILLS.value)
    ]


def run_with_kills(source: Path, output: Path, moments: Sequence[float]) -> int:
    """Starts and kills the job again and again, then lets it finish; returns how many kills hit it."""
    landed = 0
    for number, moment in enumerate(moments, start=1):
        process = start(source, output)
        time.sleep(moment)
        landed += process.poll() is None
        process.kill()
        process.wait()
        parts = len(list(output.glob("part-*")))
        print(f"kill_test: kill {number} after {moment:.1f} s; {parts} parts are there", flush=True)
    finish(source, output)
    return landed


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, whole, killed = folder / "input.jsonl", folder / "whole", folder / "killed"
        write_input(source, _ROWS.value)
        begun = time.monotonic()
        finish(source, whole)
        wall = time.monotonic() - begun
        moments = kill_moments(random.Random(_SEED.value), wall, whole / "summary.json")
        landed = run_with_kills(source, killed, moments)
        expected, found = results(whole), results(killed)
    lines = [json.loads(line) for n, data in found.items() if n.startswith("part") for line in data.splitlines()]
    same = found == expected and len({line["id"] for line in lines}) == len(lines) == _ROWS.value
    print(f"kill_test: {landed} kills, {len(lines)} rows, the same bytes: {'yes' if same else 'NO'}")
    if _RECORDS.value:
        command = f"python scripts/kill_test.py --seed={_SEED.value} --kills={_KILLS.value} --rows={_ROWS.value}"
        record(
            _ROOT / _RECORDS.value,
            "batch_job_kills_with_identical_output",
            landed if same else 0,
            "kills",
            5,
            "higher",
            command,
        )
    return 0 if same and landed == _KILLS.value else 1


if __name__ == "__main__":
    run(main)
