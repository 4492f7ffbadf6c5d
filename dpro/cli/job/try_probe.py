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

MAX_BUCKETS, MAX_MODULES = 20, 60  # that are printed
PRECISIONS = ("bf16", "fp16", "fp8", "int8")


def probe(run: Run, changes: Sequence[Change], quiet: bool) -> ProbeDocument:
    """Say what was measured.

    Args:
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

    Raises:
        Unanswerable: nothing can be chosen.
    """
    from dpro.cli.analysis import analyse
    from dpro.trial.probes import resolved

    if not any(change.probe for change in changes):
        return changes
    return resolved(changes, analyse(str(run.path)).built.predictive)


def _print(document: ProbeDocument) -> None:
    if document.codecs:
        _print_codecs(document)
    if document.sensitivities:
        _print_sensitivities(document)


def _print_codecs(document: ProbeDocument) -> None:
    from rich.table import Table

    out = console()
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


def _print_sensitivities(document: ProbeDocument) -> None:
    from rich.table import Table

    out = console()
    table = Table("module", "trace", "by", *PRECISIONS, box=None)
    rows = {(each.module, each.precision): each for each in document.sensitivities}
    modules = list(dict.fromkeys(each.module for each in document.sensitivities))
    for module in modules[:MAX_MODULES]:
        own = [rows[module, precision] for precision in PRECISIONS]
        table.add_row(module, f"{own[0].trace:.3g}", own[0].method, *(f"{each.loss:.2g}" for each in own))
    out.print(table)
    if len(modules) > MAX_MODULES:
        out.print(f"and further modules, in {document.run}")
    out.print("by precision: what it may add to the loss, as a share of it; weights only")
    out.print(f"next: dpro whatif {document.run} --edit precision:budget=0.01")
