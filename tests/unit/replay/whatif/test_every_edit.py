"""What must hold of each edit there is, on jobs of every sort and on a real trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.cli.runs import open_quietly
from dpro.errors import Unanswerable, UsageError
from dpro.replay.build import build_graph
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay
from dpro.replay.whatif.parse import parse_edit
from dpro.replay.whatif.registry import EDITS
from tests.builders import cpu_job, gpu_job
from tests.pipelines import Job, written

# Edits that change nothing at this strength, wherever they can be answered.
ZERO = [
    *("scale:factor=1", "scale:name=*,factor=1", "hurt:rank=0,factor=1", "hurt:rank=1,ms=0", "cpu:factor=1"),
    *("network:bandwidth=1,latency=1", "delay:us=0", "accumulate:steps=1", "pipeline", "balance:over=stages"),
    *("workers:count=0", "optimizer:impl=foreach", "precision:dtype=fp8,speedup=1"),
]
# Edits that take work or waiting away.
LESS = [
    *("scale:factor=0.5", "remove:kind=kernel", "remove:name=*", "heal:rank=0", "heal:rank=1", "drop:rank=1"),
    *("no-launch", "cuda-graph", "cpu:factor=2", "no-sync", "hide-input", "gc:every=0", "compile", "no-comm"),
    *("network:bandwidth=2", "optimizer:impl=fused", "precision:dtype=fp8,speedup=2"),
]
REAL = "real"


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Callable[[str], Graph]:
    """Graphs by name, each made once."""
    folder = tmp_path_factory.mktemp("jobs")
    made = {
        "cpu": cpu_job().build(folder / "cpu").graph,
        "gpu": gpu_job().build(folder / "gpu").graph,
        "pipeline": build_graph(written(Job(num_steps=2).run(), folder / "pipeline")).predictive,
    }
    return made.__getitem__


@pytest.fixture(scope="module")
def real(traces) -> Graph:
    """Two GPUs that train a recommendation model."""
    return build_graph(open_quietly(traces / "multirank" / "torchrec_v100_2r_kjt")).predictive


names = st.sampled_from(["cpu", "gpu", "pipeline"])


def _applied(graph: Graph, *edits: str) -> Graph | None:
    """The changed graph; None where an edit is refused."""
    reason = ""
    try:
        for edit in edits:
            graph = parse_edit(edit).apply(graph)
    except (Unanswerable, UsageError) as error:
        reason = str(error)
    assert "\n" not in reason
    return None if reason else graph


def _alike(one: Graph, other: Graph) -> bool:
    first, second = replay(one), replay(other)
    return first.start.size == second.start.size and bool(
        (first.start == second.start).all() and (first.end == second.end).all()
    )


@given(names, st.sampled_from(list(EDITS)))
def test_an_edit_is_refused_in_one_line_or_makes_a_graph_that_replays_and_leaves_its_own_alone(
    job, name, edit
):
    graph = job(name)
    before = replay(graph).end
    changed = _applied(graph, EDITS[edit].example)
    assert (replay(graph).end == before).all()
    if changed is not None:
        assert changed.nodes.duration.min() >= 0
        assert (replay(changed).end >= 0).all()


@given(names, st.sampled_from(ZERO))
def test_an_edit_of_strength_zero_changes_no_nanosecond(job, name, edit):
    changed = _applied(job(name), edit)
    if changed is not None and not (edit.startswith("balance") and name != "pipeline"):
        assert _alike(changed, job(name))


@given(names, st.sampled_from(LESS))
def test_taking_away_lets_no_job_end_later(job, name, edit):
    changed = _applied(job(name), edit)
    if changed is not None:
        assert replay(changed).end.max() <= replay(job(name)).end.max()


# Edits of different things: what each changes, the other neither reads nor writes.
APART = [
    ("scale:kind=kernel,factor=0.3", "cpu:factor=3"),
    ("hurt:rank=0,ms=3", "network:bandwidth=2"),
    ("no-sync", "scale:kind=kernel,factor=2"),
    ("cuda-graph", "scale:kind=kernel,factor=0.3"),
    ("remove:kind=kernel", "hide-input"),
    ("drop:rank=1", "hurt:rank=0,factor=2"),
    ("gc:every=0", "network:bandwidth=3"),
    ("heal:rank=1", "scale:kind=collective,factor=0.5"),
]


@given(names, st.sampled_from(APART))
def test_edits_of_different_things_may_come_in_either_order(job, name, pair):
    one, other = _applied(job(name), *pair), _applied(job(name), *reversed(pair))
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert _alike(one, other)


@pytest.mark.parametrize("edit", ZERO)
def test_on_a_real_trace_strength_zero_changes_no_nanosecond(real, edit):
    changed = _applied(real, edit)
    assert changed is None or _alike(changed, real)


@pytest.mark.parametrize("edit", LESS)
def test_on_a_real_trace_taking_away_lets_nothing_end_later(real, edit):
    changed = _applied(real, edit)
    assert changed is None or replay(changed).end.max() <= replay(real).end.max()


@pytest.mark.parametrize("pair", APART)
def test_on_a_real_trace_edits_of_different_things_may_come_in_either_order(real, pair):
    one, other = _applied(real, *pair), _applied(real, *reversed(pair))
    assert (one is None) == (other is None)
    assert one is None or other is None or _alike(one, other)


def test_on_a_real_trace_every_edit_is_answered_or_refused(real):
    answered = {edit for edit, cls in EDITS.items() if _applied(real, cls.example) is not None}
    assert answered >= {"heal", "no-launch", "cuda-graph", "cpu", "network", "no-comm"}
    assert not answered & {"pipeline", "balance", "recompute", "gc", "workers"}
