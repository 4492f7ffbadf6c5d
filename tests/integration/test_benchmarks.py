"""Every benchmark runs, tiny: a figure that can't be reproduced is no figure.

What a benchmark measures is not judged here, only that its command works and that what it measures on is
what it says.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys

import pytest

from dpro.replay.timeline import replay
from tests.jobs import ROOT, environment
from tests.reference.event_driven import simulate

BENCHMARKS = ROOT / "benchmarks"
SAMPLE = str(ROOT / "sample_traces" / "slow_rank")

# Arguments that make it tiny.
TINY = {
    "answer": [SAMPLE, "--spans", "1", "--rounds", "1", "--json"],
    "diagnosis": ["matrix", "--cases", "1", "--output", "out.json"],
    "diagnosis_dumps": ["--ranks", "16", "--entries", "20", "--rounds", "1", "--json"],
    "diagnosis_hangs": ["--cases", "1", "--ranks", "16", "--ring", "20"],
    "diagnosis_large": ["--ranks", "32", "--rounds", "1", "--json"],
    "diagnosis_operations": ["--cases", "1", "--json"],
    "edges": [SAMPLE, "--json"],
    "edits": [SAMPLE, "--rounds", "1", "--edit", "no-comm", "heal:rank=1"],
    "gpu": ["--dry-run", "-o", "gpu", "--only", "facts.versions,replay.gpt-bf16", "--json"],
    "engine": ["--only", "small", "--scenarios", "2", "--json"],
    "import_kineto": ["trace.json.gz", "--rounds", "1", "--json"],
    "overhead": ["--rounds", "1", "--steps", "40", "--short", "500", "--long", "500", "--json"],
    "startup": ["--json"],
    "twins": ["--only", "straggler", "--rounds", "1", "--json"],
    "unchanged": [SAMPLE, "-o", "out.json"],
    "watch_scale": ["--ranks", "8", "--cases", "straggler"],
}
PARTS = (
    "cpu_job",
    "recording",
    "diagnosis_injected",
    "diagnosis_live",
    "diagnosis_report",
    "diagnosis_rules",
)
UNTRIED = {
    "dashboard": "needs a browser",
    "diagnosis_hang_jobs": "seventeen real jobs; tests/integration/test_hang_jobs.py runs them",
    "limited_link": "needs root and TUN devices",
    "watch_latency": "real jobs of minutes; tests/integration/test_watch_jobs.py runs them",
    "whatif_accuracy": "real jobs over limited links, which need root",
}


def _module(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_benchmark_is_run_or_says_why_not():
    assert {*TINY, *PARTS, *UNTRIED} == {path.stem for path in BENCHMARKS.glob("*.py")}


def test_the_graph_of_the_engine_benchmark_replays_as_the_event_driven_twin_does():
    graph = _module("engine").training_graph(2, 300)
    nodes, edges = graph.nodes, graph.edges
    triples = list(zip(edges.source.tolist(), edges.target.tolist(), edges.lag.tolist()))
    starts = simulate(nodes.duration.tolist(), nodes.earliest.tolist(), triples)
    assert replay(graph).start.tolist() == starts


def test_a_changed_answer_is_found_wherever_it_is():
    differences = _module("unchanged").differences
    before = {"a": {"diagnose": {"findings": [{"cost": 1}, {"cost": 2}]}, "info": {"ranks": 2}}}
    after = {"a": {"diagnose": {"findings": [{"cost": 1}, {"cost": 3}]}, "info": {}}}
    assert list(differences(before, before)) == []
    assert list(differences(before, after)) == [
        ("/a/diagnose/findings[1]/cost", 2, 3),
        ("/a/info/ranks", 2, None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_a_benchmark_runs(name, tmp_path):
    pytest.importorskip("torch")
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": at, "dur": 1.0}
        for at in range(100)
    ]
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *TINY[name]],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if "--json" in TINY[name]:
        assert json.loads(done.stdout)
