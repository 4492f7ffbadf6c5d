"""How often the verdict is the one that an expert gave of the same trace.

python -m benchmarks.verdicts [--traces FOLDER] [--verdicts FILE] [--list] [--json]

The file holds one object per trace: `source` below the folder, `limit`, `limit_also_acceptable`,
`faulty_ranks`, `not_advice`, and `advice` with `kind`, `gain_low_x`, `gain_high_x`. Without options both are
looked for where DPRO_TRACES and DPRO_VERDICTS say. `--list` prints what differs. `--json` prints one object:
check → {n, agree_pct, bar, holds}. Checks: the limit is his, or one that he would accept; the ranks are those
that he names; his first advice is among ours, by kind; the intervals of gains for the same kind of advice
meet; none of ours is one that he warns of.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from dpro.cli.analysis import analyse
from dpro.errors import DproError
from dpro.verdict.verdict import Explanation, explain

SHARED = Path(__file__).resolve().parents[2] / "shared"
TRACES = Path(os.environ.get("DPRO_TRACES", SHARED / "traces"))
VERDICTS = Path(os.environ.get("DPRO_VERDICTS", SHARED / "verdicts" / "verdicts.json"))
BARS = {"limit": 90.0, "ranks": 90.0, "first advice": 85.0, "gains": 70.0, "not tempted": 100.0}  # %
# What words of a warning stand for, by the kinds of advice. Warnings of reading a number wrongly are of none.
WARNINGS = {
    r"(?i)^tune nccl|speed up .*reduce|faster rccl": ("transfer", "overlap"),
    r"(?i)overlap communication": ("overlap",),
    r"(?i)faster (gemm|kernels)|rewrite gemm": ("tune-kernel",),
    r"(?i)cuda graphs|fewer launches|fix the launches|host-bound": ("launch",),
    r"(?i)speed up htod|htod copies": ("copies",),
    r"(?i)compress gradients": ("compression",),
    r"(?i)rebalance stages": ("stages",),
    r"(?i)more micro-batches": ("microbatches",),
    r"(?i)fix .*cudamalloc": ("allocator",),
}

Differences = dict[str, list[str]]


def graded(verdict: Explanation, expert: dict[str, Any]) -> dict[str, list[tuple[bool, str]]]:
    """By check: whether each thing agrees, and what differs in words."""
    accepted = [expert["limit"], *expert.get("limit_also_acceptable", ())]
    limit = verdict.limit.kind if verdict.limit else "none"
    ours: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for advice in verdict.advice:
        ours[advice.kind].append((advice.gain_low or 1.0, advice.gain_high or 1.0))
    first = expert["advice"][0]["kind"]
    result = {
        "limit": [(limit in accepted, f"{limit}, not {' or '.join(accepted)}")],
        "ranks": [
            (
                verdict.faulty_ranks == sorted(expert["faulty_ranks"]),
                f"ranks {verdict.faulty_ranks}, not {expert['faulty_ranks']}",
            )
        ],
        "first advice": [(first in ours, f"{first} is not among {', '.join(ours) or 'none'}")],
        "gains": [],
        "not tempted": [],
    }
    for advice in expert["advice"]:
        low, high = advice["gain_low_x"], advice["gain_high_x"]
        for our_low, our_high in ours.get(advice["kind"], ()):
            said = f"{advice['kind']}: x{our_low:.2f} to {our_high:.2f}, not x{low:g} to {high:g}"
            result["gains"].append((our_low <= high and low <= our_high, said))
    his = {advice["kind"] for advice in expert["advice"]}
    for warning in expert.get("not_advice", ()):
        kinds = {kind for words, kinds in WARNINGS.items() if re.search(words, warning) for kind in kinds}
        expects = re.search(r"(?i)^expect (\d+(?:\.\d+)?)x", warning)  # of what is advised all the same
        least = float(expects[1]) if expects else 1.0
        if kinds - his:
            tempted = {kind for kind in kinds - his if any(high >= least for _, high in ours[kind])}
            result["not tempted"].append((not tempted, f"{', '.join(tempted)}: {warning}"))
    return result


def experts_of(file: Path) -> list[dict[str, Any]]:
    """What experts said, one trace each; none where there is no such file."""
    said = json.loads(file.read_text()) if file.is_file() else []
    experts: list[dict[str, Any]] = said["verdicts"] if isinstance(said, dict) else said
    return experts


def main() -> int:
    """Grade all verdicts of a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--verdicts", type=Path, default=VERDICTS)
    parser.add_argument("--list", action="store_true", help="print what differs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    experts = experts_of(options.verdicts)
    grades: dict[str, list[bool]] = {check: [] for check in BARS}
    for expert in experts:
        try:
            results = graded(explain(analyse(str(options.traces / expert["source"]))), expert)
        except DproError as error:
            results = {check: [(False, str(error))] for check in ("limit", "ranks", "first advice")}
        for check, things in results.items():
            grades[check] += [agrees for agrees, _ in things]
            for agrees, said in things:
                if options.list and not agrees:
                    print(f"{expert['source']}: {check}: {said}", file=sys.stderr)
    checks = {
        check: {
            "n": len(agreed),
            "agree_pct": round(100 * sum(agreed) / len(agreed), 1) if agreed else None,
            "bar": BARS[check],
            "holds": 100 * sum(agreed) / len(agreed) >= BARS[check] if agreed else None,
        }
        for check, agreed in grades.items()
    }
    if options.json:
        print(json.dumps(checks))
    else:
        for check, figures in checks.items():
            print(f"{check:14} {figures['n']:3}  {figures['agree_pct']}% (bar {figures['bar']:g})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
