"""What is tried where the user names nothing: edits alone and together, and how far each part of the machine
counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from benchmarks.search import WITHIN_PCT, speedup
from dpro.analysis.answers.whatif import undominated
from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import Trust, assess
from dpro.replay.graph import Graph, GraphError
from dpro.replay.timeline import replay, time_on_critical_path
from dpro.replay.whatif.edits.gradients import Priority
from dpro.replay.whatif.edits.heal import Heal
from dpro.replay.whatif.edits.synchronisation import LocalUpdates
from dpro.replay.whatif.edits.training_loop import HideInput
from dpro.replay.whatif.facts import MAX_RANKS, facts_of
from dpro.replay.whatif.predict import Prediction, Refusal, ranked
from dpro.replay.whatif.registry import EDITS, parse_edit
from dpro.replay.whatif.search import (
    MIN_GAIN,
    MIN_MARGINAL_GAIN,
    EditSets,
    bounds_of,
    can_combine,
    candidates,
    explore,
    in_order,
    replayed_gains,
)
from dpro.replay.whatif.sensitivity import (
    FACTORS,
    break_even,
    curve_sentence,
    limiting_part,
    sensitivity,
)
from dpro.store import open_run
from tests.builders import TinyRun
from tests.ddp import ddp_job
from tests.jobs import ROOT
from tests.unit.detect.jobs import equal_work, graph_of, slower, write_job


def search(graph, trust, suspects=()):
    found = explore(graph, trust, suspects=suspects)
    return found.predictions, found.refused


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Graph, Trust]:
    """Two ranks that wait for their input, of which one computes half as long again; slow transfers."""
    work = slower(slower(equal_work(2, 6), "compute", 1, times=1.5), "data", [0, 1], plus=15.0)
    work = replace(work, transfer=8.0)
    run = open_run(write_job(tmp_path_factory.mktemp("job"), work))
    built = build_graph(run)
    return built.graph, assess(built, replay(built.graph), run.manifest)


def test_edits_that_help_apart_are_tried_together_and_say_what_they_share(job):
    graph, trust = job
    predictions, _ = search(graph, trust)
    together = [prediction for prediction in predictions if len(prediction.edits) > 1]
    assert list(map(str, together[0].edits)) == ["hide-input", "split:op=all_reduce,chunks=4"]
    alone = {str(each.edits[0]): each.predicted_ns for each in predictions if len(each.edits) == 1}
    assert together[0].predicted_ns < 0.95 * min(alone[str(edit)] for edit in together[0].edits)
    assert together[0].notes[0].startswith("together they save ")


def test_search_finds_the_best_of_all_pairs_of_candidates(job):
    graph, trust = job
    facts = facts_of(graph)
    bounds, _ = bounds_of(facts, candidates(facts)[0])
    advice = [edit for edit in bounds if edit.is_advice]
    pairs = [in_order(pair) for pair in combinations(advice, 2) if can_combine(pair[1], [pair[0]])]
    best = max(speedup(facts, pair) for pair in [*pairs, *([edit] for edit in advice)])
    found = max(speedup(facts, each.edits) for each in search(graph, trust)[0] if each.is_advice)
    assert found >= best / (1 + WITHIN_PCT / 100)
    assert best > 1.2


def test_where_the_best_set_changes_the_training_the_best_that_does_not_is_also_given(tmp_path):
    work = replace(slower(equal_work(2, 6), "data", [0, 1], plus=5.0), transfer=16.0)
    run = open_run(write_job(tmp_path / "job", work))
    built = build_graph(run)
    found = explore(built.graph, assess(built, replay(built.graph), run.manifest))
    together = [each for each in found.predictions if len(each.edits) > 1]
    assert max(together, key=lambda each: each.speedup).training
    assert ["hide-input", "split:op=all_reduce,chunks=4"] in [
        list(map(str, each.edits)) for each in together if not each.training
    ]
    assert len({each.edits for each in together}) == len(together)


def test_no_part_of_a_combination_can_be_left_out(tmp_path):
    run = ddp_job().write(tmp_path / "run")  # fewer reductions leave next to nothing to put first
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    found = explore(built.graph, trust, kinds=[Priority, LocalUpdates]).predictions
    gains = {tuple(map(str, each.edits)): each.speedup for each in found}
    assert gains["priority:mb=1",] > 1.2
    assert max(gains, key=gains.__getitem__) == ("local-updates:every=16",)
    assert {len(edits) for edits in gains} == {1}


@pytest.mark.parametrize(
    "sample",
    ["healthy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slow_rank", "slow_input"))],
)
def test_no_edit_of_a_real_job_gains_more_than_its_bound_and_the_best_go_together(sample):
    run = open_run(ROOT / "sample_traces" / sample)
    built = build_graph(run)
    graph, trust = built.graph, assess(built, replay(built.graph), run.manifest)
    facts = facts_of(graph)
    bounds, _ = bounds_of(facts, candidates(facts)[0])
    gains, _ = replayed_gains(facts, list(bounds))
    assert not [str(edit) for edit, gain in gains.items() if gain > bounds[edit] + 1e-6 * facts.base_ns]
    advice = [each for each in search(graph, trust)[0] if each.is_advice and each.proven]
    several = [each.gain_ns for each in advice if len(each.edits) > 1]
    alone = max(each.gain_ns for each in advice if len(each.edits) == 1)
    assert not several or max(several) > alone + MIN_MARGINAL_GAIN * facts.base_ns


def test_search_is_the_same_each_time(job):
    graph, trust = job
    assert explore(graph, trust) == explore(graph, trust)


def test_gains_that_do_not_add_up_are_reported(tmp_path):
    # Reduced beside backward, or of half the size: what is hidden already saves nothing by being smaller.
    run = ddp_job(us_per_kb=1, num_steps=3).write(tmp_path / "run")
    built = build_graph(run)
    found = explore(built.graph, assess(built, replay(built.graph), run.manifest))
    (pair,) = [
        each
        for each in found.interactions
        if {edit.partition(":")[0] for edit in each.edits} == {"bucket", "compress"}
    ]
    assert pair.together_ms < pair.apart_ms


def test_search_keeps_to_its_budget_and_says_what_it_left_out(job):
    graph, trust = job
    reported: list[tuple[int, int]] = []
    found = explore(graph, trust, budget=3, report=lambda done, total: reported.append((done, total)))
    facts = facts_of(graph)
    bounds, _ = bounds_of(facts, candidates(facts)[0])
    bounds = {str(edit): bound for edit, bound in bounds.items()}
    worth = {edit for edit, bound in bounds.items() if bound > MIN_GAIN * facts.base_ns}
    assert len(found.untried) == len(worth) - 3
    assert set(found.untried) < worth
    assert max(bounds[edit] for edit in found.untried) <= min(
        bounds[edit] for edit in worth if edit not in found.untried
    )
    assert reported == [(1, 1), (2, 2), (3, 3)]
    assert explore(graph, trust).untried == []


def test_edit_that_breaks_the_graph_is_refused_and_the_others_are_predicted(job, monkeypatch):
    def broken(*_: object) -> Graph:
        raise GraphError("the graph has a cycle: a -> b")

    monkeypatch.setattr(HideInput, "apply", broken)
    predictions, refused = search(*job)
    assert Refusal("hide-input", "the graph has a cycle: a -> b") in refused
    assert "heal:rank=1" in [str(prediction.edits[0]) for prediction in predictions]


def test_refusals_for_one_reason_are_one(job):
    graph, trust = job
    _, refused = search(graph, trust)
    assert [refusal.edit for refusal in refused if refusal.edit.startswith("priority")] == ["priority:mb=1"]


def test_of_many_ranks_those_are_healed_that_most_of_the_critical_path_runs_over(tmp_path):
    work = slower(equal_work(12, 3), "compute", [7, 11], times=1.5)
    every, _ = candidates(facts_of(graph_of(tmp_path, work)))
    healed = [edit.place.rank for edit in every if isinstance(edit, Heal)]
    assert len(healed) == MAX_RANKS
    assert {7, 11} & set(healed)


def test_everything_that_is_tried_can_be_asked_for(tmp_path):
    found, refused = candidates(facts_of(graph_of(tmp_path, equal_work(2, 2))))
    assert {edit.name for edit in found} | {refusal.edit for refusal in refused} == EDITS.keys()
    assert [parse_edit(str(edit)) for edit in found] == found


@pytest.mark.parametrize(
    ("step_at", "expected"),
    [
        (lambda factor: 60 / factor + 40, 10.0),  # one after the other
        (lambda factor: max(100 / factor, 50), 1 / 0.55),  # side by side: at a step of 55
        (lambda factor: 100.0, None),
        (lambda factor: 99.5 + 0.5 / factor, None),  # less than one percent
    ],
)
def test_break_even_is_where_nine_tenths_are_gained(step_at, expected):
    found = break_even(100.0, FACTORS, [step_at(factor) for factor in FACTORS])
    assert found == (None if expected is None else pytest.approx(expected, rel=0.01))


def test_a_gain_goes_no_further_than_the_next_limit_and_a_part_that_stays_the_limit_has_none(tmp_path):
    steps = [1 + 100 / factor for factor in FACTORS]  # the other 1 ms is the limit only from x100 on
    assert break_even(101.0, FACTORS, steps) == pytest.approx(100 / 1.2)  # with what is left at x1000
    slow_input = slower(equal_work(1, 4), "data", [0], plus=1e6)
    curves = {curve.part: curve for curve in sensitivity(graph_of(tmp_path, slow_input))}
    alone = curves["input"]
    assert (alone.break_even, alone.then) == (None, "input")
    assert alone.step_ms[-1] < alone.base_ms / 100
    assert curve_sentence(alone) == (
        "the input pipeline: x29.96 once it is 30 times as fast, and it is still the limit"
    )


def test_part_that_limits_is_shown_by_the_critical_path(tmp_path):
    work = equal_work(2, 4)
    graph = graph_of(tmp_path / "a", work)
    assert limiting_part(graph) == "host"
    slow_input = graph_of(tmp_path / "b", slower(work, "data", [0, 1], plus=500.0))
    assert limiting_part(slow_input) == "input"
    assert limiting_part(slow_input, but="input") == "host"


def test_curves_fall_and_parts_that_the_run_does_not_show_have_none(tmp_path):
    curves = {curve.part: curve for curve in sensitivity(graph_of(tmp_path, equal_work(2, 4)))}
    assert curves.keys() == {"network", "host", "input"}
    for curve in curves.values():
        steps = (curve.base_ms, *curve.step_ms)
        assert all(later <= earlier for earlier, later in pairwise(steps))
    assert curves["host"].break_even > 2
    assert curves["host"].then == "network"


def test_a_faster_cpu_leaves_the_input_as_it_is_since_that_may_wait_for_a_disk(tmp_path):
    work = equal_work(2, 4)
    loading = slower(work, "data", [0, 1], plus=500.0)
    curves = {curve.part: curve for curve in sensitivity(graph_of(tmp_path, loading))}
    assert curves["host"].then == "input"
    assert 500 < curves["host"].step_ms[-1] < curves["host"].base_ms
    assert curves["input"].step_ms[-1] < 50


def test_kernels_that_fill_the_step_but_gain_nothing_are_not_known_to_be_no_limit(tmp_path):
    run = TinyRun()
    for step, begin in enumerate((0, 1000, 2000)):  # the host is busy all the time, perhaps with waiting
        run.call(begin, begin + 10, step)
        run.kernel("gemm", begin + 12, begin + 912, step)
        run.op("spin", begin + 10, begin + 1000)
        run.step(step, begin, begin + 1000)
    curves = {curve.part: curve for curve in sensitivity(run.build(tmp_path / "r").graph)}
    assert curves["kernels"].step_ms == []
    assert curve_sentence(curves["kernels"]) == (
        "the GPU's kernels: not known for this run: a host thread counts as busy all the time, but may wait"
    )


def test_a_host_of_which_nothing_is_left_has_no_curve(tmp_path):
    run = TinyRun()
    for step, begin in enumerate((0, 1000, 2000)):
        run.op("aten::mm", begin, begin + 999)
        run.step(step, begin, begin + 1000)
    (curve,) = sensitivity(run.build(tmp_path / "r").graph)
    assert curve_sentence(curve) == (
        "the host's CPU: not known for this run: next to nothing else of the step was recorded"
    )


def test_run_without_a_whole_step_has_no_curves(tmp_path):
    run = TinyRun()
    run.op("work", 0, 100)
    run.step(0, 500, 600)
    with pytest.raises(Unanswerable, match="complete step"):
        sensitivity(run.build(tmp_path / "r").graph)


def test_times_on_the_critical_path_add_up_to_the_window(job):
    timeline = replay(job[0])
    assert time_on_critical_path(timeline).sum() == timeline.end.max() - timeline.start.min()


def test_what_is_sure_comes_first_and_bounds_are_last(job):
    graph, trust = job
    found = explore(graph, trust)
    places = [
        (not each.is_advice, each.effect != "faster", bool(each.training)) for each in found.predictions
    ]
    assert places == sorted(places)
    assert found.predictions == ranked(reversed(found.predictions))
    assert "hide-input" in [str(each.edits[0]) for each in found.predictions if each.block == "proven"]
    assert "cpu:factor=2" in [str(each.edits[0]) for each in found.predictions if each.block == "bound"]


def _gaining(text: str, least_pct: float, most_pct: float, proven: bool = False) -> Prediction:
    """A prediction of a step of 100 ns whose interval of throughput goes from one percentage to another."""
    low, high = (100 - 100 / (1 + each / 100) for each in (least_pct, most_pct))
    speedup = 1 + (least_pct + most_pct) / 200
    edits = tuple(parse_edit(each) for each in text.split())
    after = 100 / speedup
    return Prediction(edits, after, speedup, 0, 200, (), proven, 1.0, low, high)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Of like gain the proven one, though the other gains more; a much larger gain need not be proven.
        (_gaining("optimizer", 4.5, 6, proven=True), _gaining("compile", 7, 30)),
        (_gaining("compile", 9, 30), _gaining("optimizer", 1.1, 60, proven=True)),
        # What bounds a gain is no advice.
        (_gaining("drop:rank=1", -9, -5), _gaining("no-comm", 50, 60, proven=True)),
        # Of like gain and proof the setting, before the code, though that gains more.
        (_gaining("algorithm:to=tree", 4.5, 5), _gaining("no-sync", 7, 8)),
        # Of what is equal in all that, what gains more for certain.
        (_gaining("compile", 6, 7), _gaining("cuda-graph", 5, 30)),
        # What may gain nothing comes behind the smallest sure gain; what changes the training, too.
        (_gaining("compile", 0.3, 0.5), _gaining("optimizer", -1, 90, proven=True)),
        (_gaining("compile", 0.3, 0.5), _gaining("accumulate", 20, 30, proven=True)),
    ],
)
def test_what_gains_for_certain_comes_first_and_of_like_gains_the_proven_and_the_least_effort(first, second):
    assert ranked([first, second]) == ranked([second, first]) == [first, second]


@pytest.mark.slow
def test_first_two_suggestions_on_eight_gpus_gain_for_certain_and_free_the_host_that_binds(traces):
    # The critical path of this job is host code alone: that of the model, and 9 of 42 ms of its optimizers.
    run = open_quietly(traces / "multirank" / "nanogpt_h100_8r_rs_ag")
    built = build_graph(run)
    trust = assess(built, replay(built.predictive), run.manifest)
    first, second = search(built.predictive, trust)[0][:2]
    assert [list(map(str, each.edits)) for each in (first, second)] == [
        ["cuda-graph"],
        ["cuda-graph:module=Optimizer.step#*"],
    ]
    assert all(each.is_advice and each.effect == "faster" for each in (first, second))
    assert not any(edit.training for each in (first, second) for edit in each.edits)
    assert first.gain_low_ns > second.gain_low_ns


def test_healthy_ranks_are_healed_only_where_a_finding_names_them(tmp_path):
    run = open_run(write_job(tmp_path / "even", equal_work(4, 6)))
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)

    def healed(suspects: tuple[int, ...] = ()) -> set[str]:
        return {
            str(edit)
            for each in search(built.graph, trust, suspects)[0]
            for edit in each.edits
            if isinstance(edit, Heal)
        }

    assert healed() == set()
    named = explore(built.graph, trust, suspects=(2,))
    answered = [str(each.edits[0]) for each in named.predictions] + [each.edit for each in named.little]
    assert "heal:rank=2" in answered


def test_what_a_rank_costs_is_no_advice_and_is_not_added_to_any(job):
    graph, trust = job
    healing = [each for each in search(graph, trust)[0] if any(isinstance(edit, Heal) for edit in each.edits)]
    assert [list(map(str, each.edits)) for each in healing] == [["heal:rank=1"]]
    assert not healing[0].is_advice


def test_a_slow_rank_is_healed_and_its_peers_are_not(job):
    graph, trust = job
    offered = {str(edit) for each in search(graph, trust)[0] for edit in each.edits if isinstance(edit, Heal)}
    assert offered == {"heal:rank=1"}


@pytest.mark.parametrize(
    ("low", "high", "effect"), [(10, 30, "faster"), (-10, 10, "unclear"), (-30, -5, "slower")]
)
def test_an_effect_is_clear_where_the_interval_of_the_gain_leaves_no_gain_out(low, high, effect):
    found = Prediction((), 90, 100 / 90, 50, 150, gain_low_ns=low, gain_high_ns=high)
    assert found.effect == effect


def test_gain_is_of_as_many_samples():
    # Two batches in 150 ns, of which one took 100: 25 ns are saved of each.
    found = Prediction((), 150.0, 200 / 150, 140.0, 160.0, samples=2.0)
    assert (found.base_ns, found.gain_ns) == (pytest.approx(100), pytest.approx(25))
    assert found.speedup_at(50) == pytest.approx(2)
    assert found.speedup_at(100) == float("inf")


def test_of_what_is_advised_those_are_best_that_nothing_beats_in_gain_and_effort():
    def made(text: str, speedup: float) -> Prediction:
        return Prediction((parse_edit(text),), 100 / speedup, speedup, 0, 200)

    flag, line, code = made("algorithm:to=tree", 1.1), made("compile", 1.05), made("no-sync", 1.2)
    assert undominated([flag, line, code, made("no-comm", 3.0)]) == [True, False, True, False]
    assert undominated([made("compile", 0.9)]) == [False]


def test_a_job_of_one_kernel_depends_on_nothing_and_is_searched(tmp_path):
    run = TinyRun()
    run.kernel("gemm", 0, 100)
    built = run.build(tmp_path)
    assert built.graph.edges.lag.size == 0
    assert search(built.graph, assess(built, replay(built.graph), built.graph.run.manifest))


def test_an_edit_that_leaves_nothing_of_the_step_is_refused_alone(job, monkeypatch):
    graph, trust = job
    answer = EditSets.answer
    kind = type(explore(graph, trust).predictions[0].edits[0])

    def leaving_nothing(sets, edits):
        edits = list(edits)
        if kind in map(type, edits):
            raise Unanswerable("nothing of the step would be left")
        return answer(sets, edits)

    monkeypatch.setattr(EditSets, "answer", leaving_nothing)
    found = explore(graph, trust)
    assert found.predictions
    assert kind not in {type(edit) for prediction in found.predictions for edit in prediction.edits}
    assert "nothing of the step would be left" in {refusal.reason for refusal in found.refused}


def test_the_intervals_of_step_and_throughput_are_one_interval_in_two_units():
    twice = Prediction((), 160.0, 1.25, 120.0, 220.0, samples=2.0, gain_low_ns=10.0, gain_high_ns=30.0)
    assert twice.base_ns == 100.0
    assert twice.between_ns == (140.0, 180.0)  # for twice the samples
    assert [2 * twice.base_ns / end_ns for end_ns in reversed(twice.between_ns)] == pytest.approx(
        [twice.speedup_at(10.0), twice.speedup_at(30.0)]
    )
    boundless = Prediction((), 80.0, 1.25, 60.0, 110.0)
    assert boundless.between_ns == (60.0, 110.0)
