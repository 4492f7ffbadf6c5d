"""Collectives, kernels and what-ifs: their data and figures, without a browser."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from dash import html
from msgspec import structs

from dpro.analysis.answers.whatif import search_once
from dpro.analysis.summary import HEADINGS, WORTH_SHOWING, gain_in_words, step_in_words
from dpro.cli.whatif import ROWS
from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.views.collectives import VIEW as SIZES
from dpro.dashboards.views.collectives import (
    arrivals,
    last_figure,
    last_info,
    transfer_figure,
    transfer_info,
)
from dpro.dashboards.views.difference import waterfall_figure
from dpro.dashboards.views.kernels import VIEW as KERNELS
from dpro.dashboards.views.kernels import kernel_info
from dpro.dashboards.views.matrix import late_info
from dpro.dashboards.views.verdict import VIEW as FIRST
from dpro.dashboards.views.whatif import (
    VIEW,
    between_in_words,
    change_info,
    code_change,
    curve_figure,
    curve_info,
    edits_of,
    path_figure,
    path_info,
    prediction_figure,
    prediction_info,
    ranked_info,
    try_command,
)
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.trial.changes import kind_of_edit
from dpro.extensions.trial.ledger import LedgerEntry, Ratio, append
from dpro.extensions.trial.panel import add_tries, ledger_info
from dpro.replay.cost.curves import UNCLEAR_FIT, fit_line, medians
from dpro.replay.steps import recorded_steps
from dpro.replay.timeline import durations_of
from dpro.replay.whatif.predict import predict
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import SPANS, STEPS, conform
from dpro.store import open_run
from dpro.units import NS_PER_MS, format_duration, ms, us
from dpro.verdict.verdict import explain
from tests.builders import TinyRun, gpu_job
from tests.commands import dpro
from tests.pipelines import Job, written

EDITS = [
    "heal:rank=1",
    "network:bandwidth=0.5",
    "scale:kind=kernel,factor=0.5\nnetwork:bandwidth=2",
    "no-launch",
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(gpu_job().write(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A trace of whole operations, whose steps begin late for reasons that the trace does not contain."""
    rows = Job(num_steps=3, late=0.5, noise=0.1).run()
    return load(written(rows, tmp_path_factory.mktemp("pipeline")))


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    """All-reduces of several sizes that take 20 us and 1 us per kilobyte."""
    run = TinyRun()
    at = 0.0
    for step in range(6):
        for rank in (0, 1):
            run.call(at, at + 5, step, rank)
            sort = {"sequence": step, "group": "world", "group_ranks": "0,1", "dtype": "Float"}
            size = {"bytes_in": 1000 * 4**step, "bytes_out": 1000 * 4**step}
            run.nccl(at + 10, at + 30 + 4**step, step, rank, **sort, **size)
            run.step(step, at, at + 40 + 4**step, rank)
        at += 40 + 4**step
    return load(run.write(tmp_path_factory.mktemp("sized")))


def test_transfers_lie_on_the_line_that_is_drawn_through_them(sized):
    transfers = transfer_info(sized.built.graph, Link())
    assert transfers.height == 12
    figure = transfer_figure(transfers, sized.costs, "light")
    points, line, medians = figure.data
    (cost,) = sized.costs.values()
    assert points.name.endswith(
        f"<br>latency 20 us ± {format_duration(cost.latency_error_ns)}, then 1 GB/s ± {cost.gbps_error:.2g}"
    )
    interval = [1 / (cost.ns_per_byte - sign * cost.ns_per_byte_error) for sign in (-1, 1)]
    assert interval == pytest.approx([cost.gbps - cost.gbps_error, cost.gbps + cost.gbps_error], rel=1e-3)
    assert np.allclose(np.interp(points.x, line.x, line.y), points.y, rtol=0.05)
    assert np.allclose(medians.y, np.interp(medians.x, points.x[::2], points.y[::2]), rtol=0.05)
    assert transfer_info(sized.built.graph, parse_link("?ranks=1&steps=2-3")).height == 2


def test_the_line_of_transfers_never_falls_where_one_size_was_slow():
    sizes = np.repeat([1e3, 1e4, 1e5, 1e6], 5)
    times = np.repeat([21.0, 500.0, 120.0, 1020.0], 5)  # us: that of 10 kB was stuck
    transfers = pl.DataFrame(
        {"rank": 0, "step": 0, "op": "all_reduce", "group": "world", "bytes": sizes, "transfer_us": times,
         "payload_gbps": 1.0}
    )  # fmt: skip
    cost = fit_line(sizes, times * 1e3).with_knots(*medians(sizes, times * 1e3))
    _, line, stuck = transfer_figure(transfers, {("all_reduce", "world"): cost}, "light").data
    assert (np.diff(line.y) > 0).all()
    assert np.allclose(stuck.y, [21e-6, 500e-6, 120e-6, 1020e-6])  # what was measured is drawn, too


def test_no_line_is_drawn_where_its_errors_are_as_large_as_itself():
    sizes, times = np.repeat([4e6, 9e6], 2), np.array([4e3, 14e3, 5e3, 13e3])
    transfers = pl.DataFrame(
        {"rank": 0, "step": 0, "op": "all_reduce", "group": "world", "bytes": sizes, "transfer_us": times,
         "payload_gbps": 1.0}
    )  # fmt: skip
    figure = transfer_figure(transfers, {("all_reduce", "world"): fit_line(sizes, times * 1e3)}, "light")
    assert figure.data[0].name == f"all_reduce<br>{UNCLEAR_FIT}"
    assert not any(part.mode == "lines" for part in figure.data)


def test_the_rank_that_comes_last_keeps_the_others_waiting(loaded):
    ranks = last_info(arrivals(loaded, Link()))
    assert ranks["last"].to_list() == [0, 3]
    zero, one = ranks.to_dicts()
    assert one["kept_waiting_ms"] == pytest.approx(zero["waited_ms"])
    assert one["waited_ms"] == zero["kept_waiting_ms"] == 0
    figure = last_figure(ranks, "light")
    assert [bar.name for bar in figure.data] == ["others waited for it", "it waited for others"]
    assert last_info(arrivals(loaded, parse_link("?ranks=0")))["rank"].to_list() == [0]


def test_a_wait_is_one_figure_in_table_chart_matrix_and_breakdown(tmp_path):
    """Members of a collective rarely end at the same moment: durations alone would show other waits."""
    run = TinyRun()
    for rank, (arrives, ends) in enumerate(((100, 400), (300, 450))):
        run.step(0, 0, 500, rank)
        for start, end, call in ((0, 10, 1), (10, 20, 2)):
            run.call(start, end, call, rank)
        run.kernel("gemm", 20, arrives, 1, rank)
        run.nccl(arrives, ends, 2, rank)
    loaded, whole = load(run.write(tmp_path)), Link()
    waited_ns, moved_ns = 200_000, 100_000 + 150_000
    assert loaded.sizes.select("wait_ns", "transfer_ns").row(0) == (waited_ns, moved_ns)
    came, waited_ms = arrivals(loaded, whole), waited_ns / NS_PER_MS
    assert last_info(came)["waited_ms"].to_list() == pytest.approx([waited_ms, 0])
    assert late_info(came)["waited_ms"].to_list() == pytest.approx([waited_ms])
    for parts in (loaded.breakdown, loaded.usual_breakdown):
        sums = parts.select(pl.col("exposed_wait_ns", "exposed_transfer_ns").sum()).row(0)
        assert sums == (waited_ns, moved_ns)


def test_time_in_which_a_rank_waits_in_two_calls_counts_once(tmp_path):
    run = TinyRun()
    for rank, arrives in ((0, (100, 150)), (1, (300, 400))):
        run.step(0, 0, 500, rank)
        for call, (begin, stream) in enumerate(zip(arrives, (20, 21))):
            run.call(10 * call, 10 * call + 5, call, rank)
            group = {"group": str(stream), "stream": stream}
            run.nccl(begin, 420, call, rank, **group)
    loaded = load(run.write(tmp_path))
    came = arrivals(loaded, Link())
    assert last_info(came)["waited_ms"].to_list() == pytest.approx([0.3, 0])  # from 100 to 400 us
    assert last_info(came)["kept_waiting_ms"].to_list() == pytest.approx([0, 0.3])
    assert late_info(came)["waited_ms"].to_list() == pytest.approx([0.3])


def test_calls_without_all_ranks_are_in_the_total_alone_and_counted_below_the_table(tmp_path):
    run = gpu_job()
    run.call(2, 4, 77, 0)
    run.nccl(4, 9, 77, 0)  # of one rank alone
    loaded = load(run.write(tmp_path))
    filled = str(SIZES.sections["collectives-sizes"](loaded, Link(view="collectives")))
    assert "Total alone includes the 1 not found on all ranks of their group." in filled
    assert "Wait ends when the last rank arrives" in filled


def test_long_waits_are_in_seconds():
    ranks = pl.DataFrame(
        {"rank": [0], "last": [3], "collectives": [9], "kept_waiting_ms": [9300.0], "waited_ms": [0.0]}
    )
    figure = last_figure(ranks, "light")
    assert figure.layout.yaxis.title.text == "waiting, s in all"
    assert list(figure.data[0].y) == [9.3]


def test_kernels_are_those_of_the_selection_ordered_and_filtered(loaded):
    def of(query):
        return KERNELS.tables["kernels"](loaded, parse_link(query))

    def names(query):
        return of(query)["name"].to_list()

    assert names("")[0] in ("softmax", "ncclDevKernel")
    assert names("?sort=name") == sorted(names(""))
    assert names("?sort=-name") == sorted(names(""), reverse=True)
    assert names("?filter=SOFT") == ["softmax"]
    assert names("?filter=gemm") == ["gemm"]
    assert names("?sort=nonsense") == names("?sort=total_ms")
    assert names("?ranks=9") == []
    one = of("?steps=1&ranks=0")
    assert one["count"].to_list() == [1] * 5
    assert one["share"].sum() == pytest.approx(1)
    assert one["per_step_ms"].to_list() == one["total_ms"].to_list()
    two = of("?steps=1,2&ranks=0")
    assert (2 * two["per_step_ms"]).to_list() == pytest.approx(two["total_ms"].to_list())
    without = kernel_info(loaded.spans, recorded_steps(loaded.spans, loaded.steps).clear(), Link())
    assert without["per_step_ms"].null_count() == without.height > 0


def test_kernels_outside_of_the_steps_that_count_are_left_out_and_the_table_names_these_steps(tmp_path):
    run = TinyRun()
    run.call(0, 5, 90)
    run.kernel("before", 10, 1000, 90)
    at = 1000
    for step, length in enumerate((900, 100, 100, 100)):  # the first one is far longer than a usual one
        run.call(at, at + 5, step)
        run.kernel("gemm", at + 10, at + length - 5, step)
        run.call(at + 5, at + length, 100 + step, name="cudaDeviceSynchronize")
        run.step(step, at, at + length)
        at += length
    made = load(run.write(tmp_path))
    (row,) = KERNELS.tables["kernels"](made, Link()).to_dicts()
    assert (row["name"], row["count"], row["total_ms"]) == ("gemm", 3, pytest.approx(3 * 0.085))
    assert row["per_step_ms"] == pytest.approx(0.085)
    note = "Work of the usual steps 1-3 (3 of 4 recorded)."
    assert note in str(KERNELS.sections["kernels-table"](made, Link()))
    (all_four,) = KERNELS.tables["kernels"](made, parse_link("?steps=0-3")).to_dicts()
    assert (all_four["count"], all_four["per_step_ms"]) == (4, pytest.approx((885 + 3 * 85) / 4000))


def test_operators_of_a_job_without_gpus_have_a_class_as_kernels_have():
    names = {"aten::mm": "gemm", "c10d::allreduce_": "communication", "aten::copy_": "memory"}
    spans = pl.DataFrame({"name": list(names), "kind": "cpu_op", "duration_ns": 10, "start_ns": [0, 20, 40]})
    spans = conform(SPANS, spans.with_columns(rank=0, window=0, tid=1))
    found = kernel_info(spans, recorded_steps(spans, STEPS.empty()), Link())
    assert dict(found.select("name", "class").iter_rows()) == names


def test_edits_are_those_of_the_link_one_a_line():
    link = Link(options={"edit": "heal:rank=1\n\n network:bandwidth=2"})
    assert edits_of(link) == [parse_edit("heal:rank=1"), parse_edit("network:bandwidth=2")]
    with pytest.raises(UsageError, match="did you mean"):
        edits_of(Link(options={"edit": "heel:rank=1"}))
    with pytest.raises(UsageError, match="“edits, by example” has all"):
        edits_of(Link(options={"edit": "frobnicate"}))


def test_a_prediction_is_drawn_with_its_interval(loaded):
    prediction = prediction_info(loaded, [parse_edit("heal:rank=1")])
    base = ms(float(durations_of(loaded.baseline)["duration_ns"].mean()))
    (bars,) = prediction_figure(base, prediction, "dark").data  # in microseconds
    assert bars.x[1] < bars.x[0] == 1000 * base
    assert bars.x[1] + bars.error_x.array[1] == pytest.approx(us(prediction.between_ns[1]))
    assert bars.x[1] - bars.error_x.arrayminus[1] == pytest.approx(us(prediction.between_ns[0]))


def listed_by_command(run) -> dict[str, list[str]]:
    """The predictions that the command lists: heading -> gain, step and what is changed, a line each."""
    lines: dict[str, list[str]] = {}
    heading = ""
    for line in dpro("whatif", run, "--all", "--bounds").stdout.splitlines():
        if line.removesuffix(":") in HEADINGS.values():
            heading = line.removesuffix(":")
        elif heading and line.startswith("  x"):
            lines.setdefault(heading, []).append(line.strip())
    return lines


def test_what_would_help_has_the_groups_and_intervals_of_the_command(loaded):
    ranked = ranked_info(loaded).filter(pl.col("speedup") >= WORTH_SHOWING)
    searched = {"\n".join(map(str, each.edits)) for each in search_once(loaded).predictions}
    shown: dict[str, list[str]] = {}
    for row in ranked.filter(pl.col("edit").is_in(searched)).iter_rows(named=True):
        line = f"{row['gain']}  {row['step']}: {row['what']}"
        shown.setdefault(HEADINGS[row["group"]], []).append(line)
    commanded = listed_by_command(loaded.run.path)
    assert len(shown) >= 2
    assert list(shown) == list(commanded)
    for heading, lines in commanded.items():
        assert len(lines) < ROWS  # of which the command lists no more
        assert sorted(shown[heading]) == sorted(lines)


def test_what_would_help_goes_by_gain_after_all_that_the_first_view_says_to_try(loaded):
    ranked = ranked_info(loaded)
    advice = explain(loaded).advice
    assert advice
    tried, others = ranked.head(len(advice)), ranked.slice(len(advice))
    assert tried["advice"].to_list() == [str(number + 1) for number in range(len(advice))]
    for _, rows in others.group_by("group", maintain_order=True):
        assert rows["speedup"].to_list() == sorted(rows["speedup"], reverse=True)
    numbers = dict(ranked.filter(pl.col("advice") != "").select("advice", "what").iter_rows())
    assert set(numbers) == {str(number + 1) for number in range(len(advice))}
    assert all(numbers[str(number + 1)] == each.do for number, each in enumerate(advice) if not each.edit)
    page = str(VIEW.sections["whatif-ranked"](loaded, Link()))
    assert all(f"TRY {number}" in page for number in numbers)


def test_bounds_are_folded_under_a_heading_that_says_that_they_are_no_advice(loaded):
    parts = VIEW.sections["whatif-ranked"](loaded, Link())
    bounds = ranked_info(loaded).filter((pl.col("group") == "bound") & (pl.col("speedup") >= WORTH_SHOWING))
    assert bounds.height
    (folded,) = (part for part in parts if HEADINGS["bound"] in str(getattr(part, "children", "")))
    assert isinstance(folded, html.Details)
    others = str([part for part in parts if part is not folded])
    for what in bounds["what"]:
        assert repr(what)[1:-1] in str(folded)
        assert f"children={what!r}" not in others


def test_a_step_of_more_samples_says_so(loaded):
    rows = dict(ranked_info(loaded).select("edit", "step").iter_rows())
    prediction = prediction_info(loaded, [parse_edit("accumulate:steps=2")])
    assert step_in_words(prediction).endswith(" for x2 the samples")
    assert rows["accumulate:steps=2"] == step_in_words(prediction)
    answer = str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "accumulate:steps=2"})))
    assert f"{step_in_words(prediction)} instead of" in answer
    assert gain_in_words(prediction) in answer


def test_an_edit_of_code_shows_the_lines_that_leave_and_enter(loaded):
    ((_, shown),) = code_change([parse_edit("optimizer:impl=fused")])
    marked = {line.className: line.children for line in shown.children if line.className}
    assert marked["left-out"] == "-optimizer = torch.optim.AdamW(model.parameters())\n"
    assert marked["added"] == "+optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
    healed = str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "heal:rank=1"})))
    assert "difference" not in healed
    collected = str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "accumulate:steps=2"})))
    assert "+    if (step + 1) % 2 == 0:" in collected


def test_an_edit_that_can_be_tried_comes_with_the_command_for_the_job_itself(loaded):
    recorded = replace(loaded.run.manifest, command=["torchrun", "train.py", "--name", "a b"])
    run = replace(loaded.run, manifest=recorded)
    prediction = prediction_info(loaded, [parse_edit("accumulate:steps=2")])
    assert try_command(run, prediction) == "dpro try accumulate:steps=2 -- torchrun train.py --name 'a b'"
    assert try_command(loaded.run, prediction) == "dpro try accumulate:steps=2 -- COMMAND"
    assert try_command(run, prediction_info(loaded, [parse_edit("heal:rank=1")])) == ""
    answer = str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "accumulate:steps=2"})))
    assert "dpro try accumulate:steps=2" in answer
    assert "changed-spans" not in answer  # what it adds is in no recording
    healed = str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "heal:rank=1"})))
    assert "dpro try" not in healed
    assert "view=timeline&ranks=1&find=" in healed


def test_what_an_edit_takes_off_the_critical_path_shows(loaded):
    path = path_info(loaded, [parse_edit("scale:name=softmax,kind=kernel,factor=0.5")])
    kernels = path.filter(kind="kernel").to_dicts()[0]
    assert kernels["after_ms"] < kernels["before_ms"]
    assert [bar.name for bar in path_figure(path, "light").data] == ["now", "with the edits"]
    same = path_info(loaded, [])
    assert same["before_ms"].to_list() == same["after_ms"].to_list()


@pytest.mark.parametrize("text", EDITS)
@pytest.mark.parametrize("run", ["loaded", "pipeline"])
def test_what_changes_on_the_critical_path_adds_up_to_what_is_predicted(request, run, text):
    shown = request.getfixturevalue(run)
    edits = [parse_edit(line) for line in text.splitlines()]
    prediction, changes, path = (each(shown, edits) for each in (prediction_info, change_info, path_info))
    now_ns = durations_of(shown.baseline)["duration_ns"].to_numpy().mean()
    assert path["before_ms"].sum() == pytest.approx(ms(now_ns), rel=1e-12)
    assert path["after_ms"].sum() == pytest.approx(ms(prediction.predicted_ns), rel=1e-12)
    delta = ms(prediction.predicted_ns - now_ns)
    assert changes["delta_ms"].sum() == pytest.approx(delta, abs=1e-9)
    figure = waterfall_figure(changes, "{}", "dark")
    unit_ms = {"us": 1e-3, "ms": 1.0, "s": 1e3}[figure.layout.xaxis.title.text]
    assert figure.data[0].x[-1] * unit_ms == pytest.approx(delta, abs=1e-9)


@pytest.fixture(scope="module")
def unusual(repository):
    """A run of 18 steps in depth, of which 5 are usual; what costs most is in the others."""
    return load(open_run(repository / "sample_traces" / "h200_slow_host"))


@pytest.mark.parametrize(
    "text", ["heal:rank=1", "no-sync:within=aten::_local_scalar_dense\ncompress:topk=0.01"]
)
def test_a_waterfall_ends_at_its_prediction_where_steps_are_unusual_or_hosts_set_the_pace(unusual, text):
    edits = [parse_edit(line) for line in text.splitlines()]
    prediction = prediction_info(unusual, edits)
    change_ns = prediction.predicted_ns - unusual.baseline_ns
    assert change_info(unusual, edits)["delta_ms"].sum() == pytest.approx(ms(change_ns), abs=1e-9)
    answer = html.Div(VIEW.sections["whatif-answer"](unusual, Link(options={"edit": text})))
    *_, last = answer["changes-figure"].figure.layout.yaxis.ticktext
    assert last == f"in all: {step_in_words(prediction)}"


def test_a_finding_beside_what_healing_its_ranks_saves_says_of_which_steps_each_is(unusual):
    answer = str(VIEW.sections["whatif-answer"](unusual, Link(options={"edit": "heal:rank=1"})))
    page = str(FIRST.sections["verdict-findings"](unusual, Link()))
    said = "sual steps only: the 4.25 ms a step that rank 1 costs are in pauses"
    assert answer.count(said) == 1
    assert said in page
    assert "edit=heal:rank=1" not in page  # which would gain nothing
    assert "dpro diagnose" not in answer + str(FIRST.sections["verdict-advice"](unusual, Link()))


def test_a_card_marks_the_spans_it_names_and_says_what_is_likely(unusual):
    rows = str(FIRST.sections["verdict-advice"](unusual, Link()))
    assert "find=%5E%28ncclDevKernel_AllReduce_Sum_f32_RING_LL" in rows
    assert "likely x1.7" in rows
    assert rows.index("THEN") < rows.index("once the limit is gone")  # not a gain of today
    assert rows.count("once the limit is gone") == 1
    assert "+model.register_comm_hook(None, default_hooks.bf16_compress_hook)" in rows


def test_a_job_that_hangs_shows_what_to_do_and_no_gain(repository):
    hung = load(open_run(repository / "sample_traces" / "h200_hang"))
    answer = str(VIEW.sections["whatif-answer"](hung, Link()))
    assert "see what the GPU of rank 1 still runs" in answer
    for name in ("whatif-ranked", "whatif-limits"):
        with pytest.raises(Unanswerable, match="no change gains anything until the hang is fixed"):
            VIEW.sections[name](hung, Link())
    typed = str(VIEW.sections["whatif-answer"](hung, Link(options={"edit": "bucket:mb=100"})))
    assert typed.index("see what the GPU of rank 1 still runs") < typed.index("throughput")


def test_an_edit_that_is_given_twice_counts_once():
    twice = Link(options={"edit": "heal:rank=1\n\nheal:rank=1\nno-comm"})
    assert list(map(str, edits_of(twice))) == ["heal:rank=1", "no-comm"]


def test_an_interval_that_reaches_nothing_has_an_upper_end_alone():
    assert between_in_words(0, 3e6) == "up to 3 ms"
    assert between_in_words(2e6, 3e6) == "2 ms to 3 ms"


def test_predictions_begin_with_how_far_to_trust_them(loaded):
    for options in ({}, {"edit": "heal:rank=1"}):
        assert loaded.trust.verdict in str(VIEW.sections["whatif-answer"](loaded, Link(options=options)))


def test_a_replay_that_does_not_fit_predicts_nothing(loaded):
    misfit = load(loaded.run)
    built, trust = misfit.graph_and_trust
    misfit.values["graph_and_trust"] = built, dataclasses.replace(trust, answerable=False, reasons=("cut",))
    for name in ("whatif-answer", "whatif-ranked", "whatif-limits", "whatif-path"):
        with pytest.raises(Unanswerable, match="the replay does not fit the trace: cut"):
            VIEW.sections[name](misfit, Link())


def test_what_changes_most_on_the_critical_path_is_what_was_edited(loaded):
    edits = [parse_edit("scale:name=softmax,kind=kernel,factor=0.5")]
    changes = change_info(loaded, edits)
    assert (changes["name"][0], changes["kind"][0]) == ("softmax", "kernel")
    assert changes["delta_ms"][0] < 0
    assert change_info(loaded, []).is_empty()
    bars = waterfall_figure(changes, "{}", "dark").data[0]
    assert bars.x[-1] == pytest.approx(changes["delta_ms"].sum() * 1000)  # us


def test_the_latest_edits_are_applied_once(loaded, monkeypatch):
    edit, calls = parse_edit("heal:rank=1"), []
    apply = type(edit).apply
    monkeypatch.setattr(type(edit), "apply", lambda self, graph: calls.append(1) or apply(self, graph))
    fresh = load(loaded.run)
    first = prediction_info(fresh, [edit])
    path_info(fresh, [edit])
    assert len(calls) == 1
    assert prediction_info(fresh, []).speedup == pytest.approx(1.0)
    assert (
        prediction_info(fresh, [edit])
        == first
        == predict(fresh.built.predictive, fresh.baseline, [edit], fresh.trust)
    )


def test_curves_fall_and_break_even_is_marked_on_them(loaded):
    points = curve_info(loaded.curves)
    assert {"kernels", "host"} <= set(points["part"])
    for _, own in points.group_by("part"):
        assert own["factor"][0] == 1
        assert own["step_ms"].to_list() == sorted(own["step_ms"], reverse=True)
    figure = curve_figure(points, "light")
    marks = [trace for trace in figure.data if trace.mode == "markers"]
    lines = {trace.name: trace for trace in figure.data if trace.mode == "lines"}
    assert marks
    for mark in marks:
        assert min(lines[mark.name].y) <= mark.y[0] <= max(lines[mark.name].y)


def test_tried_changes_are_listed_with_their_predictions(loaded):
    entry = LedgerEntry(
        "bucket", ["bucket:mb=5"], Ratio(0.9, 0.8, 1.0), Ratio(0.95, 0.94, 0.96), 0.01, 20.0, 3, 9, 2, "2026"
    )
    tried = ledger_info([entry, structs.replace(entry, predicted=None, time="2027")])
    assert tried["predicted_ms"].to_list() == [None, 18.0]
    assert tried["measured_high_ms"].to_list() == pytest.approx([19.2, 19.2])
    assert tried["off_by"].to_list() == [None, pytest.approx(0.9 / 0.95 - 1)]
    assert tried["inside"].to_list() == [None, True]
    assert ledger_info([]).is_empty()


def of_command(loaded, command):
    """The run as if a command had been recorded."""
    return Loaded(replace(loaded.run, manifest=replace(loaded.run.manifest, command=command)))


def trial(edits, measured, predicted=None, command=(), time="2026-11-29T1"):
    kind = kind_of_edit(edits)
    return LedgerEntry(kind, [edits], predicted, measured, 0.01, 20.0, 3, 9, 2, time, command=[*command])


def test_trials_of_other_jobs_and_intervals_that_say_nothing_are_not_shown(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    job, link = of_command(loaded, ["train.py"]), Link(view="whatif")
    append(trial("gc:every=100", Ratio(1.0, 1.0, 1.0), command=["other.py"]))
    assert "1 trial of other jobs" in str(add_tries(VIEW).sections["whatif-tries"](job, link))
    predicted, vague = Ratio(0.9, 0.8, 1.0), Ratio(0.8, 0.002, 340.0)
    append(trial("heal:rank=1", vague, predicted, ["train.py"]))
    shown = str(add_tries(VIEW).sections["whatif-tries"](job, link))
    assert "heal:rank=1" in shown
    assert "gc:every" not in shown
    words = "16 ms (too few or too uneven steps for an interval)"
    assert words in shown
    assert words in str(VIEW.sections["whatif-answer"](job, Link(options={"edit": "heal:rank=1"})))
    assert words not in str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "heal:rank=1"})))
    assert f"measured {words.replace('16 ms', '16.00 ms')}" in dpro("ledger").stdout
    assert "680" not in shown
    assert ledger_info([trial("heal:rank=1", vague, predicted)]).row(0, named=True)["inside"] is None


def test_what_was_tried_widens_intervals_as_on_the_command_line(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    loaded = of_command(loaded, ["train.py"])
    append(trial("gc:every=100", Ratio(1.0, 1.0, 1.0), command=["train.py"]))
    assert "Code('gc:every=100')" in str(
        add_tries(VIEW).sections["whatif-tries"](loaded, Link(view="whatif"))
    )
    append(trial("workers:count=3", Ratio(0.8, 0.7, 0.9), command=["train.py"]))
    append(trial("heal:rank=1", Ratio(0.85, 0.75, 0.95), Ratio(0.9, 0.8, 1.0), ["train.py"]))
    healed = str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "heal:rank=1"})))
    assert "17 ms (15 ms to 19 ms), predicted 18 ms (16 ms to 20 ms), of 20 ms on 2026-11-29" in healed
    slowed = str(VIEW.sections["whatif-answer"](loaded, Link(options={"edit": "network:bandwidth=0.5"})))
    assert "predicted 18 ms" not in slowed
    chosen = Link(view="whatif", options={"edit": "workers:count=2"})
    first, others, *_ = add_tries(VIEW).sections["whatif-tries"](loaded, chosen)[1:]
    assert "workers:count=3" in str(first)
    assert "gc:every=100" in str(others)
    assert "gc:every=100" not in str(first)

    def doubled(prediction):
        high_ns = 2e6 * prediction.high_ns
        return dataclasses.replace(prediction, high_ns=high_ns, widened="widened by bad experience")

    link = Link(view="whatif", options={"edit": "heal:rank=1"})
    for name in ("whatif-answer", "whatif-ranked"):
        assert "by bad experience" not in str(VIEW.sections[name](Loaded(loaded.run), link))
    monkeypatch.setattr("dpro.analysis.predictions.hooks_of", lambda _: [doubled])
    for name in ("whatif-answer", "whatif-ranked"):
        assert "by bad experience" in str(VIEW.sections[name](Loaded(loaded.run), link))


def test_what_the_run_cannot_answer_is_refused(loaded):
    with pytest.raises(Unanswerable):
        prediction_info(loaded, [parse_edit("heal:rank=99")])


def test_a_change_that_is_advised_is_nowhere_called_no_advice(repository):
    run = repository / "sample_traces" / "slow_rank"
    slow = load(open_run(run))
    assert "heal:rank=1" in {advice.edit for advice in explain(slow).advice}
    for edits in ("heal:rank=1", "heal:rank=1\nworkers:count=1"):
        assert "advice" not in str(VIEW.sections["whatif-answer"](slow, Link(options={"edit": edits})))
        given = [part for edit in edits.split() for part in ("--edit", edit)]
        out = dpro("whatif", run, *given).stdout
        assert "Advised by `dpro explain`:" in out
        assert "not advice" not in out
    other = Link(options={"edit": "network:bandwidth=2"})
    assert "bound" in str(VIEW.sections["whatif-answer"](slow, other))  # not advised


def test_workers_beyond_the_cores_are_warned_of_where_they_are_predicted(repository):
    run = repository / "sample_traces" / "slow_rank"
    edit, said = "workers:count=100000", "200,000 workers on host vm, which has 2 cores"
    assert said in str(VIEW.sections["whatif-answer"](load(open_run(run)), Link(options={"edit": edit})))
    assert said in " ".join(dpro("whatif", run, "--edit", edit).stdout.split())
