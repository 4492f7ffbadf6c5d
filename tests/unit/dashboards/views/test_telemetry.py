"""Telemetry: what changed, on the time axis of the timeline."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.views.telemetry import POINTS, flat_counters, held_from, telemetry_figure, telemetry_info
from dpro.schema import COUNTERS, WORKERS, conform
from tests.builders import gpu_job

S = 1_000_000_000


def _counters(*rows: tuple[int, str, str, str, int, float]) -> pl.DataFrame:
    names = ["rank", "host", "device", "counter", "time_ns", "value"]
    return conform(COUNTERS, pl.DataFrame(rows, schema=names, orient="row"))


TWO_HOSTS = _counters(
    (-1, "a", "GPU-1", "sm_clock_mhz", 10 * S, 1980),
    (-1, "a", "GPU-1", "sm_clock_mhz", 12 * S, 1200),
    (-1, "b", "eth0", "tx_bytes", 11 * S, 100),
    (-1, "b", "eth0", "tx_bytes", 13 * S, 300),
    (-1, "b", "eth0", "tx_bytes", 14 * S, 50),
    (-1, "b", "", "up", 11 * S, 1),
    (3, "b", "", "memory_bytes", 11 * S, 7),
    (3, "b", "", "memory_bytes", 12 * S, 8),
    (3, "b", "", "step_gc_ns", 12 * S, 8),
    (3, "b", "", "step_gc_ns", 13 * S, 9),
)


def test_values_stand_on_the_clock_of_the_timeline_and_counts_are_rates():
    shown = telemetry_info(TWO_HOSTS, WORKERS.empty(), {"b": S}, 10 * S, Link())
    assert shown.select("counter", "series", "time_ms", "value").rows() == [
        ("sm_clock_mhz", "a GPU-1", 0.0, 1980.0),
        ("sm_clock_mhz", "a GPU-1", 2000.0, 1200.0),
        ("tx_bytes/s", "b eth0", 0.0, 100.0),
        ("memory_bytes", "b rank 3", 0.0, 7.0),
        ("memory_bytes", "b rank 3", 1000.0, 8.0),
    ]  # what began again at 14 s has no rate


def test_processes_of_other_ranks_are_left_out_and_hosts_are_not():
    shown = telemetry_info(TWO_HOSTS, WORKERS.empty(), {}, 0, parse_link("?ranks=1"))
    assert shown["counter"].unique().sort().to_list() == ["sm_clock_mhz", "tx_bytes/s"]


def test_gpus_of_other_jobs_are_not_shown_and_the_jobs_own_are_with_their_ranks():
    other = [(-1, "a", "GPU-2", "sm_clock_mhz", second * S, second) for second in (10, 12)]
    beats = [(-1, "a", f"GPU-{number}", "sampling_us", 10 * S, 50) for number in (1, 2)]
    counters = pl.concat([TWO_HOSTS, _counters(*other, *beats)])
    workers = conform(WORKERS, pl.DataFrame({"rank": [0, 1], "host": "a", "gpu_uuid": ["GPU-1", "GPU-1"]}))
    shown = telemetry_info(counters, workers, {}, 0, Link())
    assert shown.filter(counter="sm_clock_mhz")["series"].unique().to_list() == ["a GPU-1 (rank 0, 1)"]
    assert (
        telemetry_info(counters, workers, {}, 0, parse_link("?ranks=3"))
        .filter(counter="sm_clock_mhz")
        .is_empty()
    )


def test_a_row_per_counter_shares_one_axis_and_extremes_survive_thinning():
    rows = [
        (-1, "a", "", "load_1m", second * S, 9.0 if second == 7777 else second % 2)
        for second in range(20_000)
    ]
    shown = telemetry_info(pl.concat([TWO_HOSTS, _counters(*rows)]), WORKERS.empty(), {}, 0, Link())
    figure = telemetry_figure(shown, (0.0, 5.0), "dark")
    assert [note.text for note in figure.layout.annotations][:2] == ["SM clock, MHz", "sent, B/s"]
    load_ = next(trace for trace in figure.data if trace.name == "a")
    assert len(load_.x) <= POINTS + 2
    assert np.max(load_.y) == 9
    assert figure.layout.xaxis.range == (0.0, 5.0)


def test_a_counter_that_changes_no_more_is_drawn_up_to_the_last_sample_of_its_device():
    rows = [(0, "a", "gpu", "sm_clock_mhz", second * S, value) for second, value in ((0, 345), (2, 1980))]
    rows += [(0, "a", "gpu", "power_w", second * S, 100.0 + second) for second in range(6)]
    shown = telemetry_info(_counters(*rows), WORKERS.empty(), {}, 0, Link())
    (clock,) = [
        trace for trace in telemetry_figure(shown, None, "light").data if " MHz<" in trace.hovertemplate
    ]
    assert (list(clock.x), list(clock.y)) == ([0, 2, 5], [345, 1980, 1980])


def test_large_amounts_are_shown_in_the_unit_that_fits_the_largest():
    rows = [(-1, "a", "eth0", "tx_bytes", second * S, 2.5e9 * second**2) for second in range(3)]
    rows += [(0, "a", "", "memory_bytes", second * S, (3 + second) * 1e9) for second in range(2)]
    rows += [(0, "a", "", "cpu_user_s", second * S, 3.5 * second) for second in range(3)]
    rows += [(-1, "a", "mlx5_0:1", "rx_odd_errors", second * S, second) for second in range(3)]
    shown = telemetry_info(_counters(*rows), WORKERS.empty(), {}, 0, Link())
    figure = telemetry_figure(shown, None, "light")
    assert {note.text for note in figure.layout.annotations} == {
        "sent, GB/s",
        "memory of the process, GB",
        "CPU, user code, cores busy",
        "rx_odd_errors/s",
    }
    values = {unit: _values_in(figure, unit) for unit in ("GB/s", "GB", "cores busy")}
    assert values == {"GB/s": [2.5, 7.5], "GB": [3.0, 4.0], "cores busy": [3.5, 3.5]}


def _values_in(figure, unit):
    """Values of the only series that is drawn in a unit."""
    (values,) = (trace.y for trace in figure.data if f" {unit}<extra>" in trace.hovertemplate)
    return [round(float(value), 6) for value in values]


def test_a_counter_that_hardly_changes_is_flat():
    rows = [(0, "a", "gpu", "sm_clock_mhz", second * S, 1980 - second) for second in range(3)]
    rows += [(0, "a", "gpu", "power_w", second * S, 100.0 + 9 * second) for second in range(3)]
    rows += [
        (0, "a", "gpu", "sm_clock_mhz", -second * S, 345) for second in (1, 2, 3)
    ]  # before the first span
    rows[-3] = (0, "a", "gpu", "sm_clock_mhz", -S, 1980)
    shown = telemetry_info(_counters(*rows), WORKERS.empty(), {}, 0, Link())
    assert flat_counters(held_from(shown, 0.0)).rows() == [
        ("sm_clock_mhz", "SM clock", "MHz", 1978.0, 1980.0)
    ]


def test_time_begins_with_the_first_span_and_loads_with_nothing():
    rows = [(0, "a", "", "cpu_user_s", second * S, 3.5 * second**2) for second in (-2, -1, 0, 1, 2)]
    rows += [(0, "a", "", "memory_bytes", second * S, 1e9 + second * 1e8) for second in (-2, 2)]
    figure = telemetry_figure(telemetry_info(_counters(*rows), WORKERS.empty(), {}, 0, Link()), None, "light")
    assert figure.layout.xaxis.range == (0, 2)
    modes = {note.text: axis.rangemode for note, axis in zip(figure.layout.annotations, _axes(figure))}
    assert modes == {"memory of the process, GB": None, "CPU, user code, cores busy": "tozero"}


def _axes(figure):
    return [figure.layout.yaxis, figure.layout.yaxis2]


@pytest.mark.parametrize("prefix", ["GPU-", ""])
def test_a_gpu_is_named_by_its_rank_and_not_by_its_uuid(prefix):
    uuid = f"{prefix}0123abcd-1111-2222-3333-444455556666"
    rows = [(-1, "a", uuid, "power_w", second * S, 100.0 + second) for second in range(2)]
    rows += [(-1, "a", uuid, "sampling_us", 0, 50)]
    workers = conform(WORKERS, pl.DataFrame({"rank": [3], "host": "a", "gpu_uuid": [uuid]}))
    owned = telemetry_info(_counters(*rows), workers, {}, 0, Link())
    assert owned["series"].unique().to_list() == ["a GPU (rank 3)"]
    shown = telemetry_info(_counters(*rows), WORKERS.empty(), {}, 0, Link())
    assert shown["series"].unique().to_list() == ["a GPU 0123abcd"]


def test_without_samples_there_is_nothing():
    assert telemetry_info(COUNTERS.empty(), WORKERS.empty(), {}, 0, Link()).is_empty()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(gpu_job().write(tmp_path_factory.mktemp("run")))


def test_the_time_of_telemetry_begins_with_the_graph(loaded):
    assert loaded.clocks == ({}, loaded.built.graph.origin_ns)
