from pathlib import Path

import pytest

from dpro.collectors.convert.recorded import RecordedProcess, attempts


def process(
    rank: int, started: int, world_size: int = 2, attempt: str = "", launcher: str = ""
) -> RecordedProcess:
    facts = {"rank": rank, "world_size": world_size, "attempt": attempt, "started_ns": started}
    facts |= {"launcher": launcher}
    return RecordedProcess(Path(f"{rank}-{started}"), facts)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([], []),
        ([process(1, 5), process(0, 6)], [[0, 1]]),
        # Restarts that torchrun counts; rank 1 of the first and rank 0 of the third never got to training.
        (
            [process(0, 1, attempt="0"), process(1, 5, attempt="1"), process(0, 6, attempt="1"),
             process(1, 9, attempt="2")],
            [[0], [0, 1], [1]],
        ),
        # One training after the other in a shell script, the second larger.
        ([process(0, 1, 1), process(1, 5), process(0, 6)], [[0], [0, 1]]),
        # The same without a word of it: ranks come again.
        ([process(0, 1), process(1, 2), process(1, 5), process(0, 6)], [[0, 1], [0, 1]]),
        # The torchrun of a second host is new: it has restarted nothing.
        (
            [process(0, 1, attempt="3", launcher="0"), process(1, 2, attempt="0", launcher="1"),
             process(1, 7, attempt="0", launcher="1"), process(0, 8, attempt="4", launcher="0")],
            [[0, 1], [0, 1]],
        ),
        # A node is lost and torchrun goes on with fewer.
        ([*(process(rank, rank, 3) for rank in range(3)), process(1, 7), process(0, 8)], [[0, 1, 2], [0, 1]]),
    ],
)  # fmt: skip
def test_processes_that_trained_together_are_one_attempt(processes, expected):
    assert [[each.rank for each in attempt] for attempt in attempts(processes)] == expected
