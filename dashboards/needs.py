"""Requirements of the views, and the sentence shown in place of a view whose requirement is not met.

Each function takes a run and a link, and returns one sentence; empty if the view has something to show. Most
look at the row counts of tables; other results are computed once per run, since every link needs them.
"""

from __future__ import annotations

import polars as pl

from dpro.analysis.unanswered import why_no_window
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.selection import ranges_of, ranges_text
from dpro.words import first_few

_RANKS_NAMED = 8

_NO_TELEMETRY = (
    "No telemetry was sampled: `dpro record` samples it while a job runs; imported traces have none."
)
NO_LAYOUT = (
    "How the ranks are laid out is not known: no device mesh, no description of a process group "
    "and no groups that cross each other imply it."
)
NO_CALL_STATES = (
    "The calls of this run do not say whether they finished: `dpro record` records that, "
    "and so do dumps of the flight recorder."
)
NO_HANG = "The calls of this run show no hang."
_NO_PAIRS = (
    "No two ranks are known to have met in a collective or exchanged a message: "
    "the calls of different ranks could not be matched."
)
_NO_OTHER = (
    "There is nothing to compare with: choose another run above, or give one to "
    "`dpro dashboard RUN --against OTHER`."
)


def anything(loaded: Loaded, _link: Link) -> str:
    """Require steps, operators or calls."""
    rows = loaded.num_rows
    if any(rows[table.name] for table in (STEPS, SPANS, COLLECTIVES)):
        return ""
    return "The run has no steps, operators or collective calls: `dpro info` lists what it has."


def steps(loaded: Loaded, _link: Link) -> str:
    """Require the times of steps."""
    if loaded.num_rows[STEPS.name]:
        return ""
    return "No step was recorded, so there is no value per step: traces mark them as `ProfilerStep#`."


def windows(loaded: Loaded, _link: Link) -> str:
    """Require operators and kernels."""
    if loaded.num_rows[SPANS.name]:
        return ""
    why = why_no_window(loaded.run) or "the run has no operators or kernels"
    return f"This view needs deep windows, and none was recorded: {why}."


def calls(loaded: Loaded, link: Link) -> str:
    """Require collective calls in deep windows."""
    if loaded.num_rows[COLLECTIVES.name]:
        return windows(loaded, link)
    ranks = len(loaded.run.manifest.ranks)
    return "No collective was recorded: " + (
        "the only recorded rank may have no peers." if ranks == 1 else "the traces of its ranks have none."
    )


def call_states(loaded: Loaded, _link: Link) -> str:
    """Require a hang, or the stacks of stalled ranks."""
    stood = loaded.workers["stack"] != ""
    if stood.any() or any(loaded.run.path.glob("findings/hang-*")):
        return ""
    if not loaded.has_call_states:
        return NO_CALL_STATES
    return "" if loaded.hangs else NO_HANG


def layout(loaded: Loaded, _link: Link) -> str:
    """Require the job's axes of parallelism."""
    return "" if loaded.mesh.axes else NO_LAYOUT


def pairs(loaded: Loaded, link: Link) -> str:
    """Require calls of several ranks in deep windows."""
    if len(loaded.run.manifest.ranks) == 1:
        return "One rank was recorded: there are no pairs of ranks to compare."
    if why := calls(loaded, link):
        return why
    return "" if loaded.may_have_pairs() else _NO_PAIRS


def operations(loaded: Loaded, _link: Link) -> str:
    """Require whole operations of a pipeline with several stages."""
    pipeline = loaded.pipeline
    if pipeline is None or pipeline.rows.is_empty():
        return (
            "No forward or backward pass of a micro-batch is known: `dpro record` records them of jobs that "
            "use a pipeline; traces have them as whole operations or as ranges."
        )
    return "" if pipeline.num_stages > 1 else "The job has one stage: there is no pipeline."


def telemetry(loaded: Loaded, _link: Link) -> str:
    """Require sampled counters."""
    return "" if loaded.num_rows[COUNTERS.name] else _NO_TELEMETRY


def missing_ranks(loaded: Loaded) -> str:
    """Return which ranks of the job were not recorded, in one sentence; empty if all were."""
    manifest = loaded.run.manifest
    absent = manifest.missing_ranks
    if not absent:
        return ""
    return (
        f"{len(absent)} of {manifest.world_size} ranks were not recorded: {first_few(absent, _RANKS_NAMED)}."
    )


def untimed_steps(timed: pl.DataFrame) -> str:
    """Return which steps have no time and are thus not drawn, in one sentence; empty if all have one.

    Args:
        timed: table `steps` with the columns of `dpro.timed.with_times`.
    """
    numbered = timed.filter(pl.col("step") >= 0)
    drawn = numbered.filter(pl.col("time_ns") > 0)["step"].unique()
    absent = sorted({*numbered["step"].to_list()} - {*drawn.to_list()})
    if not absent or drawn.is_empty():
        return ""
    clock = "GPU" if numbered["by_device"].any() else "host"
    what = "step" if len(absent) == 1 else "steps"
    return f"Not drawn: {what} {ranges_text(ranges_of(absent), _RANKS_NAMED)}, which no {clock} timed."


def another(loaded: Loaded, link: Link) -> str:
    """Require a run to compare with, and deep windows of both.

    Raises:
        DproError: the run that the link names cannot be opened.
    """
    other = loaded.against(link)
    if other is None:
        return _NO_OTHER
    lacking = windows(loaded, link), windows(other, link)
    return lacking[0] or (f"{link.against}: {lacking[1]}" if lacking[1] else "")
