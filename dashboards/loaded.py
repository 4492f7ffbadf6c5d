"""What the views ask of a run: what any analysis does, and what there is to draw."""

from __future__ import annotations

from dpro.analysis.analysis import Analysis
from dpro.analysis.once import once
from dpro.dashboards.segments import Tracks, make_tracks
from dpro.errors import DproError
from dpro.export.slices import slices


class Loaded(Analysis):
    """A run and what has been worked out of it so far."""

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
