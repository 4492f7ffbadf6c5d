"""Where a job stopped: which calls are shown, from when to when, and when the lanes begin."""

from __future__ import annotations

import pytest

from dpro.dashboards.command import load
from dpro.dashboards.timeline.routes import lane_info, span_info
from dpro.schema import COLLECTIVES
from tests.builders import US, gpu_job

MS = 1000 * US


@pytest.fixture
def stuck(tmp_path):
    """A job of which rank 1 never comes to the call that rank 0 waits in, long after the deep window."""
    run = gpu_job()
    for rank, sequences in ((0, (7, 8, 9)), (1, (7, 8))):
        for sequence in sequences:
            finished = sequence < 9
            row = {"collective_id": 100 * rank + sequence, "rank": rank, "window": -1, "op": "all_reduce"}
            row |= {"group": "0", "group_ranks": "0,1", "sequence": sequence, "source": "flight recorder"}
            row |= {"enqueued_ns": (20 + sequence + rank) * MS, "start_ns": -1, "span_id": -1}
            row |= {"duration_ns": 2 * MS if finished else -1}
            run.rows[COLLECTIVES.name].append(row | {"state": "completed" if finished else "started"})
    loaded = load(run.write(tmp_path))
    assert loaded.hangs
    loaded.measured.all()
    return loaded


def test_a_job_that_hangs_has_the_last_finished_call_of_each_rank_and_what_never_finished(stuck):
    stop = stuck.measured.clocks.stop
    names = [(row["rank"], row["name"]) for row in stop.calls.sort("rank", "start_ns").to_dicts()]
    assert names == [
        (0, "all_reduce #8"),
        (0, "all_reduce #9: started, never finished"),
        (1, "all_reduce #8"),
    ]
    assert stop.at - stop.begin == 3 * MS  # rank 1's ends 31 ms after the epoch, rank 0's begins at 28
    waiting = stop.calls.filter(name="all_reduce #9: started, never finished").row(0, named=True)
    assert waiting["start_ns"] + waiting["duration_ns"] == stop.end >= stop.at


def test_the_timeline_lists_them_below_the_streams_and_says_where_the_job_stopped(stuck):
    info, of = lane_info(stuck), stuck.measured.clocks
    assert info["stop"] == [of.stop.begin - of.origin_ns, of.stop.at - of.origin_ns]
    assert info["end"] == of.stop.end - of.origin_ns
    labels = [lane[0] for lane in info["ranks"][0]["lanes"]]
    assert labels == ["stream 20 (NCCL)", "stream 7 (compute)", "last calls", "main thread"]
    lanes = stuck.measured.ranks[0]
    row = lanes.lanes[2].rows[0]
    facts = dict(span_info(stuck.measured, 0, int(lanes.all.first[row]))["facts"])
    assert (facts["name"], facts["where"]) == ("all_reduce #8", "rank 0, last calls")


def test_a_job_that_does_not_hang_has_none(tmp_path):
    healthy = load(gpu_job().write(tmp_path))
    healthy.measured.all()
    info = lane_info(healthy)
    assert info["stop"] is None
    assert "last calls" not in [lane[0] for lane in info["ranks"][0]["lanes"]]
