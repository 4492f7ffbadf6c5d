"""What a process has recorded since the last look."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.tables import frames_of
from dpro.collectors.inside.records import (
    ANCHOR,
    CLOCK,
    INPUT,
    OPENED,
    RECORD,
    UPDATE,
    WINDOW,
    read_records,
)
from dpro.extensions.watch.job import MIN_RECENT, MIN_STEPS, ProcessTail, amounts_of, steps_of
from dpro.schema import COUNTERS, STEPS
from tests.recorder_output import FlushedWriter


@pytest.fixture
def tail(tmp_path: Path) -> ProcessTail:
    facts = {"rank": 3, "pid": 7, "host": "here", "local_rank": 3, "world_size": 4, "gpu_uuid": ""}
    return ProcessTail(RecordedProcess(tmp_path, facts | {"gpu_name": "", "started_ns": 5}))


def test_records_are_read_once_and_steps_follow_from_them(tail):
    assert not tail.read_records()  # there is no file yet
    own = FlushedWriter(tail.process.folder / "records.bin")
    own.write(ANCHOR, 0, 0, 0, 0)
    for count in (1, 2, 3):
        own.write(UPDATE, 0, count, count * 100, count * 100 + 10)
    assert tail.read_records()
    assert not tail.read_records()
    own.write(UPDATE, 0, 4, 400, 410)
    assert tail.read_records()
    assert (tail.num_updates, tail.last_update_ns) == (4, 400)
    expected = [(1, 110, 90), (2, 210, 90), (3, 310, 90)]
    for steps in (tail.frames()[STEPS.name], steps_of([tail])):
        assert steps.select("step", "start_ns", "duration_ns").rows() == expected


def test_steps_are_those_of_a_whole_recording_whatever_ends_them_and_in_whatever_pieces_they_are_read(tail):
    own = FlushedWriter(tail.process.folder / "records.bin")
    pieces = [
        [(UPDATE, 0, 1, 100, 110), (UPDATE, 1, 1, 150, 150)],
        [(UPDATE, 0, 2, 200, 210), (ANCHOR, 0, 0, 0, 0), (UPDATE, 0, 3, 300, 310)],
        [
            (OPENED, 0, 305, 3, 0),
            (UPDATE, 0, 4, 400, 410),
            (WINDOW, 0, 306, 495, 0),
            (UPDATE, 0, 5, 500, 510),
        ],
        [(ANCHOR, 1, 3, 4, 0), (UPDATE, 1, 2, 600, 610), (UPDATE, 1, 3, 700, 710)],
    ]
    for piece in pieces:
        for record in piece:
            own.write(*record)
        tail.read_records()
    recorded = read_records(tail.process.folder / "records.bin")
    whole = frames_of(tail.process, recorded, None)[STEPS.name]
    assert steps_of([tail]).rows() == whole.select("rank", "step", "window", "start_ns", "duration_ns").rows()


def test_a_second_optimizer_moves_the_job_but_counts_no_steps(tail):
    own = FlushedWriter(tail.process.folder / "records.bin")
    own.write(UPDATE, 0, 1, 100, 110)
    own.write(UPDATE, 1, 1, 150, 160)
    tail.read_records()
    assert tail.step == 1  # which optimizer ends steps is not known yet
    own.write(ANCHOR, 0, 0, 0, 0)
    for count in (2, 3):
        own.write(UPDATE, 0, count, count * 100, count * 100 + 10)
        own.write(UPDATE, 1, count, count * 100 + 50, count * 100 + 60)
    tail.read_records()
    assert (tail.num_updates, tail.step, tail.last_update_ns) == (6, 2, 300)


def test_amounts_of_work_are_those_of_a_whole_recording(tail):
    own = FlushedWriter(tail.process.folder / "records.bin")
    own.write(ANCHOR, 0, 0, 0, 0)
    for count, recorded in enumerate(([100], [250, 300], [301], [400]), start=1):
        for elements in recorded:  # a second time where the recorder's work took long
            own.write(INPUT, count * 100 + (elements == 300) * 5, elements)
        own.write(UPDATE, 0, count, count * 100, count * 100 + 10)
        tail.read_records()
    recorded = read_records(tail.process.folder / "records.bin")
    whole = frames_of(tail.process, recorded, None)[COUNTERS.name].select(
        "rank", "time_ns", "counter", "value"
    )
    assert amounts_of([tail]).select(whole.columns).rows() == whole.rows()
    assert whole["value"].to_list() == [150.0, 1.0, 99.0]


def test_a_step_in_a_window_that_is_still_open_counts_as_one_of_it(tail):
    own = FlushedWriter(tail.process.folder / "records.bin")
    own.write(ANCHOR, 0, 0, 0, 0)
    own.write(UPDATE, 0, 1, 100, 110)
    own.write(OPENED, 7, 105, 0, 0)
    own.write(UPDATE, 0, 2, 200, 210)
    tail.read_records()
    assert steps_of([tail])["window"].to_list() == [7]


def test_a_record_that_is_half_written_is_read_once_it_is_whole(tail):
    path = tail.process.folder / "records.bin"
    FlushedWriter(path).write(CLOCK, 1)
    with path.open("ab", buffering=0) as file:
        half = RECORD.pack(2, 0, 0, 0, CLOCK)
        file.write(half[:11])
        tail.read_records()
        assert [record.a for record in tail.recorded] == [1]
        file.write(half[11:])
        tail.read_records()
    assert [record.a for record in tail.recorded] == [1, 2]


def test_memory_is_bounded_and_what_numbers_steps_is_kept(tail):
    own = FlushedWriter(tail.process.folder / "records.bin")
    own.write(ANCHOR, 0, 0, 0, 0)
    for count in range(1, 3 * MIN_RECENT):
        own.write(UPDATE, 0, count, count * 100, count * 100)
    tail.read_records()
    assert MIN_RECENT < len(tail.recorded) <= 2 * MIN_RECENT + 1
    assert MIN_STEPS <= len(tail.steps) <= 2 * MIN_STEPS
    assert tail.steps[-1, 0] == tail.frames()[STEPS.name]["step"].max() == 3 * MIN_RECENT - 2
