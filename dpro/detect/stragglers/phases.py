"""Attribution of lateness to a part of the step, by backward passes, which are recorded without deep windows.

Takes findings of ranks whose calls come late, and tables `passes`, `steps` and `collectives`. Returns the
findings with the phase: before the backward pass, in it, or after it. Ranks wait for each other in
collectives, so a phase with collectives takes equally long on all of them, whichever is slow. So a rank is
compared with its peers in the phases without any; the remainder of its excess belongs to the phase with
collectives. If several have them (FSDP gathers parameters in both passes), the remainder is not divided.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import polars as pl

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.observations import Observation

LATE = "longer-work"  # kind of the first observation of findings from calls
MOST = 0.6  # least share of a rank's excess in the phase that is named
ALL = 0.95  # share of the excess that is worded as all of it
MIN_STEPS = 5  # fewest steps in which a rank is compared
PHASES = {  # phase: its name as a location in the code
    "before": "the forward pass or what precedes it",
    "backward": "the backward pass",
    "after": "the optimizer update or what else follows the backward pass",
}


def with_phases(
    findings: list[Finding],
    passes: pl.DataFrame,
    steps: pl.DataFrame,
    collectives: pl.DataFrame,
    *,
    on_gpus: bool,
    ahead: Collection[int],
) -> list[Finding]:
    """Add to findings of one late rank the phase in which it takes longer.

    Args:
        passes, steps, collectives: rows of those tables, times on each host's own clock.
        on_gpus: whether devices compute; then their times count, not those of the hosts that launch.
        ahead: ranks whose hosts are far ahead of their devices; there, the host is late.
    """
    lateness_of = {place: said for place, one in enumerate(findings) if (said := _lateness(one)) is not None}
    if passes.is_empty() or not lateness_of:
        return findings
    meeting = phases_with_collectives(passes, steps, collectives)
    times_of = cache(lambda by_device: phase_times(passes, steps, by_device=by_device))
    placed = [*findings]
    for place, lateness in lateness_of.items():
        (rank,) = findings[place].ranks
        times = times_of(on_gpus and rank not in ahead)
        placed[place] = _in_phase(findings[place], lateness, _excess(rank, lateness, times, meeting))
    return placed


def phase_times(passes: pl.DataFrame, steps: pl.DataFrame, *, by_device: bool) -> pl.DataFrame:
    """Return how long steps were in each phase.

    Args:
        by_device: by events of the device instead of the host's clock.

    Returns:
        `rank`, `step`, and `before`, `backward`, `after`, in ns. Forward computing between the passes of a
        step counts as `before`. Steps that were not timed entirely are left out, and those that a deep window
        slows.
    """
    start, duration = ("gpu_start_ns", "gpu_duration_ns") if by_device else ("start_ns", "duration_ns")
    begun, whole = (pl.lit(0), "gpu_step_ns") if by_device else (pl.col("begun_ns"), "took_ns")
    end = pl.col(start) + pl.col(duration)
    of_steps = passes.group_by("rank", "step").agg(
        known=(pl.col(duration) >= 0).all(), backward=pl.col(duration).sum(), last=end.max()
    )
    undisturbed = steps.filter((pl.col("window") < 0) & (pl.col("beside") < 0))
    return (
        undisturbed.select("rank", "step", "gpu_step_ns", begun_ns="start_ns", took_ns="duration_ns")
        .join(of_steps.filter("known"), on=["rank", "step"])
        .with_columns(after=pl.col(whole) - (pl.col("last") - begun))
        .with_columns(before=pl.col(whole) - pl.col("backward") - pl.col("after"))
        .filter((pl.col(whole) > 0) & (pl.col("before") >= 0) & (pl.col("after") >= 0))
        .select("rank", "step", *PHASES)
        .sort("rank", "step")
    )


def phases_with_collectives(
    passes: pl.DataFrame, steps: pl.DataFrame, collectives: pl.DataFrame
) -> frozenset[str]:
    """Return the phases in which ranks call collectives in most steps whose passes were recorded."""
    of_steps = passes.group_by("rank", "step").agg(
        first=pl.col("start_ns").min(), last=(pl.col("start_ns") + pl.col("duration_ns")).max()
    )
    begun = steps.select(
        "rank", "step", begun_ns="start_ns", ended_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    timed = begun.join(of_steps, on=["rank", "step"]).sort("begun_ns")
    calls = collectives.filter(pl.col("enqueued_ns") >= 0).select("rank", at="enqueued_ns").sort("at")
    within = calls.join_asof(timed, left_on="at", right_on="begun_ns", by="rank", check_sortedness=False)
    within = within.filter(pl.col("at") < pl.col("ended_ns"))
    phase = (
        pl.when(pl.col("at") < pl.col("first")).then(pl.lit("before"))
        .when(pl.col("at") < pl.col("last")).then(pl.lit("backward"))
        .otherwise(pl.lit("after"))
    )  # fmt: skip
    called = within.select("rank", "step", phase=phase).unique().group_by("phase").len()
    usual = called.filter(pl.col("len") > timed.height / 2)
    return frozenset(usual["phase"].to_list())


def _lateness(finding: Finding) -> Observation | None:
    """Return the observation of one rank's lateness in a finding from calls, with its steps; else None."""
    late = [one for one in finding.observations if one.kind == LATE and "last_step" in one.values]
    return late[0] if len(late) == 1 and len(finding.ranks) == 1 and finding.place is None else None


def _excess(
    rank: int, lateness: Observation, times: pl.DataFrame, meeting: Collection[str]
) -> dict[str, float]:
    """Return how much longer than its peers a rank is in each known phase, in ns per step.

    The steps of the finding are compared, and earlier ones where few of their passes are recorded.
    """
    values = lateness.values
    longer_ns, last, count = (float(values[name]) for name in ("longer_ns", "last_step", "steps"))  # type: ignore[arg-type]
    until = times.filter(pl.col("step") <= last)
    enough = pl.col("step").rank(descending=True).over("rank") <= MIN_STEPS
    latest = until.filter((pl.col("step") > last - count) | enough)
    typical = latest.group_by("rank").agg(pl.len(), *(pl.col(phase).median() for phase in PHASES))
    typical = typical.filter(pl.col("len") >= MIN_STEPS)
    late, peers = typical.filter(pl.col("rank") == rank), typical.filter(pl.col("rank") != rank)
    if late.is_empty() or peers.is_empty():
        return {}
    excess = {
        phase: float(late[phase][0]) - float(peers[phase].median())  # type: ignore[arg-type]
        for phase in PHASES
        if phase not in meeting
    }
    if len(meeting) == 1:
        (phase,) = meeting
        excess[phase] = longer_ns - sum(excess.values())
    return excess


def _in_phase(finding: Finding, lateness: Observation, excess: dict[str, float]) -> Finding:
    """Add the phase that accounts for most of the lateness; without one, the finding is unchanged."""
    longer_ns = float(lateness.values["longer_ns"])  # type: ignore[arg-type]
    phase = max(excess, key=excess.__getitem__, default="")
    if not phase or excess[phase] < MOST * longer_ns:
        return finding
    much = "{phase_ns} of it" if excess[phase] < ALL * longer_ns else "all of it"
    located = lateness.then(f"; {much} in {{phase}}", phase_ns=excess[phase], phase=PHASES[phase])
    observations = tuple(located if one is lateness else one for one in finding.observations)
    return replace(finding, observations=observations, place=CodeLocation(PHASES[phase]))
