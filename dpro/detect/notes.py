"""Notes that are not findings: pauses on purpose, a rank that others wait for, idle GPUs.

Takes the context of a run and its findings; returns sentences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from dpro.detect.baseline import Baseline, waits
from dpro.detect.context import Context, Need
from dpro.detect.findings import Finding, ranks_of
from dpro.detect.host_bound import note_idle_gpus
from dpro.detect.load_model import CLASS as UNEVEN_DATA
from dpro.detect.observations import observe_replay
from dpro.detect.stragglers.causes import excess_by_cause
from dpro.detect.stragglers.replayed import gains_of
from dpro.replay.alignment.match import NUMBERED_APART
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.peers import peers_of
from dpro.replay.timeline import step_times
from dpro.replay.whatif.edits.heal import Shortened, healing_in_each_step
from dpro.schema import LOSSES, SPANS
from dpro.units import format_duration


def notes_of(context: Context, findings: Sequence[Finding]) -> list[str]:
    """Return what is worth a sentence but not a finding, one line each."""
    described = []
    watched = Need.STEPS in context.has and context.run.manifest.options.get("watch_loss")
    if watched and not context.run.num_rows(LOSSES):
        described.append("--watch-loss saw no loss: `backward` was never called on a single number")
    described += context.pauses.described if Need.ALWAYS_ON in context.has else []
    if Need.GRAPH not in context.has or not context.run.num_rows(SPANS):
        return described
    assert context.breakdown is not None
    return [
        *described,
        *note_waiting(context.recorded, findings),
        *note_idle_gpus(context.recorded, context.breakdown),
    ]


# A rank that causes most waiting, at no cost.

MIN_WAITING = 0.1  # least waiting, as a share of the step, mean over ranks
ONCE = 0.8  # share of the wait for a rank in one step, above which that step is named
REMAINS = 0.5  # share of the waiting with the rank healed above which others are as late


def note_waiting(baseline: Baseline, findings: Sequence[Finding]) -> list[str]:
    """Return a line on the rank that others mostly wait for in collectives, unless a finding names it.

    Mostly means more than halfway from an equal share to all of the waiting.
    """
    if any(finding.class_ == UNEVEN_DATA for finding in findings):
        return []
    graph = baseline.graph
    measured = _in_whole_groups(graph, waits(graph, graph.nodes.measured_start))
    ranks, steps = measured["rank"].n_unique(), measured["step"].n_unique()
    total = float(measured["wait_ns"].sum())
    if not total:
        return []
    caused = measured.group_by("last").agg(pl.col("wait_ns").sum()).sort("wait_ns", "last")
    rank, most = caused.row(-1)
    named = ranks_of(finding for finding in findings if not finding.of_job)
    if rank in named or most < (1 + 1 / ranks) / 2 * total:
        return []
    per = ranks * steps
    timed = step_times(graph, graph.nodes.measured_start, graph.nodes.measured_end)
    step_ns = float(timed["duration_ns"].to_numpy().mean())
    if total < MIN_WAITING * per * step_ns:
        return []
    for_it = measured.filter(pl.col("last") == rank)
    by_step = for_it.group_by("step").agg(pl.col("wait_ns").sum()).sort("wait_ns")
    step, worst = by_step.row(-1)
    once = f", nearly all in step {step}" if steps > 1 and worst >= ONCE * most else ""
    seen = (
        f"each rank waits {format_duration(total / per)} per step for others in collectives, "
        f"{format_duration(most / per)} ({most / total:.0%}) of it for rank {rank}{once}; it comes last to "
        f"{for_it['instance'].n_unique()} of {measured['instance'].n_unique()}"
    )
    return [f"{seen}; {_why_it_costs_little(baseline, rank, most / per)}"]


def _why_it_costs_little(baseline: Baseline, rank: int, waited_ns: float) -> str:
    """Return what healing a rank would save, and what the others would wait for then."""
    graph, work = baseline.graph, baseline.work
    if not peers_of(baseline.teams, rank):
        return "no other rank makes the same calls for comparison, so its cost is not known"
    healed = Shortened(healing_in_each_step(rank, work))
    gains = gains_of(baseline, work, [[rank]], healed)
    step, saved = float(gains.base.mean()), float(gains.saved.mean())
    said = observe_replay(f"rank {rank} as fast as its peers in each step", step - saved, step).text
    before = _in_whole_groups(graph, waits(graph, baseline.timeline.start))
    changed = baseline.under(healed)
    after = _in_whole_groups(changed.graph, waits(changed.graph, changed.timeline.start))
    left = float(after["wait_ns"].sum())
    if left < REMAINS * float(before["wait_ns"].sum()):
        return f"{said}: the work that runs during these waits takes as long"
    after_it, most = after.group_by("last").agg(pl.col("wait_ns").sum()).sort("wait_ns", "last").row(-1)
    if after_it == rank:
        return f"{said}: {_why_late(baseline, rank, waited_ns)}"
    per = before["rank"].n_unique() * before["step"].n_unique()
    return (
        f"{said}: they would then wait {format_duration(left / per)}, {format_duration(most / per)} of it "
        f"for rank {after_it}"
    )


def _why_late(baseline: Baseline, rank: int, waited_ns: float) -> str:
    """Return what is known about a rank that is late even without its excess work."""
    longer = excess_by_cause(baseline, rank, peers_of(baseline.teams, rank), 0)
    excess = float(longer["excess_ns"].clip(lower_bound=0).sum())
    if excess < waited_ns / 2:
        return "it works hardly longer than its peers, so the trace does not show why it is late"
    first = longer.row(0, named=True)
    return (
        f"it works {format_duration(excess)} longer per step than its peers (most in {first['cause']}: "
        f"{first['example'][:80]}), but other ranks work longer where it counts"
    )


def _in_whole_groups(graph: Graph, waited: pl.DataFrame) -> pl.DataFrame:
    """Return waits in collectives with all members recorded; waiting for messages is normal in pipelines."""
    nodes = graph.nodes
    moved = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0))
    kinds = [graph.messages[message] for message in nodes.message[moved].tolist()]
    kinds_of_calls = pl.DataFrame(
        {
            "instance": nodes.collective[moved],
            "op": [kind.op for kind in kinds],
            "size": [kind.num_ranks for kind in kinds],
        },
        schema={"instance": pl.Int64, "op": pl.String, "size": pl.Int64},
    ).unique("instance")
    return (
        waited.join(kinds_of_calls.filter(~pl.col("op").is_in(NUMBERED_APART)), on="instance")
        .filter(pl.len().over("instance") >= pl.col("size"))
        .drop("op", "size")
    )
