"""Jobs of real traces, each with its graph and replay."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path

import pytest

from dpro.opening import open_path
from dpro.replay.alignment.match import Matching, match_collectives
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.fidelity.accuracy import Trust, assess
from dpro.replay.graph import Graph
from dpro.replay.timeline import Timeline, replay
from dpro.schema import COLLECTIVES, SPANS
from dpro.store import Run


@dataclasses.dataclass(frozen=True)
class Job:
    """One real job, imported; built and replayed once, when first asked for."""

    run: Run

    @cached_property
    def built(self) -> Built:
        return build_graph(self.run)

    @property
    def graph(self) -> Graph:
        return self.built.graph

    @cached_property
    def timeline(self) -> Timeline:
        return replay(self.graph)

    @cached_property
    def trust(self) -> Trust:
        return assess(self.built, self.timeline, self.run.manifest)

    @cached_property
    def matching(self) -> Matching:
        return match_collectives(self.run.table(COLLECTIVES), self.run.table(SPANS))


class Jobs:
    """Real jobs by the name of their folder."""

    def __init__(self, traces: Path) -> None:
        self.traces = traces / "multirank"
        self._jobs: dict[str, Job] = {}

    def __getitem__(self, name: str) -> Job:
        if name not in self._jobs:
            if not (self.traces / name).is_dir():
                pytest.skip(f"no {name} among the real traces in {self.traces}")
            self._jobs[name] = Job(open_path(self.traces / name))
        return self._jobs[name]
