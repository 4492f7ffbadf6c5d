"""Observations hold figures, their sentences are made of these, and no code reads the sentences."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpro
from dpro.detect.findings import CodeLocation, Finding, finding_document
from dpro.detect.findings_log import BEGINS, Notice, finding_of
from dpro.detect.observations import observation_documents, observations_of, observe
from dpro.detect.words import describe, describe_all, join_hangs
from dpro.schema import WORKERS
from dpro.units import format_duration
from dpro.words import ranks_in_words

PRODUCT = Path(dpro.__file__).resolve().parents[1]
MAY_READ = {"findings.py", "findings_log.py", "words.py"}  # what makes documents and words of findings


@pytest.mark.parametrize(
    ("sentence", "values", "text"),
    [
        ("rank {rank} waits {wait_ns}", {"rank": 3, "wait_ns": 2.5e6}, "rank 3 waits 2.5 ms"),
        ("{busy_share} busy", {"busy_share": 0.256}, "26% busy"),
        ("{written_bytes} written", {"written_bytes": 3.2e6}, "3.2 MB written"),
        ("{peer_ranks} are late", {"peer_ranks": [0, 1, 2, 5]}, "ranks 0-2, 5 are late"),
        ("since {began_at_ns}", {"began_at_ns": 1_500_000_000}, "since 00:00:01.500 UTC"),
        ("{times:.1f} times in {steps:,} steps", {"times": 2.04, "steps": 1000}, "2.0 times in 1,000 steps"),
        ("in {name}", {"name": "f{x}"}, "in f{x}"),
    ],
)
def test_a_value_is_shown_by_the_unit_in_its_name(sentence, values, text):
    observation = observe("test", sentence, **values)
    assert observation.text == text
    assert observation.values == values


def test_a_sentence_may_go_on_and_keeps_all_values():
    longer = observe("longer-work", "rank {rank} is late", rank=1).then(", by {late_ns}", late_ns=1e6)
    assert longer.text == "rank 1 is late, by 1 ms"
    assert longer.values == {"rank": 1, "late_ns": 1e6}
    assert longer.kind == "longer-work"


def test_a_sentence_without_one_of_its_values_is_an_error():
    with pytest.raises(KeyError):
        observe("test", "{missing}")


@given(st.floats(0, 1e13), st.lists(st.integers(0, 4095), min_size=1, unique=True))
def test_what_a_log_says_of_observations_is_read_back(wait_ns, ranks):
    said = (observe("waits", "{ranks} wait {wait_ns}", ranks=ranks, wait_ns=wait_ns),)
    assert said[0].text == f"{ranks_in_words(ranks)} wait {format_duration(wait_ns)}"
    assert observations_of([said[0].text], observation_documents(said)) == said
    assert [(one.kind, one.text) for one in observations_of([said[0].text], [])] == [("", said[0].text)]


def test_figures_that_json_cannot_hold_are_null():
    (document,) = observation_documents([observe("test", "{x_ns}", x_ns=math.inf)])
    assert document.values == {"x_ns": None}


def test_a_finding_of_a_log_is_the_one_that_was_written():
    finding = Finding(
        "slow.host", "rank", "1", (1,), 0.2, 0.9, 5e6, (observe("waits", "{x_ns}", x_ns=5e6),), "a lock",
        place=CodeLocation.of("/a/b/train.py(12): step"), remedy="take it out",
    )  # fmt: skip
    assert finding_of(Notice(BEGINS, 1, 5, 3, finding).document()) == finding
    document = finding_document(finding)
    assert (document.place.name, document.place.file, document.place.line) == ("step", "/a/b/train.py", 12)
    assert [one.kind for one in document.observations] == ["waits"]
    assert len(document.observations) == len(document.evidence)


def test_words_of_a_finding_say_what_it_costs_and_what_to_do():
    finding = Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, 5e6, (), "a lock", remedy="take it out")
    described = describe(finding)
    costs = "costs 5 ms per step (20% of it); confidence 0.90"
    assert described.headline == f"slow host work: rank 1 (a lock) {costs}"
    assert described.details == ["do: take it out"]


def test_hangs_of_several_ranks_in_one_operation_are_one_finding_in_words():
    awaited = observe("operation-attendance", "{ranks} never entered", ranks=[2, 5])
    first, second = (
        Finding("hang.host", "rank", str(rank), (rank,), 1.0, sure, 0.0,
                (observe("idle", "rank {rank} has nothing unfinished", rank=rank), awaited))
        for rank, sure in ((5, 0.98), (2, 0.9))
    )  # fmt: skip
    elsewhere = replace(first, component_id="7", ranks=(7,), observations=())
    assert join_hangs([first, elsewhere]) == [first, elsewhere]
    (described,) = describe_all([first, second], WORKERS.empty())
    assert described.headline.startswith(
        "hang: ranks 2, 5: their host code has not reached the call that their"
    )
    assert described.headline.endswith("confidence 0.90")
    assert list(described.evidence) == [
        "rank 5 has nothing unfinished", "rank 2 has nothing unfinished", "ranks 2, 5 never entered",
    ]  # fmt: skip
    assert described.do.startswith("see what ranks 2, 5 do: ")


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("/a/b/train.py(12): step", CodeLocation("step", "/a/b/train.py", 12), "step (train.py:12)"),
        ("/a/b/train.py:12 step", CodeLocation("step", "/a/b/train.py", 12), "step (train.py:12)"),
        ("aten::mm", CodeLocation("aten::mm"), "aten::mm"),
        ("nn.Module: layers.3", CodeLocation("nn.Module: layers.3"), "nn.Module: layers.*"),
    ],
)
def test_a_place_is_read_from_the_name_of_a_span_or_a_line_of_a_stack(name, place, words):
    assert CodeLocation.of(name) == place
    assert place.in_words == words


def test_no_detector_reads_the_sentences_of_findings():
    folders = (
        PRODUCT / "dpro/detect",
        PRODUCT / "dpro/extensions/watch",
        PRODUCT / "dpro/extensions/history",
    )
    modules = [path for folder in folders for path in folder.rglob("*.py") if path.name not in MAY_READ]
    readers = [
        f"{path}:{node.lineno}"
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "evidence"
    ]
    assert len(modules) > 30
    assert readers == []
