"""Make any selection of work faster, slower, or free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.errors import Unanswerable, UsageError
from dpro.replay.graph import Graph
from dpro.replay.whatif.edit import number
from dpro.replay.whatif.select import Selection

LARGEST_FACTOR = 1e6  # beyond that times leave the range of int64 nanoseconds
DATA_LOADING = "enumerate(DataLoader)*"


@dataclass(frozen=True)
class Scale:
    """Multiply the time of selected work by a factor."""

    selection: Selection
    factor: float = 0.5
    doubt: float = 0.05

    def __post_init__(self) -> None:
        """Refuse a negative factor."""
        if not 0 <= self.factor <= LARGEST_FACTOR:
            raise UsageError(f"scale: factor must be from 0 to {LARGEST_FACTOR:g}, not {self.factor:g}")

    def __str__(self) -> str:
        """As `--edit` accepts it."""
        return "scale:" + ",".join(filter(None, [str(self.selection), f"factor={number(self.factor)}"]))

    def apply(self, graph: Graph) -> Graph:
        """Scale durations, rounded to whole nanoseconds."""
        mask = self.selection.mask(graph)
        if not mask.any():
            raise Unanswerable(f"nothing in the run fits {self.selection}")
        duration = graph.nodes.duration.copy()
        duration[mask] = np.rint(duration[mask] * self.factor).astype(np.int64)
        return graph.with_durations(duration)

    def describe(self) -> str:
        """What is changed."""
        return f"{self.selection.describe()} takes {self.factor:.0%} of its time"

    def how(self) -> str:
        """How to do it."""
        if self.factor > 1:
            return "nothing to do: it shows what slower work would cost; assumes that nothing else changes"
        return "a faster implementation of the selected work; assumes that nothing else changes"


@dataclass(frozen=True)
class HideInput:
    """The training loop never waits for its input."""

    doubt: float = 0.1

    def __str__(self) -> str:
        """As `--edit` accepts it."""
        return "hide-input"

    def apply(self, graph: Graph) -> Graph:
        """Make the time inside the DataLoader's `__next__` free."""
        return Scale(Selection(within=DATA_LOADING), 0.0).apply(graph)

    def describe(self) -> str:
        """What is changed."""
        return "the input is ready when the step asks for it"

    def how(self) -> str:
        """How to do it."""
        return (
            "DataLoader(num_workers=N, prefetch_factor=…, pin_memory=True) with enough workers; "
            "assumes free cores for them and a source that can keep up"
        )
