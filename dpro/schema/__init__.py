"""The tables of a run directory: every column declared once, with its type, unit and one sentence.

Defines `TABLES`; `conform` checks a frame against its declaration before it is written. `dpro.replay` builds
the graph from tables. `make schema` generates `docs/schema.md` from these declarations.

Rules of all tables: times are int64 nanoseconds on the clock of the recording host and are never rewritten;
ids are int64 with -1 for none; intervals are half open; units are in the names.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from dpro.members import is_members_text
from dpro.schema.members import texts_of_lists
from dpro.table import NAN, Column, Table
from dpro.table import conform as conform

# Columns that tables share.

RANK = Column(pl.Int32, "Global rank of the process, -1 where a row belongs to no rank.")
WINDOW = Column(pl.Int32, "Which deep window of the recording; spans of different windows never touch.", 0)
START = Column(pl.Int64, "Start, ns on the recording host's clock.")
DURATION = Column(pl.Int64, "Duration in ns; -1 where the source does not know it.")
GROUP_RANKS = Column(
    pl.String,
    "Global ranks of the group, as `0-7`, `0-56:8` or `0,3`; empty where unknown.",
    "",
    texts_of_lists,
    is_members_text,
)
RECORDER = "dpro recorder"  # value of column `source` in rows that dpro recorded itself


# Tables of a rank's work: intervals on its lanes, communication, and dependencies.

SPAN_KINDS = (
    "cpu_op",  # an operator on a CPU thread
    "runtime",  # a CUDA/HIP runtime or driver call on a CPU thread
    "kernel",  # a kernel on a GPU stream
    "memcpy",  # a copy on a GPU stream
    "memset",  # a fill on a GPU stream
    "annotation",  # a named range on a CPU thread
    "gpu_annotation",  # the GPU work of a named range, on a GPU stream
    "python",  # a Python call
    "overhead",  # the profiler's own work
)
GPU_WORK_KINDS = ("kernel", "memcpy", "memset")
SYNC_KINDS = ("event_record", "stream_wait_event", "event_sync", "stream_sync", "device_sync")
MEANWHILE = "waits for "  # prefix of the names of annotations that are calls of another actor
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

# Tables of training: steps, operations of pipelines, gradients and the models they belong to.

OPERATION_KINDS = (
    "forward",  # of a micro-batch through a model chunk, with the loss where the chunk makes one
    "backward",  # gradients of inputs and of weights
    "backward_input",  # gradients of inputs alone, which the previous stage waits for
    "backward_weight",  # gradients of weights alone, which no stage waits for
    "forward_send",
    "forward_recv",
    "backward_send",
    "backward_recv",
    "optimizer",  # the work after a step's last operation of the other kinds
)
OperationKind = pl.Enum(OPERATION_KINDS)

STEPS = Table(
    "steps",
    "One training step of one rank.",
    {
        "rank": RANK,
        "step": Column(pl.Int64, "Number of the step, the same on all ranks."),
        "window": Column(pl.Int32, "Deep window that covers the step; -1 for none."),
        "beside": Column(
            pl.Int32, "Deep window of other steps that was being recorded in this one; -1 for none."
        ),
        "start_ns": START,
        "duration_ns": DURATION,
        "source": Column(
            pl.String, "What marked the boundary: optimizer hook, ProfilerStep, annotation, …", ""
        ),
        "gpu_step_ns": Column(
            pl.Int64,
            "How long the step took on its device, its idle time included: between timing events at the "
            "step's ends; -1 unknown. The host may only have enqueued the step in `duration_ns`.",
        ),
    },
    ("rank", "step", "start_ns"),
)

PASSES = Table(
    "passes",
    "A backward pass in one of the steps at whose beginning clocks were read: those of gradients that the "
    "training loop asks for.",
    {
        "rank": RANK,
        "step": Column(pl.Int64, "Number of the step that it is in."),
        "start_ns": START,
        "duration_ns": DURATION,
        "gpu_start_ns": Column(
            pl.Int64, "How long after the beginning of the step its device came to it; -1 unknown."
        ),
        "gpu_duration_ns": Column(
            pl.Int64, "How long it took on the device, its idle time included; -1 unknown."
        ),
        "recorder_ns": Column(pl.Int64, "What the recorder took at its beginning and end.", 0),
    },
    ("rank", "step", "start_ns"),
)

OPERATIONS = Table(
    "operations",
    "A forward or backward of one micro-batch on one model chunk of a pipeline stage, or a message of it.",
    {
        "rank": RANK,
        "step": Column(pl.Int64, "Step it is in; -1 outside the steps of its rank."),
        "stage": Column(pl.Int64, "Place of the rank on the pipeline axis, from 0."),
        "chunk": Column(pl.Int64, "Number of the chunk among those of its stage, in the order of the model."),
        "place": Column(pl.Int64, "Number of the chunk in the order of the model over all stages, from 0."),
        "micro_batch": Column(pl.Int64, "Number of the micro-batch in its step, from 0."),
        "kind": Column(OperationKind, "What it does."),
        "start_ns": START,
        "duration_ns": DURATION,
        "peer": Column(pl.Int32, "Rank that a message goes to or comes from; -1 for work."),
        "source": Column(pl.String, "What recorded it and, where known, the schedule.", ""),
    },
    ("rank", "start_ns", "place", "micro_batch"),
)

BUCKETS = Table(
    "buckets",
    "One gradient bucket of a DDP (torch's or Megatron-core's) or FSDP module, or buffer of DeepSpeed.",
    {
        "rank": RANK,
        "module": Column(pl.Int32, "Which wrapped module of the process, in order of construction.", 0),
        "bucket": Column(pl.Int32, "Order in which buckets are communicated."),
        "bytes": Column(pl.Int64, "Size."),
        "parameters": Column(
            pl.List(pl.Int32), "Indices of its parameters in the module; empty where unknown.", None
        ),
        "names": Column(pl.List(pl.String), "Their names; empty where unknown.", None),
        "parameter_bytes": Column(pl.List(pl.Int64), "Their sizes; empty where unknown.", None),
        "shapes": Column(pl.List(pl.List(pl.Int64)), "Their shapes; empty where unknown.", None),
        "hook": Column(
            pl.String, "What communicates it in place of a plain all-reduce; empty for none or unknown.", ""
        ),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("rank", "module", "bucket"),
)

MODEL_CALLS = Table(
    "model_calls",
    "One of a few calls of a model in training that were met: the outermost module, and what it was given. "
    "Elements are those before FSDP shards them, of the rank's part in tp.",
    {
        "rank": RANK,
        "time_ns": Column(pl.Int64, "When the rank was in it."),
        "model": Column(pl.Int32, "Which model of the process, in the order in which they were met.", 0),
        "name": Column(pl.String, "Its class.", ""),
        "parameters": Column(pl.Int64, "Elements of its parameters; -1 unknown."),
        "matrices": Column(pl.Int64, "Elements of weights with two dimensions, but for embeddings."),
        "trained_matrices": Column(pl.Int64, "Those of them that get gradients."),
        "tensors": Column(pl.Int64, "Elements of weights with more dimensions, as of convolutions."),
        "experts": Column(pl.Boolean, "Whether modules of it are called experts.", False),
        "shapes": Column(pl.List(pl.List(pl.Int64)), "Shapes of the tensors that it was given.", None),
        "dtypes": Column(pl.List(pl.String), "Their element types.", None),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("rank", "time_ns", "model"),
)

CODECS = Table(
    "codecs",
    "What one codec made of the gradients of one bucket in one step, on a copy of them: `compress:probe`.",
    {
        "rank": RANK,
        "step": Column(pl.Int64, "Number of the step."),
        "module": Column(pl.Int32, "Which wrapped module, as in `buckets`.", 0),
        "bucket": Column(pl.Int32, "Which bucket of it, as in `buckets`."),
        "names": Column(pl.List(pl.String), "Parameters of the bucket.", None),
        "codec": Column(pl.String, "As the edit `compress` has it: to=bf16, powersgd_rank=4, topk=0.01.", ""),
        "elements": Column(pl.Int64, "Gradients in the bucket."),
        "square_norm": Column(pl.Float64, "Sum of the squares of the rank's own gradients.", NAN),
        "square_error": Column(pl.Float64, "Sum of the squares of what the codec loses of them.", NAN),
        "encode_ns": Column(pl.Int64, "Time to compress them, the device's work included."),
        "decode_ns": Column(pl.Int64, "Time to make gradients of it again."),
    },
    ("rank", "step", "module", "bucket", "codec"),
)

SENSITIVITIES = Table(
    "sensitivities",
    "What one module loses at one precision, and what that may cost in loss: `precision:probe`.",
    {
        "rank": RANK,
        "module": Column(pl.String, "Name of the module, as `--modules` records it.", ""),
        "precision": Column(pl.String, "bf16, fp16, fp8 or int8.", ""),
        "elements": Column(pl.Int64, "Elements of its weight."),
        "square_norm": Column(pl.Float64, "Sum of the squares of the weight.", NAN),
        "square_error": Column(pl.Float64, "Sum of the squares of what rounding to it changes.", NAN),
        "trace": Column(pl.Float64, "Trace of the Hessian of the loss over the weight, estimated.", NAN),
        "trace_error": Column(pl.Float64, "Standard error of that; -1 where it is not known.", -1.0),
        "method": Column(pl.String, "hutchinson, or fisher where gradients cannot be derived again.", ""),
        "batches": Column(pl.Int32, "Batches that were looked at."),
        "loss": Column(pl.Float64, "Mean loss of these batches.", NAN),
    },
    ("rank", "module", "precision"),
)


# Tables of the processes of a job and their hosts: telemetry, clocks, checkpoints, starts, facts.

CheckpointKind = pl.Enum(("save", "load"))
StartPartKind = pl.Enum(("import", "process_group"))

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

LOSS_KINDS = (
    "loss",  # a number whose gradients were computed
    "grad_norm",  # a norm of gradients that a torch function returned to the job
)
LossKind = pl.Enum(LOSS_KINDS)

LOSSES = Table(
    "losses",
    "A loss or a norm of gradients on one rank, when the host asked for it. Of a tensor that is spread over "
    "ranks it is the part of this one.",
    {
        "rank": RANK,
        "step": Column(pl.Int64, "Step in which it was; -1 unknown."),
        "kind": Column(LossKind, "Which of both.", "loss"),
        "time_ns": Column(pl.Int64, "When, ns on that host's clock."),
        "value": Column(pl.Float64, "The number, of a device rounded to 32 bits; may not be finite.", NAN),
        "scaled": Column(pl.Boolean, "Whether a GradScaler skips updates that are not finite.", False),
    },
    ("rank", "time_ns"),
)

OUT_OF_MEMORY = Table(
    "out_of_memory",
    "An allocation on a GPU that was refused, the first ones of a process: what was asked for, and what held "
    "the memory.",
    {
        "rank": RANK,
        "time_ns": Column(pl.Int64, "When it was refused."),
        "device": Column(pl.Int32, "Number of the GPU in the process."),
        "requested_bytes": Column(pl.Int64, "What was asked for; -1 unknown, as in all of these sizes."),
        "total_bytes": Column(pl.Int64, "Memory of the GPU, or what of it the process may take."),
        "free_bytes": Column(pl.Int64, "Of the GPU, in no process's hands."),
        "allocated_bytes": Column(pl.Int64, "In use, by PyTorch's allocator."),
        "reserved_bytes": Column(pl.Int64, "What that allocator has of the GPU, in use or not."),
        "largest_free_bytes": Column(pl.Int64, "The largest piece of it that is not in use."),
        "refused": Column(pl.Int64, "Allocations that were refused so far."),
        "phase": Column(pl.String, "forward, backward or optimizer; empty where unknown.", ""),
        "module": Column(pl.String, "Path and class of the module that asked; empty where unknown.", ""),
        "calls": Column(pl.String, "Calls it came through, innermost first, one a line.", ""),
        "history": Column(pl.Boolean, "Whether the lines that allocated were being recorded.", False),
        "kinds": Column(
            pl.List(pl.String),
            "What held memory, largest first: parameters, buffers, gradients, optimizer state, activations "
            "(with a gradient), other tensors, and what is held by no Python object.",
            None,
        ),
        "names": Column(
            pl.List(pl.String),
            "Of which modules, layers counted together as `*`; shape and type of activations and other "
            "tensors; of the last the line that allocated it, empty where unknown.",
            None,
        ),
        "bytes": Column(pl.List(pl.Int64), "Bytes of each.", None),
    },
    ("rank", "time_ns"),
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

START_PARTS = Table(
    "start_parts",
    "One import or process group of one rank's process on its way to its first step. An import that is part "
    "of another one has no row, nor has what was imported before torch.",
    {
        "rank": RANK,
        "kind": Column(StartPartKind, "What it was.", "import"),
        "name": Column(pl.String, "The module, or the group by name.", ""),
        "start_ns": START,
        "duration_ns": Column(pl.Int64, "How long it took, ns: of a group with the wait for its members."),
        "group_ranks": GROUP_RANKS,
        "backend": Column(pl.String, "Backends of the group, as `gloo, nccl`; empty unknown.", ""),
        "purpose": Column(pl.String, "What the job calls the group (`group_desc`).", ""),
    },
    ("rank", "start_ns"),
)

WORKERS = Table(
    "workers",
    "Facts about one rank's process.",
    {
        "rank": RANK,
        "local_rank": Column(pl.Int32, "Rank within the host."),
        "world_size": Column(pl.Int32, "Number of ranks of the job."),
        "role": Column(pl.String, "Worker group: what Ray's actors are called; empty for none.", ""),
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
            "Calls of its main thread when no step had ended for long, innermost first, one a line; "
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
            "When its interpreter exited, with all its calls saved; -1 if killed before that, or unknown.",
        ),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("rank",),
)


# Tables of a server: the requests that it answered, and the iterations of its engine.

OUTCOMES = ("finished", "aborted", "unknown")
ITERATION_KINDS = (
    "prefill",  # only prompts, or parts of them
    "decode",  # one token, or a few speculated ones, for each request in the batch
    "mixed",  # prefill and decode in one batch
    "unknown",
)

Outcome = pl.Enum(OUTCOMES)
IterationKind = pl.Enum(ITERATION_KINDS)

REPLICA = Column(pl.Int64, "Number of the copy of the engine, from 0.", 0)

REQUESTS = Table(
    "requests",
    "One request that a server answered. Moments are -1 where they did not come or are unknown. Those of a "
    "log that counts from its own start are on a clock of their own.",
    {
        "replica": REPLICA,
        "request": Column(pl.Int64, "Number of the request in order of arrival, unique within the run."),
        "name": Column(pl.String, "Its id in the engine or the log, empty where it has none.", ""),
        "arrival_ns": Column(pl.Int64, "When the server, or the client that measured, had it."),
        "scheduled_ns": Column(pl.Int64, "When its first iteration began."),
        "first_token_ns": Column(pl.Int64, "When its first token was produced."),
        "end_ns": Column(pl.Int64, "When its last token was produced, or it was aborted."),
        "prompt_tokens": Column(pl.Int64, "Tokens of its prompt; -1 unknown."),
        "cached_tokens": Column(pl.Int64, "Tokens of its prompt found in the prefix cache; -1 unknown."),
        "output_tokens": Column(pl.Int64, "Tokens that were made; -1 unknown."),
        "evictions": Column(
            pl.Int64, "How often it lost its blocks of the KV cache, and was computed again; -1 unknown.", -1
        ),
        "evicted_ns": Column(pl.Int64, "Total time from each of these losses until it ran again.", 0),
        "outcome": Column(Outcome, "How it ended.", "unknown"),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("replica", "arrival_ns", "request"),
)

ITERATIONS = Table(
    "iterations",
    "One iteration of the engine of one rank: one pass of one batch through the model.",
    {
        "rank": RANK,
        "replica": REPLICA,
        "iteration": Column(pl.Int64, "Number of the iteration on its rank, from 0."),
        "start_ns": START,
        "duration_ns": DURATION,
        "kind": Column(IterationKind, "What its batch consists of.", "unknown"),
        "prefill_tokens": Column(pl.Int64, "Tokens of prompts in the batch; -1 unknown."),
        "decode_tokens": Column(pl.Int64, "Tokens that follow a prompt in the batch; -1 unknown."),
        "num_requests": Column(pl.Int64, "Requests in the batch; -1 unknown."),
        "context_tokens": Column(
            pl.Int64, "Tokens in the KV cache that the batch attends to, summed over requests; -1 unknown."
        ),
        "waiting": Column(pl.Int64, "Requests that waited when the batch was made; -1 unknown."),
        "kv_waiting": Column(
            pl.Int64, "Requests of those, where no blocks of the KV cache were free for one; -1 unknown.", -1
        ),
        "evicted": Column(
            pl.Int64, "Requests that lost their blocks of the KV cache when it was made; -1 unknown.", -1
        ),
        "source": Column(pl.String, "What its batch was read from: hook, annotation, shapes.", ""),
    },
    ("rank", "start_ns", "iteration"),
)


def kind_of_batch() -> pl.Expr:
    """Return an expression: the kind of an iteration, by its tokens of prefill and decode."""
    prefill, decode = pl.col("prefill_tokens"), pl.col("decode_tokens")
    return (
        pl.when((prefill < 0) | (decode < 0))
        .then(pl.lit("unknown"))
        .when(decode == 0)
        .then(pl.lit("prefill"))
        .when(prefill == 0)
        .then(pl.lit("decode"))
        .otherwise(pl.lit("mixed"))
    )


_ALL = (
    SPANS, COLLECTIVES, SENDS, PROCESS_GROUPS, SYNCS, DEPENDENCIES, STEPS, PASSES, OPERATIONS, BUCKETS,
    MODEL_CALLS,
    CODECS, SENSITIVITIES, LOSSES, CHECKPOINTS, OUT_OF_MEMORY, COUNTERS, CLOCK_SAMPLES, STARTS, START_PARTS,
    WORKERS,
    REQUESTS, ITERATIONS,
)  # fmt: skip
TABLES: Mapping[str, Table] = {table.name: table for table in _ALL}
