"""How well `dpro.extensions.plan` predicts published jobs in other layouts, from one measured row.

    python benchmarks/reality.py [--data FOLDER] [--check NAME …] [--json] [--write]

Reads measured tables of other people's clusters (`DPRO_REALITY`, or `--data`), which are not part of the
project. Each row of a table calibrates (`calibrate.beliefs`) and every other row of its group is predicted.
Prints a line per check, or with `--json` check -> {n, median_pct, p90_pct, order_pct, interval_held_pct,
yardstick, bar, holds}. `yardstick` has these figures for simple rules, and for the source's own prediction
where it has one. A missing table gives n 0, and a reason. `--write` puts the table into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the checks are beside this file, and it runs as a script

from benchmarks.reality_checks import checks  # noqa: E402

REALITY = Path(os.environ.get("DPRO_REALITY", REPOSITORY.parent / "shared" / "reality"))
PAGE = REPOSITORY / "docs" / "accuracy.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"


def main() -> int:
    """Run the checks; return 1 if one of them does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=REALITY, help="folder of the tables")
    parser.add_argument("--check", nargs="+", metavar="NAME", choices=list(checks.CHECKS), help="only these")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--write", action="store_true", help="write the table into docs/accuracy.md")
    asked = parser.parse_args()
    if not asked.data.is_dir():
        parser.error(f"no folder {asked.data}: name one with --data")
    found: dict[str, dict[str, Any]] = {}
    for name, check in _asked(asked.check):
        begun = time.monotonic()
        found[name] = check(asked.data)
        print(_line(name, found[name]), file=sys.stderr if asked.json else sys.stdout, flush=True)
        print(f"  {time.monotonic() - begun:.0f} s", file=sys.stderr)
    if asked.json:
        print(json.dumps(found, indent=1))
    if asked.write:
        write(found)
    return int(any(figures["holds"] is False for figures in found.values()))


def _asked(names: list[str] | None) -> Iterator[tuple[str, Callable[[Path], dict[str, Any]]]]:
    for name, check in checks.CHECKS.items():
        if not names or name in names:
            yield name, check


def _line(name: str, found: dict[str, Any]) -> str:
    if not found["n"]:
        return f"{name:28} {found['reason']}"
    keys = (
        ("median", "median_pct"),
        ("p90", "p90_pct"),
        ("order", "order_pct"),
        ("held", "interval_held_pct"),
    )
    said = "  ".join(f"{word} {found[key]}" for word, key in keys if found.get(key) is not None)
    verdict = {True: "holds", False: "MISSED", None: ""}[found["holds"]]
    return f"{name:28} n {found['n']:>6}  {said}  bar: {found['bar'] or 'none'}  {verdict}"


def write(found: dict[str, dict[str, Any]]) -> None:
    """Put the results between the marks of docs/accuracy.md."""
    lines = [
        "| check | n | median | 90th percentile | faster one named | interval holds | bar | |",
        "|" + "---|" * 8,
    ]
    for name, row in found.items():
        values = [row.get(key) for key in ("median_pct", "p90_pct", "order_pct", "interval_held_pct")]
        shown = " | ".join("" if value is None else f"{value:g}" for value in values)
        verdict = {True: "holds", False: "**missed**", None: ""}[row["holds"]]
        lines.append(f"| {name} | {row['n']:,} | {shown} | {row['bar']} | {verdict} |")
        for rule, figures in row.get("yardstick", {}).items():
            values = [figures.get(key) for key in ("median_pct", "p90_pct", "order_pct")]
            shown = " | ".join("" if value is None else f"{value:g}" for value in values)
            lines.append(f"| – {rule} | {figures['n']:,} | {shown} | | | |")
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text("\n".join([head + BEGIN, "", *lines, "", END + tail]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
