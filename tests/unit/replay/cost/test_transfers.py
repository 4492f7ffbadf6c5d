"""What communication costs: lines fitted to made-up times, and to graphs."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.members import members_text
from dpro.replay.cost.curves import fit_line
from dpro.replay.cost.transfers import beyond_sizes, fit_costs
from tests.builders import US, TinyRun
from tests.unit.replay.whatif.edits.test_communication import four_ranks

LATENCY, PER_BYTE = 50_000.0, 8.0


def _times(sizes: np.ndarray) -> np.ndarray:
    return LATENCY + PER_BYTE * sizes


@given(st.lists(st.integers(1, 10**7), min_size=4, max_size=40), st.integers(0, 10**7), st.floats(0.01, 1e3))
def test_a_line_without_noise_comes_back(sizes, latency, slope):
    x = np.array([1000, *sizes, 10**8], np.float64)
    line = fit_line(x, latency + slope * x)
    assert line.time_ns(x) == pytest.approx(latency + slope * x, rel=1e-3)
    assert line.misfit < 1e-3
    assert not line.bandwidth_only


def test_outliers_and_noise_leave_the_line_within_its_interval():
    noise = np.random.default_rng(3)
    x = np.repeat(2.0 ** np.arange(12, 23), 20)
    y = _times(x) * np.exp(noise.normal(0, 0.03, x.size))
    y[::9] *= 4  # slow spells
    line = fit_line(x, y)
    assert abs(line.ns_per_byte / PER_BYTE - 1) < 0.03
    assert abs(line.latency_ns / LATENCY - 1) < 0.05
    assert line.ns_per_byte_error > 0
    assert line.misfit < 0.05


def test_one_size_shows_bandwidth_only():
    line = fit_line(np.full(10, 1e6), np.full(10, 4e6))
    assert line.bandwidth_only
    assert (line.latency_ns, line.ns_per_byte) == (0.0, 4.0)
    assert line.gbps == 0.25


@given(st.lists(st.tuples(st.integers(1, 10**8), st.integers(1, 10**9)), min_size=4, max_size=30))
def test_neither_latency_nor_time_per_byte_is_ever_negative(samples):
    x, y = np.array(samples, np.float64).T
    line = fit_line(x, y)
    assert line.latency_ns >= 0
    assert line.ns_per_byte >= 0
    assert np.isfinite([line.latency_error_ns, line.ns_per_byte_error, line.misfit]).all()


def _job(side_by_side: bool) -> TinyRun:
    """Two ranks reduce 1 and 3 MB, in turn or at once, on a link of 1 byte per ns."""
    run = TinyRun()
    for rank in (0, 1):
        run.op("train", 0, 100_000, rank)
        for step in range(4):
            at = 20_000 * step
            first, second = 1000 + at, (1000 if side_by_side else 3000) + at
            ends = (3000 + at, 5000 + at) if side_by_side else (2000 + at, 6000 + at)
            for number, (begin, end, size) in enumerate(
                ((first, ends[0], 10**6), (second, ends[1], 3 * 10**6))
            ):
                end = end if side_by_side or number == 0 else begin + 3000
                called = run.op("c10d::allreduce_", begin - 20, begin - 10, rank)
                ran = run.mark("gloo:all_reduce", begin, end, rank, tid=20 + number)
                run.member(ran, launched_by=called, bytes_in=size, bytes_out=size, sequence=2 * step + number)
    return run


@pytest.mark.parametrize("side_by_side", [False, True])
def test_transfers_that_share_a_link_cost_what_they_would_cost_in_turn(tmp_path, side_by_side):
    graph = _job(side_by_side).build(tmp_path / "r").graph
    (line,) = fit_costs(graph).values()
    assert line.ns_per_byte == pytest.approx(1.0, rel=0.01)
    assert line.latency_ns == pytest.approx(0, abs=20 * US)


def test_sizes_that_are_unknown_show_nothing(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        run.op("train", 0, 1000, rank)
        for step in range(5):
            run.gloo((100 * step, 100 * step + 5), (100 * step + 10, 100 * step + 60), rank, sequence=step)
    assert fit_costs(run.build(tmp_path / "r").graph) == {}


def _sizes_job(gap_us: float = 5000) -> TinyRun:
    """Two ranks reduce 1, 2 and 4 MB in turn, which take 1, 1.5 and 4 ms, four times each."""
    run = TinyRun()
    for rank in (0, 1):
        run.op("train", 0, 12 * gap_us + 5000, rank)
        for number in range(12):
            at, (size, lasts) = (
                gap_us * number,
                ((10**6, 1000), (2 * 10**6, 1500), (4 * 10**6, 4000))[number % 3],
            )
            run.gloo(
                (at + 10, at + 20),
                (at + 30, at + 30 + lasts),
                rank,
                sequence=number,
                bytes_in=size,
                bytes_out=size,
                group_ranks="0,1",
            )
    return run


def test_sizes_that_are_often_seen_have_the_time_they_had(tmp_path):
    (curve,) = fit_costs(_sizes_job().build(tmp_path / "r").graph).values()
    assert curve.sizes == (1e6, 2e6, 4e6)
    assert curve.time_ns(np.array([1e6, 2e6, 4e6])) == pytest.approx([1e6, 1.5e6, 4e6], rel=1e-3)
    assert (
        abs(float(curve.line_ns(2e6)) / 1.5e6 - 1) > 0.05 or curve.misfit > 0.05
    )  # no line goes through all


def test_a_measured_table_is_moved_to_where_the_run_is(tmp_path):
    from dataclasses import replace

    sizes = 2.0 ** np.arange(16, 28)
    table = pl.DataFrame(
        {
            "op": "all_reduce",
            "num_ranks": 2,
            "hosts": 1,
            "device": "",
            "library": "",
            "version": "",
            "bytes": sizes,
            "time_ns": 20_000 + sizes / 2,
        }
    )  # twice as fast as the run
    graph = replace(_sizes_job().build(tmp_path / "r").graph, network=table)
    (curve,) = fit_costs(graph).values()
    assert curve.time_ns(np.array([1e6, 2e6, 4e6])) == pytest.approx([1e6, 1.5e6, 4e6], rel=1e-3)
    off = 1e6 / (20_000 + 1e6 / 2)  # at the smallest size of the run, and of all below
    assert float(curve.time_ns(2.0**17)) == pytest.approx(off * (20_000 + 2**16), rel=0.01)


def test_groups_of_one_axis_have_one_curve(tmp_path):
    run = TinyRun()
    for rank in range(4):
        run.op("train", 0, 40_000, rank)
        group = [0, 1] if rank < 2 else [2, 3]
        for number in range(2):
            at, size = 10_000 * number, 10**6 * (number + 1)
            run.gloo(
                (at + 10, at + 20),
                (at + 30, at + 30 + size / 1000),
                rank,
                sequence=number,
                group=f"tp{rank // 2}",
                group_ranks=members_text(group),
                bytes_in=size,
                bytes_out=size,
            )
    costs = fit_costs(run.build(tmp_path / "r").graph)
    assert len(costs) == 2
    one, other = costs.values()
    assert one is other
    assert one.num_samples == 8


def test_sizes_that_an_edit_makes_larger_than_any_in_the_run_are_said(tmp_path):
    graph = four_ranks(tmp_path)
    nodes = graph.nodes
    larger = dataclasses.replace(graph, nodes=dataclasses.replace(nodes, bytes=nodes.bytes * 8))
    (line,) = beyond_sizes(graph, larger)
    assert line.startswith("all_reduce of 8.0 kB to 8.0 MB: the run has 1.0 kB to 1.0 MB")
    assert beyond_sizes(graph, graph) == ()
    same = dataclasses.replace(graph, nodes=dataclasses.replace(nodes, bytes=nodes.bytes.copy()))
    assert beyond_sizes(graph, same) == ()


def test_where_no_size_is_known_none_is_beyond_what_the_run_shows(tmp_path):
    graph = four_ranks(tmp_path)
    unknown = np.full(graph.num_nodes, -1)
    before, after = (
        dataclasses.replace(graph, nodes=dataclasses.replace(graph.nodes, bytes=each))
        for each in (unknown, unknown.copy())
    )
    assert beyond_sizes(before, after) == ()
