"""`dpro replay`: how well the graph explains what was measured, and what decides the step time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.analysis import analyse, run_argument
from dpro.cli.output import console, json_option, print_json
from dpro.cli.run.end import end_keys, print_end
from dpro.units import format_duration, ms, us

if TYPE_CHECKING:
    import polars as pl

    from dpro.analysis.analysis import Analysis
    from dpro.replay.alignment.align import Clock
    from dpro.replay.fidelity.accuracy import Trust

PATH_ROWS = 10


@click.command()
@run_argument
@click.option("--step", type=int, metavar="N", help="Only this step, with all before it replayed too.")
@click.option("--window", type=click.IntRange(min=0), metavar="N", help="Only the steps of this deep window.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write measured and replayed timelines: Perfetto's format, or Chrome's for FILE.json or .json.gz.",
)
@json_option
def replay(run: str, step: int | None, window: int | None, export: Path | None, as_json: bool) -> None:
    """Replay the run's dataflow graph and say how well it fits what was measured.

    \b
    Every start on a GPU or in a collective is derived from what it depends on, on any rank, and compared
    with the trace. A run that fits is one `dpro whatif` and `dpro diagnose` can be believed on.

    \b
    dpro replay RUN
    dpro replay RUN --step 12
    dpro replay RUN --export run.pftrace        open it in https://ui.perfetto.dev
    dpro replay FOLDER_OF_TRACES --json
    """
    analysis = analyse(run)
    document = replay_document(analysis, chosen_steps(analysis, step, window)) | end_keys(analysis)
    if export is not None:
        from dpro.cli.run.export import write_timelines

        write_timelines(analysis, export)
    if as_json:
        print_json(document)
    else:
        print_end(analysis.end)
        _print(analysis, document)


def chosen_steps(analysis: Analysis, step: int | None, window: int | None) -> pl.DataFrame | None:
    """The steps that were asked for, as rows of `Trust.steps`; None for all.

    Raises:
        UsageError: there are none.
    """
    import polars as pl

    from dpro.errors import UsageError

    if step is None and window is None:
        return None
    steps = analysis.trust.steps
    asked = {"step": step, "window": window}
    conditions = [pl.col(key) == value for key, value in asked.items() if value is not None]
    chosen = steps.filter(conditions)
    if chosen.is_empty():
        known = ", ".join(
            f"{number} (window {at})" for at, number in steps.select("window", "step").rows()[:20]
        )
        raise UsageError(f"no such step was recorded in depth; there are {known or 'none'}")
    return chosen


def replay_document(analysis: Analysis, chosen: pl.DataFrame | None = None) -> dict[str, Any]:
    """The command's JSON.

    Args:
        analysis: a replayed run.
        chosen: the steps to speak of; None for all.
    """
    from dpro.analysis.step_time import step_time_document

    trust, evidence = analysis.trust, analysis.trust.evidence
    steps = trust.steps if chosen is None else chosen
    return {
        "run": analysis.run.label,
        "step_time": step_time_document(analysis.steps),
        "steps": [
            {
                "step": row["step"],
                "window": row["window"],
                "measured_ms": ms(row["measured_ns"]),
                "replayed_ms": ms(row["replayed_ns"]),
                "error_pct": row["error_pct"],
            }
            for row in steps.iter_rows(named=True)
        ],
        "ranks": [
            {
                "rank": row["rank"],
                "error_pct": row["error_pct"],
                "span_start_error_us": {key: _us_or_none(row[key]) for key in ("p50", "p95")},
            }
            for row in trust.ranks.iter_rows(named=True)
        ],
        "error_pct": float(steps["error_pct"].abs().mean() or 0.0),  # type: ignore[arg-type]
        "span_start_error_us": _start_errors(analysis, chosen),
        "coverage": {
            "collectives_matched": trust.collectives_matched if _has_collectives(analysis) else None,
            "collectives_outside_window": trust.collectives_outside if _has_collectives(analysis) else None,
            "kernels_classified": trust.kernels_classified,
            "time_unexplained": trust.time_unexplained,
            "host_gaps": trust.host_gaps,
            "starts_anchored": trust.starts_anchored,
        },
        "evidence": {
            "starts": {
                "derived": evidence.derived,
                "inferred": evidence.inferred,
                "fitted": evidence.fitted,
                "anchored": evidence.anchored,
            },
            "edges": evidence.edges.to_dicts(),
            "stream_pairs": {"recorded": evidence.streams_recorded, "inferred": evidence.streams_inferred},
        },
        "overlap_slowdown": None
        if trust.overlap is None
        else {"factor": trust.overlap.slowdown, "low": trust.overlap.low, "high": trust.overlap.high},
        "communication": _communication(analysis),
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
            for row in _critical_path(analysis, chosen).iter_rows(named=True)
        ],
        **trust_document(trust),
        "reasons": [*trust.reasons, *trust.doubts],
        "assumed": list(trust.assumed),
    }


def trust_document(trust: Trust) -> dict[str, Any]:
    """How far to believe what follows from the replay, as JSON."""
    return {
        "answerable": trust.answerable,
        "trust": {
            "grade": trust.grade,
            "score": trust.score,
            "verdict": trust.verdict,
            "figures": [
                {
                    "name": figure.name,
                    "value": figure.value,
                    "good": figure.good,
                    "poor": figure.poor,
                    "unit": figure.unit,
                    "score": figure.score,
                }
                for figure in trust.figures
            ],
        },
    }


def _us_or_none(ns: float | None) -> float | None:
    return None if ns is None else us(ns)


def _start_errors(analysis: Analysis, chosen: pl.DataFrame | None) -> dict[str, float | None]:
    """Percentiles of the errors of derived starts of the chosen steps, us; None where none is derived."""
    import numpy as np

    from dpro.replay.fidelity.fit import PERCENTILES, counted_starts, start_errors

    errors = analysis.trust.starts_ns
    if chosen is not None:
        nodes = analysis.built.graph.nodes
        inside = np.zeros(nodes.step.size, np.bool_)
        for window, step in chosen.select("window", "step").iter_rows():
            inside |= (nodes.window == window) & (nodes.step == step)
        errors = start_errors(analysis.timeline, counted_starts(analysis.timeline) & inside)
    return {
        "max" if percent == 100 else f"p{percent}": _us_or_none(errors.get(percent))
        for percent in PERCENTILES
    }


def _critical_path(analysis: Analysis, chosen: pl.DataFrame | None) -> pl.DataFrame:
    from dpro.replay.timeline import critical_path, critical_path_of_steps

    decisive = analysis.timeline
    return critical_path(decisive) if chosen is None else critical_path_of_steps(decisive, chosen)


def _communication(analysis: Analysis) -> list[dict[str, Any]]:
    """Latency and bandwidth of each operation and group, as far as the run tells."""
    from dpro.replay.models.link_costs import fit_costs

    return [
        {
            "op": op,
            "group": group,
            "latency_us": None if line.bandwidth_only else us(line.latency_ns),
            "latency_error_us": us(line.latency_error_ns),
            "gbps": line.gbps if math.isfinite(line.gbps) else None,
            "gbps_error": line.gbps * line.ns_per_byte_error / line.ns_per_byte if line.ns_per_byte else None,
            "transfers": line.num_samples,
            "misfit": line.misfit,
        }
        for (op, group), line in fit_costs(analysis.built.graph, analysis.replayed).items()
    ]


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
    if start["p50"] is None:
        out.print("  starts not derived: all are taken from the trace")
    else:
        out.print(f"  starts within {start['p50']:.0f} us (median), {start['p95']:.0f} us (95th percentile)")
    matched = coverage["collectives_matched"]
    outside = coverage["collectives_outside_window"]
    beside = f" of those in the windows of all, {outside:.1%} are not" if outside else ""
    out.print(
        "  collectives found on all ranks  "
        f"{'no collectives' if matched is None else f'{matched:.1%}'}{beside}"
    )
    classified = coverage["kernels_classified"]
    if classified is not None:
        out.print(f"  GPU time in kernels of a known kind  {classified:.1%}")
    out.print(f"  time that nothing explains  {coverage['time_unexplained']:.2%}")
    out.print(f"  CPU time in no span, kept as work  {coverage['host_gaps']:.1%}")
    starts = document["evidence"]["starts"]
    out.print(
        f"  starts set by recorded dependencies  {starts['derived']:.1%}, by inferred ones  "
        f"{starts['inferred']:.1%}"
    )
    pairs = document["evidence"]["stream_pairs"]
    if any(pairs.values()):
        out.print(
            f"  pairs of streams that wait for each other  {pairs['recorded']} by recorded events, "
            f"{pairs['inferred']} by inferred ones"
        )
    out.print(
        f"  starts taken from the trace  {starts['anchored']:.1%}, fitted to the draining of the device  "
        f"{starts['fitted']:.1%}"
    )
    _print_ranks(document["ranks"])
    overlap = document["overlap_slowdown"]
    if overlap is not None:
        out.print("\nKernels beside communication take ", end="")
        out.print(f"x{overlap['factor']:.2f} their time ({overlap['low']:.2f} to {overlap['high']:.2f})")
    _print_communication(document["communication"])
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
    out.print(f"\n{document['trust']['verdict']}")
    for reason in (*document["reasons"], *document["assumed"]):
        out.print(f"  - {reason}")


def _print_ranks(ranks: list[dict[str, Any]]) -> None:
    """The rank that fits worst, where there are several."""
    worst = max(ranks, key=lambda row: row["span_start_error_us"]["p95"] or 0.0, default=None)
    if worst is not None and len(ranks) > 1:
        error, start = worst["error_pct"], worst["span_start_error_us"]["p95"]
        told = "" if error is None else f"its steps within {error:.2f}%, "
        late = "no starts" if start is None else f"starts within {start:.0f} us (95th percentile)"
        console().print(f"  worst rank  {worst['rank']}: {told}{late}")


def _print_communication(lines: list[dict[str, Any]]) -> None:
    if not lines:
        return
    out = console()
    out.print("\nCommunication costs (payload per time; latency where sizes vary enough to tell it):")
    for line in lines:
        speed = "" if line["gbps"] is None else f"{line['gbps']:.4g} +- {line['gbps_error']:.2g} GB/s"
        began = line["latency_us"]
        latency = "" if began is None else f", {began:.0f} +- {line['latency_error_us']:.0f} us"
        fits = f"{line['transfers']} transfers within {line['misfit']:.0%}"
        out.print(f"  {line['op']} in {line['group'] or 'unnamed group'}: {speed}{latency} ({fits})")


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
