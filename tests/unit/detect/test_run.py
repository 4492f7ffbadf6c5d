"""Every detector is reached, and reports what stronger evidence does not explain."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import dpro.detect
from dpro.detect import run
from dpro.detect.context import Context, Need
from dpro.detect.findings import Finding
from dpro.detect.pauses import LostTime
from dpro.detect.run import (
    DETECTORS,
    OF_THE_JOB,
    Detector,
    Explained,
    run_detectors,
)
from dpro.detect.stragglers.causes import INPUT_PIPELINE
from dpro.detect.uneven_work import BalancedJob

NOT_OF_RUNS = ("dpro.detect.hang.",)  # a job that stands still is judged before any of these detectors runs
ALL = (*DETECTORS, *OF_THE_JOB)


def finding(class_: str, ranks: Sequence[int] = (), kind: str = "rank", cause: str = "") -> Finding:
    name = ", ".join(map(str, ranks)) or "it"
    return Finding(class_, kind, name, tuple(ranks), 0.1, 0.9, 1e6, (), cause)


class Known(Context):
    """A context in which what calls show is known beforehand."""

    def __init__(
        self,
        *,
        messages_unseen: bool = False,
        on_gpus: bool = False,
        late: Sequence[Finding] = (),
        turns: Sequence[Finding] = (),
        pauses: Sequence[Finding] = (),
    ) -> None:
        super().__init__()
        self.__dict__ |= {"has": frozenset(Need), "messages_unseen": messages_unseen, "on_gpus": on_gpus}
        self.__dict__ |= {"late_by_calls": list(late), "turns": list(turns), "slowdown": None}
        self.__dict__ |= {"pauses": LostTime(list(pauses), [], [])}


def found(name: str, context: Context, before: Sequence[Finding] = (), *, in_windows: bool = True):
    """What a detector finds after others have found something, and what is left of it."""
    (detector,) = (detector for detector in DETECTORS if detector.name == name)
    explained = Explained().with_more(before, in_windows=in_windows)
    return [each for each in detector.find(context, explained) if not explained.covers(each)]


def stub(name: str, *findings: Finding) -> Detector:
    return Detector(name, lambda _, __: list(findings), frozenset())


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

    plain = detector._replace(find=find)
    for missing in (None, *detector.needs):
        context = Context()
        context.__dict__["has"] = frozenset(Need) - {missing}
        run_detectors(context, [plain])
    assert asked == [True]


def test_what_is_blamed_is_not_blamed_again_by_weaker_evidence():
    slow, late = finding("slow.compute", [2]), [finding("slow.host", [2]), finding("slow.host", [3])]
    assert run_detectors(Context(), [stub("strong", slow), stub("weak", *late)]) == [slow, late[1]]
    link, nic = finding("slow.link", [0, 1], "link"), finding("slow.nic", [4])
    assert run_detectors(Context(), [stub("strong", slow, link), stub("weak", nic)]) == [slow, link]
    assert run_detectors(Context(), [stub("strong", slow), stub("weak", nic)]) == [slow, nic]


def test_the_whole_job_is_blamed_once_for_each_reason():
    uneven, input_, idle = (
        Finding(class_, "job", subject, (0, 1), 0.1, 0.9, 1e6, ())
        for class_, subject in (
            ("imbalance.data", "the ranks' batches"), ("slow.host", "the input pipeline"),
            ("slow.host", "the host"),
        )
    )  # fmt: skip
    asked = [stub("windows", uneven, idle), stub("calls", uneven, input_)]
    assert run_detectors(Context(), asked) == [uneven, idle, input_]


def test_a_rank_has_pauses_beside_what_makes_it_slow():
    slow, pause = finding("slow.host", [1]), finding("pauses", [1], cause="garbage collection")
    assert run_detectors(Context(), [stub("strong", slow), stub("pauses", pause)]) == [slow, pause]


@pytest.mark.parametrize("known", [finding("slow.compute", [7]), finding("slow.fabric", [6, 7], "hosts")])
def test_ranks_that_may_be_late_by_unseen_messages_are_not_blamed_beside_what_windows_show(known):
    late = [finding("slow.host", [1]), finding("imbalance.data", [0, 1], "job")]
    assert found("late ranks", Known(messages_unseen=True, late=late), [known]) == late[1:]
    assert found("late ranks", Known(late=late), [known]) == late
    assert found("late ranks", Known(messages_unseen=True, late=late), [known], in_windows=False) == late


@pytest.mark.parametrize(
    ("context", "before"),
    [
        (Known(messages_unseen=True), []),
        (Known(on_gpus=True), []),
        (Known(), [finding("slow.host", [1])]),
        (Known(), [finding("slow.fabric", [0, 1], "hosts")]),
    ],
)
def test_hosts_that_wait_in_calls_show_nothing_where_they_may_wait_for_others(context, before):
    context.__dict__["turns"] = [finding("slow.host", [0, 1], "job")]
    assert found("communication-bound hosts", context, before) == []
    assert found("turns", context, before) == []
    assert found("turns", Known(turns=context.turns)) == context.turns


def test_waiting_for_input_is_not_reported_where_the_slow_input_is_known(monkeypatch):
    waits = finding("slow.host", [0, 1], "job")
    monkeypatch.setattr(run, "find_input_bound", lambda *_, **__: [waits])
    context = Known()
    context.__dict__ |= {"usual_steps": None, "counters": None}
    assert found("waiting for input", context, [finding("slow.host", [1], cause=INPUT_PIPELINE)]) == []
    assert found("waiting for input", context, [finding("slow.compute", [1])]) == [waits]


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
    late = Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, cost_ms * 1e6, (), cause)
    context = Known(late=[late])
    times = [{"rank": 0, "step": step, "start_ns": step * 10**9, "window": -1} for step in steps]
    longer = [row | {"duration_ns": (200 if row["step"] >= 20 else 100) * 10**6} for row in times]
    context.__dict__["steps"] = pl.DataFrame(longer)
    context.__dict__["usual_own_times"] = pl.DataFrame(rows)
    assert found("late ranks", context) == [late] * kept


@pytest.mark.parametrize(
    ("saved_ms", "cost_ms"), [((30.0, 60.0), 30.0), ((2.0, 60.0), 20.0), ((50.0, 60.0), 20.0), (None, 20.0)]
)
def test_a_late_rank_costs_what_its_healing_saves_by_replay_if_that_is_about_what_calls_show(
    saved_ms, cost_ms
):
    late = replace(finding("slow.host", [1]), cost_ns=20e6)
    context = Known(late=[late])
    context.__dict__["saved_by_healing"] = lambda _: saved_ms and (saved_ms[0] * 1e6, saved_ms[1] * 1e6)
    (only,) = found("late ranks", context)
    assert only.cost_ns == cost_ms * 1e6
    if cost_ms == 30.0:
        assert only.severity == 0.5
        assert only.evidence[-1] == (
            "replayed with rank 1 as fast as its peers, the step takes 30 ms instead of 60 ms"
        )
    else:
        assert only == late


def test_ranks_that_take_turns_are_not_named_by_a_few_deep_steps(monkeypatch):
    turns = finding("slow.host", (0, 1), kind="job")
    new = [finding("slow.host", (0,)), finding("slow.host", (2,))]
    masked = [finding("slow.host", (1,))]
    monkeypatch.setattr(run, "slow_ranks", lambda _: new)
    monkeypatch.setattr(run, "find_masked", lambda *_: masked)
    monkeypatch.setattr(run, "find_uneven_work_of_stages", lambda _: [])
    for taking, left in (([turns], new[1:]), ([], [*new, *masked])):
        context = Known(turns=taking)
        context.__dict__["balanced"] = BalancedJob(None, [], True, {})
        assert found("work", context) == left


def test_a_rank_that_waits_for_data_is_not_named_where_all_do_at_no_less_cost():
    of_all = replace(finding("slow.host", kind="job"), component_id=INPUT_PIPELINE, cost_ns=5e6)
    waits, waits_longer = (
        replace(finding("slow.host", (rank,), cause=INPUT_PIPELINE), cost_ns=cost)
        for rank, cost in ((0, 4e6), (1, 6e6))
    )
    other = finding("slow.host", (2,))
    context = Known(late=[waits, waits_longer, other])
    assert found("late ranks", context, [of_all]) == [waits_longer, other]
    assert found("late ranks", context) == [waits, waits_longer, other]


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
    assert found("pauses", Known(pauses=[pause]), hosts) == [pause] * remains
