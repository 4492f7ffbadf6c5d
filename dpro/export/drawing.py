"""All that is written for other viewers: slices, what is known of them, and the arrows between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from dpro.detect.findings import Finding
from dpro.export.arguments import arguments_of
from dpro.export.arrows import arrows
from dpro.export.slices import slices
from dpro.replay.timeline import Timeline


class Drawing(NamedTuple):
    """What is drawn.

    Attributes:
        rows: as of `dpro.export.slices.slices`, with the columns of `dpro.export.arguments.ARGUMENTS`.
        arrows: as of `dpro.export.arrows.arrows`.
    """

    rows: pl.DataFrame
    arrows: pl.DataFrame


def drawing(timeline: Timeline, findings: Sequence[Finding] = ()) -> Drawing:
    """Everything there is to draw; arguments as `dpro.export.slices.slices`."""
    rows = slices(timeline, findings)
    known = rows.join(arguments_of(timeline.graph), on="node", how="left", maintain_order="left")
    return Drawing(known, arrows(timeline, rows))
