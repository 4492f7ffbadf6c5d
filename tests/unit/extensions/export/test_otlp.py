"""Steps and findings as OpenTelemetry has them, received by a server that reads OTLP over HTTP."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

import polars as pl
import pytest

from dpro.schema import STEPS
from dpro.store import open_run
from tests.commands import dpro

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(NamedTuple):
    """A server that keeps the requests for traces, and answers with a status."""

    url: str
    requests: list[tuple[str, ExportTraceServiceRequest]]
    answer: list[int]

    @property
    def spans(self) -> list[Any]:
        groups = [group for _, request in self.requests for group in request.resource_spans]
        return [span for group in groups for scope in group.scope_spans for span in scope.spans]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    requests: list[tuple[str, ExportTraceServiceRequest]] = []
    answer = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            plain = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            requests.append((self.path, ExportTraceServiceRequest.FromString(plain)))
            self.send_response(answer[0])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Receiver(f"http://127.0.0.1:{server.server_address[1]}", requests, answer)
    server.shutdown()
    server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    def value(each: Any) -> Any:
        kind = each.WhichOneof("value")
        found = getattr(each, kind) if kind else None
        return [value(item) for item in found.values] if kind == "array_value" else found

    return {pair.key: value(pair.value) for pair in of.attributes}


def test_each_step_of_each_rank_is_a_span_below_that_of_the_run_and_findings_are_its_events(
    repository, receiver
):
    run = repository / "sample_traces" / "slow_rank"
    done = dpro("export", run, "--otlp", receiver.url, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert {path for path, _ in receiver.requests} == {"/v1/traces"}
    [whole], steps = ([span for span in receiver.spans if span.name == name] for name in ("run", "step"))
    assert document["spans"] == len(steps) + 1
    assert {span.trace_id.hex() for span in receiver.spans} == {document["trace_id"]}
    assert {span.parent_span_id for span in steps} == {whole.span_id}
    assert len({span.span_id for span in receiver.spans}) == document["spans"]
    recorded = open_run(run).table(STEPS)
    got = pl.DataFrame(
        {
            "rank": [attributes(span)["dpro.rank"] for span in steps],
            "step": [attributes(span)["dpro.step"] for span in steps],
            "start_ns": [span.start_time_unix_nano for span in steps],
            "duration_ns": [span.end_time_unix_nano - span.start_time_unix_nano for span in steps],
        },
        schema={name: STEPS.dtypes[name] for name in ("rank", "step", "start_ns", "duration_ns")},
    )
    assert got.sort("rank", "step").equals(recorded.select(got.columns).sort("rank", "step"))
    findings = [attributes(event) for event in whole.events]
    assert len(findings) == document["findings"] >= 1
    assert findings[0]["dpro.class"] == "slow.host"
    assert findings[0]["dpro.ranks"] == [1]
    assert findings[0]["dpro.cost_ms_per_step"] > 1
    assert whole.status.code == whole.status.STATUS_CODE_UNSET


def test_a_hang_is_an_error_of_the_run(repository, receiver):
    done = dpro("export", repository / "sample_traces" / "h200_hang", "--otlp", receiver.url)
    assert done.returncode == 0, done.stderr
    [whole] = [span for span in receiver.spans if span.name == "run"]
    assert whole.status.code == whole.status.STATUS_CODE_ERROR
    assert whole.status.message.startswith("hang:")


def test_the_same_run_is_the_same_trace_and_selected_steps_are_few(repository, receiver):
    run = repository / "sample_traces" / "healthy"
    for more in ((), ("--steps", "3-5", "--ranks", "1")):
        done = dpro("export", run, "--otlp", f"{receiver.url}/tenant/traces", *more)
        assert done.returncode == 0, done.stderr
    assert {path for path, _ in receiver.requests} == {"/tenant/traces"}
    ids = [span.span_id for span in receiver.spans if span.name == "step"]
    assert len(set(ids[-3:])) == 3
    assert set(ids[-3:]) <= set(ids[:-3])


@pytest.mark.parametrize("status", [400, 404, 501])
def test_a_receiver_that_refuses_is_one_line(repository, receiver, status):
    receiver.answer[0] = status
    done = dpro("export", repository / "sample_traces" / "healthy", "--otlp", receiver.url)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"{receiver.url}/v1/traces: the spans were not received (" in line
    assert f"{status}" in line.partition("not received")[2]


@pytest.mark.parametrize("url", ["nowhere", "ftp://host", "http://"])
def test_what_is_no_url_is_refused_before_the_run_is_opened(url):
    done = dpro("export", "no such run", "--otlp", url)
    assert done.returncode == 2
    assert "give a URL that begins with http:// or https://" in done.stderr


def test_sending_and_writing_at_once_is_refused(tmp_path):
    done = dpro("export", "no such run", "--otlp", "http://host", "--chrome", tmp_path / "a.json")
    assert done.returncode == 2
