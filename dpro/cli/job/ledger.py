"""`dpro ledger`: what was predicted and what was measured, of all changes that were tried on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dpro.cli.output import console, json_option, print_json

if TYPE_CHECKING:
    from dpro.trial.documents import EntryDocument, KindDocument, LedgerDocument
    from dpro.trial.ledger import Ratio


@click.command()
@json_option
def ledger(as_json: bool) -> None:
    """List predicted against measured, per kind of change, of everything that `dpro try` has measured.

    By these errors intervals of later predictions of the same kind are widened, once there are three of it.
    """
    from dpro.trial.documents import ledger_document
    from dpro.trial.ledger import read

    document = ledger_document(*read())
    if as_json:
        print_json(document)
    else:
        _print(document)


def _print(document: LedgerDocument) -> None:
    out = console()
    for kind in document.kinds:
        out.print(_title(kind))
        for entry in document.entries:
            if entry.kind == kind.kind:
                out.print(f"  {_line(entry)}")
    if not document.kinds:
        out.print(f"Nothing was tried yet ({document.path}): dpro try EDIT... -- COMMAND...")
    if document.damaged:
        out.print(f"{document.damaged} damaged lines of {document.path} are passed over.")


def _title(kind: KindDocument) -> str:
    tries = f"{kind.kind}: {kind.tries} tr{'ies' if kind.tries > 1 else 'y'}"
    if not kind.predicted:
        return f"{tries}, nothing predicts them"
    text = (
        f"{tries}, predictions off by {kind.median_error_pct:.1f}% (median), "
        f"{kind.worst_error_pct:.1f}% at worst; "
        f"{kind.inside_interval} of {kind.predicted} inside their interval"
    )
    widens = kind.widens_by_pct
    return text if widens is None else f"{text}; further intervals are widened by {widens:.1f}%"


def _line(entry: EntryDocument) -> str:
    base = entry.baseline_ms
    predicted, measured = entry.predicted, entry.measured
    words = [entry.time[:10], " ".join(entry.edits), f"of {base:.2f} ms:"]
    words += [f"predicted {_times(predicted, base)}"] if predicted else []
    words += [f"measured {_times(measured, base)}"]
    words += [f"off by {100 * (predicted.ratio / measured.ratio - 1):+.1f}%"] if predicted else []
    return "  ".join(words)


def _times(ratio: Ratio, base: float) -> str:
    return f"{ratio.ratio * base:.2f} ms ({ratio.low * base:.2f} to {ratio.high * base:.2f})"
