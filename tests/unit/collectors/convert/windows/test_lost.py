"""GPU work that deep windows lack is said, and only that."""

import polars as pl

from dpro.collectors.convert.windows import CALLS, KERNELS, TAIL, lost_in, sentences
from dpro.schema import SPANS, conform


def spans(operators, calls, kernels):
    """Operators, calls and kernels, by their starts."""
    rows = [
        {"kind": kind, "start_ns": start, "duration_ns": 1}
        for kind, starts in (("cpu_op", operators), ("runtime", calls), ("kernel", kernels))
        for start in starts
    ]
    return conform(SPANS, pl.DataFrame(rows)) if rows else SPANS.empty()


EVEN = range(0, 1000, 10)


def test_window_with_operators_alone_lacks_the_work_of_the_gpu():
    assert lost_in(spans(EVEN, [], [])) == [KERNELS]
    assert lost_in(spans(EVEN, EVEN, [])) == [KERNELS]
    assert lost_in(spans([], [], [])) == []


def test_calls_that_end_long_before_operators_were_lost():
    assert lost_in(spans(EVEN, EVEN, EVEN)) == []
    assert lost_in(spans(EVEN, range(0, 700, 10), EVEN)) == [CALLS]
    assert lost_in(spans(EVEN, range(0, 800, 10), EVEN)) == []


def test_steps_that_end_with_work_of_the_host_have_lost_nothing():
    calls = [*range(0, 200, 10), *range(500, 700, 10)]  # two steps, 300 ns of each on the host
    assert lost_in(spans(EVEN, calls, calls)) == []


def test_few_operators_after_the_last_call_are_no_sign():
    assert lost_in(spans([*range(0, 500, 10), 900, 950], range(0, 500, 10), [5])) == []


def test_rank_and_windows_are_named():
    [text] = sentences(3, "NVIDIA H100", {KERNELS: [2]})
    assert text.startswith("deep window 2 of rank 3 has no work of NVIDIA H100")
    assert "NVreg_RestrictProfilingToAdminUsers" in text
    first, second = sentences(0, "its GPU", {TAIL: [1, 0], CALLS: list(range(20))})
    assert first.startswith("20 deep windows (0, 1, 2, 3, 4, 5, 6, 7 …) of rank 0 have no call to its GPU")
    assert second.startswith("2 deep windows (0, 1) of rank 0 have perhaps not all work")
