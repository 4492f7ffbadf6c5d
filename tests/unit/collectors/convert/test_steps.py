"""Steps from what a process wrote of their ends."""

from __future__ import annotations

import pytest

from dpro.collectors.convert.tables import _steps, steps_without_time
from dpro.collectors.inside import records
from dpro.collectors.inside.records import Record


def ended(*ends_ns: int) -> list[Record]:
    """Updates of one optimizer, after which the recorder takes 10 ns."""
    return [
        Record(0, number, end_ns, end_ns + 10, records.UPDATE) for number, end_ns in enumerate(ends_ns, 1)
    ]


def test_a_step_lasts_from_one_end_to_the_next():
    steps = _steps(3, ended(100, 200, 300))
    assert steps.select("rank", "step", "start_ns", "duration_ns").rows() == [
        (3, 1, 110, 90),
        (3, 2, 210, 90),
    ]
    assert steps_without_time(ended(100, 200, 300)) == 0


@pytest.mark.parametrize("damaged", [50, -(2**62)])
def test_a_time_that_is_damaged_costs_its_steps_and_no_others(damaged):
    recorded = ended(100, 200, damaged, 400, 500)
    steps = _steps(0, recorded)
    assert steps["step"].to_list() == [1, 3, 4]
    assert (steps["duration_ns"] >= 0).all()
    assert steps_without_time(recorded) == 1
