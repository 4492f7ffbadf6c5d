"""Which gradients are in which reduction, inferred: against what real jobs recorded of their buckets."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from dpro.opening import open_path
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.gradient_buckets import divided, gradient_passes, inferred_passes, with_other_sizes
from dpro.replay.timeline import replay
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run

SAMPLE = Path(__file__).resolve().parents[4] / "sample_traces" / "slow_rank"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Built]:
    """A real DDP job: with its buckets, as recorded, and without."""
    folder = tmp_path_factory.mktemp("inferred") / "run"
    shutil.copytree(SAMPLE, folder)
    shutil.rmtree(folder / "buckets")
    return {"recorded": build_graph(open_run(SAMPLE)), "inferred": build_graph(open_run(folder))}


def test_the_buckets_of_a_real_ddp_job_are_inferred_as_they_were_recorded(jobs):
    known, found = gradient_passes(jobs["recorded"].graph), inferred_passes(jobs["inferred"].graph)
    assert len(found) == len(known)
    for mine, theirs in zip(found, known):
        assert (mine.rank, mine.step) == (theirs.rank, theirs.step)
        assert mine.closes.tolist() == theirs.closes.tolist()
        assert mine.arrive.tolist() == theirs.arrive.tolist()
        firsts = np.append(0, mine.closes[:-1] + 1)
        sums = [np.add.reduceat(each.parameters.num_bytes, firsts).tolist() for each in (mine, theirs)]
        assert sums[0] == sums[1]
    assert not any(each.parameters.is_recorded for each in found)


@pytest.mark.slow
def test_a_change_of_inferred_reductions_is_not_proven(jobs):
    proven = {}
    for name, built in jobs.items():
        trust = assess(built, replay(built.graph), built.graph.run.manifest)
        for edits in (["compress:to=fp16"], ["heal:rank=1", "compress:to=fp16"]):
            each = predict(built.graph, baseline_steps(built.graph), [*map(parse_edit, edits)], trust)
            proven[name, *edits] = each.proven, round(each.gain_high_ns - each.gain_low_ns)
    assert {key: shown for key, (shown, _) in proven.items() if not shown} == {
        ("inferred", "compress:to=fp16"): False,
        ("inferred", "heal:rank=1", "compress:to=fp16"): False,
    }
    wider, recorded = (proven[name, "compress:to=fp16"][1] for name in ("inferred", "recorded"))
    assert wider > recorded  # all of the doubt counts


def test_sizes_that_are_not_known_leave_both_ends_open(jobs):
    each = inferred_passes(jobs["inferred"].graph)[0]
    if each.parameters.are_sizes_known:
        pytest.skip("the sample has shapes")
    total = each.parameters.num_bytes.sum()
    for where in (0, -1):
        sizes = with_other_sizes(each, where).parameters.num_bytes
        assert sizes.sum() == total
        assert sizes[0 if where == 0 else each.closes[0]] == sizes[: each.closes[0] + 1].max()


def test_a_number_is_divided_without_a_rest():
    assert divided(10, [1, 1, 1]) == [3, 4, 3]
    assert divided(12, [1, 2, 3]) == [2, 4, 6]


@pytest.mark.parametrize(
    ("trace", "counts", "num_bytes"),
    [
        ("nccl_meta/mi300x_ddp_rank0of8.json.gz", [5, 57], [5746640, 17632384]),
        ("multirank/torchrec_v100_4r_opt4", [4, 6, 4, 4], [-1] * 4),
    ],
)
def test_of_a_trace_that_says_nothing_of_buckets(traces, trace, counts, num_bytes):
    graph = build_graph(open_path(traces / trace)).graph
    first = min(gradient_passes(graph), key=lambda one: (one.rank, one.step))
    assert np.diff(first.closes, prepend=-1).tolist() == counts
    assert graph.nodes.bytes[first.transfer].tolist() == num_bytes
    assert first.parameters.are_sizes_known == (num_bytes[0] > 0)
