"""Layouts enumerated and ranked."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from dpro.errors import UsageError
from dpro.extensions.plan.layout import (
    SCHEDULE_NAMES,
    candidates,
    gpus_of,
    in_words,
    layouts,
    parse_layout,
    why_undividable,
)
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.plan import MeasuredLayout, plan
from dpro.extensions.plan.step import pipeline
from dpro.replay.cost.machine import machine_of

MODEL = Model(8, 4096, 32, 8, 128, 14336, 32000, 4096)


def test_every_candidate_has_all_gpus_and_the_whole_batch() -> None:
    rows = candidates(MODEL, 16, 8, 64)
    assert (gpus_of(rows) == 16).all()
    assert ((rows["dp"] * rows["micro_batch"] * rows["micro_batches"]) == 64).all()
    assert rows["tp"].max() == 8
    assert rows.is_unique().all()


def test_each_schedule_has_the_layouts_that_it_can_be_made_of() -> None:
    rows = candidates(MODEL, 16, 8, 64, schedules=SCHEDULE_NAMES)
    assert candidates(MODEL, 16, 8, 64).equals(candidates(MODEL, 16, 8, 64, {"schedule": 0}))
    for row in rows.filter(pl.col("pp") > 1).iter_rows(named=True):
        pipeline(row["pp"], row["vpp"], row["micro_batches"], SCHEDULE_NAMES[row["schedule"]])
    found = rows.group_by("schedule").agg(least=pl.col("pp").min(), chunks=pl.col("vpp").unique().sort())
    assert found.sort("schedule").rows() == [
        (0, 1, [1, 2, 4]), (1, 2, [1]), (3, 2, [1]), (4, 2, [2]), (5, 2, [1]),
    ]  # fmt: skip


def test_a_schedule_with_a_smaller_bubble_is_faster_and_its_step_calibrates() -> None:
    shape = {"dp": 2, "pp": 4, "micro_batches": 16}
    rows = layouts([shape, {**shape, "schedule": SCHEDULE_NAMES.index("zb-h1")}])
    ranked = plan(MODEL, rows, machine_of("H100"), Software())
    assert ranked["schedule"].to_list() == [3, 0]
    assert ranked["bubble"][0] < ranked["bubble"][1]
    assert ranked["layout"][0].endswith("zb-h1")
    said = parse_layout("dp=2,pp=4,micro_batches=16,schedule=zb-h1")
    again = plan(
        MODEL, rows, machine_of("H100"), Software(), [MeasuredLayout(said, 2 * ranked["step_ms"][0])]
    )
    assert (again["step_ms"] > 1.2 * ranked["step_ms"]).all()
    with pytest.raises(UsageError, match="dualpipe"):
        parse_layout("pp=2,schedule=any")


def test_what_is_kept_stays() -> None:
    rows = candidates(MODEL, 16, 8, 64, {"tp": 2, "recompute": 0})
    assert rows["tp"].unique().to_list() == [2]
    assert rows["recompute"].unique().to_list() == [0]


def test_a_number_of_gpus_that_nothing_divides_is_refused() -> None:
    with pytest.raises(UsageError, match="tp=3"):
        candidates(MODEL, 16, 8, 64, {"tp": 3})


def test_no_pipeline_has_more_stages_than_can_be_replayed() -> None:
    deep = replace(MODEL, layers=16384)
    rows = candidates(deep, 262_144, 8, 262_144, {"tp": 1})
    assert rows["pp"].to_numpy().max() == 128
    assert "more than 128 stages" in why_undividable(deep, {"pp": 256})


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("dp=x", "whole number"),
        ("dp=" + "9" * 5000, "whole number"),
        ("zp=2", "not part of a layout"),
        ("", "empty"),
    ],
)
def test_a_layout_that_is_none_says_what_is_wrong(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse_layout(text)


def test_a_layout_reads_back_in_words() -> None:
    row = layouts([parse_layout("dp=8,tp=2,pp=4,micro_batches=16,recompute=full")]).row(0, named=True)
    assert in_words(row) == "dp 8 x tp 2 x pp 4, micro-batch 1 x 16, full recomputation"


def test_a_plan_ranks_what_fits_first_and_says_why_others_do_not() -> None:
    machine = replace(machine_of("H100"), memory_gb=30.0)
    rows = candidates(MODEL, 8, 8, 32)
    ranked = plan(MODEL, rows, machine, Software())
    assert ranked.height == rows.height
    fits = (ranked["fits"] != "no").to_list()
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    assert (ranked.filter(pl.col("fits") == "no")["why"] != "").all()
    rates = ranked.filter(pl.col("fits") != "no")["tokens_per_s_per_gpu"].to_list()
    assert rates == sorted(rates, reverse=True)
    assert (ranked["low_ms"] < ranked["step_ms"]).all()
    assert ((ranked["mfu"] > 0) & (ranked["mfu"] < 1)).all()


def test_a_measured_step_moves_its_own_layout_most_of_the_way() -> None:
    rows = candidates(MODEL, 8, 8, 32, {"recompute": 0, "zero": 1, "vpp": 1, "micro_batch": 1})
    machine = machine_of("H100")
    before = plan(MODEL, rows, machine, Software())
    mine = before.row(0, named=True)
    columns = {name: mine[name] for name in rows.columns}
    after = plan(MODEL, rows, machine, Software(), [MeasuredLayout(columns, 1.2 * mine["step_ms"])])
    same = after.filter(*(pl.col(name) == value for name, value in columns.items()))["step_ms"][0]
    assert 1.1 < same / mine["step_ms"] < 1.2
    with pytest.raises(UsageError, match="positive"):
        plan(MODEL, rows, machine, Software(), [MeasuredLayout(columns, 0.0)])
