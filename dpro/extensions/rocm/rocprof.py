"""Reads the kernels that rocprof, AMD's profiler before rocprofv3, wrote as CSV and as JSON.

One run writes the same kernels into `results.csv` and `results.json`: the CSV is read, the JSON only where no
CSV is beside it. Columns are looked up by name. Returns a `RankTrace` per process, with times in ns on the
clock of its host. Other spans of JSON are counted, and not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dpro.errors import InputError
from dpro.extensions.rocm.rocprofv3 import path_outside_archives, rows_of_csv
from dpro.extensions.rocm.tables import TIME, traces_of
from dpro.ingest.reading.files import Source, read_bytes, read_head
from dpro.ingest.trace import RankTrace

SOURCE = "rocprof"

_RECORD = "`rocprof --timestamp on`, or better `rocprofv3 --runtime-trace`"
# Columns of the CSV, which are also arguments of events in JSON.
_NAME, _BEGIN, _END = "KernelName", "BeginNs", "EndNs"
_COLUMNS = {_NAME: pl.String, "gpu-id": pl.Int64, "queue-id": pl.String, "pid": pl.Int64}
_COLUMNS |= {_BEGIN: pl.Int64, _END: pl.Int64}
_SUFFIX = r" \[clone \.kd\]$|\.kd$"  # of a kernel's descriptor


class _Event(msgspec.Struct):
    ph: str = ""
    args: dict[str, Any] = {}


class _Document(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815  # a key of the format


def is_rocprof(head: bytes) -> bool:
    """Return whether the first bytes are a CSV file of rocprof, or its JSON."""
    columns = head.partition(b"\n")[0]
    return _is_json(head) or (_NAME.encode() in columns and b"gpu-id" in columns)


def _is_json(head: bytes) -> bool:
    # Without any kernel, only the description of the machine at its end shows the writer.
    by_rocprof = b'"DispatchNs"' in head or b'"HSASystemAttributes.' in head
    return head.lstrip()[:1] == b"{" and b'"traceEvents"' in head[:200] and by_rocprof


def read_rocprof(source: Path | Source, *, rank: int | None = None) -> list[RankTrace]:
    """Read the kernels of a file; JSON beside the CSV of its run yields no trace.

    Args:
        source: the file; its name gives the rank.
        rank: the rank, overriding the file name.

    Raises:
        InputError: the file is damaged, is in an archive, or has no kernels with their times.
    """
    path = path_outside_archives(source)
    others: dict[str, int] = {}
    warnings = []
    if _is_json(read_head(path)):
        if _beside(path, ".csv"):
            return []
        rows, others = _rows_of_json(path)
    else:
        rows = rows_of_csv(path, _COLUMNS, SOURCE)
        if json := _beside(path, ".json"):
            warnings.append(f"left out: {json}: the same kernels are in {path.name}")
    traces = traces_of(path, SOURCE, _NO_CALLS, _work(rows), rank, _RECORD)
    lacking = f"{path.name}: launches and copies are unknown; record with `rocprofv3 --runtime-trace`"
    traces[0].warnings.extend([*warnings, lacking])
    traces[0].skipped.update(others)
    return traces


def _beside(path: Path, suffix: str) -> Path | None:
    """Return the file of rocprof with the same name but for its suffix; None where there is none."""
    name = path.name.removesuffix(".gz")
    for beside in (path.with_name(Path(name).stem + suffix + packed) for packed in ("", ".gz")):
        if beside.is_file() and is_rocprof(read_head(beside)):
            return beside
    return None


def _rows_of_json(path: Path) -> tuple[pl.DataFrame, dict[str, int]]:
    """Read the kernels of a JSON file in the columns of the CSV, and count its other spans.

    Raises:
        InputError: the file is damaged.
    """
    try:
        document = msgspec.json.decode(read_bytes(path), type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: damaged JSON of rocprof ({error}); give the CSV beside it") from error
    spans = [event.args for event in document.traceEvents if event.ph == "X"]
    kernels = [args for args in spans if _NAME in args]
    texts = {name: [str(args.get(name, "")) for args in kernels] for name in _COLUMNS}
    rows = pl.DataFrame(texts, schema=dict.fromkeys(_COLUMNS, pl.String))
    others = (
        {"spans of rocprof that are no kernels": len(spans) - len(kernels)}
        if len(spans) > len(kernels)
        else {}
    )
    return rows.select(pl.col(name).cast(dtype, strict=False) for name, dtype in _COLUMNS.items()), others


# rocprof records none beside its kernels.
_NO_CALLS = pl.DataFrame(
    schema=TIME
    | dict.fromkeys(("id", "pid", "tid", "seq"), pl.Int64)
    | dict.fromkeys(("called", "args", "operator", "sizes"), pl.String)
)


def _work(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels as the work that `traces_of` takes, one stream per queue."""
    unknown = pl.lit(None, pl.Int64)
    return rows.select(
        start=_BEGIN,
        end=_END,
        type=pl.lit("KernelExecution"),
        description=pl.col(_NAME).str.replace(_SUFFIX, ""),
        device="gpu-id",
        stream=pl.col("queue-id").str.zfill(20),
        call=unknown,
        size=unknown,
        process="pid",
    )
