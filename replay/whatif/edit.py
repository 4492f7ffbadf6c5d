"""What every edit is: from one graph to another, with all that help and documentation say of it.

In: a graph. Out: the graph of the changed job. Which edits there are is listed in
`dpro.replay.whatif.registry`. A new edit is a frozen dataclass that derives from `Edit`, or from a class of
`dpro.replay.whatif.rankwise`, to be answered for large jobs, too: class attributes say what it is, fields
made with `dpro.replay.whatif.grammar.key` are what a user may give.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from dpro.errors import Unanswerable
from dpro.recorders import is_of_xla
from dpro.replay.graph import Graph, once
from dpro.replay.job_kind import JobKind, kind_of
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import check, text_of

if TYPE_CHECKING:
    from dpro.replay.whatif.rankwise import RankChanges

# What it takes to make a change, the least first, and what each is called.
EFFORTS = {
    "flag": "a setting",
    "line": "a line of code",
    "code": "new code",
    "money": "other hardware",
    "none": "cannot be done",
}


class RankChange(Protocol):
    """What changes a graph, of all ranks or of one."""

    def apply(self, graph: Graph, /) -> Graph:
        """The changed graph."""


class Edit(ABC):
    """One change to a job.

    `str(edit)` is what `--edit` accepts to make it again.

    Attributes:
        name: what `--edit` calls it.
        summary: what it does, a few words without a full stop.
        example: as `--edit` accepts it, all keys in the order of their declaration.
        needs: what a run must hold to answer it.
        assumes: what its prediction takes for granted; goes on from "assumes that".
        source: where its formula is from.
        doubt: share of the predicted gain that rests on what the edit assumes; widens the interval.
        is_advice: whether it can be done to a job as it is; if not, it says what a part of the job or of the
            machine is worth, or how much there is to gain at most.
        proof: which jobs were really changed so, and recorded before and after
            (docs/accuracy.md); empty where there are none: the edit is unproven.
        effort: what it takes to make the change, one of `EFFORTS`.
        training: what it changes in the training itself, so that a sample may teach more or less: that is
            not predicted. Empty where nothing changes.
        memory: whether it takes or frees memory of a step, so that one is tried with the other.
        of_operations: whether all it changes are whole operations, forward and backward of micro-batches.
        of_training: whether it is about gradients and updates, which only a job that trains has.
        of_torch: whether it is a change of programs of PyTorch only.
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
        """Refuse values outside what the keys allow."""
        check(self, self.name)

    def __str__(self) -> str:
        """As `--edit` accepts it."""
        given = text_of(self)
        return f"{self.name}:{given}" if given else self.name

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """The graph of the changed job.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    @classmethod
    @abstractmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Those worth trying on a run, which its own ranks, modules, sizes and operations decide.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    @abstractmethod
    def bound(self, facts: RunFacts) -> float:
        """The most that it can gain by a replay, ns of the mean step for a batch of the recorded size."""

    def bound_with(self, other: Edit, facts: RunFacts) -> float:
        """The most that it gains together with another edit, where one thing bounds both; else infinite."""
        return math.inf

    def bound_on_top(self, before: RunFacts, after: RunFacts) -> float:
        """As `bound`, on top of another edit, by less work where there is a way."""
        return self.bound(after)

    def samples(self, graph: Graph) -> float:
        """How many times as many samples a step of the changed job works on."""
        return 1.0

    def within_ranks(self) -> RankChanges | None:
        """How it changes a job rank by rank; None where it needs the graph of all ranks at once."""
        return None

    def on_operations(self) -> bool:
        """Whether it is for the whole operations of a job that has both them and what they consist of."""
        return self.of_operations

    def is_proven(self, graph: Graph) -> bool:
        """Whether a pair of recordings of jobs like that of the graph has shown what such a change does."""
        return bool(self.proof)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What the edit found in the graph that it is applied to, a line each."""
        return ()

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Other graphs that the changed job may be, at both ends of what the edit leaves open."""
        return ()

    def limit(self, graph: Graph) -> Graph | None:
        """A graph that the changed job cannot be faster than; None where none is known."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """What is changed, in a few words."""

    @abstractmethod
    def how(self) -> str:
        """How to do it for real in PyTorch."""


def refuse_foreign(edit: Edit | type[Edit], graph: Graph) -> None:
    """Refuse edits of training where nothing is trained, and of PyTorch in programs that XLA compiled.

    Raises:
        Unanswerable: the recording shows no backward pass, or is of a program that XLA compiled.
    """
    if edit.of_torch and graph.run is not None and is_of_xla(graph.run):
        raise Unanswerable("it changes programs of PyTorch, and XLA compiled this one")
    if edit.of_training and kind_of_job(graph).trains is False:
        raise Unanswerable(
            "the recording holds no backward pass: nothing is trained, so no gradients are reduced or applied"
        )


def kind_of_job(graph: Graph) -> JobKind:
    """What kind of job a graph is of."""
    run = graph.run
    return JobKind() if run is None else once(graph, "kind of job", (run,), lambda: kind_of(run))
