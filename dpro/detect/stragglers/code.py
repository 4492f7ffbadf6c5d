"""The code in which the host of a late rank takes longer than its peers', by the stacks of deep windows.

Takes findings of late ranks, and the baseline of deep windows; returns the findings with the function. A
built-in function, or one of a library, gets the file and line of the job's own function that calls it. Does
not decide which rank is late, nor at which cost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from dpro.detect.baseline import Baseline
from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.observations import Observation, observe
from dpro.detect.stragglers.causes import ADDRESS, EXPLAINED, OUTSIDE_OPERATORS, excess_by_cause
from dpro.recorders import OF_LIBRARIES, STACKS, how_to_record
from dpro.replay.attribution import LANE, innermost
from dpro.replay.graph import NO_SPAN
from dpro.replay.peers import peers_of
from dpro.schema import SPANS
from dpro.store import Run
from dpro.words import short_name

_COLUMNS = [*LANE, "kind", "name", "start_ns", "duration_ns"]
_WHOLE_FILE = "<module>"  # its line in a trace is the one at which the window began


def with_code(findings: list[Finding], baseline: Baseline) -> list[Finding]:
    """Add to findings of one late host the function that takes longer there, or how to record it.

    Findings that have observed where in deep windows their time is are unchanged, and those whose excess the
    windows do not show.
    """
    return [_with_function(finding, baseline) if _by_calls(finding) else finding for finding in findings]


def _by_calls(finding: Finding) -> bool:
    is_late = any(one.kind == "longer-work" and "last_step" in one.values for one in finding.observations)
    return is_late and finding.class_ == "slow.host" and len(finding.ranks) == 1


def _with_function(finding: Finding, baseline: Baseline) -> Finding:
    (rank,) = finding.ranks
    peers = peers_of(baseline.teams, rank)
    if not peers:
        return finding
    largest = excess_by_cause(baseline, rank, peers, int(baseline.steps.min())).row(0, named=True)
    if largest["cause"] != OUTSIDE_OPERATORS or largest["excess_ns"] < EXPLAINED * finding.cost_ns:
        return finding
    longer = observe(
        "longer-in-windows", "in deep windows, {cause_ns} of its excess is in {cause}",
        cause_ns=largest["excess_ns"], cause=largest["cause"],
    )  # fmt: skip
    shown, place = name_code(longer, largest, baseline.graph.run, rank)
    return replace(finding.observing(shown), place=place or finding.place)


def name_code(
    longer: Observation, cause: Mapping[str, Any], run: Run | None, rank: int
) -> tuple[Observation, CodeLocation | None]:
    """Add to an observation of a cause the code that takes most time, or how to record it; return both.

    Args:
        cause: a row of `excess_by_cause` of the rank.
    """
    name = cause["example"]
    if name == NO_SPAN:
        return longer.then(f"; record with {how_to_record(STACKS, run)} to name it", example=name), None
    place = _locate(name, run, rank)
    return longer.then(": {example}", example=place.in_words if place and place.file else name), place


def _locate(name: str, run: Run | None, rank: int) -> CodeLocation | None:
    """Return where a rank runs a function, operator or kernel; None without a name."""
    if not name:
        return None
    caller = _caller_of(name, run, rank) if run and re.search(OF_LIBRARIES, name) else ""
    if not caller:
        return CodeLocation.of(name)
    code = CodeLocation.of(caller)
    return CodeLocation(
        short_name(CodeLocation.of(name).name), code.file, 0 if code.name == _WHOLE_FILE else code.line
    )


def _caller_of(name: str, run: Run, rank: int) -> str:
    """Return the job's own Python function in which a rank mostly calls a function; empty where unknown."""
    of_rank = (pl.col("rank") == rank) & (pl.col("kind") == "python")
    spans = pl.concat(part.filter(of_rank) for part in run.part_by_part(SPANS, _COLUMNS))
    code = spans.filter(~pl.col("name").str.contains(OF_LIBRARIES))
    around = innermost(code, spans.filter(pl.col("name").str.replace(ADDRESS, "0x") == name))
    callers = code["name"].gather(around[around >= 0])
    return "" if callers.is_empty() else str(callers.mode().sort()[0])
