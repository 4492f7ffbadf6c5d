"""What the views ask of a run: what any analysis does, and what there is to draw."""

from __future__ import annotations

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.once import once
from dpro.dashboards.segments import Tracks, make_tracks
from dpro.detect.network import transfers_of
from dpro.errors import DproError, UsageError
from dpro.export.slices import slices
from dpro.replay.difference import Difference, explain
from dpro.store import Run


class Loaded(Analysis):
    """A run and what has been worked out of it so far."""

    def __init__(self, run: Run, other: Analysis | None = None) -> None:
        """Nothing is read yet.

        Args:
            run: the run.
            other: one to compare it with.
        """
        super().__init__(run)
        self.other = other

    def warm(self) -> None:
        """Work out what takes long, in the order in which it is likely to be asked for."""
        for name in ("judged", "verdict", "search", "tracks", "breakdown"):
            try:
                getattr(self, name)
            except DproError:
                continue  # said by the view that asks for it

    @once
    def tracks(self) -> Tracks:
        """What there is to draw of its timeline."""
        return make_tracks(slices(self.timeline), self.timeline.graph.origin_ns)

    @once
    def transfers(self) -> pl.DataFrame:
        """Each collective and message whose members are all recorded."""
        return transfers_of(self.built.graph)

    @property
    def compared_with(self) -> Analysis:
        """The other run.

        Raises:
            UsageError: there is none.
        """
        if self.other is None:
            raise UsageError(
                "there is nothing to compare with: `dpro dashboard RUN --against OTHER` shows what "
                "explains that a step of RUN takes longer than one of OTHER"
            )
        return self.other

    @once
    def difference(self) -> Difference:
        """What explains that a step takes longer than in the other run."""
        return explain(self.compared_with.built.predictive, self.built.predictive)
