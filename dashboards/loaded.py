"""What the views ask of a run: what any analysis does, and what there is to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.cached import cached
from dpro.analysis.graphs import make_graph
from dpro.analysis.unanswered import why_unanswerable
from dpro.dashboards.timeline.measured import MAX_UNASKED, Measured
from dpro.dashboards.timeline.replayed import Later, make_replayed
from dpro.dashboards.timeline.tracks import Tracks, make_tracks
from dpro.detect.network.traffic import transfers_of
from dpro.errors import DproError, UsageError
from dpro.export.slices import slices
from dpro.replay.construction.graph_builder import Built
from dpro.replay.difference import Difference, explain
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph
from dpro.replay.timeline import critical_path_of_steps
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.predict import Prediction, apply_all, predicted_timeline
from dpro.replay.whatif.sensitivity import Curve, sensitivity
from dpro.store import Run

Tried = Callable[[Sequence[Prediction]], tuple[list[Prediction], list[str]]]


class Loaded(Analysis):
    """A run and what has been worked out of it so far."""

    def __init__(
        self, run: Run, other: Analysis | None = None, as_tried: Tried = lambda found: (list(found), [])
    ) -> None:
        """Nothing is read yet.

        Args:
            run: the run.
            other: one to compare it with.
            as_tried: what changes that were tried make of predictions, and a line for each that it changed.
        """
        super().__init__(run)
        self.other, self.as_tried = other, as_tried
        self._changed: tuple[tuple[str, ...], tuple[list[Graph], list[str]]] = (), ([], [])
        self._changed_path: tuple[tuple[str, ...], pl.DataFrame] = (), pl.DataFrame()

    def warm(self) -> None:
        """Work out what takes long, in the order in which it is likely to be asked for.

        Of a run of very many spans nothing: the graph would take memory and cores from what is looked at.
        """
        if self.run.rows()["spans"] > MAX_UNASKED:
            return
        for name in ("graph_and_trust", "verdict", "search", "breakdown", "curves"):
            try:
                getattr(self, name)
            except DproError:
                continue  # said by the view that asks for it

    @cached
    def measured(self) -> Measured:
        """The lanes of its timeline, as recorded; they do not wait for the graph."""
        return Measured(self.run)

    @cached
    def replay_lanes(self) -> Later:
        """What the replay adds to its timeline, once it is asked for."""
        return Later(lambda: make_replayed(self.timeline, self.measured))

    @cached
    def tracks(self) -> Tracks:
        """What there is to draw of its timeline as a figure."""
        return make_tracks(slices(self.timeline), self.timeline.graph.origin_ns)

    @cached
    def path(self) -> pl.DataFrame:
        """What decides the steps of the unchanged graph."""
        return critical_path_of_steps(self.timeline, self.baseline)

    @cached
    def curves(self) -> list[Curve]:
        """How the step follows the speed of each part of the machine."""
        return sensitivity(self.built.predictive)

    def changed(self, edits: Sequence[Edit]) -> tuple[list[Graph], list[str]]:
        """The graph as it is after each of some edits, and what is to be said of them; the latest are kept.

        Raises:
            Unanswerable: the run lacks what an edit needs.
        """
        with self.lock_of("changed"):
            key = ("changed", *map(str, edits))
            if self._changed[0] != key:
                self._changed = key, apply_all(self.built.predictive, edits)
            return self._changed[1]

    def path_after(self, edits: Sequence[Edit]) -> pl.DataFrame:
        """What decides the steps that are predicted after some edits; the latest is kept.

        Raises:
            Unanswerable: the run lacks what an edit needs.
        """
        if not edits:
            return self.path
        graphs, _ = self.changed(edits)
        with self.lock_of("changed_path"):
            key = tuple(map(str, edits))
            if self._changed_path[0] != key:
                changed = predicted_timeline(graphs, self.trust)
                path = critical_path_of_steps(changed, self.baseline, self.baseline)
                self._changed_path = key, path
            return self._changed_path[1]

    @cached
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

    @cached
    def difference(self) -> Difference:
        """What explains that a step takes longer than in the other run."""
        return explain(self.compared_with.built.predictive, self.built.predictive)


class Passing(Loaded):
    """A state of a run that another will soon replace: its graph gets no place in the cache."""

    @cached
    def graph_and_trust(self) -> tuple[Built, Trust]:
        """The graph, and how far to believe it."""
        with why_unanswerable(self.run, lambda: self.end):
            return make_graph(self.run)
