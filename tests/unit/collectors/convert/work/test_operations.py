"""Operations of pipelines, from the records of a process."""

from __future__ import annotations

import json

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.tables import operations
from dpro.collectors.inside import files
from dpro.collectors.inside.files import PIPELINE
from dpro.collectors.inside.records import OPERATION, Record
from dpro.schema import OPERATION_KINDS, OPERATIONS, STEPS, conform
from dpro.table import complete

PLACE, MICRO_BATCH = 5, 3
STEP = complete(STEPS, pl.DataFrame({"rank": [1], "step": [7], "start_ns": [100], "duration_ns": [100]}))


def record(kind: str, start: int, end: int) -> Record:
    return Record(start, end, PLACE << 32 | MICRO_BATCH, files.OPERATIONS.index(kind), OPERATION)


def converted(folder, *recorded: Record) -> pl.DataFrame:
    facts = {"source": "torch ScheduleZBVZeroBubble", "stage": 2, "num_places": 8, "chunks": {"2": 0, "5": 1}}
    (folder / PIPELINE).write_text(json.dumps(facts))
    process = RecordedProcess(folder, {"rank": 1})
    return conform(OPERATIONS, operations(process, recorded, STEP))


def test_row_has_its_step_its_place_in_the_model_and_its_chunk(tmp_path):
    (row,) = converted(tmp_path, record("backward_input", 110, 130)).to_dicts()
    assert row == {
        "rank": 1, "step": 7, "stage": 2, "chunk": 1, "place": PLACE, "micro_batch": MICRO_BATCH,
        "kind": "backward_input", "start_ns": 110, "duration_ns": 20, "peer": -1,
        "source": "torch ScheduleZBVZeroBubble",
    }  # fmt: skip


def test_loss_is_part_of_the_forward_that_it_follows(tmp_path):
    found = converted(tmp_path, record("forward", 110, 130), record("loss", 131, 140))
    assert found.select("kind", "start_ns", "duration_ns").rows() == [("forward", 110, 30)]


def test_work_outside_steps_belongs_to_none(tmp_path):
    found = converted(tmp_path, record("forward", 90, 95), record("forward", 210, 220))
    assert found["step"].to_list() == [-1, -1]


def test_process_that_said_nothing_of_its_chunks_has_no_operations(tmp_path):
    process = RecordedProcess(tmp_path, {"rank": 1})
    assert operations(process, [record("forward", 110, 130)], STEP).is_empty()


def test_all_kinds_but_the_loss_are_declared():
    assert set(files.OPERATIONS) - {files.LOSS} <= set(OPERATION_KINDS)
