"""Writes the tables of measured figures in README.md and docs from the records in benchmarks.

python scripts/readme_table.py           # rewrites the tables
python scripts/readme_table.py --check   # exits with 1 if that would change one
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from absl import flags

from train.command import FAILED, run, say

CHECK = flags.DEFINE_bool("check", False, "Change nothing; exit with 1 if a table is out of date.")

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- table: (\S+?)(?: of (\S+))? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def tables(match: re.Match[str]) -> str:
    """The table between two marks, made anew: of a file, or of it one figure, or "task/*", all figures of a task."""
    start, first, second, end = match.groups()
    file = ROOT / (second or first)
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return start + (by_method(records, first) if second else table(records)) + end


def by_method(records: list[dict[str, Any]], chosen: str) -> str:
    """Some of the records called "task/method/figure", a row for each method.

    Args:
      records: of a file.
      chosen: "figure", then there is a column for each task; or "task/*", then there is one for each figure.
    """
    cells = {}
    for each in records:
        task, method, figure = (*each["name"].split("/"), "", "")[:3]
        if figure and chosen in (figure, f"{task}/*"):
            cells[method, figure if chosen.endswith("/*") else task] = each["value"]
    methods, columns = (sorted({key[i] for key in cells}) for i in (0, 1))
    lines = [f"| {' | '.join(['', *(column.replace('_', ' ') for column in columns)])} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for method in methods:
        values = [f"{cells[method, column]:.3g}" if (method, column) in cells else "" for column in columns]
        lines.append(f"| {' | '.join([method.replace('_', ' '), *values])} |")
    return "\n".join(lines) + "\n"


def table(records: list[dict[str, Any]]) -> str:
    """Records as a Markdown table; of those called "task/method/figure" only what was promised."""
    lines = ["| figure | value | unit | target | met |", "|---|---|---|---|---|"]
    for record in records:
        if record["name"].count("/") == 2 and record["target"] is None:
            continue
        cells = [
            record["name"].replace("_", " ").replace("/", ", "),
            f"{record['value']:.3g}",
            record["unit"],
            *judged(record),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def judged(record: dict[str, Any]) -> tuple[str, str]:
    """What a record's value was to be, and whether it is; both empty where nothing was promised."""
    value, target = record["value"], record["target"]
    if target is None:
        return "", ""
    if record["better"] == "higher":
        return f"at least {target:g}", "yes" if value >= target else "no"
    return f"at most {target:g}", "yes" if value <= target else "no"


def main() -> int:
    """Rewrites or checks."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = page.read_text(encoding="utf-8")
        new = TABLE.sub(tables, old)
        if CHECK.value and new != old:
            say(f"{page.name} is out of date; run python scripts/readme_table.py")
            return FAILED
        if new != old:
            page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run(main)
