"""What a watcher saw of a hang while the job hung, merged with what the records of the run show.

In: findings from the records, and the findings log of the run. Out: findings. The records of a job that was
ended may have lost what it waited for: a call that fails counts as finished. So a hang in the log that was
not over before the job ended decides, unless the records are surer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.findings_log import (
    FOLDER,
    JOB_ENDED,
    LoggedFinding,
    finding_of,
    logged_findings,
    time_of_day,
)
from dpro.units import NS_PER_S

MAX_FRAMES = 3  # of a thread that are quoted


def merge_watched(found: Sequence[Finding], run: Path, steps: pl.DataFrame) -> list[Finding]:
    """Merge the hangs of a run's findings log with those that its records show.

    Args:
        steps: table `steps`.

    Returns:
        The hangs of the log, or `found` where its first is a hang of higher confidence; each that is in the
        log says when it was seen, and where the threads of its ranks were.
    """
    watched = list(_still_hung(run, steps))
    if not watched:
        return list(found)
    surest = max(finding.confidence for _, finding in watched)
    if found and found[0].confidence > surest and found[0].class_.startswith("hang."):
        seen = {finding.ranks: notice for notice, finding in watched}
        return [_confirmed(each, seen[each.ranks], run) if each.ranks in seen else each for each in found]
    return [_confirmed(finding, notice, run) for notice, finding in watched]


def _still_hung(run: Path, steps: pl.DataFrame) -> Iterator[tuple[LoggedFinding, Finding]]:
    """Yield hangs that were seen and were not over before the job was."""
    last_ns = (steps["start_ns"] + steps["duration_ns"]).max() if steps.height else -1
    for notice in logged_findings(run):
        over = notice.over_ns > 0 and notice.why != JOB_ENDED
        moved = isinstance(last_ns, int) and last_ns > notice.time_ns + NS_PER_S
        if notice.class_.startswith(("hang.", "dead.")) and not over and not moved:
            yield notice, finding_of(notice)


def _confirmed(finding: Finding, notice: LoggedFinding, run: Path) -> Finding:
    """Return a finding with when it was seen, and where the threads of its ranks were then."""
    kept = run / FOLDER / f"hang-{notice.number}"
    where = f"; dumps and stacks of then are in {FOLDER}/{kept.name}" if kept.is_dir() else ""
    lines = [f"`dpro watch` saw it at {time_of_day(notice.time_ns)}, while the job hung{where}"]
    known = "\n".join(finding.evidence)
    lines += [line for line in _threads(kept / "stacks.json", finding.ranks) if line not in known]
    return replace(finding, evidence=(*finding.evidence, *lines))


def _threads(path: Path, ranks: Sequence[int]) -> Iterator[str]:
    """Yield where the main threads of some ranks were, as far as these answered."""
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
