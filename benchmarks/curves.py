"""How accurate curves of communication are, on measured tables of other people's machines.

python benchmarks/curves.py [--train FOLDER] [--data FOLDER] [--json]

A folder has `collectives.parquet`, `vidur_network.parquet`, `ultrascale_network.csv`, `deepep_*.parquet`, or
some of them; without an option, it is the folder that DPRO_REALITY names. With both options the curves are
made from one and tried on the other. With one, parts of it are left out and predicted from the rest: sizes,
groups, numbers of hosts. A check without data has n 0, holds null, and a note that says why. `--json` prints
one object: check → {n, median_pct, p90_pct, bar, holds}; of intervals {n, inside_pct, bar, holds}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from dpro.errors import InputError, Unanswerable
from dpro.replay.cost.curves import fit_curve, medians
from dpro.replay.cost.tables import NVLINK, CurveGroup, NetworkTable, network_table, read_frame
from dpro.replay.cost.transfers import Estimate, estimate

REALITY = Path(os.environ.get("DPRO_REALITY", Path(__file__).resolve().parents[2] / "shared" / "reality"))
TABLES = {
    "collectives": "collectives.parquet",
    "vidur": "vidur_network.parquet",
    "hosts": "ultrascale_network.csv",
}
DEEPEP = {
    "deepep_low_latency": ("dispatch_us", "combine_us"),
    "deepep_normal": ("dispatch_transmit_us", "combine_transmit_us"),
}
FOLDS = 4
SIZES, GROUPS = (3.0, 14.0), (5.0, 18.0)  # bars: median and 90th percentile of the error, %
INSIDE = 85.0  # % of measurements in their intervals
COLUMNS = [*CurveGroup._fields, "link", "bytes", "time_ns"]


@dataclass
class CurveErrors:
    """Errors of predictions, whether intervals contained measurements, and the number of refused groups."""

    errors: list[float] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)
    refused: int = 0

    def add(self, predicted: Estimate, measured: np.ndarray) -> None:
        """Compare predicted with measured times."""
        if predicted.time_ns is not None:
            self.errors += np.abs(predicted.time_ns / measured - 1).tolist()
        self.inside += ((predicted.low_ns <= measured) & (measured <= predicted.high_ns)).tolist()

    def ask(self, table: NetworkTable, group: CurveGroup, rows: pl.DataFrame) -> None:
        """Predict the times of rows of one group, and compare them."""
        measured = rows["time_ns"].to_numpy()
        try:
            self.add(estimate(table, group, rows["bytes"].to_numpy()), measured)
        except Unanswerable:
            self.refused += 1


def points(frame: pl.DataFrame) -> pl.DataFrame:
    """Return one row per group and size, with the median time."""
    return (
        frame.group_by(*CurveGroup._fields, "link", "bytes")
        .agg(pl.col("time_ns").median())
        .sort(*CurveGroup._fields, "bytes")
        .select(COLUMNS)
    )


def by_group(frame: pl.DataFrame) -> Iterator[tuple[CurveGroup, pl.DataFrame]]:
    """Yield each group with its points."""
    for key, rows in frame.group_by(CurveGroup._fields, maintain_order=True):
        yield CurveGroup(*key), rows


def table_of(frame: pl.DataFrame) -> NetworkTable:
    """Make the curves of points."""
    return network_table(frame, "table")


def sizes_within(train: pl.DataFrame, data: pl.DataFrame) -> CurveErrors:
    """Predict sizes that are between those of a group's training points, and not among them."""
    tried, known = CurveErrors(), table_of(train)
    for group, rows in by_group(data):
        if group not in known.curves:
            continue
        sizes = known.curves[group].knots[0]
        wanted = (
            (pl.col("bytes") > sizes[0])
            & (pl.col("bytes") < sizes[-1])
            & ~pl.col("bytes").is_in(sizes.tolist())
        )
        if (new := rows.filter(wanted)).height:
            tried.ask(known, group, new)
    return tried


def sizes_left_out(frame: pl.DataFrame) -> CurveErrors:
    """Predict every `FOLDS`-th size between the ends of each curve from the others."""
    tried = CurveErrors()
    place, last = pl.int_range(pl.len()).over(CurveGroup._fields), pl.len().over(CurveGroup._fields) - 1
    for fold in range(FOLDS):
        out = (place % FOLDS == fold) & (place > 0) & (place < last)
        each = sizes_within(frame.filter(~out), frame.filter(out))
        tried = CurveErrors(tried.errors + each.errors, tried.inside + each.inside)
    return tried


def unseen(train: pl.DataFrame, data: pl.DataFrame) -> tuple[CurveErrors, CurveErrors]:
    """Predict groups within a host that the training points have in no version: behind NVLink, and others."""
    known = table_of(train)
    seen = {group._replace(version="") for group in known.curves}
    switched, others = CurveErrors(), CurveErrors()
    for group, rows in by_group(data):
        if group._replace(version="") not in seen and group.hosts == 1:
            (switched if rows["link"][0] == NVLINK else others).ask(known, group, rows)
    return switched, others


def groups_left_out(frame: pl.DataFrame) -> tuple[CurveErrors, CurveErrors]:
    """Predict each operation and number of ranks of each device and library from the rest."""
    switched, others = CurveErrors(), CurveErrors()
    keys = [name for name in CurveGroup._fields if name != "version"]
    for _, rows in frame.filter(pl.col("hosts") == 1).group_by(keys, maintain_order=True):
        rest = frame.join(rows.select(keys).unique(), on=keys, how="anti")
        if rest.is_empty():
            continue
        for whole, part in zip((switched, others), unseen(rest, rows)):
            whole.errors += part.errors
            whole.inside += part.inside
            whole.refused += part.refused
    return switched, others


def more_hosts(train: pl.DataFrame, data: pl.DataFrame) -> CurveErrors:
    """Predict numbers of hosts that the training points lack."""
    tried, known = CurveErrors(), table_of(train)
    for group, rows in by_group(data):
        if group.hosts > 1 and group not in known.curves:
            tried.ask(known, group, rows)
    return tried


def hosts_left_out(frame: pl.DataFrame) -> CurveErrors:
    """Predict all numbers of hosts above each one from those up to it."""
    tried = CurveErrors()
    for most in sorted(set(frame["hosts"].to_list()) - {1}):
        fewer, more = frame.filter(pl.col("hosts") <= most), frame.filter(pl.col("hosts") > most)
        if more.height:
            each = more_hosts(fewer, more)
            tried = CurveErrors(tried.errors, tried.inside + each.inside, tried.refused + each.refused)
    return tried


def token_curves(
    frame: pl.DataFrame, times: tuple[str, ...]
) -> Iterator[tuple[tuple[object, ...], pl.DataFrame]]:
    """Yield dispatch and combine times of each DeepEP configuration, over tokens."""
    setting = [
        column
        for column in frame.columns
        if column not in ("tokens",) and not column.endswith(("_us", "_gb_s"))
    ]
    for column in times:
        rows = frame.rename({column: "time_ns"}).filter(pl.col("time_ns") > 0).cast({"tokens": pl.Float64})
        for key, part in rows.group_by(setting, maintain_order=True):
            yield (column, *key), part.select("tokens", "time_ns")


def tokens_predicted(train: pl.DataFrame, data: pl.DataFrame) -> list[float]:
    """Return errors of token counts between those of the training curve of the same configuration."""
    errors: list[float] = []
    for (_, known), new in _pairs(train, data):
        sizes, times = medians(known["tokens"].to_numpy(), known["time_ns"].to_numpy())
        wanted = new.filter(
            pl.col("tokens").is_between(sizes[0], sizes[-1]) & ~pl.col("tokens").is_in(sizes.tolist())
        )
        if sizes.size >= 3 and wanted.height:
            predicted = fit_curve(sizes, times).time_ns(wanted["tokens"].to_numpy())
            errors += np.abs(predicted / wanted["time_ns"].to_numpy() - 1).tolist()
    return errors


def _pairs(
    train: pl.DataFrame, data: pl.DataFrame
) -> Iterator[tuple[tuple[tuple[object, ...], pl.DataFrame], pl.DataFrame]]:
    for times in DEEPEP.values():
        if set(times) <= set(train.columns) & set(data.columns):
            new = dict(token_curves(data, times))
            for key, known in token_curves(train, times):
                if key in new:
                    yield (key, known), new[key]


def tokens_left_out(frame: pl.DataFrame) -> list[float]:
    """Return errors of every `FOLDS`-th token count, predicted from the others."""
    ranks = pl.col("tokens").rank("dense") - 1
    errors = []
    for fold in range(FOLDS):
        out = ranks % FOLDS == fold
        errors += tokens_predicted(frame.filter(~out), frame.filter(out))
    return errors


# Results.


def errors_result(errors: list[float], bar: tuple[float, float], **more: object) -> dict[str, object]:
    """Make the row of a check: median and 90th percentile of the errors, beside their bars."""
    if not errors:
        nothing = {"n": 0, "median_pct": None, "p90_pct": None, "bar": list(bar), "holds": None}
        return {**nothing, "note": _reason(more), **more}
    median, most = 100 * float(np.median(errors)), 100 * float(np.quantile(errors, 0.9))
    return {
        "n": len(errors),
        "median_pct": round(median, 2),
        "p90_pct": round(most, 2),
        "bar": list(bar),
        "holds": median <= bar[0] and most <= bar[1],
        **more,
    }


def inside_result(inside: list[bool], **more: object) -> dict[str, object]:
    """Make the row of a check: the share of measurements in their intervals."""
    share = 100 * float(np.mean(inside)) if inside else None
    return {
        "n": len(inside),
        "inside_pct": None if share is None else round(share, 1),
        "bar": INSIDE,
        "holds": None if share is None else share >= INSIDE,
        **({} if inside else {"note": _reason(more)}),
        **more,
    }


def _reason(more: Mapping[str, object]) -> str:
    """Word the reason why there is nothing to check."""
    if more.get("groups_refused"):
        return "all groups are refused"
    return "the folders lack the table, or it holds nothing of this that is unseen"


def of_table(name: str, train: pl.DataFrame | None, data: pl.DataFrame) -> dict[str, dict[str, object]]:
    """Compute the checks of one table of curves."""
    sizes = sizes_left_out(data) if train is None else sizes_within(train, data)
    switched, others = groups_left_out(data) if train is None else unseen(train, data)
    return {
        f"sizes_{name}": errors_result(sizes.errors, SIZES),
        f"sizes_{name}_interval": inside_result(sizes.inside),
        f"groups_{name}": errors_result(switched.errors, GROUPS, groups_refused=switched.refused),
        f"groups_{name}_interval": inside_result(switched.inside, groups_refused=switched.refused),
        f"groups_{name}_without_switch": {
            "n": others.refused + len(others.errors),
            "groups_refused": others.refused,
            "bar": "refused",
            "holds": not others.errors if others.errors or others.refused else None,
        },
    }


def checks(train: Path | None, data: Path) -> dict[str, dict[str, object]]:
    """Compute all checks; one without files, or without unseen data in them, has n 0 and a note."""
    results: dict[str, dict[str, object]] = {}
    for name, file in TABLES.items():
        own, known = _points(data / file), None if train is None else _points(train / file)
        if name == "hosts":
            hosts = hosts_left_out(own) if known is None else more_hosts(known, own)
            results["more_hosts_interval"] = inside_result(hosts.inside, groups_refused=hosts.refused)
            continue
        learned = {} if known is None else _libraries(name, known)
        for library, part in _libraries(name, own).items():
            results |= of_table(library, learned.get(library), part)
    for name in DEEPEP:
        files = [folder / f"{name}.parquet" for folder in (train or data, data)]
        errors: list[float] = []
        if all(file.exists() for file in files):
            known_rows, own_rows = (pl.read_parquet(file) for file in files)
            errors = tokens_left_out(own_rows) if train is None else tokens_predicted(known_rows, own_rows)
        results[f"tokens_{name}"] = errors_result(errors, SIZES)
    return results


def _libraries(name: str, frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Separate NCCL from other libraries; tables of one library stay whole."""
    if name != "collectives":
        return {name: frame}
    nccl = pl.col("library") == "nccl"
    return {"nccl": frame.filter(nccl), "custom_all_reduce": frame.filter(~nccl)}


def _points(file: Path) -> pl.DataFrame:
    """Read the points of a file; none if the file is missing, is not valid or has no row."""
    try:
        if file.exists():
            return points(read_frame(file))
    except InputError as error:
        print(f"left out: {error}", file=sys.stderr)
    types = dict.fromkeys(("num_ranks", "hosts"), pl.Int64) | dict.fromkeys(("bytes", "time_ns"), pl.Float64)
    return pl.DataFrame(schema={name: types.get(name, pl.String) for name in COLUMNS})


def main() -> None:
    """Run the checks and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", type=Path, help="folder of tables that curves are made from")
    parser.add_argument("--data", type=Path, help="folder of tables that they are tried on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    both = options.train and options.data
    found = checks(options.train if both else None, options.data or options.train or REALITY)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, result in found.items():
        print(f"{name:36}", ", ".join(f"{key} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
