"""Tables of what communication takes, measured by whoever ran them: read, and made into curves.

In: Parquet or CSV files, one row per measurement. Out: a `NetworkTable`, one curve per operation, group and
software. What to say where a table has no curve of its own is decided in `network_costs.py`.

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
| link | `link` | `nvlink`, `pcie`, …; without it, from the name of the device |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.errors import InputError
from dpro.replay.models.curves import left_out, medians, scores
from dpro.replay.models.link_costs import LinkCost, fit_curve

FEW = 2.0  # times the scale, where too few sizes were measured to find out
NVLINK = "nvlink"
# GPUs whose NVLink joins all of a host with each other, by the makers' sheets of their SXM and NVL72 boards.
SWITCHED = re.compile(r"sxm|dgx|hgx|nvl72|\b(h200|h20|h800|b200|b300|gb200|gb300)\b")
NOT_SWITCHED = re.compile(r"pcie|pairwise|\bnvl\b")
OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
       "alltoall": "all_to_all", "sendrecv": "send_recv"}  # fmt: skip
# What a file may call a column, and by what to multiply it.
BYTES = {"bytes": 1.0, "message_bytes": 1.0, "message_mb": 1e6}
TIMES = {"time_ns": 1.0, "time_us": 1e3, "latency_us": 1e3, "time_ms": 1e6}
BANDWIDTH = "bandwidth_gb_s"
WORDS = ("library", "library_version", "implementation", "link")


class CurveGroup(NamedTuple):
    """Whose curve it is.

    Attributes:
        op: as in the `collectives` table.
        num_ranks: in the group.
        hosts: that they are on.
        device: GPU model; empty where not given.
        library: and its implementation; empty where not given.
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
        links: of each device what joins the GPUs of a host; `NVLINK` where all are joined by a switch.
        name: of the file.
        times_scale: by how many times its scale 80% of the sizes left out are missed (`curves.scale`).
    """

    curves: Mapping[CurveGroup, LinkCost]
    links: Mapping[str, str]
    name: str
    times_scale: float


def read_network_table(path: Path | str) -> NetworkTable:
    """The curves of a Parquet or CSV file.

    Raises:
        InputError: it cannot be read, or lacks a column; the message says which.
    """
    return network_table(read_frame(path), str(path))


def read_frame(path: Path | str) -> pl.DataFrame:
    """The measurements of a file: the columns of `CurveGroup`, and `link`, `bytes` and `time_ns`.

    Raises:
        InputError: it cannot be read, or lacks a column; the message says which.
    """
    path = Path(path)
    try:
        frame = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path, glob=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"{path}: is no readable Parquet or CSV table ({why})") from error
    return _declared(frame, str(path))


def network_table(rows: pl.DataFrame, name: str) -> NetworkTable:
    """The curves of measurements.

    Args:
        rows: as from `read_frame`.
        name: of the table.
    """
    curves, own = {}, []
    for key, part in rows.sort(*CurveGroup._fields, "bytes").group_by(
        CurveGroup._fields, maintain_order=True
    ):
        sizes, times = medians(part["bytes"].to_numpy(), part["time_ns"].to_numpy())
        curve = curves[CurveGroup(*key)] = fit_curve(sizes, times)
        own.append(scores(sizes, left_out(sizes, times, curve.line_ns(sizes))))
    found = np.concatenate(own) if own else np.empty(0)
    links = dict(rows.select("device", "link").unique().sort("device", "link").iter_rows())
    return NetworkTable(curves, links, name, float(np.quantile(found, 0.8)) if found.size else FEW)


def _declared(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """The rows with declared columns: those of `CurveGroup`, `link`, `bytes` and `time_ns`."""
    if "op" not in frame.columns:
        raise InputError(f"{name}: no column op; docs/curves.md lists the columns of a network table")
    number = {**BYTES, **TIMES, BANDWIDTH: 1.0}
    given = frame.select(pl.all()).with_columns(
        pl.col(column).cast(pl.Float64, strict=False) for column in number if column in frame.columns
    )
    size = _first(given, BYTES, name)
    time = size / pl.col(BANDWIDTH) if BANDWIDTH in given.columns else _first(given, TIMES, name)
    ranks = _ranks(given, name)
    words = {word: pl.col(word).cast(pl.String) if word in given.columns else pl.lit("") for word in WORDS}
    device = next(
        (pl.col(c).cast(pl.String) for c in ("device", "machine") if c in given.columns), pl.lit("")
    )
    op = pl.col("op").str.to_lowercase().str.replace_all(r"[_\- ]", "")
    rows = given.select(
        op=op.replace(OPS),
        num_ranks=ranks,
        hosts=_hosts(given, ranks),
        device=device,
        library=pl.concat_str(words["library"], words["implementation"], separator=" ").str.strip_chars(),
        version=words["library_version"],
        link=words["link"],
        bytes=size,
        time_ns=time,
    ).filter(
        pl.col("bytes").is_finite()
        & (pl.col("bytes") > 0)
        & pl.col("time_ns").is_finite()
        & (pl.col("time_ns") > 0)
    )
    if rows.is_empty():
        raise InputError(f"{name}: holds no row with bytes and time above 0")
    guessed = pl.col("device").map_elements(link_of_device, pl.String)
    return rows.with_columns(
        link=pl.when(pl.col("link").fill_null("") == "")
        .then(guessed)
        .otherwise(pl.col("link").str.to_lowercase())
    ).with_columns(pl.col("device", "library", "version").fill_null(""))


def _first(frame: pl.DataFrame, names: Mapping[str, float], table: str) -> pl.Expr:
    """The first of some columns that there is, in its unit."""
    for column, times in names.items():
        if column in frame.columns:
            return pl.col(column) * times
    raise InputError(
        f"{table}: no column {' or '.join(names)}; docs/curves.md lists those of a network table"
    )


def _ranks(frame: pl.DataFrame, table: str) -> pl.Expr:
    for column in ("num_ranks", "gpus"):
        if column in frame.columns:
            return pl.col(column).cast(pl.Int64)
    raise InputError(f"{table}: no column num_ranks or gpus; docs/curves.md lists those of a network table")


def _hosts(frame: pl.DataFrame, ranks: pl.Expr) -> pl.Expr:
    for column in ("hosts", "nodes"):
        if column in frame.columns:
            return pl.col(column).cast(pl.Int64)
    for column in ("ranks_per_host", "gpus_per_node"):
        if column in frame.columns:
            return (ranks / pl.col(column)).ceil().cast(pl.Int64)
    return pl.lit(1, pl.Int64)


def link_of_device(name: str) -> str:
    """What joins the GPUs of a host with a device of such a name; empty where the name does not say."""
    words = name.lower().replace("_", " ")
    if NOT_SWITCHED.search(words):
        return "pcie"
    return NVLINK if SWITCHED.search(words) else ""
