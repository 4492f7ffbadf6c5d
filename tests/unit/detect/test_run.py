"""The orchestrator: every detector is reached, and what suppresses what."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

import dpro.detect
from dpro.detect import run
from dpro.detect.context import Context, Need
from dpro.detect.findings import Finding
from dpro.detect.run import (
    DETECTORS,
    OF_THE_JOB,
    Detector,
    not_beside_a_larger_slowdown,
    not_part_of_slow_input,
    not_taken_in_turn,
    not_the_empty_queue_of_a_late_host,
    run_detectors,
)
from dpro.detect.stragglers.causes import INPUT_PIPELINE

NOT_OF_RUNS = ("dpro.detect.hang.",)  # a job that stands still is judged before any of these detectors runs
ALL = (*DETECTORS, *OF_THE_JOB)


def finding(class_: str, ranks: Sequence[int] = (), kind: str = "rank", cause: str = "") -> Finding:
    name = ", ".join(map(str, ranks)) or "it"
    return Finding(class_, kind, name, tuple(ranks), 0.1, 0.9, 1e6, (), cause)


class Known(Context):
    """A context in which everything is known beforehand."""

    def __init__(
        self,
        *,
        messages_unseen: bool = False,
        on_gpus: bool = False,
        late: Sequence[Finding] = (),
        turns: Sequence[Finding] = (),
    ) -> None:
        super().__init__()
        self.__dict__ |= {"has": frozenset(Need), "messages_unseen": messages_unseen, "on_gpus": on_gpus}
        self.__dict__ |= {"late_by_calls": list(late), "turns": list(turns)}


def remaining(finds: dict[str, list[Finding]], context: Context) -> dict[str, list[Finding]]:
    """What remains of what detectors find, by detector, if others find nothing."""
    left: dict[str, list[Finding]] = {}

    def recorded(detector: Detector) -> Detector:
        def find(_: Context, __: Any) -> list[Finding]:
            left[detector.name] = []
            return finds.get(detector.name, [])

        def note(_: Context, __: Any, new: list[Finding]) -> list[Finding]:
            left[detector.name] = new
            return new

        return detector._replace(find=find, rules=(*detector.rules, note))

    in_graph = {"slow ranks", "masked ranks"}  # their rules ask for the balanced job
    detectors = [recorded(each if each.name not in in_graph else each._replace(rules=())) for each in ALL]
    run_detectors(context, detectors)
    return left


def modules() -> list[Any]:
    found = pkgutil.walk_packages(dpro.detect.__path__, "dpro.detect.")
    return [importlib.import_module(each.name) for each in found if not each.name.startswith(NOT_OF_RUNS)]


def names_in(module: Any) -> set[str]:
    tree = ast.parse(Path(module.__file__).read_text())
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_every_detector_is_reached_by_the_orchestrator():
    detectors = {
        name: inspect.signature(function)
        for module in modules()
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("find_") and function.__module__ == module.__name__
    }
    returned = {
        name
        for name, signature in detectors.items()
        if str(signature.return_annotation) in ("list[Finding]", "Lost")
    }
    assert len(returned) >= 15
    used = set().union(*map(names_in, (run, dpro.detect.context, dpro.detect.pipeline_slowdown)))
    assert returned - used == set()


def test_detectors_have_names_of_their_own():
    assert len({each.name for each in ALL}) == len(ALL)


@pytest.mark.parametrize("detector", ALL, ids=lambda each: each.name)
def test_a_detector_is_run_only_if_the_run_offers_what_it_needs(detector):
    asked = []

    def find(_: Context, __: Any) -> list[Finding]:
        asked.append(True)
        return []

    plain = detector._replace(find=find, unless=(), rules=())
    for missing in (None, *detector.needs):
        context = Context()
        context.__dict__["has"] = frozenset(Need) - {missing}
        run_detectors(context, [plain])
    assert asked == [True]


def test_ranks_that_deep_windows_name_are_not_named_again_by_calls():
    finds = {
        "slow ranks": [finding("slow.compute", [2])],
        "late ranks": [finding("slow.host", [2]), finding("slow.host", [3])],
    }
    assert [each.ranks for each in remaining(finds, Known())["late ranks"]] == [(3,)]


def test_what_deep_windows_report_of_the_job_is_not_reported_again_by_calls():
    uneven = finding("imbalance.data", [0, 1], "job")
    assert remaining({"uneven data": [uneven], "late ranks": [uneven]}, Known())["late ranks"] == []
    assert remaining({"late ranks": [uneven]}, Known())["late ranks"] == [uneven]


@pytest.mark.parametrize("known", [finding("slow.compute", [7]), finding("slow.fabric", [6, 7], "hosts")])
def test_ranks_that_may_be_late_by_unseen_messages_are_not_blamed_beside_what_windows_show(known):
    uneven = finding("imbalance.data", [0, 1], "job")
    finds = {"slow ranks": [known], "late ranks": [finding("slow.host", [1]), uneven]}
    assert remaining(finds, Known(messages_unseen=True))["late ranks"] == [uneven]
    assert len(remaining(finds, Known())["late ranks"]) == 2


def test_gpus_are_not_named_whose_hosts_are_late():
    late = [finding("slow.host", [1])]
    finds = {"late ranks": late, "late GPUs": [finding("slow.compute", [1]), finding("slow.compute", [2])]}
    assert [each.ranks for each in remaining(finds, Known(late=late))["late GPUs"]] == [(2,)]


def test_the_network_is_asked_by_what_distinguishes_most():
    order = ["slow network", "slow wires", "slow timed calls", "communication-bound hosts"]
    slow = finding("slow.link", [0, 1])
    for place, name in enumerate(order):
        asked = remaining({name: [slow]}, Known())
        assert [each for each in order if each in asked] == [
            each for each in order if order.index(each) <= place
        ]


@pytest.mark.parametrize(
    ("context", "late"),
    [
        (Known(messages_unseen=True), []),
        (Known(on_gpus=True), []),
        (Known(), [finding("slow.host", [1])]),
    ],
)
def test_communication_bound_hosts_are_no_finding_where_they_may_wait_for_ranks(context, late):
    assert "communication-bound hosts" not in remaining({"late ranks": late}, context)
    assert "communication-bound hosts" in remaining({}, Known())


def test_waiting_for_input_is_not_reported_where_windows_show_the_slow_input():
    for known in (finding("slow.host", [1], cause="the input pipeline"), finding("slow.compute", [1])):
        asked = remaining({"slow ranks": [known]}, Known())
        assert ("waiting for input" in asked) == (not known.cause)


def test_a_job_of_whole_operations_is_judged_by_nothing_else():
    context = Context(operations=(object(), object()))  # type: ignore[arg-type]
    assert [each.name for each in ALL if each.needs <= context.has] == ["operations"]


def test_findings_come_costliest_first_and_a_regression_last(monkeypatch):
    def finder(name: str, cost: float) -> Detector:
        found = Finding(name, "job", "it", (), 0.1, 0.9, cost, ())
        return Detector(name, lambda _, __: [found], frozenset())

    monkeypatch.setattr(run, "DETECTORS", (finder("small", 1.0), finder("large", 3.0)))
    monkeypatch.setattr(run, "OF_THE_JOB", (finder("regression", 2.0),))
    assert [each.class_ for each in run.diagnose(Context())] == ["large", "small", "regression"]


@pytest.mark.parametrize(
    ("cause", "cost_ms", "before_ms", "kept"),
    [
        ("host code that waits", 20.0, 0.0, False),
        ("host code that waits", 60.0, 0.0, True),  # most of what the job became slower by
        ("host code that waits", 20.0, 20.0, True),  # it was late before
        ("garbage collection", 20.0, 0.0, True),
    ],
)
def test_no_ranks_code_is_named_for_a_wait_that_came_with_a_far_larger_slowdown_of_all(
    cause, cost_ms, before_ms, kept
):
    steps = range(40)
    rows = [
        {"rank": rank, "step": step, "own_ns": 100e6 + rank * 1e6 * (cost_ms if step >= 20 else before_ms)}
        for step in steps
        for rank in (0, 1)
    ]
    slowdown = SimpleNamespace(since=20, before_ns=100e6, after_ns=200e6)
    context = SimpleNamespace(slowdown=slowdown, usual_own_times=pl.DataFrame(rows))
    late = Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, cost_ms * 1e6, (), cause)
    assert not_beside_a_larger_slowdown(context, {}, [late]) == [late] * kept


def test_ranks_that_take_turns_are_not_named_by_a_few_deep_steps():
    turns = finding("slow.host", (0, 1), kind="job")
    new = [finding("slow.host", (0,)), finding("slow.host", (2,)), finding("slow.host", (), kind="job")]
    assert not_taken_in_turn(Known(turns=[turns]), {}, new) == new[1:]
    assert not_taken_in_turn(Known(), {}, new) == new
    for name in ("slow ranks", "masked ranks"):
        (detector,) = (detector for detector in DETECTORS if detector.name == name)
        assert not_taken_in_turn in detector.rules


def test_a_rank_that_waits_for_data_is_not_named_where_all_do_at_no_less_cost():
    of_all = {"slow input": [replace(finding("slow.host", kind="job"), cost_ns=5e6)]}
    waits, waits_longer = (
        replace(finding("slow.host", (0,), cause=INPUT_PIPELINE), cost_ns=cost) for cost in (4e6, 6e6)
    )
    other = finding("slow.host", (2,))
    assert not_part_of_slow_input(Known(), of_all, [waits, waits_longer, other]) == [waits_longer, other]
    assert not_part_of_slow_input(Known(), {}, [waits]) == [waits]
    (late,) = (detector for detector in DETECTORS if detector.name == "late ranks")
    assert not_part_of_slow_input in late.rules


@pytest.mark.parametrize(
    ("cause", "kind", "id_", "ranks", "late", "remains"),
    [
        ("empty queue", "rank", "1", (1,), (1,), False),
        ("", "job", "empty queue", (1, 2), (1, 2), False),
        ("", "job", "empty queue", (1, 2), (1,), True),  # of rank 2 no other finding says it
        ("", "job", "garbage collection", (1,), (1,), True),
    ],
)
def test_gpus_that_wait_for_new_work_are_not_reported_beside_all_hosts_that_are_late(
    cause, kind, id_, ranks, late, remains
):
    pause = Finding("pauses", kind, id_, ranks, 0.1, 0.9, 1e6, (), cause)
    hosts = [Finding("slow.host", "rank", str(rank), (rank,), 0.1, 0.9, 1e6, ()) for rank in late]
    left = not_the_empty_queue_of_a_late_host(None, {"late ranks": hosts}, [pause])
    assert left == [pause] * remains
