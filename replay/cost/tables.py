"""Tables of measurements in users' files, read with one line of error for what is wrong.

Files of communication times have one row per measurement, and become a `NetworkTable`: one curve per
operation, group and software, from measurements in which the library chose the protocol. `transfers.py`
decides what to use where a table has no curve.

Columns of a file, by the first name that it has:

| column | names | meaning |
|---|---|---|
| op | `op` | all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv |
| bytes | `bytes`, `message_bytes`; `message_mb` | payload: of a gather and a scatter the whole buffer |
| time | `time_ns`, `time_us`, `latency_us`, `time_ms`; `bandwidth_gb_s` | of one collective |
| ranks | `num_ranks`, `gpus` | in the group |
| ranks on a host | `ranks_per_host`, `gpus_per_node`; `hosts`, `nodes` | without any: all on one host |
| device | `device`, `machine` | may be left out, as may all that follow |
| software | `library`, `library_version`, `implementation` | curves of different software are not mixed |
| protocol | `protocol` | `ll`, `ll128`, `simple`, where NCCL_PROTO fixed it; else empty |
| link | `link` | `nvlink`, `pcie`, …; without it, from the name of the device |
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.errors import InputError, first_line
from dpro.limits import MAX_WHOLE_BYTES, read_small
from dpro.panics import panics_as
from dpro.replay.cost import HOLDS
from dpro.replay.cost.curves import LinkCost, fit_curve, left_out, medians, scores
from dpro.table import why_unreadable
from dpro.words import first_few


def read_measured(path: Path, numbers: Collection[str], names: Collection[str]) -> pl.DataFrame:
    """Read the requested columns that a file has.

    Args:
        path: of the file, Parquet unless it ends in `.csv`.
        numbers: columns that become floats; null where empty.
        names: columns that become text.

    Raises:
        InputError: the file cannot be read, or a column has values of another type; the message says which.
    """
    frame = _read(path)
    return frame.select(
        *(_numbers(frame[name], path) for name in numbers if name in frame.columns),
        *(_names(frame[name], path) for name in names if name in frame.columns),
    )


def _read(path: Path) -> pl.DataFrame:
    def unreadable(why: str) -> InputError:
        return InputError(f"{path}: not a readable Parquet or CSV table ({why})")

    content = BytesIO(read_small(path, MAX_WHOLE_BYTES))
    try:
        with panics_as(unreadable):
            if path.suffix == ".csv":
                return pl.read_csv(content, infer_schema_length=None)
            return pl.read_parquet(content)
    except pl.exceptions.PolarsError as error:
        is_text = path.suffix == ".csv"
        raise unreadable(first_line(error) if is_text else why_unreadable(error)) from error


def _numbers(column: pl.Series, path: Path) -> pl.Series:
    if column.dtype in (pl.String, pl.Categorical):
        text = column.cast(pl.String)
        numbers = text.str.strip_chars().cast(pl.Float64, strict=False)
        wrong = text.filter(numbers.is_null() & (text.fill_null("") != ""))
        if wrong.len():
            raise InputError(f"{path}: column {column.name} has {wrong[0][:40]!r}, which is not a number")
        return numbers
    if not (column.dtype.is_numeric() or column.dtype == pl.Null):
        raise InputError(f"{path}: column {column.name} has {column.dtype} instead of numbers")
    return column.cast(pl.Float64)


def _names(column: pl.Series, path: Path) -> pl.Series:
    kind = column.dtype
    if not (kind in (pl.String, pl.Categorical, pl.Enum, pl.Null) or kind.is_numeric()):
        raise InputError(f"{path}: column {column.name} has {kind} instead of names")
    return column.cast(pl.String)


# Communication times.

FEW = 2.0  # times the scale of errors, where too few sizes were measured to estimate it
NVLINK = "nvlink"
# GPUs whose NVLink switch joins all GPUs of a host, by the makers' sheets of their SXM and NVL72 boards.
SWITCHED = re.compile(r"sxm|dgx|hgx|nvl72|\b(h200|h20|h800|b200|b300|gb200|gb300)\b")
NOT_SWITCHED = re.compile(r"pcie|pairwise|\bnvl\b")
OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
       "alltoall": "all_to_all", "sendrecv": "send_recv"}  # fmt: skip
KNOWN = (*OPS.values(), "broadcast", "reduce")
# Names that a file may use for a column, with their factors.
BYTES = {"bytes": 1.0, "message_bytes": 1.0, "message_mb": 1e6}
TIMES = {"time_ns": 1.0, "time_us": 1e3, "latency_us": 1e3, "time_ms": 1e6}
BANDWIDTH = "bandwidth_gb_s"
RANKS = {"num_ranks": 1.0, "gpus": 1.0}
HOSTS, RANKS_PER_HOST = ("hosts", "nodes"), ("ranks_per_host", "gpus_per_node")
DEVICES = ("device", "machine")
SHORTEST_NS, LONGEST_NS = 100.0, 3.6e12  # of the usual collective; outside, a column is in another unit
FASTEST_GBPS = 20_000.0
WORDS = ("library", "library_version", "implementation", "link", "protocol")


class CurveGroup(NamedTuple):
    """Key of a curve.

    Attributes:
        op: as in the `collectives` table.
        num_ranks: in the group.
        hosts: number of hosts of the group.
        device: GPU model; empty where not given.
        library: with its implementation; empty where not given.
        version: of the library.
    """

    op: str
    num_ranks: int
    hosts: int = 1
    device: str = ""
    library: str = ""
    version: str = ""


@dataclass(frozen=True, eq=False)
class NetworkTable:
    """Curves of measured times.

    Attributes:
        curves: by group.
        links: link between the GPUs of a host, by device; `NVLINK` where a switch joins all.
        name: of the file.
        times_scale: factor on `curves.scale` within which 90% of the errors of left-out sizes are.
    """

    curves: Mapping[CurveGroup, LinkCost]
    links: Mapping[str, str]
    name: str
    times_scale: float


def read_frame(path: Path | str) -> pl.DataFrame:
    """Read a file's measurements: the columns of `CurveGroup`, and `link`, `protocol`, `bytes` and `time_ns`.

    Raises:
        InputError: it cannot be read, or lacks a column; the message says which.
    """
    numbers = (*BYTES, *TIMES, BANDWIDTH, *RANKS, *HOSTS, *RANKS_PER_HOST)
    frame = read_measured(Path(path), numbers, ("op", *DEVICES, *WORDS))
    name = str(path)
    if "op" not in frame.columns:
        raise InputError(f"{name}: no column op; docs/curves.md lists the columns of a network table")
    size = _first(frame, BYTES, name)
    time = size / pl.col(BANDWIDTH) if BANDWIDTH in frame.columns else _first(frame, TIMES, name)
    ranks = _first(frame, RANKS, name)
    words = {word: pl.col(word) if word in frame.columns else pl.lit("") for word in WORDS}
    device = next((pl.col(column) for column in DEVICES if column in frame.columns), pl.lit(""))
    op = pl.col("op").str.to_lowercase().str.replace_all(r"[_\- ]", "")
    rows = frame.select(
        op=op.replace(OPS),
        num_ranks=ranks,
        hosts=_hosts(frame, ranks),
        device=device,
        library=pl.concat_str(words["library"], words["implementation"], separator=" ").str.strip_chars(),
        version=words["library_version"],
        link=words["link"],
        protocol=words["protocol"].str.to_lowercase().fill_null(""),
        bytes=size,
        time_ns=time,
    ).filter(
        *((pl.col(column) > 0) & pl.col(column).is_finite() for column in ("bytes", "time_ns")),
        *((pl.col(column) >= 1) & pl.col(column).is_finite() for column in ("num_ranks", "hosts")),
        *(pl.col(column) == pl.col(column).round() for column in ("num_ranks", "hosts")),
    )
    if rows.is_empty():
        raise InputError(f"{name}: no row has bytes and time above 0 and a whole number of ranks")
    rows = rows.cast({"num_ranks": pl.Int64, "hosts": pl.Int64})
    ops = first_few(rows["op"].drop_nulls().unique().sort().to_list(), 3) or "none"
    rows = rows.filter(pl.col("op").is_in(KNOWN))
    if rows.is_empty():
        raise InputError(f"{name}: no operation is known to dpro ({ops}); it knows {', '.join(KNOWN)}")
    # In a wrong unit, half of the times are implausibly short, or longer than any job waits.
    usual = float(np.median(rows["time_ns"].to_numpy()))
    moved = float(np.median((rows["bytes"] / rows["time_ns"]).to_numpy()))
    if usual < SHORTEST_NS or moved > FASTEST_GBPS:
        raise InputError(f"{name}: times are not in the unit of their column: half are below {usual:.2g} ns")
    if usual > LONGEST_NS:
        raise InputError(f"{name}: times are not in the unit of their column: half are above an hour")
    guessed = pl.col("device").map_elements(link_of_device, pl.String)
    return rows.with_columns(
        link=pl.when(pl.col("link").fill_null("") == "")
        .then(guessed)
        .otherwise(pl.col("link").str.to_lowercase())
    ).with_columns(pl.col("device", "library", "version").fill_null(""))


def network_table(rows: pl.DataFrame, name: str) -> NetworkTable:
    """Fit the curves of measurements.

    Args:
        rows: as from `read_frame`.
    """
    curves, scores_of_curves = {}, []
    chosen = rows.filter(protocol="") if "protocol" in rows.columns else rows
    chosen = chosen.sort(*CurveGroup._fields, "bytes")
    for key, part in chosen.group_by(CurveGroup._fields, maintain_order=True):
        sizes, times = medians(part["bytes"].to_numpy(), part["time_ns"].to_numpy())
        curve = curves[CurveGroup(*key)] = fit_curve(sizes, times)
        scores_of_curves.append(scores(sizes, left_out(sizes, times, curve.line_ns(sizes))))
    all_scores = np.concatenate(scores_of_curves) if scores_of_curves else np.empty(0)
    links = dict(rows.select("device", "link").unique().sort("device", "link").iter_rows())
    return NetworkTable(
        curves, links, name, float(np.quantile(all_scores, HOLDS)) if all_scores.size else FEW
    )


def _first(frame: pl.DataFrame, names: Mapping[str, float], table: str) -> pl.Expr:
    """Return the first of `names` in the frame, scaled to its unit."""
    for column, times in names.items():
        if column in frame.columns:
            return pl.col(column) * times
    raise InputError(
        f"{table}: no column {' or '.join(names)}; docs/curves.md lists those of a network table"
    )


def _hosts(frame: pl.DataFrame, ranks: pl.Expr) -> pl.Expr:
    for column in HOSTS:
        if column in frame.columns:
            return pl.col(column)
    for column in RANKS_PER_HOST:
        if column in frame.columns:
            return (ranks / pl.col(column)).ceil()
    return pl.lit(1.0)


def link_of_device(name: str) -> str:
    """Return the link between GPUs of a host, by the device's name; empty where the name does not show it."""
    words = name.lower().replace("_", " ")
    if NOT_SWITCHED.search(words):
        return "pcie"
    return NVLINK if SWITCHED.search(words) else ""
