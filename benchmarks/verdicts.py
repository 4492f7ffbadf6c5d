"""How often the verdict agrees with an expert's on the same trace.

python -m benchmarks.verdicts [--traces FOLDER …] [--verdicts FILE …] [--list] [--leave-one-out] [--json]

A file has one object per trace: `source` below the folder, `limit`, `limit_also_acceptable`,
`limit_null_acceptable` (whether naming no limit is right, too), `faulty_ranks`, `not_advice`, and `advice`
with `kind`, `gain_low_x`, `gain_high_x`. Without options, DPRO_TRACES and DPRO_VERDICTS name both. `--list`
prints the differences. `--json` prints one object: check → {n, agree_pct, bar, holds}. Checks: the limit is
the expert's, or one that the expert accepts; the ranks are those that the expert names; the expert's first
advice is among dpro's, by kind; the intervals of gains for advice of one
kind overlap; dpro gives no advice that the expert warns of.

`--leave-one-out` asks whether constants are overfitted to the traces on which they were set. Each constant is
tried at half and twice its value on all traces, and between where that changes what is right. Each trace is
then judged with the value that is right for most of the others (the middle of such values). Checks: the limit
and the first advice are right with it; and for each constant, the number of right traces at each value.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpro.analysis.analysis import Analysis
from dpro.cli.analysis import analyse
from dpro.errors import DproError
from dpro.verdict import advice, facts, ledger, limits, ranking, verdict
from dpro.verdict.sources import edits, hosts, kernels, parts, transfers
from dpro.verdict.verdict import Explanation, explain

SHARED = Path(__file__).resolve().parents[2] / "shared"
TRACES = Path(os.environ.get("DPRO_TRACES", SHARED / "traces"))
VERDICTS = Path(os.environ.get("DPRO_VERDICTS", SHARED / "verdicts" / "verdicts.json"))
BARS = {"limit": 90.0, "ranks": 90.0, "first advice": 85.0, "gains": 70.0, "not tempted": 100.0}  # %
# The kinds of advice that a warning is about, by its words. Warnings of misread numbers are about none.
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

FACTORS = (0.5, 0.71, 1.0, 1.41, 2.0)  # of each constant
BOUNDS, BETWEEN = (0.5, 2.0), {0.71: 0.5, 1.41: 2.0}
LEFT_OUT = ("limit", "first advice")  # checks that constants decide
WITHIN = 5.0  # %: how much lower the share of right traces may be with one left out
OF_ADVICE = (advice, ranking, edits, hosts, kernels, parts, transfers)
DECIDING = (*OF_ADVICE, facts, ledger, limits)  # modules whose constants decide a verdict
NOT_FITTED = (
    "MAX_ADVICE", "MAX_GAIN", "NOTHING_LEFT", "FREE", "LONGEST", "NS_PER_MS", "NO_SPAN", "NO_STEP", "ON_GPU",
)  # fmt: skip


def graded(verdict: Explanation, expert: dict[str, Any]) -> dict[str, list[tuple[bool, str]]]:
    """Grade a verdict: for each check, whether each item agrees, and the difference in words."""
    accepted = [limit or "none" for limit in (expert["limit"], *expert.get("limit_also_acceptable", ()))]
    if expert.get("limit_null_acceptable"):
        accepted.append("none")
    limit = verdict.limit.kind if verdict.limit else "none"
    ours: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for given in verdict.advice:
        ours[given.kind].append((given.gain_low or 1.0, given.gain_high or 1.0))
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
    for advised in expert["advice"]:
        low, high = advised["gain_low_x"], advised["gain_high_x"]
        for our_low, our_high in ours.get(advised["kind"], ()):
            said = f"{advised['kind']}: x{our_low:.2f} to {our_high:.2f}, not x{low:g} to {high:g}"
            result["gains"].append((our_low <= high and low <= our_high, said))
    his = {advised["kind"] for advised in expert["advice"]}
    for warning in expert.get("not_advice", ()):
        kinds = {kind for words, kinds in WARNINGS.items() if re.search(words, warning) for kind in kinds}
        expects = re.search(r"(?i)^expect (\d+(?:\.\d+)?)x", warning)  # accepted gain
        least = float(expects[1]) if expects else 1.0
        if kinds - his:
            tempted = {kind for kind in kinds - his if any(high >= least for _, high in ours[kind])}
            result["not tempted"].append((not tempted, f"{', '.join(tempted)}: {warning}"))
    return result


def constants() -> dict[str, float]:
    """Return the numbers that decide a verdict, by name."""
    return {
        name: value
        for module in DECIDING
        for name, value in vars(module).items()
        if name.isupper() and name not in NOT_FITTED and isinstance(value, (int, float))
    }


def scaled(value: float, factor: float) -> float:
    """Scale a constant by a factor; of a gain, the part above 1."""
    is_gain = isinstance(value, float) and 1 < value < 1.5
    return 1 + (value - 1) * factor if is_gain else type(value)(value * factor)


def right_at(analysis: Analysis, expert: dict[str, Any]) -> Iterator[tuple[str, list[tuple[bool, ...]]]]:
    """Yield for each constant whether a trace's limit and its first advice are right, at each factor."""

    def right() -> tuple[bool, ...]:
        checks = graded(explain.__wrapped__(analysis), expert)  # type: ignore[attr-defined]
        return tuple(checks[check][0][0] for check in LEFT_OUT)

    with ledgers_kept():
        now = right()
        for name, value in constants().items():
            modules, rows = [module for module in DECIDING if hasattr(module, name)], {1.0: now}
            for factor in (*BOUNDS, *BETWEEN):
                if factor in BETWEEN and rows[BETWEEN[factor]] == now:
                    rows[factor] = now
                    continue
                for module in modules:
                    setattr(module, name, scaled(value, factor))
                rows[factor] = right()
            for module in modules:
                setattr(module, name, value)
            yield name, [rows[factor] for factor in FACTORS]


@contextmanager
def ledgers_kept() -> Iterator[None]:
    """Compute the ledger of a job once for all values of constants that only decide about advice."""
    made: dict[tuple[object, ...], list[ledger.LedgerRow]] = {}

    def entries_of(of: facts.JobFacts) -> list[ledger.LedgerRow]:
        graph = of.job.graph
        columns = graph.nodes.duration, graph.edges.source, graph.edges.target, graph.edges.lag
        values = [vars(module).get(name) for module in DECIDING[len(OF_ADVICE) :] for name in constants()]
        key = (*values, *(hashlib.blake2b(column.tobytes()).digest() for column in columns))
        if key not in made:
            made[key] = ledger.entries_of(of)
        return made[key]

    verdict.entries_of = entries_of
    try:
        yield
    finally:
        verdict.entries_of = ledger.entries_of


def middle_of_best(count: Sequence[int]) -> int:
    """Return the middle index of the longest run of values that are right most often."""
    best = [number for number, right in enumerate(count) if right == max(count)]
    runs = [[number] for number in best[:1]]
    for number in best[1:]:
        if number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    longest = max(runs, key=len)
    return longest[len(longest) // 2]


def left_out(experts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Judge each trace with constants that are best for the others; by check."""
    right: dict[str, list[list[tuple[bool, ...]]]] = defaultdict(list)
    for expert in experts:
        print(expert["source"], file=sys.stderr)
        with suppress(DproError):
            for name, rows in right_at(analyse(expert["source"]), expert):
                right[name].append(rows)
    result = {}
    for number, check in enumerate(LEFT_OUT):
        table = {
            name: np.array([[row[number] for row in rows] for rows in of_traces])  # [traces, factors]
            for name, of_traces in right.items()
        }
        agrees = {name: share_left_out(rows) for name, rows in table.items()}
        worst = min(agrees, key=agrees.__getitem__)
        now = 100 * float(table[worst][:, FACTORS.index(1.0)].mean())
        counts = {name: rows.sum(axis=0).tolist() for name, rows in table.items()}
        result[f"{check} left out"] = {
            "n": len(table[worst]),
            "agree_pct": round(agrees[worst], 1),
            "constant": worst,
            "none_left_out_pct": round(now, 1),
            "bar": round(now - WITHIN, 1),
            "holds": agrees[worst] >= now - WITHIN,
            "right_at": {name: dict(zip(map(str, FACTORS), count)) for name, count in counts.items()},
        }
    return result


def share_left_out(right: NDArray[np.bool_]) -> float:
    """Return the % of traces that are right with the constant that fits the others best.

    Args:
        right: [traces, factors].
    """
    chosen = [middle_of_best((right.sum(axis=0) - own).tolist()) for own in right]
    return 100 * float(right[np.arange(len(right)), chosen].mean())


def experts_of(file: Path) -> list[dict[str, Any]]:
    """Read experts' verdicts, one trace each; none where there is no such file."""
    said = json.loads(file.read_text()) if file.is_file() else []
    experts: list[dict[str, Any]] = said["verdicts"] if isinstance(said, dict) else said
    return experts


def main() -> int:
    """Grade all verdicts of the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, nargs="+", default=[TRACES], help="a folder for each file")
    parser.add_argument("--verdicts", type=Path, nargs="+", default=[VERDICTS])
    parser.add_argument("--list", action="store_true", help="print what differs")
    parser.add_argument("--leave-one-out", action="store_true", help="try constants that fit others")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if len(options.traces) != len(options.verdicts):
        parser.error("--traces takes a folder for each file of --verdicts")
    experts = [
        expert | {"source": str(folder / expert["source"])}
        for folder, file in zip(options.traces, options.verdicts)
        for expert in experts_of(file)
    ]
    if options.leave_one_out:
        if not experts:
            parser.error(f"no graded trace in {', '.join(map(str, options.verdicts))}")
        print(json.dumps(left_out(experts), indent=None if options.json else 2))
        return 0
    grades: dict[str, list[bool]] = {check: [] for check in BARS}
    for expert in experts:
        try:
            results = graded(explain(analyse(expert["source"])), expert)
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
