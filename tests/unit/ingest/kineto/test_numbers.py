"""Times and ids of a Kineto trace: what one becomes depends on no other of its chunk."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Raw

from dpro.ingest.kineto import read_trace
from dpro.ingest.kineto.events import MISSING_NS, nanoseconds, whole_numbers
from tests.traces import cpu_op, write

LATE = Raw(b"1700000000000000.123")
TIMES: list[tuple[Any, int]] = [
    (5, 5_000),
    (-1.5, -1_500),
    (1419116104994.671, 1419116104994671),
    (0.00149, 1),
    (Raw(b"0.00149"), 1),
    (1e-05, 0),
    (LATE, 1700000000000000123),
    (Raw(b'"1700000000000000.123"'), 1700000000000000123),
    (Raw(b"9007199254740993.5"), MISSING_NS),
    (2**60, MISSING_NS),
    (None, MISSING_NS),
    (Raw(b'"soon"'), MISSING_NS),
    (10**400, MISSING_NS),
]
NUMBERS: list[tuple[Any, int]] = [
    (7, 7),
    ("7", 7),
    ("1_0", 10),
    ("stream 7", 7),
    ("2" * 5000, -1),
    (None, -1),
]


@pytest.mark.parametrize(("beside", "_"), TIMES)
def test_a_time_is_the_same_whatever_stands_beside_it(beside, _):
    for time, expected in TIMES:
        assert nanoseconds([beside, time])[1] == expected


@pytest.mark.parametrize(("beside", "_"), NUMBERS)
def test_an_id_is_the_same_whatever_stands_beside_it(beside, _):
    for value, expected in NUMBERS:
        assert whole_numbers([beside, value])[1] == expected


@pytest.mark.parametrize("place", [0, 1, 37, 39])
def test_one_late_time_with_decimals_among_whole_ones_keeps_its_nanoseconds(tmp_path, place):
    events = [cpu_op(f"op {number}", 1_700_000_000_000_000 + number, 1) for number in range(40)]
    path = write(tmp_path / "rank0.json", events)
    written = f"{1_700_000_000_000_000 + place}"
    text = path.read_text()
    assert text.count(written) == 1
    path.write_text(text.replace(written, f"{written}.123"))
    starts = read_trace(path).frames["spans"]["start_ns"].to_list()
    assert starts[place] - starts[place - 1 if place else 1] == (1_123 if place else -877)
