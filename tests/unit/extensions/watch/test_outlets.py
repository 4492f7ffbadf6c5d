"""A webhook and an endpoint for Prometheus, by real HTTP on this machine."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dpro.detect.findings import Finding
from dpro.documents import DocumentPart
from dpro.errors import MissingExtra, UsageError
from dpro.extensions.watch import outlets
from dpro.extensions.watch.command import check_outlets
from dpro.extensions.watch.outlets import Metrics, Webhook

LATE = Finding("slow.host", "rank", "3", (3,), 0.2, 0.9, 5e6, ())


class Number(DocumentPart, frozen=True):
    """A document of one key."""

    number: float


@contextmanager
def receiver(refusals: int = 0) -> Iterator[tuple[str, list[dict[str, int]]]]:
    """A server that refuses the first posts and keeps the others."""
    got: list[dict[str, int]] = []
    refused = iter(range(refusals))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            refuse = next(refused, None) is not None
            if not refuse:
                got.append(json.loads(body))
            self.send_response(503 if refuse else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", got
    server.shutdown()
    server.server_close()


def test_findings_are_posted_in_order_and_again_where_the_other_side_fails(monkeypatch):
    monkeypatch.setattr(outlets, "PAUSES_S", (0.01, 0.01, 0.01))
    with receiver(refusals=2) as (url, got):
        hook = Webhook(url)
        hook.post(Number(1), ["a finding"])
        hook.post(Number(2), ["a finding"])
        hook.close()
        assert got == [{"schema_version": 2, "number": 1}, {"schema_version": 2, "number": 2}]
        assert hook.lost == 0


def test_a_webhook_that_cannot_be_reached_is_given_up_and_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(outlets, "PAUSES_S", (0.01,))
    with receiver() as (url, _):
        pass  # no server listens there any more
    hook = Webhook(url)
    for number in range(3):
        hook.post(Number(number), ["a finding"])
    hook.close()
    assert hook.lost == 3


def test_a_document_that_cannot_be_sent_is_dropped_and_the_next_one_is_posted(monkeypatch):
    monkeypatch.setattr(outlets, "PAUSES_S", ())
    with receiver() as (url, got):
        hook = Webhook(url)
        for number in (math.nan, math.inf, 3):
            hook.post(Number(number), ["a finding"])
        hook.close()
        assert got == [{"schema_version": 2, "number": 3}]
        assert hook.lost == 2


def test_an_answer_that_is_no_http_is_a_failure_like_any_other(monkeypatch):
    monkeypatch.setattr(outlets, "PAUSES_S", ())
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                with suppress(OSError), server.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(b"nonsense\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        hook = Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/")
        hook.post(Number(1), ["a finding"])
        hook.post(Number(2), ["a finding"])
        hook.close()
    assert hook.lost == 2


def test_a_url_of_apprise_is_sent_words_and_again_where_the_other_side_fails(monkeypatch):
    pytest.importorskip("apprise")
    monkeypatch.setattr(outlets, "PAUSES_S", (0.01,))
    with receiver(refusals=1) as (url, got):
        hook = Webhook(url.replace("http://", "json://"))
        hook.post(Number(1), ["slow.host: rank 3 costs 5 ms", "- waits for data", "- in 9 of 10 steps"])
        hook.post(Number(2), ["over: slow.host: rank 3"])
        hook.close()
    assert hook.lost == 0
    assert [(each["title"], each["message"]) for each in got] == [
        ("slow.host: rank 3 costs 5 ms", "- waits for data\n- in 9 of 10 steps"),
        ("over: slow.host: rank 3", "over: slow.host: rank 3"),
    ]


CHATS = {
    "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ": "https://hooks.slack.com/",
    "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ": "https://hooks.slack.com/",
    "workflows://prod-1.westeurope.logic.azure.com:443/643e69f83c8944/abcd-sig": "https://prod-1.westeurope.logic.",
    "pagerduty://A4bc0b@0123456789/dpro/watch": "https://events.pagerduty.com/",
}  # fmt: skip


@pytest.mark.parametrize("url", CHATS, ids=lambda url: url.partition("//")[0] + url[8:13])
def test_chats_and_pagers_get_a_message_in_their_own_form(monkeypatch, url):
    pytest.importorskip("apprise")
    requests = pytest.importorskip("requests")
    sent = []

    def send(_: object, request: Any, **__: object) -> object:
        sent.append((request.url, json.loads(request.body)))
        answer = requests.Response()
        answer.status_code, answer._content = 202 if "pager" in request.url else 200, b"ok"
        return answer

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    hook = Webhook(url)
    hook.post(Number(1), ["slow.host: rank 3", "- waits for data"])
    hook.close()
    [(where, message)] = sent
    assert where.startswith(CHATS[url])
    assert "slow.host: rank 3" in json.dumps(message)
    assert "waits for data" in json.dumps(message)
    assert "Apprise" not in json.dumps(message)
    assert hook.lost == 0


@pytest.mark.parametrize("url", ["nowhere", "nonsense://secret", "ftp://secret", "slack://", "http:/secret"])
def test_what_is_no_place_to_post_to_is_refused_without_its_url_being_said(url):
    pytest.importorskip("apprise")
    with pytest.raises(UsageError, match="begins with http:// or https://, or one of Apprise") as caught:
        check_outlets(url, "")
    assert "secret" not in str(caught.value)


def test_without_apprise_documents_are_posted_and_chats_need_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    monkeypatch.setattr(outlets, "find_spec", lambda name: None)
    check_outlets("https://example.com/hook", "")
    with pytest.raises(MissingExtra, match=r"dpro-toolkit\[notify\]"):
        check_outlets("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "")


def scrape(port: int, path: str = "/metrics") -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def test_metrics_show_what_is_wrong_by_class_and_have_few_series_whatever_is_found():
    pytest.importorskip("prometheus_client")
    metrics = Metrics("127.0.0.1", 0)
    try:
        metrics.update([], {"ranks": 4})
        before = scrape(metrics.port)
        metrics.begins(LATE)
        metrics.update([LATE], {"ranks": 4, "steps": 17})
        now = scrape(metrics.port)
        assert before['dpro_findings_open{class="slow.host"}'] == 0
        assert before['dpro_rank{class="slow.host"}'] == -1
        assert now['dpro_findings_open{class="slow.host"}'] == 1
        assert now['dpro_findings_total{class="slow.host"}'] == 1
        assert now['dpro_cost_seconds{class="slow.host"}'] == 0.005
        assert now['dpro_rank{class="slow.host"}'] == 3
        assert (now["dpro_ranks"], now["dpro_steps"]) == (4, 17)
        assert now.keys() - before.keys() == {"dpro_steps"}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(metrics.port, "/")
    finally:
        metrics.close()


def test_metrics_without_their_library_are_refused_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for refused in (lambda: check_outlets("", "9464"), lambda: Metrics("", 0)):
        with pytest.raises(MissingExtra, match=r"pip install .dpro-toolkit\[watch\]"):
            refused()
    check_outlets("https://chat.example", "")


@pytest.fixture
def metrics(monkeypatch) -> Iterator[Metrics]:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(outlets, "MAX_SCRAPE_S", 0.2)
    metrics = Metrics("", 0)
    metrics.update([], {"ranks": 4})
    yield metrics
    metrics.close()


def ask(port: int, request: bytes) -> bytes:
    """All that is answered until the connection is closed by the other side."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, suppress(ConnectionError):
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


def test_without_an_address_only_this_machine_is_answered(metrics):
    assert metrics.address == "127.0.0.1"


def test_numbers_that_are_none_and_classes_of_any_name_are_written_as_prometheus_reads_them(metrics):
    odd = replace(LATE, class_='a "b"\\\n', cost_ns=math.nan)
    metrics.begins(odd)
    metrics.update([odd, replace(LATE, cost_ns=math.inf)], {"ranks": math.nan, "low": -math.inf})
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
        lines = answer.read().decode().split("\n")
    assert r'dpro_cost_seconds{class="a \"b\"\\\n"} NaN' in lines
    assert 'dpro_cost_seconds{class="slow.host"} +Inf' in lines
    assert "dpro_low -Inf" in lines
    assert "dpro_ranks NaN" in lines


@pytest.mark.parametrize("request_", [b"", b"GET /metrics HTTP/1.1\r\n"])
def test_who_asks_nothing_for_long_is_cut_off(metrics, request_):
    assert ask(metrics.port, request_) in (b"", metrics.body)


def test_a_request_that_is_too_long_is_refused(metrics):
    answer = ask(metrics.port, b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * outlets.MAX_REQUEST)
    assert answer == b"" or b" 431 " in answer
    assert scrape(metrics.port)["dpro_ranks"] == 4


def test_more_than_so_many_at_a_time_are_closed_at_once_and_later_ones_answered(metrics, monkeypatch):
    monkeypatch.setattr(outlets, "MAX_SCRAPE_S", 60.0)
    address = ("127.0.0.1", metrics.port)
    held = [socket.create_connection(address, timeout=30) for _ in range(outlets.MAX_SCRAPES)]
    assert ask(metrics.port, b"") == b""
    for each in held:
        each.close()
    for _ in range(600):
        with suppress(OSError):
            assert scrape(metrics.port)["dpro_ranks"] == 4
            return
    raise AssertionError("nothing is answered any more")
