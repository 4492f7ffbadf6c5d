"""What every edit is: a small frozen dataclass that turns one graph into another and can explain itself."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dpro.replay.graph import Graph


def number(value: float) -> str:
    """A number as `--edit` accepts it, with all its digits and no more."""
    return repr(float(value)).removesuffix(".0")


@runtime_checkable
class Edit(Protocol):
    """One change to a job.

    `str(edit)` is what `--edit` accepts to make it again.
    """

    @property
    def doubt(self) -> float:
        """Share of the predicted gain that rests on what the edit assumes; widens the interval."""

    def apply(self, graph: Graph) -> Graph:
        """The graph of the changed job.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    def describe(self) -> str:
        """What is changed, in a few words."""

    def how(self) -> str:
        """How to do it for real in PyTorch, and what the prediction assumes."""
