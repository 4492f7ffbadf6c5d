"""Results of checks as tables for people: Markdown, one row per line of a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WIDEST = 160


def rows(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the document as Markdown."""
    machine = ", ".join(f"{name} {_value(value)}" for name, value in document["machine"].items() if value)
    yield f"{'Rehearsed, nothing measured' if document['dry_run'] else 'Measured'} on: {machine or 'unknown'}"
    for stage, checks in document["stages"].items():
        yield ""
        yield f"| {stage} | n | figures | bar | holds |"
        yield "|---|---|---|---|---|"
        for name, check in checks.items():
            yield from _of_check(name, check)


def summary(document: Mapping[str, Any]) -> dict[str, int]:
    """Count checks, those that are not whole, and lines that hold, that do not, and that are facts."""
    checks = [check for each in document["stages"].values() for check in each.values()]
    holds = [line["holds"] for check in checks for line in check["lines"].values()]
    return {
        "checks": len(checks),
        "not_whole": sum(check["status"] != "whole" for check in checks),
        "hold": sum(each is True for each in holds),
        "do_not_hold": sum(each is False for each in holds),
        "facts": sum(each is None for each in holds),
    }


def _of_check(name: str, check: Mapping[str, Any]) -> Iterator[str]:
    for line, found in check["lines"].items():
        figures = ", ".join(f"{key} {_value(value)}" for key, value in found["figures"].items())
        holds = {True: "yes", False: "**no**", None: ""}[found["holds"]]
        label = name if line == name else f"{name}: {line}"
        yield f"| {_cell(label)} | {found['n']} | {_cell(figures)} | {_cell(found['bar'])} | {holds} |"
    if check["status"] != "whole":
        words = (check.get("error") or "").strip().splitlines()
        yield f"| {_cell(name)} | | {check['status']}: {_cell(words[-1] if words else '')} | | **no** |"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)


def _cell(text: str) -> str:
    flat = " ".join(text.replace("|", "\\|").split())
    return flat if len(flat) <= WIDEST else flat[: WIDEST - 1] + "…"
