"""How well dpro predicts servers: request logs, published tables, controlled pairs of a real server.

    python benchmarks/serving.py [--data FOLDER] [--pairs FOLDER] [--json]

`--data` has measured tables of other people's servers (`DPRO_REALITY`), which are not part of the project.
`--pairs` has runs of `python -m benchmarks.serving_server.pairs`. Prints a line per check, or with `--json`
check -> {n, figures, bar, holds}; without data, n is 0, holds null, and the figures say why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the checks are beside this file, and it runs as a script

from benchmarks import as_program  # noqa: E402
from benchmarks.serving_checks import logs, pairs, saturation, tables  # noqa: E402

REALITY = Path(os.environ.get("DPRO_REALITY", REPOSITORY.parent / "shared" / "reality"))
# Per cent: of the median, and of the 90th percentile.
LOG_BARS = {"latency": (2.0, None), "first token": (8.0, 25.0), "time per token": (4.0, None)}
TABLE_BARS = {
    "clients x 2": {"token": 8.0, "first": 15.0},
    "parallelism": {"token": 15.0, "first": 15.0},
    "device": {"token": 15.0, "first": 15.0},
}
ORDER_BAR, COVERAGE_BAR = 85.0, 85.0
WORST_BAR = 100.0  # a point that is off by its measured value
PAIR_BARS = {"time per token": 5.0, "throughput": 5.0, "first token": 10.0}
PARTS = {"token": "time per token", "first": "first token"}
Figures = dict[str, Any]


def main() -> int:
    """Run the checks; return 1 if one of them does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=REALITY, help="folder of the tables")
    parser.add_argument("--pairs", type=Path, help="folder of recorded pairs")
    parser.add_argument("--json", action="store_true", help="print one object")
    asked = parser.parse_args()
    found: dict[str, Figures] = {}
    for name, check in checks(asked.data, asked.pairs):
        found[name] = check
        print(_line(name, check), file=sys.stderr if asked.json else sys.stdout, flush=True)
    if asked.json:
        print(json.dumps(found, indent=1))
    return int(any(check["holds"] is False for check in found.values()))


def checks(data: Path, recorded: Path | None) -> Iterator[tuple[str, Figures]]:
    """Yield the name and figures of each check.

    Args:
        data: folder of the tables.
        recorded: folder of pairs; None for none.
    """
    if (data / "serving_vllm_requests.csv").exists():
        for server, errors, held in logs.second_halves(data):
            for name, (median, p90) in LOG_BARS.items():
                yield f"log of {server}, {name}", _figures(errors[name], median, p90, "refused")
            yield f"log of {server}, intervals", _share(np.array(held), COVERAGE_BAR)
        yield from _saturated("first requests of a log", pl.DataFrame(saturation.of_logs(data)))
    else:
        yield "logs", _missing(f"no serving_vllm_requests.csv in {data}")
    if (data / "azure_llm_2023.parquet").exists():
        yield from _saturated("faster arrivals", pl.DataFrame(saturation.of_faster_arrivals(data)))
    for source, file, check in (
        ("silicon", "serving_silicon.parquet", tables.of_silicon),
        ("splitwise", "splitwise_perf.csv", tables.of_splitwise),
    ):
        if not (data / file).exists():
            yield source, _missing(f"no {file} in {data}")
            continue
        for question, errors in check(data).items():
            for part, name in PARTS.items():
                yield f"{source}, {question}, {name}", _figures(errors[part], TABLE_BARS[question][part])
            yield f"{source}, {question}, order", _share(errors["order"], ORDER_BAR)
    if recorded is None:
        yield "pairs", _missing("no --pairs")
        return
    rows = pairs.of_pairs(recorded)
    for name, bar in PAIR_BARS.items():
        mine = rows.filter(figure=name)["error"].drop_nulls()
        yield f"pairs, {name}", _figures(mine.to_numpy(), bar)
    yield "pairs, intervals", _share(rows["held"].to_numpy(), COVERAGE_BAR)


def _figures(
    errors: Sequence[float] | np.ndarray,
    median_bar: float,
    p90_bar: float | None = None,
    otherwise: str = "no rows",
) -> Figures:
    if not len(errors):
        return _missing(otherwise)
    absolute = 100 * np.abs(np.asarray(errors))
    median, p90 = float(np.median(absolute)), float(np.quantile(absolute, 0.9))
    bar = {"median_pct": median_bar} | ({"p90_pct": p90_bar} if p90_bar else {})
    holds = median <= median_bar and (p90_bar is None or p90 <= p90_bar)
    return _check(len(errors), {"median_pct": round(median, 2), "p90_pct": round(p90, 2)}, bar, holds)


def _saturated(name: str, rows: pl.DataFrame) -> Iterator[tuple[str, Figures]]:
    """Check first tokens near and beyond saturation: interval coverage, and the largest error of points."""
    first = rows.filter(pl.col("figure").str.starts_with("ttft"))
    yield (
        f"{name}, intervals of first tokens",
        _share(
            first.select(pl.col("measured").is_between("low", "high")).to_series().to_numpy(), COVERAGE_BAR
        ),
    )
    points = (
        first.drop_nulls("said").select(100 * (pl.col("said") / pl.col("measured") - 1).abs()).to_series()
    )
    shown = {"worst_pct": round(float(points.to_numpy().max(initial=0.0)), 1)}
    shown |= {"without_point": first.height - len(points), "refused": rows.filter(figure="").height}
    yield (
        f"{name}, points of first tokens",
        _check(len(points), shown, {"worst_pct": WORST_BAR}, shown["worst_pct"] <= WORST_BAR),
    )


def _share(right: np.ndarray, bar: float) -> Figures:
    if not len(right):
        return _missing("no rows")
    share = 100 * float(np.mean(right))
    return _check(len(right), {"right_pct": round(share, 1)}, {"right_pct": bar}, share >= bar)


def _missing(reason: str) -> Figures:
    return _check(0, {"reason": reason}, None, None)


def _check(count: int, figures: Figures, bar: dict[str, float] | None, holds: bool | None) -> Figures:
    return {"n": count, "figures": figures, "bar": bar, "holds": holds}


def _line(name: str, check: Figures) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in check["figures"].items())
    return f"{name}: n {check['n']}, {shown}; bar {check['bar']}, holds {check['holds']}"


if __name__ == "__main__":
    as_program(main)
