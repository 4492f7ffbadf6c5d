"""Real jobs recorded on the CPU replay, and of two that differ in one thing each is predicted from the other.

The jobs and the changes are those of `benchmarks/accuracy/twins.py`, which has more of them. What the ranks
mostly do is sleep, so that a busy machine changes little.
"""

from __future__ import annotations

import pytest

from benchmarks.accuracy import twins

pytest.importorskip("torch")

# On a busy machine, one in ten recordings of the same job differs by 5 %.
TOLERANCE = 0.10


def named(name: str):
    (twin,) = [twin for twin in twins.TWINS if twin.name == name]
    return twin


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("straggler healed (DDP)", marks=pytest.mark.slow),  # make demo holds it, too
        pytest.param("one stage faster (pipeline)", marks=pytest.mark.slow),
        pytest.param("straggler healed (tensor parallel)", marks=pytest.mark.slow),
    ],
)
def test_each_of_two_jobs_that_differ_in_one_thing_is_predicted_from_the_other(tmp_path, name):
    twin = named(name)
    twins.record_all(tmp_path, [twin], 1)
    before, after = map(twins.read, twins.folders(tmp_path, twin, 1)[0])
    assert before.measured_ms > 1.1 * after.measured_ms
    assert twins.predicted_ms(before, twin.forward) == pytest.approx(after.measured_ms, rel=TOLERANCE)
    assert twins.predicted_ms(after, twin.backward) == pytest.approx(before.measured_ms, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "uneven", "fsdp", "tp", "pipeline"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_jobs_of_all_kinds_replay(tmp_path, kind, ranks):
    twin = twins.Twin("", kind, "", "", twins.edit(), twins.edit(), ranks)
    twins.record(tmp_path / "run", twin, "--slow-rank 1 --slow-ms 5", 0)
    job = twins.read(tmp_path / "run")
    assert job.trust.error_pct <= 3.0
    assert job.trust.coverage.collectives_matched == 1.0
    assert job.trust.coverage.time_unexplained <= 0.01
    step_ms = job.measured_ms
    p50_ns, p95_ns = job.trust.start_error_ns
    assert p50_ns <= 0.01 * step_ms * twins.MS
    assert p95_ns <= 0.05 * step_ms * twins.MS
