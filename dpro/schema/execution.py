"""Tables of what a rank ran: intervals on its lanes, communication, and what waited for what."""

from __future__ import annotations

import polars as pl

from dpro.schema.shared import DURATION, GROUP_RANKS, RANK, START, WINDOW
from dpro.table import Column, Table

SPAN_KINDS = (
    "cpu_op",  # an operator on a CPU thread
    "runtime",  # a CUDA/HIP runtime or driver call on a CPU thread
    "kernel",  # a kernel on a GPU stream
    "memcpy",  # a copy on a GPU stream
    "memset",  # a fill on a GPU stream
    "annotation",  # a named range on a CPU thread
    "gpu_annotation",  # the shadow of a named range on a GPU stream
    "python",  # a Python call
    "overhead",  # the profiler's own work
)
GPU_WORK_KINDS = ("kernel", "memcpy", "memset")
SYNC_KINDS = ("event_record", "stream_wait_event", "event_sync", "stream_sync", "device_sync")
SpanKind = pl.Enum(SPAN_KINDS)
SyncKind = pl.Enum(SYNC_KINDS)

SPANS = Table(
    "spans",
    "An interval on one lane (CPU thread or GPU stream) of one rank.",
    {
        "span_id": Column(pl.Int64, "Unique within the rank."),
        "rank": RANK,
        "window": WINDOW,
        "kind": Column(SpanKind, "Kind of interval.", "cpu_op"),
        "name": Column(pl.String, "Name as recorded.", ""),
        "start_ns": START,
        "duration_ns": DURATION,
        "pid": Column(pl.Int64, "Process of a CPU span."),
        "tid": Column(pl.Int64, "Thread of a CPU span."),
        "device": Column(pl.Int32, "Device index of a GPU span."),
        "stream": Column(pl.Int64, "Stream of a GPU span."),
        "correlation": Column(pl.Int64, "Joins a runtime call with the GPU work it launched."),
        "external_id": Column(pl.Int64, "Joins a runtime call or GPU work with the CPU op that issued it."),
        "sequence_number": Column(
            pl.Int64, "Autograd sequence number: joins a backward op with its forward."
        ),
        "forward_thread": Column(pl.Int64, "Profiler's id of the forward thread; > 0 on a backward op."),
        "bytes": Column(pl.Int64, "Bytes moved, for copies and fills."),
        "shapes": Column(pl.String, "Input shapes as JSON, empty where not recorded.", ""),
        "micro_batch": Column(pl.Int32, "Micro-batch the work belongs to."),
        "model_chunk": Column(pl.Int32, "Virtual pipeline chunk."),
    },
    ("rank", "window", "start_ns", "span_id"),
)

COLLECTIVES = Table(
    "collectives",
    "One rank's part in one collective or point-to-point operation.",
    {
        "collective_id": Column(pl.Int64, "Unique within the rank."),
        "rank": RANK,
        "window": Column(pl.Int32, "Deep window that saw it run; -1 where only its call was recorded."),
        "op": Column(
            pl.String,
            "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, "
            "barrier, send, recv, send_recv, or the name as recorded.",
            "",
        ),
        "group": Column(pl.String, "Process group by name, empty where unknown.", ""),
        "group_ranks": GROUP_RANKS,
        "sequence": Column(pl.Int64, "Sequence number within the group."),
        "bytes_in": Column(pl.Int64, "Bytes this rank puts in; -1 unknown."),
        "bytes_out": Column(pl.Int64, "Bytes this rank gets; -1 unknown."),
        "dtype": Column(pl.String, "Element type, empty where unknown.", ""),
        "peer": Column(pl.Int32, "The other global rank of a send or receive."),
        "enqueued_ns": Column(pl.Int64, "When the call was made; -1 unknown."),
        "start_ns": Column(pl.Int64, "When it began to run, waiting included; -1 unknown."),
        "duration_ns": Column(pl.Int64, "Waiting plus moving; -1 unknown."),
        "algorithm": Column(pl.String, "RING, TREE, …, empty where unknown.", ""),
        "protocol": Column(pl.String, "LL, LL128, SIMPLE, empty where unknown.", ""),
        "asked_ns": Column(
            pl.Int64, "When its caller waited for the result, where the recorder itself noted it; -1 unknown."
        ),
        "span_id": Column(pl.Int64, "The span (kernel, or worker-thread range) that ran it."),
        "launch_span_id": Column(pl.Int64, "The CPU span that issued it."),
        "source": Column(pl.String, "What the row was read from.", ""),
        "state": Column(
            pl.String,
            "scheduled, started, completed as the flight recorder says; empty where unknown.",
            "",
        ),
    },
    ("rank", "window", "start_ns", "collective_id"),
)

SENDS = Table(
    "sends",
    "What NCCL's proxy thread of one rank sent to one peer over one channel in one call.",
    {
        "rank": RANK,
        "group": Column(pl.String, "Communicator, as in `collectives`.", ""),
        "member": Column(pl.Int32, "The rank's number in it."),
        "peer_member": Column(pl.Int32, "The number of the member it sent to."),
        "sequence": Column(pl.Int64, "Number of the call in the communicator."),
        "channel": Column(pl.Int32, "Which of NCCL's channels."),
        "operation": Column(pl.Int64, "Number of the proxy's operation in the communicator."),
        "time_ns": Column(pl.Int64, "When the first piece was handed to the network; -1 unknown."),
        "steps": Column(pl.Int64, "Pieces that it was sent in."),
        "bytes": Column(pl.Int64, "Size of all of them."),
        "wire_ns": Column(
            pl.Int64,
            "From handing a piece to the network until the network was done with it, summed over the "
            "pieces; waiting for the GPU or for room at the peer is not included.",
        ),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("rank", "time_ns", "group", "operation"),
)

PROCESS_GROUPS = Table(
    "process_groups",
    "What one rank's flight recorder said of one process group when it was saved.",
    {
        "rank": RANK,
        "group": Column(pl.String, "Process group by name, empty where unknown.", ""),
        "group_ranks": GROUP_RANKS,
        "enqueued": Column(pl.Int64, "Sequence number of the last call that was issued; -1 unknown."),
        "completed": Column(pl.Int64, "Sequence number of the last call that was finished; -1 unknown."),
        "saved_ns": Column(pl.Int64, "When the flight recorder was saved, at the latest; -1 unknown."),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("rank", "group", "enqueued"),
)

SYNCS = Table(
    "syncs",
    "A dependency that is not order on a lane: event record and wait, stream or device synchronisation.",
    {
        "rank": RANK,
        "window": WINDOW,
        "kind": Column(SyncKind, "Which synchronisation.", "device_sync"),
        "span_id": Column(pl.Int64, "The CPU span (runtime call) that asked for it."),
        "correlation": Column(pl.Int64, "Correlation of that call."),
        "device": Column(pl.Int32, "Device that is waited for, or that waits."),
        "stream": Column(pl.Int64, "Stream that waits (stream_wait_event) or is waited for; -1 unknown."),
        "event_id": Column(pl.Int64, "Event handle."),
        "record_stream": Column(pl.Int64, "Stream the awaited event was recorded on."),
        "record_correlation": Column(pl.Int64, "Correlation of the call that recorded the awaited event."),
        "start_ns": START,
        "duration_ns": DURATION,
    },
    ("rank", "window", "start_ns", "span_id"),
)

DEPENDENCIES = Table(
    "dependencies",
    "One span needs another: its operator, as an execution trace says.",
    {
        "rank": RANK,
        "window": WINDOW,
        "source_span_id": Column(pl.Int64, "The span that is needed."),
        "target_span_id": Column(pl.Int64, "The span that needs it."),
        "kind": Column(
            pl.String, "data (target reads a tensor that source wrote), control (source called target).", ""
        ),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("rank", "window", "target_span_id", "source_span_id", "kind"),
)
