"""The account of a job: its step time by cause, its limit, the ranks at fault, the gains of changes.

Defines the record that all documents of one run share, so that their step times and gains agree. Computes
nothing: `dpro.verdict.verdict.explain` fills the record in.
"""

from __future__ import annotations

from msgspec import field

from dpro.documents import Document, DocumentPart


class StepEntry(DocumentPart, frozen=True):
    """The part of the usual step that one cause takes; all entries add up to the step.

    Attributes:
        cause: compilation, checkpoint, collection, no-core, rank, input, synchronisation,
            allocator, imbalance, pipeline-bubble, communication, host, memory-copies, compute or unexplained,
            in this order: each entry is what removing its cause saves after those before it are removed. A
            cause that is hidden behind others, so that its removal saves nothing, comes after them.
        ranks: ranks that the cause belongs to; empty where it is not specific to ranks.
        ms: milliseconds of the step.
        evidence: the observation behind the entry, in words.
    """

    cause: str
    ranks: list[int]
    ms: float
    evidence: str


class Gain(DocumentPart, frozen=True):
    """Predicted throughput after a change, as a multiple of today's.

    Attributes:
        low: lower end of the interval; null where unknown.
        middle: most likely value; null where unbounded.
        high: upper end of the interval; null where unknown or unbounded.
    """

    low: float | None
    middle: float | None
    high: float | None


class Account(DocumentPart, frozen=True):
    """One account of a job, the same in the documents of all commands.

    Attributes:
        step_ms: the usual step as the job runs without the recorder; null where unknown.
        step_low_ms: lower bound of `step_ms`, from the variation of steps and the recorder's cost.
        step_high_ms: upper bound of `step_ms`, from the same sources.
        recorded_step_ms: the usual step as recorded; null without deep windows.
        steps: number of usual steps averaged.
        left_out: number of unusual steps in deep windows, which are not averaged.
        samples: samples per step over all recorded ranks; null where unknown.
        tokens: tokens per step over all recorded ranks; null where unknown.
        entries: the step by cause; empty without deep windows, and where their replay does not fit.
        limit: what limits the step, as in `explain`; empty where the run does not show it.
        fault: the ranks or parts at fault, in words.
        faulty_ranks: ranks that findings name.
        gains: gains of the changes that `explain` advises, by the text that `whatif --edit` takes.
    """

    step_ms: float | None = None
    step_low_ms: float | None = None
    step_high_ms: float | None = None
    recorded_step_ms: float | None = None
    steps: int = 0
    left_out: int = 0
    samples: float | None = None
    tokens: float | None = None
    entries: list[StepEntry] = field(default_factory=list)
    limit: str = ""
    fault: str = ""
    faulty_ranks: list[int] = field(default_factory=list)
    gains: dict[str, Gain] = field(default_factory=dict)


class AccountedDocument(Document, frozen=True, kw_only=True):
    """An answer about one run.

    Attributes:
        account: account of the job over all its steps, equal in the documents of all commands; null where
            the run cannot be judged.
    """

    account: Account | None = None
