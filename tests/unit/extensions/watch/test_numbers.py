"""Numbers that go bad are named while the job runs, also long after the step in which they did."""

from __future__ import annotations

import json
import math
import struct
from types import SimpleNamespace

import pytest

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside import records
from dpro.collectors.inside.records import RecordWriter
from dpro.extensions.watch import numbers
from dpro.extensions.watch.job import MIN_RECENT, ProcessTail, workers_of
from dpro.extensions.watch.numbers import NumberWatch


class PlayedRank:
    """A process that records a loss in each step."""

    def __init__(self, folder, rank):
        path = folder / f"rank{rank}"
        path.mkdir()
        facts = {
            "rank": rank,
            "local_rank": rank,
            "world_size": 2,
            "host": "n1",
            "pid": rank,
            "started_ns": 0,
        }
        facts |= {"gpu_uuid": "", "gpu_name": "", "image": 0, "versions": {}}
        (path / "facts.json").write_text(json.dumps(facts))
        self.writer = RecordWriter(path / "records.bin")
        self.writer.write(records.ANCHOR, 0, 0, 0, 0)
        self.tail, self.steps = ProcessTail(RecordedProcess(path, facts)), 0

    def step(self, loss, scaled=0):
        at_ns = 10 * self.steps
        if loss is not None:
            bits = struct.unpack("<q", struct.pack("<d", loss))[0]
            self.writer.write(records.LOSS, at_ns, bits, scaled, scaled)
        self.steps += 1
        self.writer.write(records.UPDATE, 0, self.steps, at_ns + 5, at_ns + 6)

    def read(self):
        self.writer.flush()
        self.tail.read_records()


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "LOOK_S", 0.0)
    monkeypatch.setattr(numbers, "SHARE", math.inf)
    return [PlayedRank(tmp_path, rank) for rank in range(2)]


def look(watch, ranks):
    for rank in ranks:
        rank.read()
    tails = {rank.tail.process.folder: rank.tail for rank in ranks}
    return watch.look(SimpleNamespace(tails=tails, workers=workers_of(tails.values())))


def test_the_first_rank_is_named_also_when_its_records_are_long_past(ranks):
    watch = NumberWatch()
    for step in range(50):
        for rank in ranks:
            rank.step(math.nan if (step, rank) == (40, ranks[1]) or step > 40 else 1.0)
    (before,) = look(watch, ranks)
    for _ in range(2 * MIN_RECENT):
        for rank in ranks:
            rank.step(math.nan)
    (after,) = look(watch, ranks)
    for finding in (before, after):
        assert (finding.class_, finding.ranks, finding.cause) == (
            "loss.not_finite",
            (1,),
            "loss NaN in step 40",
        )


def test_a_jump_is_named_and_what_a_scaler_skips_is_not(ranks):
    watch = NumberWatch()
    for step in range(60):
        ranks[0].step(9.0 if step == 55 else 1.0)
        ranks[1].step(math.inf if step == 20 else 1.0, scaled=1)
    (finding,) = look(watch, ranks)
    assert (finding.class_, finding.ranks) == ("loss.jump", (0,))


def test_of_a_job_without_losses_nothing_is_said(ranks):
    for rank in ranks:
        rank.step(None)
    assert look(NumberWatch(), ranks) is None
