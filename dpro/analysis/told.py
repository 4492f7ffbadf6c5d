"""What was found while a job ran, as `dpro watch` keeps it in the run.

In: a run. Out: each finding once, with when it began and when and why it was over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpro.detect.findings import Finding
from dpro.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    import polars as pl

    from dpro.store import Run

FOLDER = "findings"
FILE = "findings.jsonl"
BEGINS, ENDS = "begins", "ends"
JOB_ENDED = "the job has ended"
MAX_FRAMES = 3  # of a thread that are quoted


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


def finding_of(notice: Mapping[str, Any]) -> Finding:
    """What a notice was about."""
    component, cost_ms = notice["component"], notice["cost_ms_per_step"] or 0.0
    return Finding(
        notice["class"],
        component["kind"],
        component["id"],
        tuple(notice["ranks"]),
        notice["severity"] or 0.0,
        notice["confidence"] or 0.0,
        cost_ms * NS_PER_MS,
        tuple(notice["evidence"]),
        notice.get("cause", ""),
    )


def as_watched(found: Sequence[Finding], run: Run, steps: pl.DataFrame) -> list[Finding]:
    """What hangs in a run: what was seen while it hung counts, unless the records of the run are surer.

    Args:
        found: what the records show, surest first.
        run: the run.
        steps: table `steps`.
    """
    watched = list(_still_hung(run, steps))
    if not watched:
        return list(found)
    surest = max(finding.confidence for _, finding in watched)
    if found and found[0].confidence > surest and found[0].class_.startswith("hang."):
        seen = {finding.ranks: notice for notice, finding in watched}
        return [_confirmed(each, seen[each.ranks], run) if each.ranks in seen else each for each in found]
    return [_confirmed(finding, notice, run) for notice, finding in watched]


def _still_hung(run: Run, steps: pl.DataFrame) -> Iterator[tuple[Mapping[str, Any], Finding]]:
    """Hangs that were seen and were not over before the job was."""
    last_ns = (steps["start_ns"] + steps["duration_ns"]).max() if steps.height else -1
    for notice in told_while_it_ran(run):
        over = notice["over_ns"] > 0 and notice["why"] != JOB_ENDED
        moved = isinstance(last_ns, int) and last_ns > notice["time_ns"] + NS_PER_S
        if notice["class"].startswith(("hang.", "dead.")) and not over and not moved:
            yield notice, finding_of(notice)


def _confirmed(finding: Finding, notice: Mapping[str, Any], run: Run) -> Finding:
    """A finding with when it was seen, and where the threads of its ranks were then."""
    kept = run.path / FOLDER / f"hang-{notice['number']}"
    where = f"; dumps and stacks of then are in {FOLDER}/{kept.name}" if kept.is_dir() else ""
    lines = [f"`dpro watch` saw it at {clock(notice['time_ns'])}, while the job hung{where}"]
    said = "\n".join(finding.evidence)
    lines += [line for line in _threads(kept / "stacks.json", finding.ranks) if line not in said]
    return replace(finding, evidence=(*finding.evidence, *lines))


def _threads(path: Path, ranks: Sequence[int]) -> Iterator[str]:
    """Where the main threads of some ranks were, as far as they answered."""
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for answer in answers.get("ranks", ()):
        frames: list[dict[str, Any]] = next((each["frames"] for each in answer.get("threads", ())), [])
        if answer.get("rank") in ranks and frames:
            calls = (f"{frame['file']}:{frame['line']} {frame['function']}" for frame in frames[:MAX_FRAMES])
            yield f"the main thread of rank {answer['rank']} was in {' < '.join(calls)}"
    for rank, why in answers.get("why_silent", {}).items():
        if int(rank) in ranks:
            yield f"rank {rank} did not say where its threads were: {why}"
