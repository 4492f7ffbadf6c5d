"""`dpro replay`: how well the graph explains what was measured, and what decides the step time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.analysis import Analysis, analyse, run_argument
from dpro.cli.output import console, json_option, print_json
from dpro.units import format_duration, ms, us

if TYPE_CHECKING:
    from dpro.replay.align import Clock

PATH_ROWS = 10


@click.command()
@run_argument
@json_option
def replay(run: str, as_json: bool) -> None:
    """Replay the run's dataflow graph and say how well it fits what was measured.

    \b
    Every start on a GPU or in a collective is derived from what it depends on, on any rank, and compared
    with the trace. A run that fits is one `dpro whatif` and `dpro diagnose` can be believed on.

    \b
    dpro replay RUN
    dpro replay FOLDER_OF_TRACES --json
    """
    analysis = analyse(run)
    document = replay_document(analysis)
    if as_json:
        print_json(document)
    else:
        _print(analysis, document)


def replay_document(analysis: Analysis) -> dict[str, Any]:
    """The command's JSON."""
    from dpro.replay.timeline import critical_path, replay

    trust = analysis.trust
    # Waits that only look like late launches would stand in for what was waited for.
    decisive = replay(analysis.built.predictive) if analysis.built.of_operations else analysis.timeline
    p50, p95 = trust.start_error_ns
    return {
        "run": analysis.run.label,
        "steps": [
            {
                "step": row["step"],
                "measured_ms": ms(row["measured_ns"]),
                "replayed_ms": ms(row["replayed_ns"]),
                "error_pct": row["error_pct"],
            }
            for row in trust.steps.iter_rows(named=True)
        ],
        "error_pct": trust.error_pct,
        "span_start_error_us": {"p50": us(p50), "p95": us(p95)},
        "coverage": {
            "collectives_matched": trust.collectives_matched if _has_collectives(analysis) else None,
            "kernels_classified": trust.kernels_classified,
            "time_unexplained": trust.time_unexplained,
            "host_gaps": trust.host_gaps,
            "starts_anchored": trust.starts_anchored,
        },
        "overlap_slowdown": None
        if trust.overlap is None
        else {"factor": trust.overlap.slowdown, "low": trust.overlap.low, "high": trust.overlap.high},
        "clock_offsets": [
            {
                "rank": rank,
                "offset_ns": clock.line.offset_ns,
                "uncertainty_ns": clock.line.uncertainty_ns,
                "source": clock.source,
            }
            for rank, clock in _first_clocks(analysis).items()
        ],
        "clocks": _clocks(analysis),
        "critical_path": [
            {"rank": row["rank"], "name": row["name"], "kind": row["kind"], "ms": ms(row["duration_ns"])}
            for row in critical_path(decisive).iter_rows(named=True)
        ],
        "answerable": trust.answerable,
        "reasons": list(trust.reasons),
        "assumed": list(trust.assumed),
    }


def _first_clocks(analysis: Analysis) -> dict[int, Clock]:
    """Each rank's clock in its first window."""
    alignment = analysis.built.alignment
    return {rank: alignment.of(rank) for rank in sorted({rank for rank, _ in alignment.clocks})}


def _clocks(analysis: Analysis) -> list[dict[str, Any]]:
    """Each host's clock against the reference, by window."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for (rank, window), clock in sorted(
        analysis.built.alignment.clocks.items(), key=lambda item: item[0][::-1]
    ):
        facts = {
            "clock": clock.name,
            "window": window,
            "ranks": [],
            "reference_ns": clock.line.reference_ns,
            "offset_ns": clock.line.offset_ns,
            "drift_ppm": clock.line.drift_ppb / 1000,
            "uncertainty_ns": clock.line.uncertainty_ns,
            "source": clock.source,
        }
        found.setdefault((window, clock.name), facts)["ranks"].append(rank)
    return list(found.values())


def _has_collectives(analysis: Analysis) -> bool:
    return analysis.built.matching.rows.height > 0


def _print(analysis: Analysis, document: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    coverage = document["coverage"]
    steps = document["steps"]
    graph, manifest = analysis.built.graph, analysis.run.manifest
    out.print(
        f"{analysis.run.label}: {len(manifest.ranks)} of {manifest.world_size} ranks, "
        f"{graph.num_nodes:,} nodes, {graph.edges.source.size:,} edges"
    )
    if steps:
        table = Table("step", "measured ms", "replayed ms", "error %", box=None, pad_edge=False)
        for row in steps[:PATH_ROWS]:
            cells = (row["measured_ms"], row["replayed_ms"], row["error_pct"])
            table.add_row(str(row["step"]), *(f"{cell:.2f}" for cell in cells))
        out.print(table)
        if len(steps) > PATH_ROWS:
            out.print(f"… and {len(steps) - PATH_ROWS} more steps (--json has all)")
    start = document["span_start_error_us"]
    out.print(f"\nHow well it fits: step time within {document['error_pct']:.2f}% on average; ")
    out.print(f"  starts within {start['p50']:.0f} us (median), {start['p95']:.0f} us (95th percentile)")
    matched = coverage["collectives_matched"]
    out.print(
        f"  collectives found on all ranks  {'no collectives' if matched is None else f'{matched:.1%}'}"
    )
    classified = coverage["kernels_classified"]
    if classified is not None:
        out.print(f"  GPU time in kernels of a known kind  {classified:.1%}")
    out.print(f"  time that nothing explains  {coverage['time_unexplained']:.2%}")
    out.print(f"  CPU time in no span, kept as work  {coverage['host_gaps']:.1%}")
    out.print(f"  starts taken from the trace, not derived  {coverage['starts_anchored']:.1%}")
    overlap = document["overlap_slowdown"]
    if overlap is not None:
        out.print("\nKernels beside communication take ", end="")
        out.print(f"x{overlap['factor']:.2f} their time ({overlap['low']:.2f} to {overlap['high']:.2f})")
    _print_clocks(document["clocks"])
    total = math.fsum(row["ms"] for row in document["critical_path"])
    table = Table(
        "rank",
        "kind",
        "ms",
        "share",
        "name",
        title="Critical path",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for row in document["critical_path"][:PATH_ROWS]:
        share = row["ms"] / total if total else 0.0
        table.add_row(str(row["rank"]), row["kind"], f"{row['ms']:.2f}", f"{share:.0%}", row["name"][:70])
    out.print()
    out.print(table)
    verdict = (
        "Predictions from this run can be believed."
        if document["answerable"]
        else "Do not predict from this run."
    )
    out.print(f"\n{verdict}")
    for reason in (*document["reasons"], *document["assumed"]):
        out.print(f"  - {reason}")


def _print_clocks(clocks: list[dict[str, Any]]) -> None:
    """Clocks that are not the reference's: of the first window that has them, and how they do in others."""
    from rich.table import Table

    names = list(dict.fromkeys(row["clock"] for row in clocks))
    if len(names) < 2:
        return
    table = Table(
        "clock", "ranks", "ahead by", "drift ppm", "known to", "from",
        title="Clocks", title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for name in names[:PATH_ROWS]:
        own = [row for row in clocks if row["clock"] == name]
        first, worst = own[0], max(row["uncertainty_ns"] for row in own)
        unknown = min(row["uncertainty_ns"] for row in own) < 0
        num_ranks = len({rank for row in own for rank in row["ranks"]})
        table.add_row(
            name, str(num_ranks), format_duration(first["offset_ns"]),
            f"{first['drift_ppm']:.1f}", "unknown" if unknown else format_duration(worst), first["source"],
        )  # fmt: skip
    console().print(table)
    if len(names) > PATH_ROWS:
        console().print(f"… and {len(names) - PATH_ROWS} more clocks (--json has all, for each window)")
