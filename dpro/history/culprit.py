"""The host that a finding is about.

In: a finding, and the host of each rank. Out: the host, if the finding blames one part of one host, or why
not. What is said to be one of several, and what blames the work or the program, names no host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from dpro.detect.findings import Finding

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
