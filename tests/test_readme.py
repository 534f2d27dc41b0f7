"""Every command and every piece of code in the README runs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "python scripts" in block]


@pytest.mark.real_model
def test_python_blocks_run_in_order() -> None:
    """The README's Python is one session that runs from top to bottom, with the real model."""
    # In a process of its own: the README's reader has no strict promotion switched on.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(PYTHON)], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "DecodeOutput(" in done.stdout and "drafts kept" in done.stdout
    assert "[[2 3 4 0 1 2]]" in done.stdout  # the bigram table counts


@pytest.mark.real_model
@pytest.mark.parametrize("block", SHELL, ids=lambda block: re.search(r"scripts/(\w+)", block)[1])
def test_shell_blocks_run(block: str, tmp_path: Path) -> None:
    """The README's commands exit with 0; chat is given one line to answer."""
    for folder in ("scripts", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    script = block.replace("python scripts", f"{sys.executable} scripts")
    done = subprocess.run(
        ["bash", "-euc", script], input="Hello\n", capture_output=True, text=True, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "decode.py" in block:
        parts = list((tmp_path / "outputs/first").glob("part-*.jsonl"))
        assert [json.loads(line)["id"] for part in parts for line in part.read_text().splitlines()] == [1, 2]


def test_table_is_made_from_the_records() -> None:
    """The README's figures are those of benchmarks/*.json."""
    done = subprocess.run(
        [sys.executable, "scripts/readme_table.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_a_target_is_met_or_not() -> None:
    """The last column says which, by the side that is better; a figure without a target is not judged."""
    program = (
        "from readme_table import judged\n"
        "for value, target, better in ((2, 3, 'higher'), (3, 3, 'higher'), (2, 3, 'lower'), (4, 3, 'lower')):\n"
        "    print(judged({'value': value, 'target': target, 'better': better}))\n"
        "print(judged({'value': 1, 'target': None, 'better': 'lower'}))"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/scripts{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    judged = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert judged[:2] == [("at least 3", "no"), ("at least 3", "yes")], done.stderr
    assert judged[2:] == [("at most 3", "yes"), ("at most 3", "no"), ("", "")]
