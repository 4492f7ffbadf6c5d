"""What a start consisted of, from starts written down moment by moment."""

from __future__ import annotations

import json

import pytest

from dpro.extensions.goodput.attempts import attempts_of
from dpro.extensions.goodput.document import goodput_document
from dpro.extensions.goodput.life import life_of
from tests.commands import dpro
from tests.lives import WrittenAttempt, job

BOTH = {"group_ranks": "0-1", "backend": "gloo", "purpose": "undefined"}


def written(folder, *parts, loads=(), ranks=2):
    """A job that imports until 2 s, joins its group until 3 s, sets up until 4 s, and does steps of 1 s."""
    attempt = WrittenAttempt(begin=0.0, ranks=ranks)
    end = attempt.trained(5)
    for kind, rank, start, took, name, *more in parts:
        attempt.part(kind, rank, start, took, name, **(more[0] if more else {}))
    for start, stall, path, more in loads:
        attempt.checkpoint("load", start, stall, path, **more)
    return job(folder / "run", [attempt.ended(end)])


def start_of(run):
    (start,) = goodput_document(life_of([run]), ["run"]).starts
    return start, {stage.stage: stage for stage in start.stages}


def test_stages_add_up_and_nested_parts_count_once(tmp_path):
    run = written(
        tmp_path,
        ("import", 0, 3.1, 0.4, "models.big"),
        ("import", 0, 3.2, 0.1, "models.inner"),
        ("import", 0, 3.8, 1.0, "compiler"),  # into the first step
        loads=[(3.5, 0.2, "/ckpt/step-9", {"bytes": 42_000_000_000})],
    )
    start, stages = start_of(run)
    assert start.total_s == pytest.approx(5.0)
    assert sum(stage.last_s for stage in start.stages) == pytest.approx(start.total_s)
    assert stages["imports"].longest_s == pytest.approx(2 + 0.4 + 0.2)
    assert stages["imports"].median_s == pytest.approx((2.6 + 2) / 2)
    assert stages["load"].longest_s == pytest.approx(0.2)
    assert [part.what for part in stages["load"].parts] == ["/ckpt/step-9 (42.0 GB)"]
    assert [(part.what, part.took_s) for part in stages["imports"].parts] == [
        ("Python and imports up to torch", 2.0), ("import compiler", 1.0), ("import models.big", 0.4),
    ]  # fmt: skip
    assert stages["set_up"].longest_s == pytest.approx(1.0)
    assert stages["set_up"].rank == 1


def test_imports_of_a_package_are_one_part(tmp_path):
    names = ("models", "models.a", "models.a.b", "models.a.c", "other")
    parts = [("import", 0, 3.1 + 0.1 * n, 0.1, name) for n, name in enumerate(names)]
    attempt = attempts_of([written(tmp_path, *parts)])[0]
    assert attempt.parts.height == 5
    document = json.loads(dpro("goodput", str(tmp_path / "run"), "--json").stdout)
    (imports,) = [stage for stage in document["starts"][0]["stages"] if stage["stage"] == "imports"]
    assert [part["what"] for part in imports["parts"]] == [
        "Python and imports up to torch",
        "import models.a",
    ]


def test_group_names_the_rank_that_it_waited_for(tmp_path):
    run = written(
        tmp_path,
        ("process_group", 0, 3.1, 0.8, "1", BOTH),
        ("process_group", 1, 3.8, 0.1, "1", BOTH),
    )
    _, stages = start_of(run)
    (part,) = stages["process_group"].parts
    assert stages["process_group"].rank == 0
    assert stages["process_group"].longest_s == pytest.approx(1.8)
    assert part.what == "group of 2 ranks (gloo)"
    assert (part.waited_s, part.waited_for) == (pytest.approx(0.7), 1)
    said = dpro("goodput", str(run.path)).stdout
    assert "group of 2 ranks (gloo) 800 ms, 700 ms of it until rank 1 came" in said


@pytest.mark.parametrize(
    "others",
    [
        [],  # the other member was not recorded
        [("process_group", 1, 3.15, 0.05, "1", BOTH)],  # had it long before: it was not waited for
    ],
)
def test_no_rank_is_named_where_members_did_not_meet(tmp_path, others):
    _, stages = start_of(written(tmp_path, ("process_group", 0, 3.1, 0.8, "1", BOTH), *others))
    (part,) = stages["process_group"].parts
    assert part.waited_s is None is part.waited_for


def test_no_rank_is_named_of_a_group_that_was_made_again_under_its_name(tmp_path):
    parts = [
        ("process_group", rank, start, took, "1", BOTH)
        for rank, times in enumerate([[(3.1, 0.1), (3.3, 0.5)], [(3.1, 0.1), (3.7, 0.1)]])
        for start, took in times
    ]
    _, stages = start_of(written(tmp_path, *parts))
    longest = stages["process_group"].parts[0]
    assert (longest.took_s, longest.waited_for) == (pytest.approx(0.5), None)


def test_run_of_an_older_version_says_that_its_parts_are_not_known(tmp_path):
    run = written(tmp_path)
    start, stages = start_of(run)
    assert not start.has_parts
    assert stages["set_up"].longest_s == pytest.approx(1.0)
    assert "were not recorded one by one" in dpro("goodput", str(run.path)).stdout


def test_attempt_without_a_step_has_no_start(tmp_path):
    attempt = WrittenAttempt(begin=0.0)
    attempt.trained(0)
    run = job(tmp_path / "run", [attempt.killed(9.0)])
    assert goodput_document(life_of([run]), ["run"]).starts == []
