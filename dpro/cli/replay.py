"""`dpro replay`: show how well the graph explains the measurements, and what decides the step time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import analyse, layout_option, network_option, run_argument, steps_option
from dpro.cli.following import print_following
from dpro.cli.options import MAX_STEPS
from dpro.cli.output import console, json_option, print_end, print_json
from dpro.errors import DproError
from dpro.units import NS_PER_US, format_duration, ms
from dpro.words import short_name, shortened

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.answers.replay import (
        HostClock,
        LinkCostDocument,
        PathPart,
        ReplayDocument,
    )
    from dpro.selection import Ranges

PATH_ROWS = 10
_BESIDE_NAME, _MIN_NAME = 31, 24  # characters beside names on the critical path, and of a name at least


@click.command()
@run_argument
@layout_option
@click.option(
    "--step",
    type=click.IntRange(0, MAX_STEPS),
    metavar="N",
    help="Show only this step; all steps before it are still replayed.",
)
@click.option(
    "--window",
    type=click.IntRange(0, MAX_STEPS),
    metavar="N",
    help="Show only the steps of this deep window.",
)
@steps_option
@network_option
@json_option
def replay(
    run: str, step: int | None, window: int | None, steps: Ranges, network_table: str | None, as_json: bool
) -> None:
    """Replay a run's dataflow graph and report how well it fits the measurements.

    Every start of a GPU operation or collective is derived from its dependencies, on any rank, and compared
    with the trace. If the replay fits, you can trust `dpro whatif` and `dpro diagnose` on this run.

    \b
    dpro replay RUN
    dpro replay RUN --step 12
    dpro replay RUN --steps 5-7,30
    dpro replay FOLDER_OF_TRACES --json
    dpro replay RUN --network-table nccl.csv     for pretended ranks
    """
    from dpro.analysis.answers.replay import chosen_steps, replay_document

    analysis = analyse(run, network_table)
    document = replay_document(analysis, chosen_steps(analysis, step, window, steps))
    if as_json:
        from dpro.verdict.verdict import with_account

        print_json(with_account(document, analysis))
    else:
        print_end(analysis.end)
        _print(analysis, document)
        print_following(run, analysis, ["whatif"])


def _print(analysis: Analysis, document: ReplayDocument) -> None:
    from rich.table import Table

    from dpro.analysis.step_time import usual_step_in_words
    from dpro.analysis.unanswered import pretended_lines
    from dpro.replay.fidelity.accuracy import windows_mislead
    from dpro.replay.whatif.predict import measured_ns

    out = console()
    graph, manifest, condensed = analysis.outline.graph, analysis.run.manifest, analysis.condensed
    sizes = f"{graph.num_nodes:,} nodes, {graph.edges.source.size:,} edges"
    if condensed is not None:
        sizes = f"{condensed.pooled.num_nodes:,} nodes, condensed rank by rank to {sizes}"
    out.print(f"{analysis.run.label}: {len(manifest.ranks)} of {manifest.world_size} ranks, {sizes}")
    for line in pretended_lines(manifest, document.pretended):
        out.print(line)
    if not manifest.is_pretended and not analysis.outline.of_operations:
        with suppress(DproError):  # no complete step, or only interrupted ones
            # The usual step of the account, since the table below has steps as recorded.
            recorded_ns = measured_ns(analysis.trust, analysis.baseline)
            if recorded_ns:
                misleads = windows_mislead(analysis.steps)
                out.print(usual_step_in_words(ms(analysis.baseline_ns), ms(recorded_ns), misleads))
    out.print(document.trust.verdict)
    for reason in (*document.reasons, *document.assumed):
        out.print(f"  - {reason}")
    out.print()
    steps = document.steps
    if steps:
        table = Table("step", "measured ms", "replayed ms", "error %", box=None, pad_edge=False)
        for row in steps[:PATH_ROWS]:
            cells = (row.measured_ms, row.replayed_ms, row.error_pct)
            table.add_row(str(row.step), *(f"{round(cell, 2) + 0:.2f}" for cell in cells))  # no -0.00
        out.print(table)
        if len(steps) > PATH_ROWS:
            out.print(f"… and {len(steps) - PATH_ROWS} more steps (--json has all)")
    _print_fit(document)
    _print_starts(document)
    worst = max(document.ranks, key=lambda row: row.span_start_error_us.p95 or 0.0, default=None)
    if worst is not None and len(document.ranks) > 1:
        error, late_us = worst.error_pct, worst.span_start_error_us.p95
        of_steps = "" if error is None else f"its steps within {error:.2f}%, "
        late = "no starts" if late_us is None else f"starts within {_us(late_us)} (95th percentile)"
        out.print(f"  worst rank  {worst.rank}: {of_steps}{late}")
    overlap = document.overlap_slowdown
    if overlap is not None:
        out.print("\nBeside communication, kernels take ", end="")
        out.print(f"x{overlap.factor:.2f} as long ({overlap.low:.2f} to {overlap.high:.2f})")
    if document.communication:
        out.print("\nCommunication costs (payload per time, and latency, where larger than their errors):")
        for cost in document.communication:
            fits = f"{cost.transfers} transfers within {cost.misfit:.0%}"
            out.print(
                f"  {cost.op} in {cost.group or 'a group without a name'}: {_cost_words(cost)} ({fits})"
            )
    _print_clocks(document.clocks)
    _print_path(document.critical_path)


def _cost_words(cost: LinkCostDocument) -> str:
    """Word the parts of a communication cost that the transfers determine."""
    from dpro.replay.cost.curves import UNCLEAR_FIT

    parts = []
    if cost.gbps is not None:
        parts.append(f"{cost.gbps:.4g} +- {cost.gbps_error:.2g} GB/s")
    if cost.latency_us is not None:
        parts.append(f"{cost.latency_us:.0f} +- {cost.latency_error_us:.0f} us")
    return ", ".join(parts) or UNCLEAR_FIT


def _print_fit(document: ReplayDocument) -> None:
    """Print the errors of the replay, and what the trace does not cover."""
    out, coverage, start = console(), document.coverage, document.span_start_error_us
    out.print(f"\nHow well it fits: step time within {document.error_pct:.2f}% on average")
    if start["p50"] is None:
        out.print("  starts not derived: all are taken from the trace")
    else:
        median, p95 = (_us(start[name]) for name in ("p50", "p95"))
        out.print(f"  starts within {median} (median), {p95} (95th percentile)")
    matched, outside = coverage.collectives_matched, coverage.collectives_outside_window
    beside = f" of those while all ranks were recorded; {outside:.1%} ran before or after" if outside else ""
    if matched is not None:
        out.print(f"  collectives found on all ranks  {matched:.1%}{beside}")
    if coverage.kernels_classified is not None:
        out.print(f"  GPU time in kernels of a known kind  {coverage.kernels_classified:.1%}")
    out.print(f"  unexplained time  {coverage.time_unexplained:.2%}")
    if coverage.host_gaps < 1:  # 1 means that no CPU time was recorded
        out.print(f"  CPU time in no span, kept as work  {coverage.host_gaps:.1%}")


def _print_starts(document: ReplayDocument) -> None:
    from dpro.analysis.summary import copied_in_words

    out, starts, pairs = console(), document.evidence.starts, document.evidence.stream_pairs
    out.print(
        f"  starts set by recorded dependencies  {starts.derived:.1%}, by inferred ones  "
        f"{starts.inferred:.1%}"
    )
    if pairs.recorded or pairs.inferred:
        out.print(
            f"  pairs of streams that wait for each other  {pairs.recorded} by recorded events, "
            f"{pairs.inferred} by inferred ones"
        )
    copied = copied_in_words(document.coverage.starts_anchored, document.trust.figures)
    fitted = f"; {starts.fitted:.1%} of starts by when the device ran out of work" if starts.fitted else ""
    out.print(f"  start times copied from the trace  {copied}{fitted}")


def _us(us: float | None) -> str:
    return format_duration(round((us or 0.0) * NS_PER_US))


def _print_path(path: Sequence[PathPart]) -> None:
    from rich.table import Table

    total, out = math.fsum(row.ms for row in path), console()
    table = Table(
        "rank", "kind", "ms", "share", "name",
        title="Critical path, over all these steps", title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for row in path[:PATH_ROWS]:
        share = row.ms / total if total else 0.0
        rank = "" if row.rank < 0 else str(row.rank)
        name = shortened(short_name(row.name), max(out.width - _BESIDE_NAME, _MIN_NAME))
        table.add_row(rank, row.kind, f"{row.ms:.2f}", f"{share:.0%}", name)
    out.print()
    out.print(table)


def _print_clocks(clocks: Sequence[HostClock]) -> None:
    """Print each clock with its lead and drift in its first window, and its worst uncertainty, if several."""
    from rich.table import Table

    names = list(dict.fromkeys(row.clock for row in clocks))
    if len(names) < 2:
        return
    table = Table(
        "clock", "ranks", "ahead by", "drift ppm", "known to", "from",
        title="Clocks", title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for name in names[:PATH_ROWS]:
        windows = [row for row in clocks if row.clock == name]
        first, worst = windows[0], max(row.uncertainty_ns for row in windows)
        unknown = min(row.uncertainty_ns for row in windows) < 0
        num_ranks = len({rank for row in windows for rank in row.ranks})
        table.add_row(
            name, str(num_ranks), format_duration(first.offset_ns),
            f"{first.drift_ppm:.1f}", "unknown" if unknown else format_duration(worst), first.source,
        )  # fmt: skip
    console().print()
    console().print(table)
    if len(names) > PATH_ROWS:
        console().print(f"… and {len(names) - PATH_ROWS} more clocks (--json has all, for each window)")
