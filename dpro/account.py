"""The account of a job: the step, where it goes, what limits it, who is at fault, what changes would give.

In: nothing. Out: the record that every document of one run shares, so that no two answers speak of another
step or another gain. `dpro.verdict.verdict.explain` fills it in.
"""

from __future__ import annotations

from msgspec import field

from dpro.documents import Document, DocumentPart


class StepEntry(DocumentPart, frozen=True):
    """What of the usual step goes into one cause; all of them add up to the step.

    Attributes:
        cause: compilation, checkpoint, collection, no-core, rank, input, synchronisation,
            allocator, imbalance, pipeline-bubble, communication, host, memory-copies, compute or unexplained,
            in this order: each is what its removal saves on top of those before it.
        ranks: that it is of, where it is of some.
        ms: of the step.
        evidence: what says so.
    """

    cause: str
    ranks: list[int]
    ms: float
    evidence: str


class Gain(DocumentPart, frozen=True):
    """How many times the throughput is after a change.

    Attributes:
        low, middle, high: at least, likely, at most; null where it has no bound or no interval is known.
    """

    low: float | None
    middle: float | None
    high: float | None


class Account(DocumentPart, frozen=True):
    """One account of a job, the same in the documents of all commands.

    Attributes:
        step_ms: the usual step as the job runs; null where none is known.
        step_low_ms, step_high_ms: what it may be: as steps vary, and by what recording may have cost.
        recorded_step_ms: the same steps as recorded; null where none was recorded in depth.
        steps: how many usual steps that is the mean of.
        left_out: how many steps in deep windows are no usual ones.
        samples, tokens: that all recorded ranks work on in one step; null where not known.
        entries: where the step goes; empty where none was recorded in depth.
        limit: what limits the step, as `explain` has it; empty where the run does not show it.
        fault: which ranks or parts are at fault, in words.
        faulty_ranks: ranks that findings name.
        gains: of changes that `explain` advises, by the text that `whatif --edit` takes.
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
        account: of the job and all its steps, the same in the documents of all commands; null where the run
            cannot be judged.
    """

    account: Account | None = None
