"""A server's latency and throughput, on engines small enough to work out by hand; times in ms."""

import json

import msgspec
import numpy as np
import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.documents import plain
from dpro.errors import InputError
from dpro.extensions.serving.answers import ServerDiagnosis, ServerReport, sent_with_server
from dpro.extensions.serving.document import ServingDocument, part_of, parts_of_iterations, serving_document
from dpro.extensions.serving.findings import (
    ExpertWaits,
    ServerFacts,
    expert_waits,
    findings_of,
    gain_of_blocks,
)
from dpro.extensions.serving.latency import PARTS, counted, durations, engines, number, percentiles, waits
from dpro.members import members_text
from dpro.replay.alignment.align import one_clock
from dpro.replay.alignment.match import match_collectives
from dpro.replay.alignment.transfers import split_members
from dpro.schema import COLLECTIVES, ITERATIONS, REQUESTS, SPANS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.verdict.report import make_report, markdown_of
from tests.builders import TinyRun
from tests.commands import dpro

MS = 1_000_000


def requests(*rows):
    """Rows of (arrival, scheduled, first token, end, output tokens)."""
    names = ("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")
    frame = [
        {
            "request": number,
            **{name: at * MS if at >= 0 else -1 for name, at in zip(names, row, strict=False)},
        }
        | {"output_tokens": row[4], "prompt_tokens": 10, "outcome": "finished"}
        for number, row in enumerate(rows)
    ]
    return conform(REQUESTS, pl.DataFrame(frame))


def iterations(*rows):
    """Rows of (kind, start, duration, requests)."""
    frame = [
        {
            "rank": 0, "iteration": number, "kind": kind, "start_ns": start * MS, "duration_ns": took * MS,
            "num_requests": count, "prefill_tokens": 10 * (kind != "decode"), "decode_tokens": count,
        }
        for number, (kind, start, took, count) in enumerate(rows)
    ]  # fmt: skip
    return conform(ITERATIONS, pl.DataFrame(frame))


# Request 0 has its prompt in [0, 10), then decodes; the prompt of request 1 holds it up in [30, 70).
SERVED = iterations(
    ("prefill", 0, 10, 1), ("decode", 10, 4, 1), ("decode", 15, 4, 1), ("decode", 20, 4, 1),
    ("decode", 24, 4, 1), ("mixed", 30, 40, 2), ("decode", 70, 4, 2), ("decode", 74, 4, 2),
)  # fmt: skip
ASKED = requests((0, 0, 10, 78, 8), (12, 30, 70, 78, 3))


def test_durations_are_those_between_the_moments_that_are_known():
    timed = durations(requests((0, 5, 20, 60, 5), (0, -1, -1, -1, -1), (0, 5, 20, 20, 1)))
    assert timed["ttft_ms"].to_list() == [20, None, 20]
    assert timed["tpot_ms"].to_list() == [10, None, None]
    assert timed["queue_ms"].to_list() == [5, None, 5]
    found = percentiles(timed)
    assert (found["latency_ms"].requests, found["latency_ms"].mean, found["latency_ms"].p50) == (2, 40, 40)


def test_what_a_request_waits_for_adds_up_to_its_latency():
    waited = waits(durations(ASKED), engines(SERVED))
    total = waited.select(pl.sum_horizontal(PARTS)).to_series()
    assert total.to_list() == pytest.approx(waited["latency_ms"].to_list())


def test_a_prompt_of_another_request_stalls_one_that_decodes():
    first, second = waits(durations(ASKED), engines(SERVED)).sort("request").to_dicts()
    assert first["stall_ms"] == pytest.approx(36)  # 40 ms where an iteration that decodes takes 4
    assert first["stalled_by"] == 1
    assert first["idle_ms"] == pytest.approx(4)  # at 14, 19, and from 28 to 30
    assert (second["stall_ms"], second["stalled_by"]) == (0, -1)
    assert second["place_ms"] + second["running_ms"] == pytest.approx(18)


def test_requests_of_another_clock_are_not_joined_with_iterations():
    later = iterations(*[("decode", 5_000 + 10 * n, 4, 1) for n in range(6)])
    assert waits(durations(ASKED), engines(later)).is_empty()


def short_of_blocks(size=2):
    """Request 1 waits for blocks in [10, 30); request 0 has lost its own in [40, 50), while it decodes."""
    rows = [("prefill", 0, 10, 1), *[("decode", at, 10, size) for at in range(10, 80, 10)]]
    served = iterations(*rows).with_columns(
        kv_waiting=pl.Series([0, 3, 3, 0, 0, 0, 0, 0]), evicted=pl.Series([0, 0, 0, 0, 1, 0, 0, 0])
    )
    asked = requests((0, 0, 10, 80, 8), (5, 30, 40, 80, 5)).with_columns(
        evictions=pl.Series([1, 0]), evicted_ns=pl.Series([10 * MS, 0])
    )
    return conform(ITERATIONS, served), conform(REQUESTS, asked)


def test_waiting_for_blocks_is_apart_from_waiting_for_a_place():
    served, asked = short_of_blocks()
    waited = waits(durations(asked), engines(served))
    assert waited.select(pl.sum_horizontal(PARTS)).to_series().to_list() == pytest.approx([80, 75])
    first, second = waited.sort("request").to_dicts()
    assert (first["kv_ms"], first["evicted_ms"], first["place_ms"]) == (10, 10, 0)
    assert first["decode_ms"] == pytest.approx(60)  # of the 70 after its first token
    assert (second["kv_ms"], second["evicted_ms"]) == (20, 0)
    assert (second["place_ms"], second["running_ms"], second["prompt_ms"]) == (0, 5, 10)


def test_blocks_that_were_lost_before_the_first_token_count_there():
    served, asked = short_of_blocks()
    soon = asked.with_columns(evicted_ns=pl.Series([0, 45 * MS]))  # 40 ms were after its first token
    second = waits(durations(soon), engines(served)).sort("request").to_dicts()[1]
    assert (second["decode_ms"], second["prompt_ms"], second["kv_ms"]) == (0, 5, 20 + 45)


def test_the_answer_names_the_lack_of_blocks_and_its_cost(tmp_path):
    served, asked = short_of_blocks()
    document = serving_document(run_of(tmp_path, requests=asked, iterations=served))
    (lack,) = [each for each in document.findings if each.class_ == "kv_cache"]
    assert lack.cost_ttft_ms == pytest.approx(20 / 2)
    assert lack.cost_tpot_ms == pytest.approx(10 / 7 / 2)
    assert lack.gain_tokens_per_s is None  # batches of one size do not say what a larger one takes
    assert (
        lack.evidence[1]
        == "1 of 2 requests lost their blocks, 1 time in all, and ran again after 10 ms, mean"
    )
    assert "requests wait for blocks of the KV cache in 25% of its iterations' time" in document.sentences[0]
    assert not [line for line in document.unknown if "KV cache" in line]


def test_batches_with_those_that_wait_for_blocks_would_make_more_tokens():
    rows = [(size, 3 if size == 4 else 0) for size in (1, 2, 4) for _ in range(5)]
    served = iterations(*[("decode", 20 * at, 10 + size, size) for at, (size, _) in enumerate(rows)])
    engine = engines(
        served.with_columns(kv_waiting=pl.Series([lacking for _, lacking in rows], dtype=pl.Int64))
    )[0]
    nothing = durations(requests((0, 0, 10, 80, 8)))
    seen = ServerFacts(nothing, nothing, {0: engine}, {}, None, capacity=1000.0)
    share = 5 * 14 / (5 * (11 + 12 + 14))  # of the time, with batches of 4; those of 7 would take 17 ms
    assert gain_of_blocks(seen) == pytest.approx(1000 * share * (7 / 17 / (4 / 14) - 1))


def test_the_lack_of_blocks_is_not_a_small_batch():
    rows = [("decode", 20 * at, 10, 1 + at % 3) for at in range(15)]
    served = iterations(*rows)
    asked = durations(requests((0, 0, 10, 80, 8)))
    none = waits(asked, {})

    def classes(lacking):
        engine = engines(served.with_columns(kv_waiting=pl.lit(lacking, pl.Int64)))
        found = findings_of(ServerFacts(asked, none, engine, {}, None, 100.0))
        return [each.class_ for each in found]

    assert classes(0) == ["small_batch"]
    assert classes(1) == []


def test_costs_of_what_windows_show_are_shares_of_a_token():
    timed = durations(requests((0, 0, 10, 80, 8)))  # 10 ms per token
    seen = ServerFacts(timed, waits(timed, {}), {}, {"host": 30.0, "matmul": 10.0, "idle": 5.0}, None, 100.0)
    (host,) = findings_of(seen)
    assert (host.class_, host.cost_tpot_ms) == ("host_bound", pytest.approx(7.5))
    assert host.gain_tokens_per_s == pytest.approx(300)


@pytest.mark.parametrize(("exchanged_ms", "helps"), [(18.0, "dispatch and combine"), (2.0, "all-reduces")])
def test_help_with_communication_is_for_what_most_of_it_is(exchanged_ms, helps):
    timed = durations(requests((0, 0, 10, 80, 8)))
    parts, experts = {"communication": 20.0, "matmul": 20.0}, ExpertWaits(1.0, exchanged_ms, 0, 1.0)
    found = findings_of(ServerFacts(timed, waits(timed, {}), {}, parts, experts, None))
    assert [helps in each.help for each in found] == [True]


def test_iterations_that_a_window_began_or_ended_in_do_not_count():
    rows = [("decode", 10 * at, 10, 1) for at in range(4)]
    work = spans(("cpu_op", "aten::mm", 5, 5), ("cpu_op", "aten::mm", 12, 6), ("cpu_op", "aten::mm", 21, 2))
    parts, count = parts_of_iterations(work, iterations(*rows))
    assert (count, parts["matmul"], parts["host"]) == (1, 6, 4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (17_570.4, "17,570"),
        (581.49, "581"),
        (16.44, "16.4"),
        (0.02131, "0.0213"),
        (0, "0"),
        (1e-7, "0"),
    ],
)
def test_numbers_have_no_exponent(value, text):
    assert number(value) == text


def test_one_of_something_is_singular():
    assert [counted(count, "request") for count in (0, 1, 1200)] == [
        "0 requests",
        "1 request",
        "1,200 requests",
    ]


def test_the_time_of_an_iteration_that_does_not_depend_on_its_batch():
    rows = [(size, n) for size in (1, 2, 4) for n in range(5)]
    engine = engines(
        iterations(*[("decode", 100 * at, 10 + 2 * size, size) for at, (size, _) in enumerate(rows)])
    )[0]
    assert engine.growth() == pytest.approx((10, 2))
    assert engines(SERVED)[0].growth() is None


def test_a_part_of_an_iteration_counts_in_proportion():
    engine = engines(SERVED)[0]
    until = engine.until(engine.durations, np.array([-5, 5, 12, 15, 10_000]) * MS)
    assert (until / MS).tolist() == pytest.approx([0, 5, 12, 14, 74])


def spans(*rows):
    frame = [
        {"rank": 0, "kind": kind, "name": name, "start_ns": start * MS, "duration_ns": took * MS}
        for kind, name, start, took in rows
    ]
    return conform(SPANS, pl.DataFrame(frame))


def test_parts_of_an_iteration_add_up_and_communication_counts_where_it_is_exposed():
    work = spans(
        ("kernel", "flash_fwd_kernel", 1, 2),
        ("kernel", "sm90_gemm", 3, 2),
        ("kernel", "ncclDevKernel_AllReduce_Sum_bf16", 4, 3),
        ("cpu_op", "aten::mm", 0, 10),
    )
    parts, count = parts_of_iterations(work, iterations(("decode", 0, 10, 1), ("decode", 40, 10, 1)))
    assert count == 1  # the other has no span
    assert parts == {
        "attention": 2, "matmul": 2, "sampling": 0, "other": 0, "communication": 2, "host": 4, "idle": 0,
    }  # fmt: skip


def test_without_a_gpu_operators_count_and_the_rest_is_the_host():
    work = spans(("cpu_op", "aten::addmm", 1, 3), ("cpu_op", "aten::argmax", 12, 1))
    parts, count = parts_of_iterations(work, iterations(("decode", 0, 10, 1), ("decode", 11, 5, 1)))
    assert (count, parts["matmul"], parts["sampling"], parts["host"], parts["idle"]) == (
        2,
        1.5,
        0.5,
        5.5,
        0.5,
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("flashinfer::sampling::TopKSamplingFromProb", "sampling"),
        ("grouped_topk_kernel", "other"),
        ("aten::linear", "matmul"),
        ("_C::weight_packed_linear", "matmul"),
        ("_C::cpu_attention_with_kv_cache", "attention"),
        ("void deep_ep::internode_ll::dispatch<true>", "communication"),
    ],
)
def test_parts_are_by_name(name, part):
    assert part_of(name) == part


def test_waiting_for_experts_is_what_exchanges_take_before_the_last_rank_comes():
    rows = [(0, 0, 10), (1, 6, 5), (0, 20, 9), (1, 25, 4)]
    group = {"window": 0, "op": "dispatch", "group": "g", "group_ranks": members_text([0, 1])}
    frame = [
        {"rank": rank, "start_ns": start * MS, "duration_ns": took * MS, "sequence": number // 2, **group}
        for number, (rank, start, took) in enumerate(rows)
    ]
    clock = one_clock([(0, 0), (1, 0)], "one host")

    def waited(some):
        matching = match_collectives(conform(COLLECTIVES, pl.DataFrame(some)), SPANS.empty())
        return expert_waits(split_members(matching.rows, clock), num_iterations=2)

    found = waited(frame)
    assert found is not None
    assert (found.wait_ms, found.total_ms, found.rank, found.share) == (5.5, 14, 1, 1.0)
    assert waited(frame[:3]) is None


def run_of(folder, **tables):
    write_manifest(folder, Manifest(world_size=1, ranks=[0]))
    for name, frame in tables.items():
        write_part(folder, {"requests": REQUESTS, "iterations": ITERATIONS}[name], "rank00000", frame)
    return open_run(folder)


def test_the_answer_names_the_stall_and_its_cost(tmp_path):
    document = serving_document(run_of(tmp_path, requests=ASKED, iterations=SERVED))
    stall = next(each for each in document.findings if each.class_ == "prefill_stall")
    assert stall.cost_tpot_ms == pytest.approx(36 / 7 / 2)  # 36 ms over 7 tokens of one of two requests
    assert document.sentences[0].startswith("Arrivals limit throughput")
    assert document.sentences[1].startswith("Latency is limited by their own prompt (35% of 72 ms)")
    assert document.output_tokens_per_s == pytest.approx(11 / 0.078)
    assert [each.kind for each in document.iterations] == ["decode", "mixed", "prefill"]


def test_what_the_command_prints_is_what_its_schema_says(tmp_path):
    run_of(tmp_path, requests=ASKED, iterations=SERVED)
    printed = json.loads(dpro("serving", tmp_path, "--json").stdout)
    assert plain(msgspec.convert(printed, ServingDocument)) == printed
    text = dpro("serving", tmp_path).stdout
    assert "prefill_stall" in text
    assert "stalled longest by request 1" in text


def test_a_log_alone_is_answered_and_what_it_lacks_is_said(tmp_path):
    slow = requests(*[(n, 400 + n, 450 + n, 900 + n, 9) for n in range(4)])
    document = serving_document(run_of(tmp_path, requests=slow))
    assert document.sentences[0].startswith("The engine limits throughput")
    assert [each.class_ for each in document.findings] == ["queue"]
    assert any("no iterations" in line for line in document.unknown)


def test_arrivals_are_apart_from_requests_that_ended(tmp_path):
    queued = requests((0, 0, 10, 500, 3), (100, 500, 600, 900, 3), (200, 900, 950, 1500, 3))
    document = serving_document(run_of(tmp_path, requests=queued))
    assert (document.arrivals_per_s, document.requests_per_s) == (pytest.approx(15.0), pytest.approx(2.0))
    assert "15 arrivals/s, 2 requests/s" in dpro("serving", tmp_path).stdout
    at_once = requests((0, 0, 10, 500, 3), (0, 0, 10, 500, 3))
    write_part(tmp_path, REQUESTS, "rank00000", at_once)
    assert serving_document(open_run(tmp_path)).arrivals_per_s is None


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_commands_for_steps_send_a_log_alone_to_the_command_for_servers(tmp_path, command):
    run_of(tmp_path, requests=ASKED)
    refused = dpro(command, tmp_path)
    assert refused.returncode == 1
    assert "are enough for `dpro serving`" in refused.stderr


def test_slowest_requests_are_named_once_and_percentiles_have_their_unit(tmp_path):
    named = ASKED.with_columns(name=pl.Series(["0", "chat-b"]))
    lines = dpro("serving", run_of(tmp_path, requests=named).path).stdout.splitlines()
    assert any("measure, ms" in line for line in lines)
    slow = [line.split(":")[1] for line in lines if line.startswith("slow")]
    assert slow == [" request 0", " request 1 (chat-b)"]


def test_iterations_alone_are_answered(tmp_path):
    document = serving_document(run_of(tmp_path, iterations=SERVED))
    assert "without a log" in document.sentences[0]
    assert document.latency == {}
    assert document.busy is None


def test_a_run_of_training_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="no requests and no iterations"):
        serving_document(run_of(tmp_path))


def test_a_report_and_a_diagnosis_of_a_server_have_its_answer(tmp_path):
    steps = TinyRun()
    for step in range(3):
        steps.call(1000 * step, 1000 * step + 5, step)
        steps.kernel("gemm", 1000 * step + 10, 1000 * step + 470, step)
        steps.step(step, 1000 * step, 1000 * step + 990)
    steps.write(tmp_path)
    for table, rows in ((REQUESTS, ASKED), (ITERATIONS, SERVED)):
        write_part(tmp_path, table, "rank00000", rows)
    answer = plain(serving_document(open_run(tmp_path)))
    for command, kind in (("report", ServerReport), ("diagnose", ServerDiagnosis)):
        printed = json.loads(dpro(command, tmp_path, "--json").stdout)
        assert printed["serving"] == answer
        assert plain(msgspec.convert(printed, kind)) == printed


def test_a_report_to_send_begins_with_what_limits_the_server(tmp_path):
    run = run_of(tmp_path, requests=ASKED, iterations=SERVED)
    made = make_report(Analysis(run))
    sent = sent_with_server(made, run)
    document = serving_document(run)
    first, stall = sent.findings[0], sent.findings[1]
    assert [first.meaning, *first.evidence] == document.sentences
    assert (stall.title, stall.do) == ("server, prefill_stall", document.findings[0].help)
    assert sent.tables[0].rows[0][:2] == ["ttft", "2"]
    assert document.sentences[0] in markdown_of(sent)
    alone = run_of(tmp_path / "alone", iterations=SERVED)
    assert sent_with_server(made, alone).tables == made.tables
