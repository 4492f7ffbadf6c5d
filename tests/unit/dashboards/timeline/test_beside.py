"""A second run on the time axis of the first, worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.app import make_app
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import OfferedRun, Runs, ShownRun
from dpro.dashboards.timeline.beside import NO_STEP, beside, lane_difference, typical_step
from dpro.errors import UsageError
from tests.builders import TinyRun
from tests.unit.dashboards.test_app import HOST, ask


def _job(folder, first_us: int, kernel_us: int, name: str = "gemm") -> Loaded:
    """Steps 4 to 6 of 1 ms each, the first of them late; a kernel in each, under a range around the step."""
    run = TinyRun()
    for at, watts in ((1500, 400.0), (1600, 450.0)):
        run.counter("power_w", first_us + at, watts)
        run.rows["counters"][-1]["host"] = "a"
    for number, step in enumerate((4, 5, 6)):
        begin = first_us + 1000 * number + (500 if number else 0)
        run.op("ProfilerStep#", begin, begin + 1000)
        run.call(begin + 10, begin + 20, number)
        run.kernel(name, begin + 100, begin + 100 + kernel_us, number)
        run.step(step, begin - (500 if not number else 0), begin + 1000)
    return Loaded(run.write(folder))


@pytest.fixture
def two(tmp_path):
    after = _job(tmp_path / "after", 0, 300)
    before = _job(tmp_path / "before", 9000, 500, "before's gemm")
    for loaded in (after, before):
        loaded.measured.all()
    return after, before


def _steps(*lasts: float) -> pl.DataFrame:
    ends = np.cumsum(lasts)
    return pl.DataFrame({"step": range(7, 7 + len(lasts)), "begin_ms": ends - lasts, "end_ms": ends})


@pytest.mark.parametrize(
    ("lasts", "step"), [((30.0, 10.5, 10.0, 9.0), 8), ((1.0, 2.0), 7), ((5.0,), 7), ((), NO_STEP)]
)
def test_the_typical_step_is_the_first_that_takes_about_the_median(lasts, step):
    assert typical_step(_steps(*lasts) if lasts else _steps(1.0).clear()) == step


def test_the_first_typical_steps_begin_together_unless_others_are_chosen(two):
    after, before = (loaded.measured for loaded in two)
    other = beside(after, "before", before)
    assert (other.here.step, other.there.step) == (5, 5)
    assert other.there.begin + other.shift_ns == other.here.begin
    chosen = beside(after, "before", before, "6~5")
    assert (chosen.here.step, chosen.there.step) == (6, 5)
    assert chosen.shift_ns - other.shift_ns == 1_000_000
    for wrong, why in (
        ("5~9", "step 9 is not in a deep window"),
        ("5", "is invalid: give a step of each run"),
        ("a~b", "align 'a~b'"),
    ):
        with pytest.raises(UsageError, match=why):
            beside(after, "before", before, wrong)


def test_runs_without_steps_begin_together(tmp_path):
    made = [TinyRun() for _ in range(2)]
    for run in made:
        run.op("aten::mm", 5, 25)
    first, second = (Loaded(run.write(tmp_path / str(n))).measured for n, run in enumerate(made))
    other = beside(first, "second", second)
    assert (other.here.step, other.shift_ns) == (NO_STEP, 0)
    assert lane_difference(first, other).rows() == [(0, "main thread", 20_000, 20_000, 0)]


def test_lanes_differ_by_their_busy_time_in_the_aligned_steps(two):
    after, before = (loaded.measured for loaded in two)
    found = lane_difference(after, beside(after, "before", before))
    assert found.filter(lane="stream 7 (compute)").rows() == [
        (0, "stream 7 (compute)", 500_000, 300_000, -200_000)
    ]
    assert found["delta_ns"].abs().to_list() == sorted(found["delta_ns"].abs().to_list(), reverse=True)


def test_a_host_that_waits_in_a_range_differs_though_no_lane_is_busier(tmp_path):
    runs = []
    for name, slept in (("after", 500), ("before", 100)):
        run = TinyRun()
        run.mark("load", 0, slept)
        run.op("aten::mm", slept, slept + 50)
        run.step(0, 0, slept + 50)
        runs.append(Loaded(run.write(tmp_path / name)).measured)
    after, before = runs
    assert lane_difference(after, beside(after, "before", before)).rows() == [
        (0, "main thread, in no operator: load", 100_000, 500_000, 400_000),
        (0, "main thread", 50_000, 50_000, 0),
    ]


def test_a_lane_that_only_one_run_has_counts_in_full(two, tmp_path):
    after = two[0].measured
    run = TinyRun()
    run.call(0, 5, 1)
    run.kernel("ncclDevKernel_AllReduce", 10, 40, 1, stream=20)
    run.step(0, 0, 100)
    alone = Loaded(run.write(tmp_path / "alone")).measured
    rows = {row[1]: row[2:] for row in lane_difference(after, beside(after, "x", alone)).iter_rows()}
    assert rows["stream 20 (NCCL)"] == (30_000, None, -30_000)
    assert rows["stream 7 (compute)"] == (None, 300_000, 300_000)


@pytest.fixture
def app(two):
    after, before = two
    offers = [OfferedRun("after", "after"), OfferedRun("before", "before")]
    return make_app(Runs(ShownRun(after), "after", lambda: offers, lambda _: ShownRun(before)))


def test_requests_show_the_other_run_on_the_axis_of_the_first(app, two):
    client, after = app.server.test_client(), two[0].measured
    info = client.get("/timeline/lanes?against=before", headers=HOST).json
    assert info["complete"]
    assert info["beside"]["begin"] == after.clocks.steps["begin_ms"][1] * 1e6
    assert [step[2] for step in info["beside"]["steps"]] == [step[2] for step in info["steps"]]
    whose = [(each["side"], each["rank"]) for each in info["ranks"]]
    assert whose == [("m", 0), ("o", 0)]
    lane = next(lane for lane in info["ranks"][1]["lanes"] if lane[0] == "stream 7 (compute)")
    span = client.get(
        f"/timeline/view?against=before&begin=0&end={info['end']}&px=900&rows=o0.{lane[2]}-{lane[3]}",
        headers=HOST,
    )
    head = json.loads(span.data[4 : 4 + int.from_bytes(span.data[:4], "little")])
    assert list(head["names"].values()) == ["before's gemm"]
    assert head["count"] == 3
    asked = f"side=o&rank=0&against=before&item={int(two[1].measured.ranks[0].all.first[lane[2]]) + 1}"
    found = client.get(f"/timeline/span?{asked}", headers=HOST).json
    assert found["place"]["name"] == "before's gemm"
    assert found["place"]["side"] == found["arrows"][0]["place"]["side"] == "o"
    begin = info["beside"]["begin"]
    assert found["place"]["start"] == begin + 100_000
    counters = client.get(
        f"/timeline/view?against=before&begin=0&end={info['end']}&px=900&rows=c0.0-2", headers=HOST
    )
    head = json.loads(counters.data[4 : 4 + int.from_bytes(counters.data[:4], "little")])
    assert [track[4] for track in info["counters"]] == ["m", "o"]
    assert head["counters"]["0"] == head["counters"]["1"] == [[begin, begin + 100_000], [400, 450]]
    area = f"begin={begin}&end={begin + 1_000_000}&rows=m0.{lane[2]}-{lane[3]};o0.{lane[2]}-{lane[3]}"
    totals = client.get(f"/timeline/area?against=before&{area}", headers=HOST).json
    assert [[name, ns] for name, _, _, ns, *_ in totals["names"]] == [
        ["before's gemm", 500_000],
        ["gemm", 300_000],
    ]
    assert [[lane, ns] for _, lane, _, ns in totals["lanes"]] == [
        ["stream 7 (compute)", 300_000], ["stream 7 (compute) of before", 500_000]
    ]  # fmt: skip


def test_the_page_offers_the_steps_and_lists_the_lanes(app):
    tools = ask(app, "timeline-tools", "?view=timeline&against=before")
    assert "with before" in tools
    assert "begins with" in tools
    assert "begins with" not in ask(app, "timeline-tools", "?view=timeline&against=before&show=measured")
    assert "begins with" not in ask(app, "timeline-tools", "?view=timeline")
    words = ask(app, "timeline-beside", "?view=timeline&against=before&align=6~5")
    assert "Busy time of each lane in step 6, and in step 5 of before" in words
    assert "-200 us" in words
    assert "align" in ask(app, "timeline-beside", "?view=timeline&against=before&align=x")
    client = app.server.test_client()
    table = client.get("/csv/timeline/lanes?view=timeline&against=before", headers=HOST).text.splitlines()
    assert table[0] == "rank,lane,before_ms,after_ms,delta_ms"
    assert any(line.startswith("0,stream 7 (compute),0.5,0.3,-0.") for line in table)
    assert client.get("/csv/timeline/lanes?view=timeline", headers=HOST).status_code == 400
