"""The hang view's data and figures, on calls written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pytest

from dpro.analysis.summary import finding_info, health_info
from dpro.dashboards.theme import colour, least_width
from dpro.dashboards.views.hang import (
    MAX_BOXES,
    chain_figure,
    chain_info,
    rank_info,
    stack_info,
    standing_figure,
    standing_info,
    wrapped_label,
)
from dpro.detect.hang.find import find_causes
from dpro.schema import WORKERS, conform
from tests.unit.detect.hanging import OPEN, RUNNING, Job

THREE = (0, 1, 2)


@pytest.fixture
def stuck() -> Job:
    """Rank 3 never comes to where rank 2 waits for it; ranks 0 and 1 wait for rank 2 in another group."""
    job = Job(4)
    job.call(THREE, THREE)
    job.call((2,), (2, 3), OPEN)
    job.call((0, 1), THREE, OPEN)
    return job


def test_the_chain_ends_at_the_rank_at_fault_and_ranks_that_wait_for_the_same_are_one_box(stuck):
    case = stuck.case()
    (finding,) = find_causes(case)
    assert finding.ranks == (3,)
    chains = chain_info(case, finding.ranks)
    labels = {box.label: box for box in chains.boxes}
    assert labels["rank 3"].at_fault
    assert labels["rank 3"].x == 0
    ways = {(chains.boxes[a].label, chains.boxes[b].label) for a, b in chains.arrows}
    assert ("rank 2", "all_reduce #1, 2-3") in ways
    assert ("all_reduce #1, 2-3", "rank 3") in ways
    assert any(a == "ranks 0-1" for a, _ in ways)
    assert all(chains.boxes[a].x < chains.boxes[b].x for a, b in chains.arrows)
    figure = chain_figure(chains, "light")
    assert [trace.name for trace in figure.data] == ["at fault", "ranks that wait", "what they wait in"]
    assert sum(note.showarrow for note in figure.layout.annotations) == len(chains.arrows)
    left, right = figure.layout.xaxis.range
    assert left > right  # the cause is drawn first


def test_a_rank_that_came_and_does_not_finish_is_what_the_others_wait_for():
    job = Job(3)
    job.call(THREE, THREE)
    job.call((0, 1), THREE, RUNNING)
    job.call((2,), THREE, OPEN)
    case = job.case()
    (finding,) = find_causes(case)
    assert (finding.class_, finding.ranks) == ("hang.device", (2,))
    chains = chain_info(case, finding.ranks)
    ways = [(chains.boxes[a].label, chains.boxes[b].label) for a, b in chains.arrows]
    operation = "all_reduce #2, 0-1-2"
    assert sorted(ways) == [(operation, "rank 2"), ("ranks 0-1", operation)]
    assert [box.x for box in chains.boxes if box.at_fault] == [1]


def test_ranks_that_wait_for_each_other_are_a_circle_of_arrows():
    job = Job(4)
    job.call((0, 1), (0, 1, 2), OPEN)
    job.call((2, 3), (1, 2, 3), OPEN)
    case = job.case()
    chains = chain_info(case, [rank for each in find_causes(case) for rank in each.ranks])
    ways = {(chains.boxes[a].label, chains.boxes[b].label) for a, b in chains.arrows}
    first, second = "all_reduce #1, 0-1-2", "all_reduce #1, 1-2-3"
    assert ways >= {("rank 1", first), (first, "rank 2"), ("rank 2", second), (second, "rank 1")}
    assert ways - {("rank 1", first), (first, "rank 2"), ("rank 2", second), (second, "rank 1")} == {
        ("rank 0", first),
        ("rank 3", second),
    }


def test_of_a_large_job_the_nearest_boxes_are_shown_and_the_rest_counted():
    job = Job(300)
    job.call(range(300), range(300))
    for first in range(0, 298):  # a long chain: each waits for the next
        job.call((first,), (first, first + 1), OPEN)
    chains = chain_info(job.case(), ())
    assert len(chains.boxes) == MAX_BOXES
    assert chains.left_out > 0
    assert all(end < MAX_BOXES for _, end in chains.arrows)


def test_calls_in_a_row_are_named_by_the_first_and_the_last():
    job = Job(2)
    for _ in range(3):
        job.call((0, 1), (0, 1), OPEN)
    job.call((0,), (0, 1), OPEN)
    labels = [box.label for box in chain_info(job.case(), (1,)).boxes if box.kind == "operation"]
    assert any("#2–" in label for label in labels), labels


def test_many_ranks_that_wait_for_one_are_a_number_in_one_box():
    job = Job(200)
    job.call([rank for rank in range(200) if rank % 3 == 1], (*range(1, 200, 3), 0), OPEN)
    many = next(box for box in chain_info(job.case(), (0,)).boxes if len(box.members) > 1)
    assert many.label == "67 ranks"
    assert len(many.facts[0]) <= 300


def _text(labels):
    return [label.replace("<br>", "").replace(" ", "") for label in labels]


def test_labels_are_whole_on_as_many_lines_as_they_take(stuck):
    chains = chain_info(stuck.case(), (3,))
    name = "all_reduce #1, " + "tensor_model_parallel_group_" * 8
    boxes = tuple(replace(box, label=name) if box.kind == "operation" else box for box in chains.boxes)
    drawn = chain_figure(replace(chains, boxes=boxes), "light")
    short = chain_figure(chains, "light")
    assert drawn.layout.height > short.layout.height
    assert least_width(drawn) > least_width(short) > 200  # a narrow page scrolls: labels do not overlap
    assert name.replace(" ", "") in _text(drawn.data[2].text)
    longest = max(len(line) for line in drawn.data[2].text[0].split("<br>"))
    between = max(drawn.data[2].x) - min(drawn.data[1].x)  # columns
    assert least_width(drawn) > 7.3 * longest * between  # 31 capitals of 11 pixels are 224 wide
    standing = standing_info(stuck.case()).with_columns(group=pl.lit(name) + pl.col("group"))
    figure = standing_figure(standing, "light")
    assert all(f"{name}".replace(" ", "") in label for label in _text(figure.layout.yaxis.ticktext))
    assert all("<br>" in label for label in figure.layout.yaxis.ticktext)
    assert figure.layout.height > standing_figure(standing_info(stuck.case()), "light").layout.height


def test_labels_break_at_underscores_and_lie_above_the_arrows(stuck):
    assert (
        wrapped_label("all_gather #7554, EXPERT_TENSOR_GROUP", 20)
        == "all_gather #7554,<br>EXPERT_TENSOR_GROUP"
    )
    assert wrapped_label("EXPERT_TENSOR_GROUP", 12) == "EXPERT_<br>TENSOR_GROUP"
    notes = chain_figure(chain_info(stuck.case(), (3,)), "dark").layout.annotations
    labels = [bool(note.text) for note in notes]
    assert labels == sorted(labels)
    assert {note.bgcolor for note in notes if note.text} == {colour("panel", "dark")}


def test_no_rank_waits_in_a_job_that_moves():
    job = Job(2)
    job.call((0, 1), (0, 1))
    assert chain_info(job.case(), ()).boxes == ()
    standing = standing_info(job.case())
    assert standing["behind"].to_list() == [0, 0]
    assert not standing["absent"].any()


def test_who_is_behind_and_who_waits_where(stuck):
    standing = standing_info(stuck.case())
    rows = {(row["group"], row["rank"]): row for row in standing.iter_rows(named=True)}
    assert rows["0-1-2", 0]["issued"] == 2
    assert rows["0-1-2", 0]["finished"] == 1
    assert rows["0-1-2", 2]["behind"] == 1
    assert rows["0-1-2", 0]["waits_in"].startswith("all_reduce #2")
    assert rows["2-3", 3]["absent"]
    heat, waiting, absent = standing_figure(standing, "dark").data
    assert heat.textfont.color == colour("ink", "dark")
    assert heat.z.shape == (2, 4)
    assert {"#2", "#1, 1 behind"} <= set(heat.text.ravel())
    assert len(waiting.x) == 3
    assert len(absent.x) == 2
    blamed = standing_figure(standing, "dark", first=(3,))
    assert blamed.layout.xaxis.ticktext == (3, 0, 1, 2)
    assert least_width(blamed) > 4 * 16  # each number has its room, however narrow the page is


def test_the_state_of_a_rank_without_a_dump_is_unknown(stuck):
    stuck.lose(3)
    case = stuck.case()
    standing = standing_info(case)
    assert standing.filter(rank=3)["issued"].null_count() == 1
    findings = find_causes(case)
    states = dict(rank_info(case, findings, WORKERS.empty()).select("rank", "state").iter_rows())
    assert states[0] == states[1] == "waits"
    assert standing_figure(standing, "light").data


def test_the_table_of_ranks_begins_with_the_one_at_fault(stuck):
    case = stuck.case()
    ranks = rank_info(case, find_causes(case), WORKERS.empty())
    assert ranks["rank"].to_list() == [3, 0, 1, 2]
    assert ranks["state"].to_list() == ["at fault", "waits", "waits", "waits"]
    assert ranks.filter(rank=2)["waits_in"].item().startswith("all_reduce #1")


def test_stacks_that_are_the_same_are_listed_once_and_damaged_files_are_passed_over(tmp_path):
    rows = [{"rank": rank, "stack": "a.py:1 wait" if rank else "b.py:9 sleep"} for rank in range(3)]
    workers = conform(WORKERS, pl.DataFrame(rows))
    frames = [{"file": "c.py", "line": 3, "function": "load"}]
    for number, text in (
        (1, json.dumps({"ranks": [{"rank": 2, "threads": [{"name": "T", "frames": frames}]}]})),
        (2, "{"),
    ):
        folder = tmp_path / "findings" / f"hang-{number}"
        folder.mkdir(parents=True)
        (folder / "stacks.json").write_text(text)
    stacks = stack_info(workers, tmp_path)
    assert stacks["ranks"].to_list() == [[0], [1, 2], [2]]
    assert stacks["stack"].to_list() == ["b.py:9 sleep", "a.py:1 wait", "c.py:3 load"]


def test_the_first_view_says_a_hang_in_words_and_gives_it_no_cost_per_step(stuck):
    findings = find_causes(stuck.case())
    state, sentence = health_info(findings, [], None)
    assert state == "bad"
    assert "Rank 3: its host code has not reached the call that its peers wait in" in sentence
    assert "per step" not in sentence
    assert finding_info(findings)["cost_ms_per_step"].to_list() == [None]
