"""Findings that a run which is still being recorded showed earlier and shows no more.

In: the findings of one copy of the run and of the next. Out: what was withdrawn, when, and why. Only copies
whose findings were computed count: what no reader saw needs no withdrawal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dpro.detect.findings import Finding
from dpro.detect.findings_log import identity_of, time_of_day

if TYPE_CHECKING:
    from dpro.dashboards.loaded import Loaded

_VERDICTS = ("verdict_on_hangs", "verdict_by_calls", "verdict_by_replay")  # of `Analysis`, in its order


class Withdrawn(NamedTuple):
    """A finding that no longer holds.

    Attributes:
        finding: as it was shown last.
        time_ns: when the copy that does not show it was there.
        why: it was withdrawn.
    """

    finding: Finding
    time_ns: int
    why: str


class EarlierFindings(NamedTuple):
    """What readers of earlier copies of a run were shown.

    Attributes:
        findings: of the latest of those copies.
        withdrawn: what was withdrawn until then.
    """

    findings: tuple[Finding, ...] = ()
    withdrawn: tuple[Withdrawn, ...] = ()


def shown_by(loaded: Loaded) -> EarlierFindings:
    """Return what a copy and those before it showed; nothing is computed for it."""
    computed = (loaded.values.get(name) for name in _VERDICTS)
    if not any(isinstance(verdict, tuple) for verdict in computed):
        return loaded.earlier
    return EarlierFindings(tuple(loaded.verdict[0]), withdrawn_of(loaded))


def withdrawn_of(loaded: Loaded) -> tuple[Withdrawn, ...]:
    """Return what was withdrawn until a copy of the run, the earliest first.

    Raises:
        DproError: the findings of the copy cannot be computed.
    """
    if not any(loaded.earlier):
        return ()
    findings, unknown = loaded.verdict
    now = {identity_of(each) for each in findings}
    steps = loaded.steps["step"].to_numpy()
    last = f"the steps up to {steps.max()}" if steps.size else "its steps"
    why = f"{last} do not show it" if not unknown else f"not known now: {unknown[0]}"
    gone = [Withdrawn(each, loaded.opened_ns, why) for each in loaded.earlier.findings]
    return tuple(each for each in (*loaded.earlier.withdrawn, *gone) if identity_of(each.finding) not in now)


def withdrawn_in_words(withdrawn: Withdrawn) -> str:
    """Return a line that says what was withdrawn, when and why."""
    found = withdrawn.finding
    when = time_of_day(withdrawn.time_ns)
    return f"{found.title}: withdrawn at {when} because {withdrawn.why}"
