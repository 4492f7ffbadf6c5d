"""The tables of a run directory: every column declared once, with its type, unit and one sentence.

In: nothing. Out: `TABLES`; `conform` checks a frame against its declaration before it is written.
How tables become a graph is up to `dpro.replay`. `make schema` generates `docs/schema.md` from here.

execution   what a rank ran: spans, communication, and what waits for what
training    steps, operations of pipelines, gradients and the models they belong to
job         processes and hosts: telemetry, clocks, checkpoints, starts, facts
serving     requests of a server, iterations of its engine
shared      columns that tables share
members     columns that have the ranks of groups

Rules that all tables share: times are int64 nanoseconds on the clock of the host that recorded them and
are never rewritten; ids are int64 and -1 means none; intervals are half open; units are in the names.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpro.schema.execution import COLLECTIVES as COLLECTIVES
from dpro.schema.execution import DEPENDENCIES as DEPENDENCIES
from dpro.schema.execution import GPU_WORK_KINDS as GPU_WORK_KINDS
from dpro.schema.execution import PROCESS_GROUPS as PROCESS_GROUPS
from dpro.schema.execution import SENDS as SENDS
from dpro.schema.execution import SPAN_KINDS as SPAN_KINDS
from dpro.schema.execution import SPANS as SPANS
from dpro.schema.execution import SYNC_KINDS as SYNC_KINDS
from dpro.schema.execution import SYNCS as SYNCS
from dpro.schema.job import CHECKPOINTS as CHECKPOINTS
from dpro.schema.job import CLOCK_SAMPLES as CLOCK_SAMPLES
from dpro.schema.job import COUNTERS as COUNTERS
from dpro.schema.job import STARTS as STARTS
from dpro.schema.job import WORKERS as WORKERS
from dpro.schema.serving import ITERATION_KINDS as ITERATION_KINDS
from dpro.schema.serving import ITERATIONS as ITERATIONS
from dpro.schema.serving import OUTCOMES as OUTCOMES
from dpro.schema.serving import REQUESTS as REQUESTS
from dpro.schema.training import BUCKETS as BUCKETS
from dpro.schema.training import CODECS as CODECS
from dpro.schema.training import MODEL_CALLS as MODEL_CALLS
from dpro.schema.training import OPERATION_KINDS as OPERATION_KINDS
from dpro.schema.training import OPERATIONS as OPERATIONS
from dpro.schema.training import SENSITIVITIES as SENSITIVITIES
from dpro.schema.training import STEPS as STEPS
from dpro.table import Table
from dpro.table import conform as conform

_ALL = (
    SPANS, COLLECTIVES, SENDS, PROCESS_GROUPS, SYNCS, DEPENDENCIES, STEPS, OPERATIONS, BUCKETS, MODEL_CALLS,
    CODECS, SENSITIVITIES, CHECKPOINTS, COUNTERS, CLOCK_SAMPLES, STARTS, WORKERS, REQUESTS, ITERATIONS,
)  # fmt: skip
TABLES: Mapping[str, Table] = {table.name: table for table in _ALL}
