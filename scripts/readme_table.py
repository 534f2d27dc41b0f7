"""Writes the tables of measured figures in README.md and docs from the records in benchmarks.

python scripts/readme_table.py           # rewrites the tables
python scripts/readme_table.py --check   # exits with 1 if that would change one
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from absl import flags

from train.command import FAILED, run, say

CHECK = flags.DEFINE_bool("check", False, "Change nothing; exit with 1 if a table is out of date.")

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table(file: Path) -> str:
    """The records of a file as a Markdown table."""
    if not file.exists():
        return ""
    lines = ["| figure | value | unit | target |", "|---|---|---|---|"]
    for record in json.loads(file.read_text(encoding="utf-8")):
        sign = {"higher": "at least", "lower": "at most"}[record["better"]]
        target = "" if record["target"] is None else f"{sign} {record['target']:g}"
        lines.append(f"| {record['name'].replace('_', ' ')} | {record['value']:.3g} | {record['unit']} | {target} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrites or checks."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = page.read_text(encoding="utf-8")
        new = TABLE.sub(lambda match: match[1] + table(ROOT / match[2]) + match[3], old)
        if CHECK.value and new != old:
            say(f"{page.name} is out of date; run python scripts/readme_table.py")
            return FAILED
        if new != old:
            page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run(main)
