"""Every benchmark runs on tiny inputs, so that every published figure can be reproduced.

Results are not judged here, only that each command works, and that it measures on what it claims to.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import polars as pl
import pytest

from benchmarks import plans
from benchmarks.accuracy import bars
from benchmarks.accuracy import pairs as all_pairs
from benchmarks.accuracy.pairs import pairs
from benchmarks.speed.engine import training_graph
from benchmarks.unchanged import differences
from dpro.replay.timeline import replay
from tests.jobs import ROOT, environment
from tests.reference.event_driven import simulate

BENCHMARKS = ROOT / "benchmarks"
SAMPLE = str(ROOT / "sample_traces" / "slow_rank")

# Arguments that make it tiny.
TINY = {
    "accuracy.answered": [SAMPLE, "--json"],
    "accuracy.edges": [SAMPLE, "--json"],
    "accuracy.schedules": ["--only", "1F1B", "skip", "--steps", "6", "--json"],
    "accuracy.twins": ["--only", "straggler", "--rounds", "1", "--json"],
    "accuracy.whatif": ["--pair", "dlrm ddp, 2 ranks, computing: opt", "--rounds", "1", "--json"],
    "condense": ["--traces", SAMPLE, "--ranks", "4", "--json"],
    "curves": ["--data", ".", "--json"],
    "diagnosis": ["matrix", "--cases", "1", "--output", "out.json"],
    "diagnosis.dumps": ["--ranks", "16", "--entries", "20", "--rounds", "1", "--json"],
    "diagnosis.healing": ["--ranks", "16", "--json"],
    "diagnosis.hangs": ["--cases", "1", "--ranks", "16", "--ring", "20", "--json"],
    "diagnosis.jobs": ["--only", "no such job", "--json"],
    "diagnosis.large": ["--ranks", "32", "--rounds", "1", "--json"],
    "diagnosis.operations": ["--cases", "1", "--json"],
    "goodput": ["--campaigns", "2", "--minutes", "0.5", "--json"],
    "gpu": ["--dry-run", "-o", "gpu", "--only", "facts.versions,replay.gpt-bf16", "--json"],
    "gpu_pairs": ["--pairs", "pairs.json", "--json"],
    "plans": ["--only", "dlrm, loopback", "--rounds", "1", "--json"],
    "questions": ["--traces", "none", "--verdicts", "none.json", "--json"],
    "serving": ["--data", ".", "--json"],
    "speed.answer": [SAMPLE, "--spans", "1", "--rounds", "1", "--json"],
    "speed.edits": [SAMPLE, "--rounds", "1", "--edit", "no-comm", "heal:rank=1"],
    "speed.engine": ["--only", "small", "--scenarios", "2", "--json"],
    "speed.fabric": ["--hosts", "4", "--json"],
    "speed.import_kineto": ["trace.json.gz", "--rounds", "1", "--json"],
    "speed.loaded": [SAMPLE, "--load", "1", "--rounds", "1", "--only", "report", "--json"],
    "speed.overhead": ["--rounds", "1", "--steps", "40", "--short", "500", "--long", "500", "--json"],
    "speed.ranks": ["--ranks", "8", "16", "--rounds", "1", "--json"],
    "speed.startup": ["--json"],
    "speed.storage": ["--steps", "12", "--json"],
    "unchanged": [SAMPLE, "-o", "out.json"],
    "verdicts": ["--verdicts", "none.json", "--json"],
    "advised": ["--only", "input", "--rounds", "1", "--json"],
    "watch.scale": ["--ranks", "8", "--cases", "straggler"],
}
CHECKS = {
    "accuracy.answered",
    "accuracy.schedules",
    "accuracy.twins",
    "accuracy.whatif",
    "condense",
    "diagnosis.hangs",
    "diagnosis.jobs",
    "diagnosis.operations",
    "goodput",
    "gpu_pairs",
    "plans",
    "serving",
}  # of truth: with a bar that holds or not
PARTS = (
    "accuracy.bars",
    "accuracy.orders",
    "accuracy.pairs",
    "by_hand",
    "recorder_cost",
    "campaigns.campaign",
    "campaigns.compared",
    "campaigns.design",
    "campaigns.hosts",
    "campaigns.job",
    "campaigns.published",
    "recording.advised_job",
    "recording.cpu_job",
    "recording.exchanges",
    "recording.groups_job",
    "recording.model_job",
    "recording.models",
    "recording.orders_job",
    "recording.pipeline_job",
    "serving_checks.logs",
    "serving_checks.pairs",
    "serving_checks.saturation",
    "serving_checks.steady",
    "serving_checks.tables",
    "serving_server.goal",
    "serving_server.hooks",
    "serving_server.link",
    "serving_server.pairs",
    "serving_server.pools",
    "serving_server.server",
    "diagnosis.cases",
    "diagnosis.injected",
    "diagnosis.live",
    "diagnosis.matrix",
    "diagnosis.report",
    "diagnosis.rules",
    "device_checks.figures",
    "device_checks.jobs",
    "device_checks.models",
    "device_checks.operators",
    "device_checks.shipped",
    "device_checks.tables",
    "fabric_lab.blame",
    "fabric_lab.cases",
    "fabric_lab.connections",
    "fabric_lab.job",
    "fabric_lab.lab",
    "fabric_lab.lifetime",
    "fabric_lab.pairs_job",
    "fabric_lab.rank",
    "fabric_lab.ranks",
    "fabric_lab.recorded",
    "fabric_lab.replan",
    "fabric_lab.traffic",
    "reality_checks.checks",
    "reality_checks.models",
    "reality_checks.scoring",
    "reality_checks.tables",
    "serving_server.server",
    "speed.copies",
)
UNTRIED = {
    "dashboard": "needs a browser",
    "devices": "tests/unit/replay/cost/kernels/test_benchmark.py runs it on tables made there",
    "timeline": "needs a browser; test_timeline.py measures a tiny run with its parts",
    "diagnosis.hang_jobs": "seventeen real jobs; tests/integration/test_hang_jobs.py runs them",
    "reality": "tests/unit/extensions/plan/test_reality.py runs it on tables made there",
    "fabric": "needs root and network namespaces; tests/integration/test_fabric_lab.py runs some of it there",
    "search": "minutes; tests/unit/replay/whatif/test_search.py compares with all pairs of a tiny job",
    "recording.limited_link": "needs root and TUN devices",
    "speed.cluster": "clusters of Dask, minutes; test_dask.py has one do the same",
    "serving_server.cost": "needs transformers; minutes",
    "serving_server.pairs": "needs transformers; minutes",
    "watch.latency": "real jobs of minutes; tests/integration/test_watch_jobs.py runs them",
}


def test_every_family_of_pairs_is_among_those_that_are_recorded() -> None:
    families = [make for name, make in vars(all_pairs).items() if name.startswith("of_")]
    assert {pair.name for make in families for pair in make()} == {pair.name for pair in all_pairs.pairs()}


def test_every_benchmark_is_run_or_says_why_not():
    files = [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("[!_g]*/*.py")]
    modules = {".".join(path.relative_to(BENCHMARKS).with_suffix("").parts) for path in files}
    programs = {name.removesuffix(".__main__") for name in modules if not name.endswith("__init__")}
    assert {*TINY, *PARTS, *UNTRIED} == programs


def row(name: str, edit: str, before: float, after: float, predicted: float, **more: object) -> dict:
    """What `accuracy.whatif` says of a pair, a batch of the same size before and after."""
    found = {"pair": name, "controlled": True, "edits": [edit], "rounds": 2, "same_job_pct": 1.0}
    found |= {"before_ms": before, "after_ms": after, "predicted_ms": predicted}
    found |= {"error_pct": 100 * (predicted / after - 1), "held": 1.0, "interval_pct": 5.0}
    found |= {"gained_ms": before - after, "gain_held": 1.0, "gain_width": 0.4}
    return found | bars.signs(before, after, predicted, 1.0) | more


def test_pairs_are_held_to_their_bars_by_class_and_signs_count_beyond_noise():
    rows = [
        row("a", "bucket:mb=1", 100, 80, 81),
        row("b", "accumulate:steps=2", 100, 98, 101),  # 2% is no effect
        row("c", "batch:factor=2", 100, 80, 101, controlled=False),
        {"pair": "d", "controlled": True, "edits": ["gc"], "rounds": 2, "refused": "no pauses"},
    ]
    found = bars.checks(rows, whole=False)
    assert all(check.keys() == {"n", "figures", "bar", "holds"} for check in found.values())
    assert found["controlled"]["figures"]["median_error_pct"] == pytest.approx((1.25 + 100 * 3 / 98) / 2)
    assert (found["controlled"]["n"], found["controlled"]["holds"]) == (2, False)
    assert found["noisy"]["figures"]["worst_error_pct"] == pytest.approx(100 * 21 / 80)
    assert (found["signs"]["n"], found["signs"]["figures"]) == (2, {"right": 1, "wrong": ["c"]})
    assert found["pairs"]["figures"] == {"refused": {"d": "no pauses"}}
    assert len(list(bars.table(rows, found))) == 2 + len(rows) + len(found)


def test_an_edit_is_proven_only_where_a_pair_is_measured():
    every = [row(edit, f"{edit}:a=1", 100, 80, 80) for pair in pairs() for edit in pair.families]
    families = bars.checks(every, whole=True)["families"]
    assert families["holds"], families["figures"]
    assert set(families["figures"]["without_pair"]) == {
        "precision",
        "compile",
        "cuda-graph",
        "no-sync",
        "algorithm",
        "tensors",  # `benchmarks/plans.py` has its pairs
    }
    assert not bars.checks(every[:1], whole=True)["families"]["holds"]


def planned_job(name: str, over_fastest_pct: float, **more: object) -> dict:
    """What `plans` says of a job, by how much its plan is faster than the fastest size for all buckets."""
    found = {"job": name, "over_fastest_pct": over_fastest_pct, "exposed": True, "gain_held": 1.0}
    return found | {"error_pct": 1.0, "same_job_pct": [0.5], "seconds": 4.0} | more


def test_plans_are_held_to_the_fastest_size_that_was_really_recorded():
    rows = [
        planned_job("a", 7.0),
        planned_job("b", -0.9),  # within the noise
        planned_job("c", 6.0, exposed=False),
    ]
    found = plans.checks(rows)
    assert all(check.keys() == {"n", "figures", "bar", "holds"} for check in found.values())
    assert all(check["holds"] for check in found.values())
    assert (found["faster where exposed"]["n"], found["faster where exposed"]["figures"]["share"]) == (2, 0.5)
    slower = plans.checks([*rows, planned_job("d", -1.1, gain_held=0.0, seconds=11.0)])
    assert slower["no slower than the fastest size"]["figures"]["slower"] == {"d": -1.1}
    assert not any(check["holds"] for check in slower.values())
    noisy = plans.checks([*rows, planned_job("d", -1.1, same_job_pct=[3.0, 3.0, 3.0, 3.0])])
    assert noisy["no slower than the fastest size"]["holds"]
    refused = plans.checks([*rows, {"job": "d", "refused": "no spans"}])
    assert (refused["gains"]["figures"]["held"], refused["gains"]["holds"]) == (0.75, False)
    assert refused["search"]["n"] == 3
    assert len(list(plans.table([{"job": "d", "refused": "no spans"}], refused))) == 3 + len(refused)


def test_the_graph_of_the_engine_benchmark_replays_as_the_event_driven_twin_does():
    graph = training_graph(2, 300)
    nodes, edges = graph.nodes, graph.edges
    triples = list(zip(edges.source.tolist(), edges.target.tolist(), edges.lag.tolist()))
    starts = simulate(nodes.duration.tolist(), nodes.earliest.tolist(), triples)
    assert replay(graph).start.tolist() == starts


def test_a_changed_answer_is_found_wherever_it_is():
    before = {"a": {"diagnose": {"findings": [{"cost": 1}, {"cost": 2}]}, "info": {"ranks": 2}}}
    after = {"a": {"diagnose": {"findings": [{"cost": 1}, {"cost": 3}]}, "info": {}}}
    assert list(differences(before, before)) == []
    assert list(differences(before, after)) == [
        ("/a/diagnose/findings[1]/cost", 2, 3),
        ("/a/info/ranks", 2, None),
    ]


def program(name: str) -> list[str]:
    """How a benchmark is started: those beside the folders by their files."""
    file = BENCHMARKS / f"{name}.py"
    return [sys.executable, str(file)] if file.is_file() else [sys.executable, "-m", f"benchmarks.{name}"]


def collectives() -> pl.DataFrame:
    """A measured table: all-reduces of a GPU with NVLink, on straight lines."""
    rows = [(ranks, 1 << power) for ranks in (2, 4, 8) for power in range(10, 28)]
    return pl.DataFrame(rows, ("gpus", "message_bytes"), orient="row").with_columns(
        op=pl.lit("all_reduce"),
        device=pl.lit("h100_sxm"),
        library=pl.lit("nccl"),
        latency_us=10 * pl.col("gpus").log(2) + pl.col("message_bytes") / 1e5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_a_benchmark_runs(name, tmp_path):
    pytest.importorskip("torch")
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": at, "dur": 1.0}
        for at in range(100)
    ]
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    collectives().write_parquet(tmp_path / "collectives.parquet")
    sides = {"before": [{"file": SAMPLE}], "after": [{"file": SAMPLE}]}
    (tmp_path / "pairs.json").write_text(json.dumps([{"name": "same", "edits": ["gc"], **sides}]))
    done = subprocess.run(
        [*program(name), *TINY[name]],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if "--json" in TINY[name]:
        document = json.loads(done.stdout)
        assert document
        if name in CHECKS:
            assert all(check.keys() == {"n", "figures", "bar", "holds"} for check in document.values())
