"""Calls of actors in deep windows: cases by hand."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from dpro.collectors.convert.actors import Call, calls_of, waits, with_actor_calls
from dpro.collectors.convert.recorded import RecordedProcess, of_training, worker_groups
from dpro.schema import SPANS, conform


def call(start: int, end: int, name: str = "R.generate", tid: int = 1) -> Call:
    return Call(start, end, name, tid)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], []),
        ([call(0, 10)], [(0, 10, "waits for R.generate")]),
        # Only while the actor is in no call: before 20, from 30 to 40, from 50 on.
        ([call(10, 60)], [(10, 20, "waits for R.generate"), (30, 40, "waits for R.generate"),
                          (50, 60, "waits for R.generate")]),
        # Of two that overlap that one which began first, then what the other does longer.
        ([call(0, 10), call(5, 15, "S.score")],
         [(0, 10, "waits for R.generate"), (10, 15, "waits for S.score")]),
        ([call(0, 15), call(5, 10, "S.score")], [(0, 15, "waits for R.generate")]),
    ],
)  # fmt: skip
def test_an_actor_waits_for_others_while_it_is_in_no_call(others, expected):
    busy = [call(20, 30, "T.update"), call(40, 50, "T.update"), call(0, 1, "T.ping", tid=2)]
    found = waits(sorted(busy), others, 0, 70)
    assert [(one.start_ns, one.end_ns, one.name) for one in found] == expected
    assert {one.tid for one in found} <= {1}


def process(number: int, **facts: object) -> RecordedProcess:
    known = {"rank": 0, "world_size": 2, "started_ns": number, "host": "h", "pid": number}
    known |= {"actor": f"{number}", "actor_name": "", "actor_class": ""}
    return RecordedProcess(Path("launch", f"h-{number}"), known | facts)


def noted(path: Path, *calls: Call) -> None:
    path.write_text("".join(json.dumps(one._asdict()) + "\n" for one in calls))


def test_calls_are_ranges_of_the_window_cut_to_it(tmp_path):
    trainer = RecordedProcess(tmp_path / "h-7", process(7, rank=1).facts)
    noted(tmp_path / "actor-h-7.jsonl", call(50, 130, "T.update", 70), call(900, 990, "T.update", 70))
    noted(tmp_path / "actor-h-8.jsonl", call(150, 400, "R.generate", 80))
    spans = conform(
        SPANS, pl.DataFrame({"span_id": [5], "start_ns": [120], "duration_ns": [80], "tid": [70]})
    )
    ranges = with_actor_calls(spans, trainer, 3, 1000, begin_ns=100).filter(pl.col("span_id") > 5)
    columns = ["name", "start_ns", "duration_ns", "rank", "window", "pid", "tid"]
    assert ranges.select(columns).rows() == [
        ("T.update", 100, 30, 1, 3, 7, 70),
        ("waits for R.generate", 150, 50, 1, 3, 7, 70),
    ]
    other = RecordedProcess(tmp_path / "h-9", process(9).facts)
    assert with_actor_calls(spans, other, 3, 1000, None) is spans


def test_damaged_lines_are_no_calls(tmp_path):
    path = tmp_path / "actor-h-1.jsonl"
    whole = json.dumps(call(1, 2)._asdict())
    path.write_text("\n".join(['{"name": 7', "[]", whole.replace("1", '"x"', 1), whole]))
    assert list(calls_of(path)) == [call(1, 2)]


def named(*processes: RecordedProcess) -> dict[str, list[int]]:
    return {role: [one.facts["pid"] for one in group] for role, group in worker_groups(processes).items()}


def test_groups_are_of_one_class_and_one_name_but_for_digits():
    named_ones = [process(number, actor_class="W", actor_name=f"trainer-{number}") for number in (2, 1)]
    of_verl = [
        process(number, actor_class="WorkerDict", actor_name=f"x9WorkerDict_0:{number}") for number in (3, 4)
    ]
    assert named(*named_ones, *of_verl) == {"trainer": [1, 2], "WorkerDict": [3, 4]}
    pools = [
        process(number, actor_class="W", actor_name=f"{'ab'[number % 2]}W_{number}") for number in (5, 6)
    ]
    assert named(*pools) == {"W-0": [5], "W-1": [6]}
    assert named(process(1, actor_class="../W")) == {"_._W": [1]}


def test_actors_that_train_alone_are_groups_also_when_they_are_started_again():
    alone = [
        process(number, actor=actor, actor_class="R", world_size=1) for number, actor in enumerate("abab")
    ]
    assert named(*alone) == {"R-0": [0, 2], "R-1": [1, 3]}


def test_group_that_records_most_is_that_which_trains(tmp_path):
    group = [process(number, actor_class="AB"[number]) for number in (0, 1)]
    group = [RecordedProcess(tmp_path / f"h-{number}", one.facts) for number, one in enumerate(group)]
    group[1].folder.mkdir()
    (group[1].folder / "records.bin").write_bytes(b"records")
    assert [one.folder for one in of_training(group)] == [group[1].folder]
    assert of_training(group[:1]) == group[:1]


def test_other_processes_are_one_group_without_a_name():
    plain = process(1, actor="")
    assert named() == {}
    assert named(plain, process(2, actor="")) == {"": [1, 2]}
    assert named(plain, process(2, actor_class="R")) == {"driver": [1], "R": [2]}
