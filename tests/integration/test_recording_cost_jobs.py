"""Without what recording cost, steps of real jobs take what steps take that are not recorded."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.analysis.analysis import Analysis
from dpro.replay.construction.recording_cost import BY_PRIOR, Profiler, find_recording_cost
from dpro.replay.graph import Graph
from dpro.replay.steps import step_series
from dpro.replay.timeline import replay, step_ends, step_lengths
from dpro.schema import STEPS
from tests.jobs import record, script

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

MODELS = {
    "mlp": "torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40)))",
    "transformer": "torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 128), 6)",
}
JOB = """
torch.set_num_threads(1)
model = MODEL
optimizer = Descent(model.parameters())
batch = torch.ones(8, 4, 64)
for _ in range(240):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


def undisturbed_ns(graph: Graph) -> float:
    """What a step takes in which the machine does little else: on a busy one most take longer."""
    timeline = replay(graph)
    return float(np.percentile(step_lengths(step_ends(graph, timeline.start, timeline.end)), 10))


@pytest.mark.parametrize("model", MODELS)
def test_what_recording_cost_is_taken_out_by_the_prior_alone_to_within_a_seventh(model, tmp_path):
    program = script(tmp_path, JOB.replace("MODEL", MODELS[model]))
    run, done = record(tmp_path, program, "--skip", "20", "--every", "50", "--window-steps", "5")
    assert done.returncode == 0, done.stderr
    analysis = Analysis(run)
    series = step_series(analysis.steps)
    assert series is not None
    plain_ns, graph = float(np.percentile(series.times, 10)), analysis.built.graph
    assert analysis.built.recording is not None
    prior = find_recording_cost(graph, STEPS.empty(), Profiler(is_own=True))
    assert prior is not None
    assert prior.source == BY_PRIOR
    recorded_ns, likely_ns = map(undisturbed_ns, (graph, graph.with_durations(prior.duration)))
    assert likely_ns < recorded_ns
    assert likely_ns == pytest.approx(plain_ns, rel=0.15)
