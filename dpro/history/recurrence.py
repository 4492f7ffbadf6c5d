"""What is said of a host that is found at fault again.

In: findings of a run. Out: the same, with a line of evidence where earlier runs had findings about their
host. They are remembered for later runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from dpro.detect.findings import Finding
from dpro.history.culprit import culprit_of
from dpro.history.store import Remembered, remember, remembered, run_name
from dpro.units import NS_PER_S

DAY_NS = 86_400 * NS_PER_S
MIN_CONFIDENCE = 0.5  # of what is remembered
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def with_history(
    findings: Iterable[Finding], hosts: Mapping[int, str], run: Path, time_ns: int
) -> list[Finding]:
    """Remember findings, and return them with what earlier runs had."""
    name, found, rows = run_name(run), [], []
    for finding in findings:
        host = culprit_of(finding, hosts).host
        if host and finding.confidence >= MIN_CONFIDENCE:
            row = Remembered(host, finding.class_, finding.confidence, time_ns, name)
            rows.append(row)
            line = recurrence(row, remembered(host))
            finding = replace(finding, evidence=(*finding.evidence, line)) if line else finding
        found.append(finding)
    if rows:
        remember(rows)
    return found


def recurrence(now: Remembered, known: Iterable[Remembered]) -> str:
    """A line about earlier findings of a host; empty where there are none."""
    earlier = [each for each in known if each.run != now.run and each.time_ns < now.time_ns]
    if not earlier:
        return ""
    same = [each for each in earlier if each.class_ == now.class_]
    others = Counter(each.class_ for each in earlier if each.class_ != now.class_)
    days = _days(now.time_ns - min(each.time_ns for each in earlier))
    more = ", ".join(f"{number} of {class_}" for class_, number in sorted(others.items()))
    line = f"host {now.host}: {_ordinal(len(same) + 1)} finding of {now.class_} in {days}"
    return f"{line}, after {more}" if more else line


def _ordinal(number: int) -> str:
    if number < len(_ORDINALS):
        return _ORDINALS[number]
    teens = 10 < number % 100 < 20
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _days(ns: int) -> str:
    days = -(-ns // DAY_NS)
    return "a day" if days <= 1 else f"{days} days"
