"""Logs of requests as engines, benchmarks and gateways write them."""

import json
import os

import pytest

from dpro.errors import InputError
from dpro.extensions.serving.requests import moment_ns, read_requests
from dpro.ingest.importer import find_traces
from tests.commands import dpro, refused

MOMENTS = ("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")


def log(tmp_path, text):
    path = tmp_path / "log"
    path.write_text(text if isinstance(text, str) else "\n".join(json.dumps(each) for each in text))
    return read_requests([path])


def test_csv_with_seconds_since_the_start(tmp_path):
    text = "request,input_tokens,output_tokens,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s\n"
    found = log(tmp_path, text + "a,10,4,0.5,0.6,0.7,1.25,2\n").requests
    assert found.select(MOMENTS).rows() == [(500_000_000, 700_000_000, 1_250_000_000, 2_000_000_000)]
    assert found.select("name", "prompt_tokens", "output_tokens", "outcome").rows() == [
        ("a", 10, 4, "finished")
    ]


def test_spans_of_opentelemetry_keep_every_nanosecond(tmp_path):
    span = {
        "name": "llm_request",
        "startTimeUnixNano": "1743414537480756881",
        "endTimeUnixNano": "1743414539480756881",
        "attributes": [
            {"key": "gen_ai.request.id", "value": {"stringValue": "cmpl-1"}},
            {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "33"}},
            {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": "7"}},
            {"key": "gen_ai.latency.time_in_queue", "value": {"doubleValue": 0.25}},
            {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.5}},
        ],
    }
    found = log(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}]).requests
    start = 1743414537480756881
    assert found.select(MOMENTS).rows() == [
        (start, start + 250_000_000, start + 500_000_000, start + 2 * 10**9)
    ]
    assert found.select("prompt_tokens", "output_tokens").rows() == [(33, 7)]


def span_line(name, attributes, second=0):
    """A span as OpenTelemetry's console exporter has it, in one line."""
    return {
        "name": name, "context": {"trace_id": "0xabc", "span_id": "0x1"}, "kind": "SpanKind.SERVER",
        "start_time": f"2026-01-02T03:04:0{second}.250000Z",
        "end_time": f"2026-01-02T03:04:0{second + 2}.250000Z",
        "status": {"status_code": "UNSET"}, "attributes": attributes,
    }  # fmt: skip


VLLM_SPAN = {
    "gen_ai.latency.time_to_first_token": 0.5, "gen_ai.latency.e2e": 1.99,
    "gen_ai.latency.time_in_queue": 0.1,
    "gen_ai.usage.prompt_tokens": 33, "gen_ai.usage.completion_tokens": 7, "gen_ai.request.id": "cmpl-1",
}  # fmt: skip


def test_spans_of_vllm_a_line_each_are_requests(tmp_path):
    found = log(
        tmp_path, [span_line("llm_request", VLLM_SPAN), span_line("llm_request", VLLM_SPAN, 3)]
    ).requests
    start = 1767323040 * 10**9 + 250_000_000
    assert found.select(MOMENTS).rows()[0] == (
        start, start + 100_000_000, start + 500_000_000, start + 2 * 10**9
    )  # fmt: skip
    assert found.select("name", "prompt_tokens", "output_tokens").rows() == [("cmpl-1", 33, 7)] * 2


def test_spans_about_something_else_are_no_requests(tmp_path):
    found = log(
        tmp_path, [span_line("POST /v1/completions", {"http.method": "POST"}), span_line("r", VLLM_SPAN)]
    )
    assert found.requests["name"].to_list() == ["cmpl-1"]
    assert found.skipped == {"requests of spans without a model": 1}


def test_a_log_says_how_often_requests_lost_their_blocks(tmp_path):
    lines = [{"arrival_time": 1.0, "latency": 2.0, "num_preemptions": 3}, {"arrival_time": 2.0}]
    assert log(tmp_path, lines).requests["evictions"].to_list() == [3, -1]


def test_a_benchmarks_lists_are_a_request_for_each_place(tmp_path):
    lists = {"input_lens": [5, 6], "output_lens": [3, 2], "ttfts": [0.1, 0.2], "itls": [[0.05, 0.05], [0.1]]}
    found = log(tmp_path, [lists | {"start_times": [10.0, 11.0], "errors": ["", "timed out"]}]).requests
    assert found["end_ns"].to_list() == [10_200_000_000, 11_300_000_000]
    assert found["outcome"].to_list() == ["finished", "aborted"]


def test_lines_of_a_gateway_with_dates_and_inner_objects(tmp_path):
    line = {"timestamp": "2026-01-02T03:04:05Z", "status": 200, "duration_ms": 1500, "ttft_ms": 20}
    found = log(
        tmp_path, [line | {"usage": {"prompt_tokens": 8, "completion_tokens": 2}, "id": "x"}]
    ).requests
    start = 1767323045 * 10**9
    assert found.select("arrival_ns", "first_token_ns", "end_ns").rows() == [
        (start, start + 20_000_000, start + 1_500_000_000)
    ]
    assert found.select("name", "prompt_tokens", "outcome").rows() == [("x", 8, "finished")]


@pytest.mark.parametrize(
    ("written", "in_utc"),
    [
        ("2024-05-01T12:00:00.123456+02:00", "2024-05-01T10:00:00.123456Z"),
        ("2024-05-01T12:00:00.123+05:30", "2024-05-01T06:30:00.123Z"),
        ("2024-05-01T12:00:00.123456789Z", "2024-05-01T12:00:00.123456Z"),
    ],
)
def test_dates_keep_their_offset_from_utc(written, in_utc):
    assert moment_ns(written, 0.0) == moment_ns(in_utc, 0.0)


def test_azures_public_trace_has_arrivals_and_lengths_alone(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    found = log(tmp_path, text).requests
    assert found.select("prompt_tokens", "output_tokens", "end_ns", "outcome").rows() == [
        (374, 44, -1, "unknown")
    ]


def test_bad_rows_are_counted_with_the_line_of_the_first(tmp_path):
    lines = [
        '{"arrival_time": 1, "end_time": 2}',
        "nonsense",
        "[1]",
        '{"id": 4}',
        '{"arrival_time": 3, "end_time": 2}',
    ]
    found = log(tmp_path, "\n".join(lines))
    assert found.requests.height == 1
    assert found.skipped == {
        "requests not a JSON object": 2,
        "requests with times that run backwards": 1,
        "requests without an arrival time": 1,
    }
    assert "2 rows left out, not a JSON object, the first in line 2" in found.warnings[0]


def test_moments_and_lengths_that_no_table_holds_are_left_out(tmp_path):
    lines = [
        {"arrival_time": 1, "latency": 2, "prompt_tokens": 3},
        {"arrival_time": 1, "latency": 1e12, "prompt_tokens": 8e18},
        {"arrival_time": 1e16},
        {"arrival_time": "9999-12-31T00:00:00Z"},
        {"arrival_time": 10**4000},
    ]
    found = log(tmp_path, lines)
    assert found.requests.select("end_ns", "prompt_tokens").rows() == [(3_000_000_000, 3), (-1, -1)]
    assert found.skipped == {"requests without an arrival time": 3}


@pytest.mark.parametrize("replica", ["\u00b2", "9" * 5000])
def test_replicas_may_have_any_name(tmp_path, replica):
    lines = [{"arrival_time": 1, "replica": replica}, {"arrival_time": 2, "replica": "1"}]
    found = log(tmp_path, lines).requests
    assert dict(found.select("arrival_ns", "replica").rows()) == {10**9: 1, 2 * 10**9: 0}


def test_values_in_values_are_left_out_where_they_are_too_deep(tmp_path):
    good = '{"arrival_time": 1}'
    deep = [
        '{"arrival_time":' + "[" * 940 + "]" * 940 + "}",
        '{"resourceSpans":' + '{"a":' * 940 + "1" + "}" * 941,
    ]
    found = log(tmp_path, "\n".join([good, *deep]))
    assert found.skipped == {"requests nested more than 64 deep": 2}


def test_a_line_ends_where_json_says(tmp_path):
    found = log(tmp_path, '{"arrival_time": 1, "id": "a\u2028b\u0085c"}\r\n{"arrival_time": 2}\r\n')
    assert found.requests["name"].to_list() == ["a\u2028b\u0085c", ""]


def test_a_pipe_that_no_process_writes_to_is_an_empty_log(tmp_path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(InputError, match="the file is empty"):
        read_requests([tmp_path / "log"])


def test_a_moment_that_another_process_noted_a_little_early_is_kept(tmp_path):
    found = log(tmp_path, "arrival_s,scheduled_s,last_token_s\n1.001,1.000,2\n").requests
    assert found["scheduled_ns"].to_list() == [1_001_000_000]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "[]", "{}", '"word"'])
def test_a_file_without_requests_is_refused_in_one_line(tmp_path, text):
    with pytest.raises(InputError, match="no row is a request"):
        log(tmp_path, text)


def test_replicas_are_numbered(tmp_path):
    found = log(tmp_path, "dp_rank,arrival_s\n10,1\n2,2\n10,3\n").requests
    assert found.select("replica", "arrival_ns").rows() == [(0, 2 * 10**9), (1, 10**9), (1, 3 * 10**9)]


def test_a_log_in_place_of_a_trace_is_sent_to_the_option_for_logs(tmp_path):
    moments = {"arrival_time": 0, "ttft": 0.1, "latency": 1.0, "prompt_tokens": 10}
    rows = [",".join(moments), ",".join(map(str, moments.values()))]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    (tmp_path / "log.jsonl").write_text("\n".join([json.dumps(moments)] * 2))
    for source in (tmp_path / "log.csv", tmp_path / "log.jsonl", tmp_path):
        with pytest.raises(InputError, match=r"logs? of requests\); `dpro import --requests FILE -o RUN`"):
            find_traces([source])


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "time,event\n1,begin\n", '{"created": 1}', "\0\1", "[[", "[1]"]
)
def test_what_says_no_more_than_a_moment_is_no_log(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(InputError, match="no trace found") as caught:
        find_traces([tmp_path / "file"])
    assert "--requests" not in str(caught.value)


def test_an_import_of_nothing_is_sent_to_the_option_for_logs(tmp_path):
    done = dpro("import", "-o", tmp_path / "run")
    assert refused(done, 2) == "dpro: name the traces to import, or only --requests"
