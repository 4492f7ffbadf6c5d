"""The benchmark's checks of closed forms and published tables, on tables made here."""

from __future__ import annotations

import polars as pl
import pytest

from benchmarks.campaigns.published import (
    EXPLAINED,
    FIGURES,
    RSC_H,
    SPOT,
    closed_forms,
    published_figures,
    spot_availability,
)


def figures_in(folder, **more):
    values = {
        RSC_H[1024]: 7.9,
        RSC_H[16384]: 1.8,
        RSC_H[131072]: 0.23,
        "step time at full batch 2048": 105.2,
        "hardware failures, about": 1,
        "time to save a checkpoint": 40,
        "interruptions, planned": 47,
        "interruptions, unexpected": 419,
        "effective training time, lower bound": 0.9,
    } | more
    pl.DataFrame({"quantity": list(values), "value": list(map(float, values.values()))}).write_csv(
        folder / FIGURES
    )
    return published_figures(folder)


@pytest.mark.slow
def test_simulation_meets_closed_forms():
    assert closed_forms()["holds"]


def test_one_model_explains_both_sizes_and_young_is_close_to_what_bloom_did(tmp_path):
    found = figures_in(tmp_path)
    assert found["holds"], found
    assert found["figures"]["rsc_independent_1024_gpus_h"] == pytest.approx(28.8)
    assert found["figures"]["bloom_best_steps"] == 66
    # e^(-466 X / 1296 h) is 0.9 at 17.6 min.
    assert found["figures"]["llama_interruption_costs_min"] == pytest.approx(17.6)


def test_times_that_no_model_of_two_rates_gives_do_not_hold(tmp_path):
    assert not figures_in(tmp_path, **{RSC_H[EXPLAINED[0]]: 28.8})["holds"]


def test_hosts_that_go_and_come_as_before_are_predicted_and_others_are_not(tmp_path):
    def trace(later):
        hosts = [10, 9, 10, 9, 10, later, 9, later, 9, later]
        rows = {"time_s": [100.0 * n for n in range(10)], "available": hosts}
        return pl.DataFrame(rows | {"trace": ["a"] * 10, "event": ["count"] * 10, "node": [""] * 10})

    trace(10).write_parquet(tmp_path / SPOT)
    found = spot_availability(tmp_path)
    assert found["holds"], found
    trace(4).write_parquet(tmp_path / SPOT)
    assert not spot_availability(tmp_path)["holds"]
