"""`dpro ledger`: what was predicted and what was measured, of all changes that were tried on this machine."""

from __future__ import annotations

import math
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, json_option, print_json

if TYPE_CHECKING:
    from dpro.trial.ledger import Entry


@click.command()
@json_option
def ledger(as_json: bool) -> None:
    """List predicted against measured, per kind of change, of everything that `dpro try` has measured.

    By these errors intervals of later predictions of the same kind are widened, once there are three of it.
    """
    from dpro.trial.ledger import ledger_path, read

    entries, damaged = read()
    document = {
        "path": str(ledger_path()),
        "damaged": damaged,
        "kinds": [
            _kind(kind, list(same)) for kind, same in groupby(sorted(entries, key=_by_kind), key=_by_kind)
        ],
        "entries": [_entry(entry) for entry in entries],
    }
    if as_json:
        print_json(document)
    else:
        _print(document)


def _by_kind(entry: Entry) -> str:
    return entry.kind


def _kind(kind: str, entries: list[Entry]) -> dict[str, Any]:
    """One kind of change; errors are those of predicted step times, as a share of the measured one."""
    from dpro.trial.ledger import usual_error

    errors = [abs(math.expm1(-entry.error)) for entry in entries if entry.error is not None]
    usual, _ = usual_error(entries, kind)
    return {
        "kind": kind,
        "tries": len(entries),
        "predicted": len(errors),
        "inside_interval": sum(bool(entry.is_inside) for entry in entries),
        "median_error_pct": 100 * median(errors) if errors else None,
        "worst_error_pct": 100 * max(errors) if errors else None,
        "widens_by_pct": 100 * math.expm1(usual) if usual else None,
    }


def _entry(entry: Entry) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(entry) | {"is_inside": entry.is_inside}


def _print(document: dict[str, Any]) -> None:
    out = console()
    for kind in document["kinds"]:
        out.print(_title(kind))
        for entry in (each for each in document["entries"] if each["kind"] == kind["kind"]):
            out.print(f"  {_line(entry)}")
    if not document["kinds"]:
        out.print(f"Nothing was tried yet ({document['path']}): dpro try EDIT... -- COMMAND...")
    if document["damaged"]:
        out.print(f"{document['damaged']} damaged lines of {document['path']} are passed over.")


def _title(kind: dict[str, Any]) -> str:
    tries = f"{kind['kind']}: {kind['tries']} tr{'ies' if kind['tries'] > 1 else 'y'}"
    if not kind["predicted"]:
        return f"{tries}, nothing predicts them"
    text = (
        f"{tries}, predictions off by {kind['median_error_pct']:.1f}% (median), "
        f"{kind['worst_error_pct']:.1f}% at worst; "
        f"{kind['inside_interval']} of {kind['predicted']} inside their interval"
    )
    widens = kind["widens_by_pct"]
    return text if widens is None else f"{text}; further intervals are widened by {widens:.1f}%"


def _line(entry: dict[str, Any]) -> str:
    base = entry["baseline_ms"]
    predicted, measured = entry["predicted"], entry["measured"]
    words = [entry["time"][:10], " ".join(entry["edits"]), f"of {base:.2f} ms:"]
    words += [f"predicted {_times(predicted, base)}"] if predicted else []
    words += [f"measured {_times(measured, base)}"]
    words += [f"off by {100 * (predicted['ratio'] / measured['ratio'] - 1):+.1f}%"] if predicted else []
    return "  ".join(words)


def _times(ratio: dict[str, float], base: float) -> str:
    return f"{ratio['ratio'] * base:.2f} ms ({ratio['low'] * base:.2f} to {ratio['high'] * base:.2f})"
