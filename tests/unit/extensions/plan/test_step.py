"""Steps of layouts: rings by hand, and what more bandwidth and more micro-batches may do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.plan.layout import layouts
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.plan import calibrate, sensitivities
from dpro.extensions.plan.step import job_of, layers_of_chunks, step_times
from dpro.replay.cost.machine import Machine, machine_of, one_way_us

MODEL = Model(8, 4096, 32, 8, 128, 14336, 32000, 4096)
LINKS = ("inside_gbps", "outside_gbps")


def steps(machine: Machine, software: Software | None = None, **columns: int) -> pl.DataFrame:
    rows = layouts([columns])
    return step_times(job_of(MODEL, rows, machine, software or Software()), machine)


def test_a_ring_within_a_host_moves_all_but_its_own_share() -> None:
    machine = Machine("H100", per_host=8, inside_gbps=100, inside_us=0)
    us = one_way_us(np.array([8e6]), np.array([4.0]), np.array([1.0]), machine)
    assert us[0] == pytest.approx(3 / 4 * 8e6 / 100e9 * 1e6)


def test_rings_across_hosts_share_the_ports_of_each() -> None:
    machine = Machine("H100", per_host=8, inside_gbps=1e6, outside_gbps=80, inside_us=0, outside_us=0)
    # Two hosts of 8 with stride 8: eight rings of two ranks leave each host, half of the buffer each.
    apart = one_way_us(np.array([8e6]), np.array([2.0]), np.array([8.0]), machine)
    assert apart[0] == pytest.approx(8 * 8e6 / 2 / 80e9 * 1e6)
    # One group over both hosts has the ports for itself.
    together = one_way_us(np.array([8e6]), np.array([16.0]), np.array([1.0]), machine)
    assert together[0] == pytest.approx(8e6 / 2 / 80e9 * 1e6)


def test_a_group_of_one_sends_nothing() -> None:
    assert one_way_us(np.array([8e6]), np.array([1.0]), np.array([1.0]), Machine("H100"))[0] == 0


def test_layers_that_do_not_divide_leave_fewer_to_the_last_chunk() -> None:
    assert layers_of_chunks(10, 4).tolist() == [3, 2, 3, 2]
    assert layers_of_chunks(8, 4).tolist() == [2, 2, 2, 2]


def test_stages_balanced_with_the_output_layer_leave_it_fewer_layers() -> None:
    # Sixteen layers and an output layer worth four: twenty blocks of work over four stages, five each.
    assert layers_of_chunks(16, 4, 4.0).tolist() == [5, 5, 5, 1]


def test_a_gpu_without_data_sheet_is_refused() -> None:
    with pytest.raises(Unanswerable, match="no data sheet"):
        machine_of("Z9000")


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(LINKS),
    st.floats(1.0, 20.0),
    st.sampled_from([(8, 1, 1), (2, 4, 1), (4, 2, 2), (2, 2, 4), (1, 8, 2)]),
)
def test_more_bandwidth_never_makes_a_step_longer(
    link: str, times: float, degrees: tuple[int, int, int]
) -> None:
    dp, tp, pp = degrees
    machine = machine_of("H100")
    faster = replace(machine, **{link: getattr(machine, link) * times})
    columns = {"dp": dp, "tp": tp, "pp": pp, "micro_batches": 8}
    before, after = (steps(each, **columns)["step_ms"][0] for each in (machine, faster))
    assert after <= before * (1 + 1e-9)


def test_the_bubble_of_a_layout_goes_away_with_many_micro_batches() -> None:
    even = replace(MODEL, vocabulary=1)  # no output layer to speak of: all stages are equal
    machine = replace(machine_of("H100"), outside_gbps=1e9, inside_gbps=1e9, message_us=0)
    rows = layouts([{"pp": 4, "micro_batches": count} for count in (4, 64, 512)])
    bubbles = step_times(job_of(even, rows, machine, Software(head_kernels=0)), machine)["bubble"].to_numpy()
    assert bubbles[0] == pytest.approx(3 / 7, abs=0.02)
    assert bubbles[0] > bubbles[1] > bubbles[2]
    assert bubbles[2] < 0.02


def test_a_layer_that_computes_little_takes_as_long_as_its_host() -> None:
    machine = replace(machine_of("H100"), host_us=1e4, fixed_ms=0, growth=0)
    tiny = replace(MODEL, hidden=128, heads=1, kv_heads=1, ffn=128, vocabulary=128, sequence=128)
    software = Software(kernels=10, head_kernels=0)
    found = step_times(job_of(tiny, layouts([{}]), machine, software), machine)["pipeline_ms"][0]
    assert found == pytest.approx(8 * 3 * 10 * 10, rel=0.01)  # layers, passes of one and two, kernels, ms


def test_recomputing_whole_layers_costs_a_forward_more() -> None:
    plain, again = (steps(machine_of("A100"), recompute=r)["pipeline_ms"][0] for r in (0, 2))
    assert 1.25 < again / plain < 1.36


def test_a_measured_row_moves_others_less_than_itself_and_narrows_their_intervals() -> None:
    machine = machine_of("H100")
    rows = layouts([{"dp": 8}, {"dp": 8}, {"dp": 2, "tp": 4}])
    slopes = sensitivities(job_of(MODEL, rows, machine, Software()), machine)
    before, after = calibrate(rows, slopes, {}), calibrate(rows, slopes, {0: np.log(1.2)})
    assert before.factor.tolist() == [1.0, 1.0, 1.0]
    assert 1.2 > after.factor[1] > after.factor[2] > 1.0
    assert (after.deviation < before.deviation).all()
    assert after.deviation[1] < after.deviation[2]


def test_a_row_far_from_what_is_expected_counts_less() -> None:
    machine = machine_of("H100")
    rows = layouts([{"dp": 8}, {"dp": 2, "tp": 4}])
    slopes = sensitivities(job_of(MODEL, rows, machine, Software()), machine)
    usual, odd = (calibrate(rows, slopes, {0: missed}).factor[1] for missed in (0.1, 1.5))
    assert np.log(odd) / 1.5 < np.log(usual) / 0.1
