"""How the job of a run ended, as all commands begin with it where that was no good end.

In: an `Analysis`. Out: a line of text, or the key `end` of a command's JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpro.cli.output import console

NOTHING_BEFORE = "Until then nothing slow shows in what was recorded."

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.end import End


def print_end(end: End) -> None:
    """One line on stdout where the job failed, hung or was ended; nothing otherwise."""
    if end.early:
        console().print(end.sentence)


def end_keys(analysis: Analysis) -> dict[str, Any]:
    """What is added to a command's JSON."""
    from dpro.analysis.end import end_document

    return {"end": end_document(analysis.end)}
