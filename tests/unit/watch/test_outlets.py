"""A webhook and an endpoint for Prometheus, by real HTTP on this machine."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dpro.detect.findings import Finding
from dpro.watch import outlets
from dpro.watch.outlets import Metrics, Webhook

LATE = Finding("slow.host", "rank", "3", (3,), 0.2, 0.9, 5e6, ())


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
        hook.post({"number": 1})
        hook.post({"number": 2})
        hook.close()
        assert got == [{"number": 1}, {"number": 2}]
        assert hook.lost == 0


def test_a_webhook_that_cannot_be_reached_is_given_up_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(outlets, "PAUSES_S", (0.01,))
    with receiver() as (url, _):
        pass  # nobody listens there any more
    hook = Webhook(url)
    for number in range(3):
        hook.post({"number": number})
    hook.close()
    assert hook.lost == 3


def scrape(port: int, path: str = "/metrics") -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def test_metrics_tell_what_is_wrong_by_class_and_have_few_series_whatever_is_found():
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
