"""What a finding costs of the usual step of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpro.detect.findings import HIDDEN, PAUSES, TIME_SLICES, Finding
from dpro.detect.observations import observe

LATE = Finding("slow.host", "rank", "1", (1,), severity=0.2, confidence=0.9, cost_ns=20.0, observations=())


@pytest.mark.parametrize(
    ("finding", "cost_ns", "share"),
    [
        (replace(LATE, severity=0.4, cost_ns=24.0), 24.0, 0.48),  # its steps took 60 ns, the usual one 50
        (replace(LATE, severity=0.9, cost_ns=54.0), 50.0, 1.0),
        (LATE, 10.0, 0.2),  # they took 100 ns: of quite other steps a share alone is known
        (LATE.observing(observe(TIME_SLICES, "stands still")), 10.0, 0.2),
        (LATE.observing(observe(HIDDEN, "hidden")), 20.0, 0.2),
        (replace(LATE, class_=PAUSES), 20.0, 0.2),
        (replace(LATE, class_="hang.host"), 20.0, 0.2),
        (replace(LATE, cost_ns=0.0), 0.0, 0.2),
    ],
)
def test_a_finding_costs_a_part_of_the_usual_step(finding, cost_ns, share):
    of_step = finding.of_usual_step(50.0)
    assert (of_step.cost_ns, of_step.severity) == pytest.approx((cost_ns, share))
