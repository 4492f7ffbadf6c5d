"""What is said of a host that is found at fault again.

In: findings of a run. Out: the same, with a line of evidence where earlier runs had findings about their
host. They are remembered for later runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dpro.detect.findings import Finding
from dpro.history.store import Remembered, remember, remembered, run_name
from dpro.units import NS_PER_S
from dpro.words import ordinal

DAY_NS = 86_400 * NS_PER_S
MIN_CONFIDENCE = 0.5  # of what is remembered
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def with_history(
    findings: Iterable[Finding], hosts: Mapping[int, str], run: Path, time_ns: int
) -> list[Finding]:
    """Remember findings, and return them with what earlier runs had."""
    name, with_lines, rows = run_name(run), [], []
    for finding in findings:
        host = culprit_of(finding, hosts).host
        if host and finding.confidence >= MIN_CONFIDENCE:
            row = Remembered(host, finding.class_, finding.confidence, time_ns, name)
            rows.append(row)
            line = recurrence(row, remembered(host))
            finding = replace(finding, evidence=(*finding.evidence, line)) if line else finding
        with_lines.append(finding)
    if rows:
        remember(rows)
    return with_lines


def recurrence(now: Remembered, before: Iterable[Remembered]) -> str:
    """A line about earlier findings of a host; empty where there are none."""
    earlier = [row for row in before if row.run != now.run and row.time_ns < now.time_ns]
    if not earlier:
        return ""
    of_class = Counter(row.class_ for row in earlier)
    nth = _nth(of_class.pop(now.class_, 0) + 1)
    days = _days(now.time_ns - min(row.time_ns for row in earlier))
    more = ", ".join(f"{number} of {class_}" for class_, number in sorted(of_class.items()))
    line = f"host {now.host}: {nth} finding of {now.class_} in {days}"
    return f"{line}, after {more}" if more else line


def _nth(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else ordinal(number)


def _days(ns: int) -> str:
    days = -(-ns // DAY_NS)
    return "a day" if days <= 1 else f"{days} days"


# The host that a finding blames. What is said to be one of several, and what blames the work or the program,
# names no host.

BLAMELESS = ("hang.mismatch", "imbalance.", "pauses", "warm-up", "slow.regression", "jitter")
OF_RANKS = ("rank", "ranks", "nic", "sender", "receiver", "link")
_RANKS = re.compile(r"(?:ranks? )?\d+(?:(?: - | ?-> ?|-|, ?)\d+)*")  # not leaf1 > node3:nic0


class Culprit(NamedTuple):
    """A host, or why there is none.

    Attributes:
        host: its name; empty where the finding names no single one.
        why_not: why it names none; empty where it does.
    """

    host: str
    why_not: str = ""


def culprit_of(finding: Finding, hosts: Mapping[int, str]) -> Culprit:
    """The host that a finding is about."""
    if finding.class_.startswith(BLAMELESS):
        return Culprit("", f"{finding.class_} blames the work or the program, no part of a host")
    if len(set(hosts.values())) < 2:
        return Culprit("", "the job runs on one host")
    kind = finding.component_kind
    if kind == "one of":
        return Culprit("", f"ambiguous: one of {finding.component_id}")
    if kind == "host" and finding.component_id in hosts.values():
        return Culprit(finding.component_id)
    if kind not in OF_RANKS:
        return Culprit("", f"it is about {kind} {finding.component_id}, not about one host")
    if kind != "ranks" and not _RANKS.fullmatch(finding.component_id):
        return Culprit("", f"it is about {kind} {finding.component_id}, which is no rank")
    named = {hosts.get(rank, "") for rank in _ranks(finding)}
    if len(named) == 1 and "" not in named:
        return Culprit(named.pop())
    return Culprit("", f"ambiguous: {kind} {finding.component_id} is on {len(named)} hosts")


def _ranks(finding: Finding) -> set[int]:
    """The ranks that the component names; a port is slow for all that exchange with its rank."""
    if finding.component_kind == "ranks":
        return set(finding.ranks)
    return {int(number) for number in re.findall(r"\d+", finding.component_id)}
