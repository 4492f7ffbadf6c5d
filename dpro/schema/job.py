"""Tables of the processes of a job and their hosts: telemetry, clocks, checkpoints, starts, facts."""

from __future__ import annotations

import polars as pl

from dpro.schema.shared import RANK, START
from dpro.table import Column, Table

CheckpointKind = pl.Enum(("save", "load"))

COUNTERS = Table(
    "counters",
    "One telemetry value: of a step or an interval that begins then, or sampled. A sampled value is a row if "
    "it differs from the one before: it holds until the next of its rank, host, device and counter.",
    {
        "rank": RANK,
        "host": Column(pl.String, "Host that was sampled.", ""),
        "device": Column(
            pl.String,
            "GPU uuid as in `workers` (of an instance GPU/instance), network port, which DataLoader worker, "
            "or empty for the host.",
            "",
        ),
        "counter": Column(pl.String, "What was sampled, with its unit; without one, a count.", ""),
        "time_ns": Column(pl.Int64, "When, ns on that host's clock."),
        "value": Column(pl.Float64, "The value.", 0.0),
    },
    ("host", "device", "counter", "time_ns"),
)

CLOCK_SAMPLES = Table(
    "clock_samples",
    "What is needed to align this rank's clock with the others.",
    {
        "rank": RANK,
        "time_ns": Column(pl.Int64, "Wall clock (CLOCK_REALTIME), ns."),
        "monotonic_ns": Column(pl.Int64, "CLOCK_MONOTONIC_RAW at the same moment, ns; -1 unknown."),
        "peer_rank": Column(pl.Int32, "Rank whose clock was compared; -1 for the host's own two clocks."),
        "offset_ns": Column(pl.Int64, "This rank's clock minus the peer's, ns.", 0),
        "round_trip_ns": Column(
            pl.Int64, "Round trip of the exchange, ns: bounds the error of the offset.", 0
        ),
    },
    ("rank", "time_ns", "peer_rank"),
)

CHECKPOINTS = Table(
    "checkpoints",
    "One save or load of a file or folder of state by one rank, whole where it has a duration.",
    {
        "rank": RANK,
        "kind": Column(CheckpointKind, "Whether it was saved or loaded.", "save"),
        "start_ns": START,
        "duration_ns": Column(pl.Int64, "Until it was written or read, ns; -1 where that was not seen."),
        "stall_ns": Column(pl.Int64, "How long it held up the thread that trains, ns."),
        "bytes": Column(pl.Int64, "Size of what this rank wrote or read; -1 unknown."),
        "path": Column(pl.String, "The file or folder; empty where unknown.", ""),
        "inode": Column(pl.Int64, "Its number in the file system: a file that is renamed keeps it."),
        "modified_ns": Column(pl.Int64, "When it was last changed, by the file system."),
        "source": Column(pl.String, "The function that was called.", ""),
    },
    ("rank", "start_ns"),
)

STARTS = Table(
    "starts",
    "How one rank's process came to its first step. Moments are -1 where they did not come or were not seen.",
    {
        "rank": RANK,
        "scheduled_ns": Column(pl.Int64, "When the scheduler started the job."),
        "launched_ns": Column(pl.Int64, "When `dpro record` started the command."),
        "process_ns": Column(pl.Int64, "When the kernel started the process."),
        "imported_ns": Column(pl.Int64, "When it had imported torch."),
        "group_begin_ns": Column(pl.Int64, "When it asked for its process group."),
        "group_ns": Column(pl.Int64, "When it had that."),
        "work_ns": Column(pl.Int64, "When its loop first asked for a batch or for gradients."),
        "first_update_ns": Column(pl.Int64, "When its first step ended."),
        "restart": Column(pl.Int32, "How often torchrun had restarted it; -1 without torchrun."),
    },
    ("rank",),
)

WORKERS = Table(
    "workers",
    "Facts about one rank's process.",
    {
        "rank": RANK,
        "local_rank": Column(pl.Int32, "Rank within the host."),
        "world_size": Column(pl.Int32, "Number of ranks of the job."),
        "host": Column(pl.String, "Host name, empty where unknown.", ""),
        "clock": Column(
            pl.String, "Host's clock: ranks with the same share it. Boot id of the kernel; empty unknown.", ""
        ),
        "pid": Column(pl.Int64, "Process id."),
        "gpu_uuid": Column(pl.String, "GPU the rank computes on, or the instance of it.", ""),
        "gpu_pci": Column(pl.String, "Its PCI address, as `0000:c1:00.0`; empty where unknown.", ""),
        "gpu_name": Column(pl.String, "Its model.", ""),
        "dp": Column(pl.Int32, "Coordinate on the data-parallel axis."),
        "tp": Column(pl.Int32, "Coordinate on the tensor-parallel axis."),
        "pp": Column(pl.Int32, "Coordinate on the pipeline axis."),
        "cp": Column(pl.Int32, "Coordinate on the context-parallel axis."),
        "ep": Column(pl.Int32, "Coordinate on the expert-parallel axis."),
        **{
            f"{axis}_size": Column(pl.Int32, f"Ranks along the axis of `{axis}`, as the job's meshes say.")
            for axis in ("dp", "tp", "pp", "cp", "ep")
        },
        "started_ns": Column(pl.Int64, "When recording of the rank began."),
        "ended_ns": Column(pl.Int64, "When the process was last seen alive."),
        "exit_code": Column(pl.Int32, "Exit code; -1 where unknown or killed by a signal."),
        "exit_signal": Column(pl.Int32, "Signal that ended it; -1 for none or unknown."),
        "stack": Column(
            pl.String,
            "Where its main thread stood when no step had ended for long, innermost call first, one a line; "
            "empty where unknown.",
            "",
        ),
        "error": Column(
            pl.String,
            "Exception that ended it: type and message, then the calls it came through, innermost first, one "
            "a line; empty for none or unknown.",
            "",
        ),
        "failed_ns": Column(pl.Int64, "When that exception ended the script; -1 for none or unknown."),
        "left_ns": Column(
            pl.Int64,
            "When its interpreter went, all its calls saved; -1 where it was killed before, or unknown.",
        ),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("rank",),
)
