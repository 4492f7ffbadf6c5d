"""What a recorder would leave of a job of `training_jobs.py`: a run directory.

Each host has a clock of its own, which may be off and drift; clocks are compared now and then, with an error.
Of the telemetry a share may be missing: that share of the samples, and of the ranks all there is. What was
not recorded in depth is there as a call alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.members import members_text
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, SPANS, STEPS, TABLES, WORKERS, conform
from dpro.store import Manifest, write_manifest, write_part
from tests.reference.training_jobs import Job, Log, hosts_apart, mesh_of

MS = 1_000_000
FIRST_NS = 1_758_581_000 * 10**9
SKEWS = ("none", "compared", "unknown")
COMPARED_EVERY_MS = 2_000.0
LANES = {"main": 0, "compute": 7, "send": 21, "recv": 22,
         "world": 23, "tp": 24, "dp": 25, "ep": 26}  # fmt: skip
COUNTED = {
    "data": "step_data_wait_ns",
    "gc": "step_gc_ns",
    "queue": "step_run_queue_ns",
    "cpu": "step_training_thread_cpu_ns",
}
KERNELS = {
    "all_reduce": "AllReduce_Sum_bf16_RING_LL",
    "all_gather": "AllGather_RING_LL",
    "reduce_scatter": "ReduceScatter_Sum_bf16_RING_LL",
    **dict.fromkeys(("send", "recv", "all_to_all"), "SendRecv"),
}


@dataclass(frozen=True)
class Recording:
    """How a job is recorded.

    Attributes:
        skew: whether clocks of hosts agree, were compared, or differ by an unknown amount.
        lost: the ranks of which nothing is there.
        missing: share of the samples of counters that are missing.
        seed: of what is drawn.
        timed: whether calls outside of deep windows were timed, as NCCL's Inspector does.
    """

    skew: str = "none"
    lost: tuple[int, ...] = ()
    missing: float = 0.0
    seed: int = 0
    timed: bool = False


def write_run(folder: Path, job: Job, log: Log, recording: Recording) -> Path:
    """Write the run directory."""
    ranks = [rank for rank in range(job.num_ranks) if rank not in recording.lost]
    for name, frame in frames_of(job, log, recording).items():
        write_part(folder, TABLES[name], "ranks", frame)
    write_manifest(folder, Manifest(world_size=job.num_ranks, ranks=ranks))
    return folder


def frames_of(job: Job, log: Log, recording: Recording) -> dict[str, pl.DataFrame]:
    """The tables, as they are declared."""
    random = np.random.default_rng([recording.seed, 1])
    hosts = np.arange(job.num_ranks) // hosts_apart(job.num_ranks)
    clock = _clocks(int(hosts.max()) + 1, recording.skew, random)[hosts]
    frames = {
        COLLECTIVES.name: _collectives(job, log, clock, recording.timed),
        STEPS.name: _steps(log, clock),
        COUNTERS.name: _counters(log, clock, recording.missing, random),
        WORKERS.name: _workers(job, hosts, recording.skew),
    }
    if log.spans:
        frames[SPANS.name] = _spans(job, log, clock)
    if recording.skew == "compared":
        frames[CLOCK_SAMPLES.name] = _comparisons(job, log, hosts, clock, random)
    here = ~pl.col("rank").is_in(recording.lost)
    return {name: conform(TABLES[name], frame.filter(here)) for name, frame in frames.items()}


def _clocks(num_hosts: int, skew: str, random: np.random.Generator) -> np.ndarray:
    """[H, 2] ms that each host's clock is ahead at first, and by how much it is faster."""
    if skew == "none":
        return np.zeros((num_hosts, 2))
    far = 400.0 if skew == "compared" else 20.0
    ahead = random.uniform(-far, far, num_hosts)
    faster = random.normal(0, 10e-6, num_hosts)
    return np.stack([ahead - ahead[0], faster - faster[0]], axis=1)


def _ns(times: np.ndarray, clock: np.ndarray) -> np.ndarray:
    """[N] ms of the common clock -> ns of each one's own."""
    return FIRST_NS + np.rint((times * (1 + clock[:, 1]) + clock[:, 0]) * MS).astype(np.int64)


def _column(batches: list[dict], name: str) -> np.ndarray:
    """A column of all batches; a value that is not an array is the same in all of its batch."""
    return np.concatenate([np.broadcast_to(batch[name], batch["rank"].shape) for batch in batches])


def _text(batches: list[dict], *names: str) -> pl.Series:
    texts = [" ".join(str(batch[name]) for name in names) for batch in batches]
    kinds = list(dict.fromkeys(texts))
    place = {text: at for at, text in enumerate(kinds)}
    codes = np.repeat([place[text] for text in texts], [batch["rank"].size for batch in batches])
    return pl.Series(kinds, dtype=pl.String).gather(codes)


def _collectives(job: Job, log: Log, clock: np.ndarray, timed: bool) -> pl.DataFrame:
    calls = log.calls
    rank = _column(calls, "rank")
    begin, end = (_ns(_column(calls, name), clock[rank]) for name in ("begin", "end"))
    window = _column(calls, "window")
    deep = window >= 0
    frame = pl.DataFrame(
        {
            "rank": rank.astype(np.int32),
            "window": window.astype(np.int32),
            "op": _text(calls, "op"),
            "kind": _text(calls, "group"),
            "index": _column(calls, "group_index"),
            "sequence": _column(calls, "number"),
            "bytes_in": _column(calls, "bytes"),
            "bytes_out": _column(calls, "bytes"),
            "peer": _column(calls, "peer").astype(np.int32),
            "enqueued_ns": _ns(_column(calls, "called"), clock[rank]),
            "start_ns": np.where(deep | timed, begin, -1),
            "duration_ns": np.where(deep | timed, end - begin, -1),
            "correlation": np.where(deep, _column(calls, "correlation"), -1),
            "dtype": ["bfloat16"] * rank.size,
        }
    ).with_columns(collective_id=pl.int_range(pl.len()))
    frame = frame.join(_groups(job, frame), on=["kind", "index"], how="left", maintain_order="left")
    span = {"span_id": _span_id("ran"), "launch_span_id": _span_id("called")}
    return frame.with_columns(**span).drop("kind", "index", "correlation")


def _span_id(what: str) -> pl.Expr:
    """Spans of a call are identified by its correlation."""
    offset = {"called": 1, "ran": 2}[what]
    return pl.when(pl.col("correlation") >= 0).then(10**8 * offset + pl.col("correlation")).otherwise(-1)


def _groups(job: Job, frame: pl.DataFrame) -> pl.DataFrame:
    """`kind`, `index`, `group` (its name) and `group_ranks`."""
    mesh = mesh_of(job.layout, job.num_ranks)
    rows = []
    for kind, index, peer, rank in (
        frame.group_by("kind", "index").agg(pl.col("peer").first(), pl.col("rank").first()).iter_rows()
    ):
        members = sorted((rank, peer)) if peer >= 0 else mesh.groups[kind][index].tolist()
        rows.append((kind, index, f"{kind}.{index}", members_text(members)))
    schema = {"kind": pl.String, "index": pl.Int64, "group": pl.String, "group_ranks": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _steps(log: Log, clock: np.ndarray) -> pl.DataFrame:
    steps = log.steps
    rank = _column(steps, "rank")
    begin, end = (_ns(_column(steps, name), clock[rank]) for name in ("begin", "end"))
    return pl.DataFrame(
        {
            "rank": rank.astype(np.int32),
            "step": _column(steps, "step"),
            "window": _column(steps, "window").astype(np.int32),
            "start_ns": begin,
            "duration_ns": end - begin,
        }
    ).with_columns(source=pl.lit("optimizer"))


def _counters(log: Log, clock: np.ndarray, missing: float, random: np.random.Generator) -> pl.DataFrame:
    rank = _column(log.steps, "rank")
    begin = _ns(_column(log.steps, "begin"), clock[rank])
    frames = [
        pl.DataFrame(
            {
                "rank": rank.astype(np.int32),
                "time_ns": begin,
                "value": np.rint(np.concatenate(log.counters[name]) * MS),
            }
        ).with_columns(counter=pl.lit(counter))
        for name, counter in COUNTED.items()
    ]
    if log.elements:
        elements = frames[0].with_columns(
            value=np.concatenate(log.elements), counter=pl.lit("step_input_elements")
        )
        frames.append(elements)
    rows = pl.concat(frames)
    return rows.filter(pl.Series(random.random(rows.height) >= missing))


def _workers(job: Job, hosts: np.ndarray, skew: str) -> pl.DataFrame:
    mesh, rank = mesh_of(job.layout, job.num_ranks), np.arange(job.num_ranks)
    here = hosts if skew != "none" else np.zeros_like(hosts)
    return pl.DataFrame(
        {
            "rank": rank.astype(np.int32),
            "local_rank": rank % hosts_apart(job.num_ranks),
            "world_size": np.full(rank.size, job.num_ranks),
            "host": [f"node{host}" for host in hosts],
            "clock": [f"boot{host}" for host in here],
            "pid": 1000 + rank,
            "gpu_uuid": [f"GPU-{at}" if job.gpu else "" for at in rank],
            "gpu_name": ["H100" if job.gpu else ""] * rank.size,
            "dp": mesh.dp,
            "tp": mesh.tp if job.layout == "tp_pp" else np.full(rank.size, -1),
            "pp": mesh.pp if job.layout == "tp_pp" else np.full(rank.size, -1),
        }
    )


def _spans(job: Job, log: Log, clock: np.ndarray) -> pl.DataFrame:
    """Spans of hosts and devices, those of collectives among them."""
    batches = log.spans + [_ran(job, call) for call in log.calls if call["window"] >= 0]
    rank = _column(batches, "rank")
    begin, end = (_ns(_column(batches, name), clock[rank]) for name in ("begin", "end"))
    on_device = _text(batches, "kind").is_in(["kernel"]).to_numpy()
    lane = _text(batches, "lane").replace_strict(LANES, return_dtype=pl.Int64).to_numpy()
    process = 1000 + rank
    frame = pl.DataFrame(
        {
            "rank": rank.astype(np.int32),
            "window": _column(batches, "window").astype(np.int32),
            "kind": _text(batches, "kind"),
            "name": _text(batches, "name"),
            "start_ns": begin,
            "duration_ns": end - begin,
            "pid": np.where(on_device, -1, process),
            "tid": np.where(on_device, -1, process + 100_000 * lane),
            "device": np.where(on_device, 0, -1),
            "stream": np.where(on_device, lane, -1),
            "correlation": _column(batches, "correlation"),
        }
    )
    return frame.with_columns(span_id=_numbered(batches))


def _numbered(batches: list[dict]) -> np.ndarray:
    """Ids of spans: those of collectives and their calls follow from the correlation."""
    ids = []
    for place, batch in enumerate(batches):
        known = batch.get("span_id", place)
        ids.append(np.full(batch["rank"].size, known))
    return np.concatenate(ids)


def _ran(job: Job, call: dict) -> dict:
    """The span of a collective: a kernel, or what a worker thread does."""
    op = call["op"]
    gpu = {"kind": "kernel", "name": f"ncclDevKernel_{KERNELS[op]}"}
    gpu["lane"] = op if op in ("send", "recv") else call["group"]
    cpu = {"kind": "annotation", "name": f"gloo:{op}", "lane": gpu["lane"]}
    number = call["correlation"] if job.gpu else -1
    row = {name: call[name] for name in ("rank", "begin", "end", "window")}
    return (
        row | {"correlation": number, "span_id": 2 * 10**8 + call["correlation"]} | (gpu if job.gpu else cpu)
    )


def _comparisons(
    job: Job, log: Log, hosts: np.ndarray, clock: np.ndarray, random: np.random.Generator
) -> pl.DataFrame:
    """Each host's first rank compares its clock with that of rank 0."""
    last = float(log.steps[-1]["end"].max())
    times = np.arange(0, last + COMPARED_EVERY_MS, COMPARED_EVERY_MS)
    rows = []
    for rank in np.flatnonzero(np.diff(hosts, prepend=-1))[1:]:
        here = np.broadcast_to(clock[rank], (times.size, 2))
        ahead = _ns(times, here) - FIRST_NS - np.rint(times * MS)
        rows.append(
            pl.DataFrame(
                {
                    "rank": np.full(times.size, rank, np.int32),
                    "time_ns": _ns(times, here),
                    "monotonic_ns": np.rint(times * MS).astype(np.int64),
                    "peer_rank": np.zeros(times.size, np.int32),
                    "offset_ns": (ahead + random.normal(0, 0.01 * MS, times.size)).astype(np.int64),
                    "round_trip_ns": np.full(times.size, 50_000),
                }
            )
        )
    return pl.concat(rows)
