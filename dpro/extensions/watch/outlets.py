"""Outlets of findings besides the terminal and the run: a webhook or a chat, and an endpoint for Prometheus.

Takes notices, and the watcher's state; sends and serves them over HTTP. Neither delays the watcher: a webhook
has a queue and a thread, and a scrape is answered with the text of the last look. Apprise formats messages
for Slack, Teams, PagerDuty and others; any other URL gets JSON documents. prometheus-client writes the text
of a scrape; the server is our own, since the library's server limits neither connections nor requests nor
their time.
"""

from __future__ import annotations

import logging
import queue
import re
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from io import BytesIO
from typing import Any, NamedTuple

from msgspec import Struct

from dpro.detect.findings import Finding
from dpro.documents import encode
from dpro.errors import MissingExtra, UsageError, needs_extra
from dpro.units import NS_PER_S

MAX_WAITING = 100  # notices that wait to be posted; further ones are dropped
PAUSES_S = (1.0, 4.0, 16.0)  # before the second try, and so on; then a notice is dropped
POST_S = 5.0  # for the receiver to answer
MAX_CLOSE_S = 3.0  # how long the end of the watch waits for queued messages
MAX_SCRAPES = 8  # connections at a time; further ones are closed
MAX_SCRAPE_S = 5.0  # from the connection to the end of the answer
MAX_REQUEST = 8192  # bytes
LOOPBACK = "127.0.0.1"
GAUGES = {
    "ranks": "processes that train",
    "steps": "steps so far",
    "still_seconds": "seconds since a step last ended",
    "looks": "looks at the job so far",
    "goodput": "share of its time so far in which steps were done for the first time",
    "ettr": "effective training time ratio so far",
    "attempts": "starts of the job so far",
    "wall_seconds": "time of the job that these are of",
}
CLASSES = (
    "hang.host", "hang.device", "hang.comm", "hang.mismatch", "dead.rank", "slow.compute", "slow.host",
    "slow.link", "slow.nic", "slow.fabric", "slow.regression", "imbalance.stage", "imbalance.data",
    "memory.growth", "loss.not_finite", "loss.jump",
)  # fmt: skip


class Posted(NamedTuple):
    """A message as a document for programs and as text for people; one of the two is posted."""

    document: bytes
    title: str
    text: str


def chat_of(url: str) -> Any:
    """Return Apprise's service for a URL; None for an HTTP URL that gets documents.

    Raises:
        UsageError: it is not a URL of either kind.
        MissingExtra: only Apprise may support it, and it is not installed.
    """
    is_http = url.startswith(("http://", "https://"))
    if find_spec("apprise") is None:
        if is_http:
            return None
        if "://" in url:
            raise MissingExtra("apprise", "notify")
    else:
        from apprise import Apprise, AppriseAsset

        logging.getLogger("apprise").propagate = False  # its log would show the URL
        chat = Apprise.instantiate(url, asset=AppriseAsset(app_id="dpro", app_desc="dpro", app_url=""))
        if chat is not None or is_http:
            return chat
    raise UsageError(
        "--webhook: give a URL that begins with http:// or https://, or one of Apprise, as slack://…"
    )


class Webhook:
    """Posts each message to a URL, in order, with a few tries; `lost` counts dropped messages."""

    def __init__(self, url: str) -> None:
        """Start the thread that posts.

        Raises:
            UsageError, MissingExtra: as from `chat_of`.
        """
        self._url = url
        self._chat = chat_of(url)
        self._waiting: queue.Queue[Posted] = queue.Queue(MAX_WAITING)
        self.lost = 0
        threading.Thread(target=self._work, name="webhook", daemon=True).start()

    def post(self, document: Struct, lines: Sequence[str]) -> None:
        """Queue a message; drop it if too many wait, or if its document cannot be written as JSON.

        Args:
            lines: the message in words; the first line is its title.
        """
        try:
            title, *text = lines
            self._waiting.put_nowait(Posted(encode(document).encode(), title, "\n".join(text)))
        except (queue.Full, ValueError):
            self.lost += 1

    def close(self) -> None:
        """Wait up to `MAX_CLOSE_S` for queued messages."""
        deadline = time.monotonic() + MAX_CLOSE_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.05)

    def _work(self) -> None:
        while True:
            message = self._waiting.get()
            for pause_s in (0.0, *PAUSES_S):
                time.sleep(pause_s)
                if self._post(message):
                    break
            else:
                self.lost += 1
            self._waiting.task_done()

    def _post(self, message: Posted) -> bool:
        with suppress(Exception):  # a failure must not stop later messages
            if self._chat is not None:
                return bool(self._chat.notify(title=message.title, body=message.text or message.title))
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url, message.document, headers)
            with urllib.request.urlopen(request, timeout=POST_S):
                return True
        return False


class _Server(ThreadingHTTPServer):
    """A thread per connection, for at most `MAX_SCRAPES` at a time, each for at most `MAX_SCRAPE_S`."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._until: dict[Any, float] = {}  # connection -> when it is cut
        super().__init__((host, port), handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._until) < MAX_SCRAPES

    def process_request(self, request: Any, client_address: Any) -> None:
        self._until[request] = time.monotonic() + MAX_SCRAPE_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        now = time.monotonic()
        for request, until in self._until.copy().items():
            if until < now:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # its thread then reads the end of the stream

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client has closed the connection


class _Families(NamedTuple):
    """A registry for prometheus-client."""

    families: list[Any]

    def collect(self) -> list[Any]:
        return self.families


class Metrics:
    """Answers `/metrics`; the only label is the class, so that the number of series is bounded.

    Attributes:
        body: the answer to scrapes.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen.

        Args:
            host: address to listen on; empty for this machine only.
            port: port to listen on, 0 for any that is free.

        Raises:
            OSError: the port is taken, or not allowed.
            MissingExtra: prometheus-client is not installed.
        """
        with needs_extra("watch"):
            from prometheus_client import generate_latest
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        self._gauge, self._counter, self._exposed = GaugeMetricFamily, CounterMetricFamily, generate_latest
        self.body = b""
        self._begun: Counter[str] = Counter()
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def handle(self) -> None:
                head = _head(self.request)
                if len(head) > MAX_REQUEST:
                    self.wfile.write(b"HTTP/1.0 431 Request Header Fields Too Large\r\n\r\n")
                    return
                self.rfile = BytesIO(head)
                self.handle_one_request()

            def do_GET(self) -> None:
                is_metrics = self.path.split("?")[0] == "/metrics"
                body = metrics.body if is_metrics else b"see /metrics\n"
                self.send_response(200 if is_metrics else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(host or LOOPBACK, port, Handler)
        address, self.port = self._server.server_address[:2]
        self.address = str(address)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def begins(self, finding: Finding) -> None:
        """Count a new finding."""
        self._begun[finding.class_] += 1

    def update(self, findings: list[Finding], numbers: Mapping[str, float]) -> None:
        """Write the answer to scrapes.

        Args:
            numbers: gauges by name, without `dpro_`.
        """
        open_ = Counter(finding.class_ for finding in findings)
        cost: dict[str, float] = {}
        first: dict[str, int] = {}
        for finding in findings:
            cost[finding.class_] = cost.get(finding.class_, 0.0) + finding.cost_ns / NS_PER_S
            first.setdefault(finding.class_, min(finding.ranks, default=-1))
        families = [
            self._gauge("dpro_findings_open", "findings that hold now", labels=["class"]),
            self._counter("dpro_findings", "findings so far", labels=["class"]),
            self._gauge("dpro_cost_seconds", "what they cost per step", labels=["class"]),
            self._gauge("dpro_rank", "a rank that is named, -1 for none", labels=["class"]),
        ]
        for class_ in dict.fromkeys([*CLASSES, *sorted({*open_, *self._begun})]):
            values = open_[class_], self._begun[class_], cost.get(class_, 0.0), first.get(class_, -1)
            for family, value in zip(families, values, strict=True):
                family.add_metric([class_], value)
        gauges = [self._gauge(f"dpro_{name}", GAUGES.get(name, ""), value) for name, value in numbers.items()]
        self.body = self._exposed(_Families([*families, *gauges]))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _head(connection: socket.socket) -> bytes:
    """Return a request up to its empty line; one of over `MAX_REQUEST` bytes is cut somewhat later."""
    head = b""
    while not re.search(rb"\n\r?\n", head) and len(head) <= MAX_REQUEST:
        more = connection.recv(MAX_REQUEST)
        if not more:
            break
        head += more
    return head
