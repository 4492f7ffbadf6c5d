"""What `dpro try` does about probes: record the job with one, print what it measured, choose by it.

In: a run of the job with a probe's measurements. Out: a table and a document; changes with what was chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpro.store import Run
    from dpro.trial.changes import Change
    from dpro.trial.probe_documents import ProbeDocument

MAX_BUCKETS = 20  # that are printed


def probe(run: Run, changes: Sequence[Change], quiet: bool) -> ProbeDocument:
    """Say what was measured.

    Args:
        run: of the job.
        changes: the probes.
        quiet: whether nothing is printed.

    Raises:
        Unanswerable: the job was too short for it.
    """
    from dpro.trial.probe_documents import probe_document

    document = probe_document(run, [change.text for change in changes])
    if not quiet:
        _print(document)
    return document


def with_choices(changes: tuple[Change, ...], run: Run) -> tuple[Change, ...]:
    """Changes with what is chosen for this job.

    Args:
        changes: as given.
        run: of the job as it is, with measurements of the probes that changes need.

    Raises:
        Unanswerable: nothing can be chosen.
    """
    from dpro.cli.analysis import analyse
    from dpro.trial.probes import resolved

    if not any(change.probe for change in changes):
        return changes
    return resolved(changes, analyse(str(run.path)).built.predictive)


def _print(document: ProbeDocument) -> None:
    from rich.table import Table

    out = console()
    if document.codecs:
        table = Table("bucket", "gradients of", "MB", "codec", "lost", "ms", box=None)
        kept = [each for each in document.codecs if each.bucket < MAX_BUCKETS]
        for each in kept:
            names = each.names[0] if len(each.names) == 1 else f"{each.names[0]} … {each.names[-1]}"
            size = f"{4 * each.elements / 2**20:.2f}"
            table.add_row(str(each.bucket), names, size, each.codec, f"{each.lost:.2%}", f"{each.ms:.3f}")
        out.print(table)
        if len(kept) < len(document.codecs):
            out.print(f"and further buckets, in {document.run}")
        out.print("lost: the norm of what is lost over that of the gradients; ms: to compress and back")
        out.print(f"next: dpro whatif {document.run} --edit compress:budget=0.05")
