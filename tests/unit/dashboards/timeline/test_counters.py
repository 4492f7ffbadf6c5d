"""Counters beside the lanes, computed by hand."""

from __future__ import annotations

import numpy as np

from dpro.dashboards.command import load
from dpro.dashboards.timeline.counters import CounterTrack, counter_tracks
from tests.builders import gpu_job

TRACK = CounterTrack(0, "power", "W", np.array([100, 200, 400]), np.array([10.0, 30.0, 20.0]))


def test_a_value_holds_until_the_next():
    assert [each.tolist() for each in TRACK.within(150, 450)] == [[150, 200, 400], [10, 30, 20]]
    assert TRACK.totals(150, 450) == ((50 * 10 + 200 * 30 + 50 * 20) / 300, 10, 30)
    assert TRACK.totals(250, 300) == (30, 30, 30)
    assert TRACK.totals(0, 50) is None


def test_what_is_drawn_has_the_first_least_and_most_of_each_pixel():
    value = np.array([5.0, 1, 9, 3, 7, 2, 8, 4])
    track = CounterTrack(0, "power", "W", np.arange(8) * 10, value)
    assert track.drawn(0, 80, 8) == ((np.arange(8) * 10).tolist(), value.tolist())
    assert track.drawn(0, 80, 2) == ([0, 10, 20, 40, 50, 60], [5, 1, 9, 7, 2, 8])


def test_tracks_of_a_rank_are_its_gpus_and_those_of_hosts_come_last(tmp_path):
    run = gpu_job()
    for time_us, watts, sent in [(0, 300.0, 0.0), (500, 400.0, 5e5), (1000, 350.0, 2e6)]:
        rest = {"host": "a", "time_ns": 1000 * time_us}
        run.rows["counters"] += [
            {"rank": 1, "device": "", "counter": "power_w", "value": watts, **rest},
            {"rank": -1, "device": "eth0", "counter": "tx_bytes", "value": sent, **rest},
            {"rank": -1, "device": "", "counter": "load_1m", "value": watts, **rest},
        ]
    loaded = load(run.write(tmp_path))
    power, port = counter_tracks(loaded.counters, loaded.workers, loaded.measured.clocks)
    assert (power.rank, power.label, power.unit, power.value.tolist()) == (1, "power", "W", [300, 400, 350])
    assert (port.rank, port.label, port.unit) == (-1, "a eth0 sent", "GB/s")
    assert port.value.tolist() == [1, 3]
    assert (power.start - power.start[0]).tolist() == [0, 500_000, 1_000_000]
