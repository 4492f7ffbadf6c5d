"""The answer of `dpro goodput`."""

from __future__ import annotations

import json

import pytest

from dpro.goodput.document import goodput_document, life_of
from tests.commands import dpro
from tests.lives import WrittenAttempt, job


@pytest.fixture
def restarted(tmp_path):
    first = WrittenAttempt(begin=0)
    last = first.trained(10)
    first.checkpoint("save", 4 + 3.01, 0.0, "/c")
    first.checkpoints[0]["duration_ns"] = 5 * 10**9
    second = WrittenAttempt(begin=last + 10)
    second.checkpoint("load", second.begin + 3.5, 0.0, "/c")
    second.ended(second.trained(8))
    return job(tmp_path / "run", [first.ended(last, code=1), second])


def test_document_says_what_each_attempt_did(restarted):
    document = goodput_document(life_of([restarted]), ["run"])
    assert [(each.first_step, each.steps, each.repeated, each.ended_well) for each in document.attempts] == [
        (0, 10, 0, False),
        (3, 8, 7, True),
    ]
    assert document.steps == 11
    assert sum(each.share for each in document.classes) == pytest.approx(1)
    assert document.goodput == pytest.approx(2 * 11 / (2 * document.wall_s))
    assert document.saving_background_s == pytest.approx(5)


def test_command_prints_classes_largest_first_and_one_object_for_programs(restarted):
    path = str(restarted.path)
    lines = dpro("goodput", path).stdout.splitlines()
    assert lines[0].startswith("goodput 30.6% of 36 s on 2 ranks; 11 steps in 2 attempts")
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[1:] if "a rank" in line]
    assert shares == sorted(shares, reverse=True)
    document = json.loads(dpro("goodput", path, "--json").stdout)
    assert document["runs"] == [path]
    assert {"class", "rank_hours", "share"} == set(document["classes"][0])


def test_run_of_an_import_has_no_moments_and_says_so(tmp_path):
    run = WrittenAttempt(begin=0).written(tmp_path / "run")
    document = goodput_document(life_of([run]), ["run"])
    assert (document.classes, document.goodput) == ([], 0.0)
    assert document.notes == ["no moment of any rank was recorded"]
