"""The base class of all edits: a change from one graph to another, with its texts for help and documentation.

Takes a graph; returns the graph of the changed job. `dpro.replay.whatif.registry` lists the edits. A new edit
is a frozen dataclass that derives from `Edit`, or from a class of `dpro.replay.whatif.rankwise` so that large
jobs can answer it too: class attributes describe it, and fields made with `dpro.replay.whatif.grammar.key`
are the keys that a user may give.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from dpro.errors import Unanswerable
from dpro.recorders import is_of_xla
from dpro.replay.graph import Graph, computed_once
from dpro.replay.job_kind import JobKind, kind_of
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import check, text_of

if TYPE_CHECKING:
    from dpro.replay.whatif.rankwise import RankChanges

# Efforts of a change, the least first, with their words.
EFFORTS = {
    "flag": "a setting",
    "line": "a line of code",
    "code": "new code",
    "money": "other hardware",
    "none": "cannot be done",
}


class RankChange(Protocol):
    """A change of a graph, of all ranks or of one."""

    def apply(self, graph: Graph, /) -> Graph:
        """Return the changed graph."""


class Edit(ABC):
    """One change to a job.

    `str(edit)` is the text with which `--edit` makes it again.

    Attributes:
        name: in `--edit`.
        summary: its effect, in a few words without a full stop.
        example: as `--edit` accepts it, all keys in the order of their declaration.
        needs: what a run must have to answer it.
        assumes: assumptions of its prediction; continues "assumes that".
        source: of its formula.
        doubt: share of the predicted gain that rests on its assumptions; widens the interval.
        is_advice: whether it can be made to a job as it is; if not, it is the worth of a part of the job or
            of the machine, or an upper bound of a gain.
        proof: jobs that were changed in this way and recorded before and after (docs/accuracy.md); empty
            without any: the edit is unproven.
        effort: of making the change, one of `EFFORTS`.
        training: its effect on the training itself, by which a sample may teach more or less: that is not
            predicted. Empty without such an effect.
        memory: whether it takes or frees memory of a step, so that one is tried with the other.
        of_operations: whether it changes only whole operations: forward and backward of micro-batches.
        of_training: whether it concerns gradients and updates, which only a job that trains has.
        of_torch: whether it changes programs of PyTorch only.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str]
    needs: ClassVar[str]
    assumes: ClassVar[str]
    source: ClassVar[str]
    doubt: float
    is_advice: ClassVar[bool] = True
    proof: ClassVar[str] = ""
    effort: ClassVar[str]
    training: ClassVar[str] = ""
    memory: ClassVar[Literal["", "takes", "frees"]] = ""
    of_operations: ClassVar[bool] = False
    of_training: ClassVar[bool] = False
    of_torch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise if a value is outside the range of its key."""
        check(self, self.name)

    def __str__(self) -> str:
        """Return the text of the edit, as `--edit` accepts it."""
        given = text_of(self)
        return f"{self.name}:{given}" if given else self.name

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """Return the graph of the changed job.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    @classmethod
    @abstractmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edits worth trying on a run, from its ranks, modules, sizes and operations.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    @abstractmethod
    def bound(self, facts: RunFacts) -> float:
        """Return an upper bound of the gain by a replay, ns of the mean step for a recorded batch."""

    def bound_with(self, other: Edit, facts: RunFacts) -> float:
        """Return an upper bound of the gain together with another edit; infinite where none is known."""
        return math.inf

    def bound_on_top(self, before: RunFacts, after: RunFacts) -> float:
        """Return an upper bound of the gain on top of another edit, from less work where possible."""
        return self.bound(after)

    def samples(self, graph: Graph) -> float:
        """Return the factor on the samples of a step in the changed job."""
        return 1.0

    def within_ranks(self) -> RankChanges | None:
        """Return the changes rank by rank; None where the edit needs the graph of all ranks at once."""
        return None

    def on_operations(self) -> bool:
        """Return whether to apply it to whole operations in a job that has both them and their kernels."""
        return self.of_operations

    def is_proven(self, graph: Graph) -> bool:
        """Return whether recordings of similar jobs before and after have confirmed such a change."""
        return bool(self.proof)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Return findings about the graph that the edit is applied to, a line each."""
        return ()

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return alternative graphs of the changed job, at both ends of what the edit leaves open."""
        return ()

    def limit(self, graph: Graph) -> Graph | None:
        """Return a graph that the changed job cannot be faster than; None where none is known."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Describe the change in a few words."""

    @abstractmethod
    def how(self) -> str:
        """Describe how to make the change in PyTorch."""


def refuse_foreign(edit: Edit | type[Edit], graph: Graph) -> None:
    """Raise for edits of training where nothing is trained, and of PyTorch in programs that XLA compiled.

    Raises:
        Unanswerable: the recording shows no backward pass, or is of a program that XLA compiled.
    """
    if edit.of_torch and graph.run is not None and is_of_xla(graph.run):
        raise Unanswerable("it changes programs of PyTorch, and XLA compiled this one")
    if edit.of_training and kind_of_job(graph).trains is False:
        raise Unanswerable(
            "the recording has no backward pass: nothing is trained, so no gradients are reduced or applied"
        )


@computed_once
def kind_of_job(graph: Graph) -> JobKind:
    """Return the kind of job of a graph."""
    return JobKind() if graph.run is None else kind_of(graph.run)
