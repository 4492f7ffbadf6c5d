"""What `dpro attach` answers, as typed documents.

In: what the ranks of a job replied to a request, as JSON. Out: a document for each thing that can be asked.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from dpro.documents import Document, DocumentPart


class StackFrame(DocumentPart, frozen=True):
    """A call that has not returned.

    Attributes:
        file: of the function.
        line: that it is at.
        function: its name.
    """

    file: str
    line: int
    function: str


class ThreadStack(DocumentPart, frozen=True):
    """A thread of a process.

    Attributes:
        name: of the thread.
        frames: its calls, innermost first.
    """

    name: str
    frames: list[StackFrame]


class RankStacks(DocumentPart, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Where the threads of a rank are.

    Attributes:
        rank: the rank.
        by_signal: true where a handler in C replied, since a call in C holds the interpreter; else absent.
        threads: its threads, without those of the recorder.
    """

    rank: int
    by_signal: bool | UnsetType = UNSET
    threads: list[ThreadStack]


class RankWindow(DocumentPart, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What became of a requested deep window on one rank.

    Attributes:
        rank: the rank.
        window: number of the window; absent where the job records none.
        steps: its first step, and the one after its last; likewise.
        why_not: why it was not recorded; empty where it was.
    """

    rank: int
    window: int | UnsetType = UNSET
    steps: tuple[int, int] | UnsetType = UNSET
    why_not: str


class AttachDocument(Document, frozen=True, kw_only=True):
    """A copy of what a running job has recorded so far.

    Attributes:
        run: the run directory of the job.
        copy: the run that was made of what is recorded so far; absent where none was asked for.
    """

    run: str
    copy: str | UnsetType = UNSET


class WindowDocument(AttachDocument, frozen=True, kw_only=True):
    """A deep window that was requested of a running job.

    Attributes:
        ranks: what became of it on each rank that replied.
        silent_ranks: ranks that did not reply in time.
        window: number of the window.
    """

    ranks: list[RankWindow]
    silent_ranks: list[int]
    window: int


class StacksDocument(AttachDocument, frozen=True, kw_only=True):
    """Where all threads of a running job are.

    Attributes:
        ranks: those that replied.
        silent_ranks: ranks that did not reply in time.
    """

    ranks: list[RankStacks]
    silent_ranks: list[int]


class SwitchDocument(AttachDocument, frozen=True, kw_only=True):
    """Deep windows of a running job were switched off or on.

    Attributes:
        from_step: the step from which that counts.
    """

    from_step: int


class ProfileDocument(Document, frozen=True, kw_only=True):
    """A run that was made of the profile of a job which dpro does not record.

    Attributes:
        run: the run that was made.
        ranks: ranks that it has.
        warnings: of the importer.
    """

    run: str
    ranks: list[int]
    warnings: list[str]
