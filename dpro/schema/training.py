"""Tables of training: steps, operations of pipelines, gradients and the models they belong to."""

from __future__ import annotations

import polars as pl

from dpro.schema.shared import DURATION, RANK, START
from dpro.table import NAN, Column, Table

OPERATION_KINDS = (
    "forward",  # of a micro-batch through a model chunk, with the loss where the chunk makes one
    "backward",  # gradients of inputs and of weights
    "backward_input",  # gradients of inputs alone, which the stage before waits for
    "backward_weight",  # gradients of weights alone, which can wait
    "forward_send",
    "forward_recv",
    "backward_send",
    "backward_recv",
    "optimizer",  # what follows the last of them in a step
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
