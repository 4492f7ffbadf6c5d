"""What was found while a job ran, as `dpro watch` keeps it in the run.

In: a run. Out: each finding once, with when it began and when and why it was over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro.store import Run

FOLDER = "findings"
FILE = "findings.jsonl"
BEGINS, ENDS = "begins", "ends"


def read_findings(run: Path) -> list[Mapping[str, Any]]:
    """What was found while a job ran, in the order told; lines that are not whole are left out."""
    path = run / FOLDER / FILE
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def told_while_it_ran(run: Run) -> list[dict[str, Any]]:
    """What `dpro watch` found while a run was recorded: each finding once, with when and why it was over."""
    found: dict[int, dict[str, Any]] = {}
    for notice in read_findings(run.path):
        if notice["event"] == BEGINS:
            found[notice["number"]] = {**notice, "over_ns": -1}
        elif notice["number"] in found:
            found[notice["number"]] |= {"over_ns": notice["time_ns"], "why": notice["why"]}
    return [{key: each[key] for key in each if key != "event"} for each in found.values()]


def told_in_words(told: list[dict[str, Any]]) -> list[str]:
    """The same for people, one line each."""
    lines = []
    for each in told:
        when = clock(each["time_ns"])
        until = f", over at {clock(each['over_ns'])}: {each['why']}" if each["over_ns"] > 0 else ""
        component = f"{each['component']['kind']} {each['component']['id']}"
        lines.append(f"at {when}, step {each['step']}: {each['class']}: {component}{until}")
    return lines


def clock(time_ns: int) -> str:
    """The time of day here."""
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))
