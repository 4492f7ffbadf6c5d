"""What is written for other viewers: slices and what is known of them, arrows between them, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl

from dpro.detect.findings import Finding
from dpro.export.arguments import arguments_of
from dpro.export.arrows import arrows
from dpro.export.counters import sampled_counters, within
from dpro.export.slices import slices
from dpro.replay.timeline import Timeline
from dpro.schema import COUNTERS, WORKERS
from dpro.selection import ALL, Selection


class Drawing(NamedTuple):
    """What is drawn.

    Attributes:
        rows: as of `dpro.export.slices.slices`, with the columns of `dpro.export.arguments.ARGUMENTS`.
        arrows: as of `dpro.export.arrows.arrows`.
        counters: as of `dpro.export.counters.sampled_counters`, from the first slice to the last.
    """

    rows: pl.DataFrame
    arrows: pl.DataFrame
    counters: pl.DataFrame


def drawing(
    timeline: Timeline,
    findings: Sequence[Finding] = (),
    ahead: Mapping[str, int] | None = None,
    selection: Selection = ALL,
) -> Drawing:
    """Return the drawing of a replayed graph.

    Args:
        ahead: by how many ns each host's clock is ahead of the timeline's; all agree if None.
    """
    rows = slices(timeline, findings, selection)
    known = rows.join(arguments_of(timeline.graph), on="node", how="left", maintain_order="left")
    return Drawing(known, arrows(timeline, rows), _counters(timeline, rows, ahead or {}, selection))


def _counters(
    timeline: Timeline, rows: pl.DataFrame, ahead: Mapping[str, int], selection: Selection
) -> pl.DataFrame:
    run = timeline.graph.run
    if run is None or rows.is_empty():
        return sampled_counters(COUNTERS.empty(), WORKERS.empty(), ahead)
    workers = run.table(WORKERS)
    ranks = selection.keep(workers)["rank"].to_list() if selection.ranks else ()
    values = sampled_counters(run.table(COUNTERS), workers, ahead, ranks)
    return within(values, int(rows["start_ns"].to_numpy().min()), int(rows["end_ns"].to_numpy().max()))
