"""Work and ranges in a Nsight Systems export as columns of `spans`.

In: an `Export`. Out: one frame of all processes, sorted by time: kernels, copies, fills and CUDA graphs on
streams, runtime calls, NVTX ranges and the profiler's overhead on threads. It does not assign ranks to
processes, nor relate ranges to each other.
"""

from __future__ import annotations

import polars as pl

from dpro.ingest.nsys.tables import Export, process_of, thread_of

_TIME = {"start": pl.Int64, "end": pl.Int64}
_ON_GPU = _TIME | {
    "deviceId": pl.Int64,
    "streamId": pl.Int64,
    "correlationId": pl.Int64,
    "globalPid": pl.Int64,
}
_CALL = _TIME | {"globalTid": pl.Int64, "nameId": pl.Int64, "correlationId": pl.Int64}

# CUPTI's numbers. Names are spelt as torch.profiler spells them.
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH"}
_COPIES |= {10: "PtoP"}
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}

# What `torch.autograd.profiler.emit_nvtx` appends to the name of an operator, each where it is known:
# `, seq = 41, op_id = 990, sizes = [[2, 3]], input_op_ids = [(989,0)]`.
_EMITTED = r", (?:seq|op_id) = \d.*$|, sizes = \[.*$"
_SEQUENCE = r", seq = (\d+)"
_SIZES = r", sizes = (\[.*?\])(?:, input_op_ids|$)"
# Operators that torch.profiler calls annotations.
_ANNOTATION = r"^(Optimizer\.|ProfilerStep#|nccl:|gloo:|FSDP::|DistributedDataParallel|enumerate\(DataLoader)"

_MARKED, _DOMAIN_CREATED = 34, 75
# CUPTI appends the version of the interface to the runtime's names (not to the driver's).
_RUNTIME_VERSION = r"^(cuda\w+?)(_ptsz|_ptds)?_v\d+$"


def read_spans(export: Export) -> tuple[pl.DataFrame, dict[str, int]]:
    """All spans of all processes, and what was not taken, by reason.

    Returns:
        Columns of `spans` without ids, and `process` (its id), `domain` (of an NVTX range) and `payload`
        (its JSON, empty for none), by start and then the longer first. Times are as the export has them.
    """
    parts = [
        _kernels(export),
        _graphs(export),
        _copies(export),
        _fills(export),
        _calls(export),
        _ranges(export),
        _overhead(export),
    ]
    spans = pl.concat(parts, how="diagonal_relaxed").with_columns(duration_ns=pl.col("end") - pl.col("start"))
    whole = spans.filter(pl.col("duration_ns") >= 0)
    lost = {
        "spans without an end": spans.height - whole.height,
        "operating system calls": export.count("OSRT_API"),
    }
    numbers = [name for name, dtype in whole.schema.items() if dtype == pl.Int64]
    filled = whole.with_columns(pl.col(numbers).fill_null(-1), pl.col(pl.String).fill_null(""))
    ordered = filled.rename({"start": "start_ns"}).drop("end")
    return (
        ordered.sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True),
        {reason: count for reason, count in lost.items() if count},
    )


def _on_gpu(rows: pl.DataFrame, kind: str, name: pl.Expr) -> pl.DataFrame:
    return rows.select(
        *_TIME,
        kind=pl.lit(kind),
        name=name,
        process=process_of("globalPid"),
        device="deviceId",
        stream="streamId",
        correlation="correlationId",
        bytes="bytes" if "bytes" in rows.columns else pl.lit(-1, pl.Int64),
    )


def _kernels(export: Export) -> pl.DataFrame:
    names = {"demangledName": pl.Int64, "shortName": pl.Int64}
    rows = export.rows("CUPTI_ACTIVITY_KIND_KERNEL", _ON_GPU | names)
    named = export.named(rows, long="demangledName", short="shortName")
    return _on_gpu(named, "kernel", pl.coalesce("long", "short"))


def _graphs(export: Export) -> pl.DataFrame:
    """Where graphs were traced whole, what is in them is one piece of work."""
    rows = export.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _ON_GPU | {"graphId": pl.Int64})
    return _on_gpu(rows, "kernel", pl.format("CUDA graph {}", pl.col("graphId").fill_null(-1)))


def _copies(export: Export) -> pl.DataFrame:
    kinds = {"bytes": pl.Int64, "copyKind": pl.Int64, "srcKind": pl.Int64, "dstKind": pl.Int64}
    rows = export.rows("CUPTI_ACTIVITY_KIND_MEMCPY", _ON_GPU | kinds)
    source, target = (
        pl.col(side).replace_strict(_MEMORIES, default="Unknown", return_dtype=pl.String)
        for side in ("srcKind", "dstKind")
    )
    way = pl.col("copyKind").replace_strict(_COPIES, default="Unknown", return_dtype=pl.String)
    return _on_gpu(rows, "memcpy", pl.format("Memcpy {} ({} -> {})", way, source, target))


def _fills(export: Export) -> pl.DataFrame:
    rows = export.rows("CUPTI_ACTIVITY_KIND_MEMSET", _ON_GPU | {"bytes": pl.Int64, "memKind": pl.Int64})
    memory = pl.col("memKind").replace_strict(_MEMORIES, default="Unknown", return_dtype=pl.String)
    return _on_gpu(rows, "memset", pl.format("Memset ({})", memory))


def _calls(export: Export) -> pl.DataFrame:
    rows = export.named(export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", _CALL), name="nameId")
    name = pl.col("name").str.replace(_RUNTIME_VERSION, "$1")
    return _on_thread(rows.with_columns(name), "runtime", correlation=pl.col("correlationId"))


def _overhead(export: Export) -> pl.DataFrame:
    tables = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")
    rows = pl.concat([export.rows(table, _CALL) for table in tables])
    return _on_thread(export.named(rows, name="nameId"), "overhead")


def _ranges(export: Export) -> pl.DataFrame:
    """NVTX ranges on the thread that began them; what PyTorch emitted for its operators is taken apart."""
    texts = {"text": pl.String, "textId": pl.Int64, "jsonText": pl.String, "jsonTextId": pl.Int64}
    kinds = {"eventType": pl.Int64, "domainId": pl.Int64, "globalTid": pl.Int64}
    rows = export.named(export.rows("NVTX_EVENTS", _TIME | kinds | texts), stored="textId", json="jsonTextId")
    rows = rows.with_columns(name=pl.coalesce("text", "stored"), payload=pl.coalesce("jsonText", "json"))
    domains = rows.filter(pl.col("eventType") == _DOMAIN_CREATED).select(
        "domainId", process=process_of("globalTid"), domain="name"
    )
    ranges = rows.filter(pl.col("end").is_not_null() & (pl.col("eventType") < _DOMAIN_CREATED))
    ranges = ranges.filter(pl.col("eventType") != _MARKED).with_columns(process=process_of("globalTid"))
    ranges = ranges.join(
        domains.unique(["domainId", "process"], keep="any"), on=["domainId", "process"], how="left"
    )
    name, op = pl.col("name"), pl.col("name").str.replace(_EMITTED, "")
    operator = (op != name) & ~name.str.contains(_ANNOTATION)
    return _on_thread(
        ranges.with_columns(
            name=op,
            kind=pl.when(operator).then(pl.lit("cpu_op")).otherwise(pl.lit("annotation")),
            sequence_number=name.str.extract(_SEQUENCE).cast(pl.Int64, strict=False),
            shapes=name.str.extract(_SIZES).str.replace_all(" ", ""),
        ),
        "",
        **{kept: pl.col(kept) for kept in ("sequence_number", "shapes", "domain", "payload")},
    )


def _on_thread(rows: pl.DataFrame, kind: str, **more: pl.Expr) -> pl.DataFrame:
    """Rows as CPU spans; without a `kind` it is a column."""
    return rows.select(
        *_TIME,
        "name",
        kind=pl.lit(kind) if kind else pl.col("kind"),
        process=process_of("globalTid"),
        pid=process_of("globalTid"),
        tid=thread_of("globalTid"),
        **more,
    )
