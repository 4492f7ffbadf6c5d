"""What must hold of each edit there is, on jobs of every sort and on a real trace.

A new edit must be in the tables here: with a strength at which it changes nothing, or as one that twice is
once; as one that takes time away or adds some; and with what it may be applied before or after. What
the tables hold must be answered by some job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay
from dpro.replay.whatif.edit import EFFORTS, Edit
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import EDITS, all_kinds, kind_named, parse_edit
from dpro.replay.whatif.search import bounds_of, candidates, replayed_gains
from tests.builders import cpu_job, gpu_job
from tests.ddp import ddp_job
from tests.fabrics import crossing_pairs
from tests.pipelines import Job, written
from tests.unit.extensions.plan.edits.test_chunked import experts_job, tensor_job
from tests.unit.replay.whatif.edits.gpu.test_kernels import ADD, GEMM, pointwise
from tests.unit.replay.whatif.edits.gpu.test_precision import FLAT, graph_of, matmuls
from tests.unit.replay.whatif.edits.test_batch import remembered
from tests.unit.replay.whatif.edits.test_coalescing import series_job
from tests.unit.replay.whatif.edits.test_communication import four_ranks
from tests.unit.replay.whatif.edits.test_host import collecting, loading
from tests.unit.replay.whatif.edits.test_synchronisation import accumulated, fsdp_job

# A plan that reduces the gradients of job `ddp` here one by one.
PLAN = f"tensors:plan={Path(__file__).with_name('tensor_plan.json')}"
# Edits that change nothing at this strength, wherever they can be answered.
ZERO = [
    *("scale:factor=1", "scale:name=*,factor=1", "slow:rank=0,factor=1", "slow:rank=1,ms=0", "cpu:factor=1"),
    *("network:bandwidth=1,latency=1", "delay:us=0", "accumulate:steps=1", "pipeline", "balance:over=stages"),
    *("workers:count=0", "optimizer:impl=foreach", "precision:dtype=fp8,speedup=1", "algorithm:to=ring"),
    *(
        "prefetch:ahead=0",
        "batch:factor=1",
        "data-parallel:ranks=4",
        "bucket:mb=100",
        "local-updates:every=1",
        "device:to=V100",
        "split:chunks=1",
        "moe-pipeline:chunks=1",
        "stages:layers=2/2/2/2",
        "skip:share=0",
        "fill:ms=100000",
        "oversubscription:ratio=1",
    ),
]
ZERO_ONLY = {
    "balance:over=stages": "pipeline",
    "data-parallel:ranks=4": "rings",
    "device:to=V100": "v100",
}  # even work, four ranks: of these jobs
# Edits that leave nothing for themselves to change.
ONCE = [
    *("remove:kind=kernel", "replace:name=aten::mm,us=30", "drop:rank=1", "no-launch"),
    *("cuda-graph", "free-host", "no-sync", "hide-input", "no-comm", "optimizer:impl=fused", "bucket:mb=1"),
    "reduce-last",
    PLAN,
]
NEITHER = {
    "coalesce": "of a series that is one collective no other is left",
    "gc": "pauses are those of the run as it was recorded",
    "compile": "where there is nothing to fuse, it is refused",
    "overlap": "gradients are called for beside backward as they were, or not at all",
    "heal": "medians are taken again of what is left, whose noise is that of single steps",
    "compress": "compressing has a cost of its own, and twice is refused",
    "priority": "pieces are cut and updates deferred at any size; each time from what was recorded",
    "recompute": "there is no such thing as half of a forward pass",
}
CHUNKS = "what overlaps gains, and each chunk costs something besides"
NEITHER_WAY = {
    "device": "another GPU is faster at some operations and slower at others",
    **{"split": CHUNKS, "moe-pipeline": CHUNKS},
}
FABRIC = ("ecmp", "fail", "paths", "spray", "place", "beside")
NEITHER |= dict.fromkeys(FABRIC, "paths are chosen again, from those of the run")
# Edits that take work or waiting away.
LESS = [
    *("scale:factor=0.5", "remove:kind=kernel", "remove:name=*", "heal:rank=0", "heal:rank=1", "drop:rank=1"),
    *("no-launch", "free-host", "cuda-graph", "cpu:factor=2", "no-sync", "hide-input", "gc:every=0"),
    *("compile", "no-comm", "reduce-last", "coalesce"),
    *("network:bandwidth=2", "optimizer:impl=fused", "precision:dtype=fp8,speedup=2", "prefetch:ahead=1"),
    *("algorithm:to=halving", "replace:name=aten::mm,us=1", "bucket:mb=1", "compress:to=bf16"),
    *(
        "priority:mb=1",
        "local-updates:every=4",
        "overlap:mode=full",
        "workers:count=2",
        "balance:over=stages",
        "skip:share=0.25",
        "paths",
        "spray:headroom=0",
        "place",
    ),
    PLAN,
]
# Edits that add some.
MORE = [
    *("scale:factor=2", "slow:rank=1,factor=2", "slow:rank=0,ms=1", "accumulate:steps=2", "cpu:factor=0.5"),
    *("network:bandwidth=0.5", "recompute:module=layers.*", "batch:factor=2", "data-parallel:ranks=16"),
    *("overlap:mode=off", "pipeline:schedule=gpipe", "delay:us=500"),
    *("stages:layers=5/1/1/1,now=2/2/2/2", "fill:ms=1"),
    *("ecmp", "fail:link=leaf0/spine0", "oversubscription:ratio=2", "beside:hosts=node[0-3]"),
]
# Edits of different things: what each changes, the other neither reads nor writes.
APART = [
    ("scale:kind=kernel,factor=0.3", "cpu:factor=3"),
    ("slow:rank=0,ms=3", "network:bandwidth=2"),
    ("no-sync", "scale:kind=kernel,factor=2"),
    ("cuda-graph", "scale:kind=kernel,factor=0.3"),
    ("no-launch", "scale:kind=kernel,factor=0.3"),
    ("free-host", "scale:kind=kernel,factor=0.3"),
    ("remove:kind=kernel", "hide-input"),
    ("drop:rank=1", "slow:rank=0,factor=2"),
    ("gc:every=0", "network:bandwidth=3"),
    ("delay:us=500", "scale:kind=cpu,factor=0.5"),
    ("heal:rank=1", "scale:kind=collective,factor=0.5"),
    ("replace:name=aten::mm,us=30", "no-comm"),
    ("optimizer:impl=fused", "scale:kind=collective,factor=0.5"),
    ("compile", "cpu:factor=2"),
    ("precision:dtype=fp8,speedup=2", "cpu:factor=2"),
    ("accumulate:steps=2", "scale:kind=cpu,factor=0.5"),
    ("recompute:module=layers.*", "scale:kind=collective,factor=0.5"),
    ("batch:factor=2", "scale:kind=collective,factor=0.5"),
    ("data-parallel:ranks=8", "slow:rank=0,ms=1"),
    ("algorithm:to=halving", "scale:kind=cpu,factor=0.5"),
    ("prefetch:ahead=1", "scale:name=work,factor=2"),
    ("bucket:mb=1", "scale:name=LinearForward,factor=2"),
    (PLAN, "scale:name=LinearForward,factor=2"),
    ("compress:to=bf16", "scale:name=LinearForward,factor=2"),
    ("local-updates:every=4", "scale:name=LinearForward,factor=2"),
    ("reduce-last", "scale:name=LinearForward,factor=2"),
    ("coalesce", "scale:name=aten::add_,factor=2"),
    ("overlap:mode=off", "scale:name=LinearForward,factor=2"),
    ("priority:mb=1", "scale:name=LinearForward,factor=2"),
    ("device:to=H200", "cpu:factor=2"),
    ("split:chunks=2", "scale:name=update,factor=0.5"),
    ("moe-pipeline:chunks=2", "scale:name=update,factor=0.5"),
]
NOT_APART = {
    "workers": "how much of reading is hidden depends on how long all else takes",
    "balance": "the mean of all work is of all that others change, too",
    "pipeline": "the order of work depends on how long it takes",
    "stages": "layers are moved with all that was changed of them",
    "skip": "what is skipped is skipped with all that was changed of it",
    "fill": "what fits depends on how long all else takes",
    **dict.fromkeys((*FABRIC, "oversubscription"), "what meets depends on when it begins"),
}
TABLES = {
    "nothing": [*ZERO, *ONCE],
    "direction": [*LESS, *MORE],
    "order": [text for pair in APART for text in pair],
}
# Jobs here have no modules that are numbered side by side, nor commands that name a number of layers; plans
# are searched for by `--make-plan`.
UNSOUGHT = {"beside", "recompute", "stages", "tensors"}
EXCUSED = {"nothing": NEITHER, "direction": NEITHER_WAY, "order": NOT_APART}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Callable[[str], Graph]:
    """Graphs by name, each made once."""
    folder = tmp_path_factory.mktemp("jobs")
    runs = {
        "cpu": cpu_job(),
        "gpu": gpu_job(),
        "ddp": remembered(ddp_job(), free=1 << 30),
        "fsdp": fsdp_job(),
        "input": loading(per_batch=300),
        "garbage": collecting(),
        "passes": accumulated(2),
        "series": series_job(),
        "pointwise": pointwise([(ADD, 90), (ADD, 90), (GEMM, 50)]),
    }
    made = {name: run.build(folder / name).graph for name, run in runs.items()}
    product = [("aten::mm", FLAT, "volta_fp16_s884gemm", 90), ("aten::add", [], ADD, 90)]
    made["v100"] = graph_of(matmuls(product), folder / "v100", "Tesla V100-SXM2-16GB")
    made["rings"] = four_ranks(folder / "rings")
    made |= {"tensor": tensor_job().build(folder / "tensor").graph}
    made |= {"experts": experts_job().build(folder / "experts").graph}
    made["pipeline"] = build_graph(written(Job(4, 2, 2, 2).run(), folder / "pipeline")).predictive
    made["fabric"] = crossing_pairs(folder / "fabric", 2000)
    return made.__getitem__


@pytest.fixture(scope="module")
def real(traces) -> Graph:
    """Two GPUs that train a recommendation model."""
    return build_graph(open_quietly(traces / "multirank" / "torchrec_v100_2r_kjt")).predictive


NAMES = (
    "tensor",
    "experts",
    "cpu",
    "gpu",
    "ddp",
    "fsdp",
    "input",
    "garbage",
    "passes",
    "series",
    "pointwise",
    "rings",
    "pipeline",
    "v100",
    "fabric",
)
names = st.sampled_from(NAMES)


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


def _same_job(one: Graph, other: Graph) -> bool:
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
    changed = _applied(graph, kind_named(edit).example)
    assert (replay(graph).end == before).all()
    if changed is not None:
        assert changed.nodes.duration.min() >= 0
        assert (replay(changed).end >= 0).all()


@given(names, st.sampled_from(ZERO))
def test_an_edit_of_strength_zero_changes_no_nanosecond(job, name, edit):
    changed = _applied(job(name), edit)
    if changed is not None and ZERO_ONLY.get(edit, name) == name:
        assert _same_job(changed, job(name))


@given(names, st.sampled_from(ONCE))
def test_an_edit_that_was_made_leaves_itself_nothing_to_change(job, name, edit):
    once, twice = _applied(job(name), edit), _applied(job(name), edit, edit)
    if once is not None and twice is not None:
        assert _same_job(twice, once)


@given(names, st.sampled_from(MORE))
def test_adding_lets_no_job_end_earlier(job, name, edit):
    changed = _applied(job(name), edit)
    if changed is not None:
        assert replay(changed).end.max() >= replay(job(name)).end.max()


@pytest.mark.parametrize("table", TABLES)
def test_every_edit_there_is_is_in_each_of_the_tables_here(table):
    listed = {text.partition(":")[0] for text in TABLES[table]}
    assert listed | EXCUSED[table].keys() == EDITS.keys()
    assert not listed & EXCUSED[table].keys()


@pytest.mark.parametrize("text", sorted({text for texts in TABLES.values() for text in texts}))
def test_what_the_tables_hold_is_answered_by_some_job(job, text):
    assert any(_applied(job(name), text) is not None for name in NAMES)


@given(names, st.sampled_from(LESS))
def test_taking_away_lets_no_job_end_later(job, name, edit):
    changed = _applied(job(name), edit)
    if changed is not None:
        assert replay(changed).end.max() <= replay(job(name)).end.max()


@given(names, st.sampled_from(APART))
def test_edits_of_different_things_may_come_in_either_order(job, name, pair):
    one, other = _applied(job(name), *pair), _applied(job(name), *reversed(pair))
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert _same_job(one, other)


@pytest.mark.parametrize("edit", ZERO)
def test_on_a_real_trace_strength_zero_changes_no_nanosecond(real, edit):
    changed = _applied(real, edit)
    assert changed is None or _same_job(changed, real)


@pytest.mark.parametrize("edit", LESS)
def test_on_a_real_trace_taking_away_lets_nothing_end_later(real, edit):
    changed = _applied(real, edit)
    assert changed is None or replay(changed).end.max() <= replay(real).end.max()


@pytest.mark.parametrize("pair", APART)
def test_on_a_real_trace_edits_of_different_things_may_come_in_either_order(real, pair):
    one, other = _applied(real, *pair), _applied(real, *reversed(pair))
    assert (one is None) == (other is None)
    assert one is None or other is None or _same_job(one, other)


def _bounded(graph: Graph, edits: list[Edit]) -> None:
    """A replay gains no more than the bound, to a nanosecond per node that is rounded."""
    facts = facts_of(graph)
    bounds, _ = bounds_of(facts, edits)
    gains, _ = replayed_gains(facts, list(bounds))
    rounding = graph.num_nodes / facts.baseline.height
    assert all(gain <= bounds[edit] + rounding for edit, gain in gains.items()), gains


@pytest.mark.parametrize("name", NAMES)
def test_no_candidate_gains_more_than_its_bound(job, name):
    _bounded(job(name), candidates(facts_of(job(name)))[0])


@given(names, st.sampled_from(sorted({text for texts in TABLES.values() for text in texts})))
def test_no_edit_gains_more_than_its_bound(job, name, text):
    _bounded(job(name), [parse_edit(text)])


def test_on_a_real_trace_no_candidate_gains_more_than_its_bound(real):
    _bounded(real, candidates(facts_of(real))[0])


def _forgetful(graph: Graph) -> Graph:
    return dataclasses.replace(graph, facts={})


@given(names, st.lists(st.sampled_from(sorted(set(LESS + MORE))), min_size=2, max_size=3))
def test_what_is_kept_of_a_graph_changes_no_edit_of_it_and_of_what_edits_made_of_it(job, name, edits):
    kept, fresh = _applied(job(name), *edits), job(name)
    try:
        for edit in edits:
            fresh = parse_edit(edit).apply(_forgetful(fresh))
    except (Unanswerable, UsageError):
        assert kept is None
    else:
        assert kept is not None
        assert _same_job(kept, fresh)


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_declares_candidates_a_bound_and_its_effort(edit):
    assert kind_named(edit).effort in EFFORTS
    assert "effort" in vars(kind_named(edit))
    for method in (kind_named(edit).bound, kind_named(edit).candidates):
        assert not getattr(method, "__isabstractmethod__", False)


def test_every_edit_has_a_candidate_on_some_job(job):
    found = {edit.name for name in NAMES for edit in candidates(facts_of(job(name)))[0]}
    assert found | UNSOUGHT == EDITS.keys()


# What undoes a finding, and a job that has what the finding is about.
REMEDIES = {
    "hide-input": "input",
    "workers:count=1": "input",
    "gc:every=100": "garbage",
    "balance:over=stages": "pipeline",
    "heal:rank=1": "cpu",
}


@pytest.mark.parametrize("text", REMEDIES)
def test_the_remedy_of_a_finding_is_among_what_is_tried(job, text):
    every, _ = candidates(facts_of(job(REMEDIES[text]), suspects=[1]))
    assert text in list(map(str, every))


@pytest.mark.parametrize(
    ("name", "text", "samples"),
    [
        ("ddp", "accumulate:steps=3", 3.0),
        ("ddp", "batch:factor=2", 2.0),
        ("ddp", "drop:rank=1", 0.5),
        ("rings", "data-parallel:ranks=16", 4.0),
        ("pipeline", "drop:dp=0", 0.5),
        ("ddp", "bucket:mb=1", 1.0),
    ],
)
def test_an_edit_says_how_many_times_the_samples_of_a_step_are(job, name, text, samples):
    assert parse_edit(text).samples(job(name)) == samples


def test_on_a_real_trace_every_edit_is_answered_or_refused(real):
    answered = {kind.name for kind in all_kinds() if _applied(real, kind.example) is not None}
    assert answered >= {"heal", "no-launch", "cuda-graph", "cpu", "network", "no-comm"}
    assert not answered & {"pipeline", "balance", "recompute", "gc", "workers"}
