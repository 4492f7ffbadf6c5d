"""Where findings go besides the terminal and the run: a webhook, and an endpoint for Prometheus.

In: notices, and the watcher's state. Out: HTTP. Neither holds up the watcher: a webhook is a queue with a
thread of its own, and a scrape is answered from numbers that the last look left. Both are the standard
library's: the text format of Prometheus is a line per number.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dpro.detect.findings import Finding

WAITING = 100  # notices that wait to be posted; more are dropped
PAUSES_S = (1.0, 4.0, 16.0)  # before the second try, and so on; then a notice is given up
POST_S = 5.0
LAST_S = 3.0  # how long the end of the watch waits for what is still to be posted
CLASSES = (
    "hang.host", "hang.device", "hang.comm", "hang.mismatch", "dead.rank", "slow.compute", "slow.host",
    "slow.link", "slow.nic", "slow.fabric", "slow.regression", "imbalance.stage", "imbalance.data",
)  # fmt: skip


class Webhook:
    """Posts each document to a URL, in order, a few times if it has to."""

    def __init__(self, url: str) -> None:
        """Start the thread that posts."""
        self._url = url
        self._waiting: queue.Queue[Mapping[str, Any]] = queue.Queue(WAITING)
        self.lost = 0
        threading.Thread(target=self._work, name="webhook", daemon=True).start()

    def post(self, document: Mapping[str, Any]) -> None:
        """Have a document posted; it is dropped where too many wait."""
        try:
            self._waiting.put_nowait(document)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Give what is still to be posted a moment."""
        deadline = time.monotonic() + LAST_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.05)

    def _work(self) -> None:
        while True:
            document = self._waiting.get()
            for pause_s in (0.0, *PAUSES_S):
                time.sleep(pause_s)
                if self._posted(document):
                    break
            else:
                self.lost += 1
            self._waiting.task_done()

    def _posted(self, document: Mapping[str, Any]) -> bool:
        body = json.dumps(document, allow_nan=False).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=POST_S):
            return True
        return False


class Metrics:
    """Answers `/metrics`; labels are classes alone, so that there are few series whatever the job's size."""

    def __init__(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: the port is taken, or may not be.
        """
        self._text = ""
        self._begun: Counter[str] = Counter()
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.split("?")[0] == "/metrics"
                body = metrics._text.encode() if known else b"see /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def begins(self, finding: Finding) -> None:
        """A finding is new."""
        self._begun[finding.class_] += 1

    def update(self, findings: list[Finding], numbers: Mapping[str, float]) -> None:
        """Take in what is true now.

        Args:
            findings: what is wrong.
            numbers: gauges by name, without `dpro_`.
        """
        open_ = Counter(finding.class_ for finding in findings)
        cost: Counter[str] = Counter()
        first: dict[str, int] = {}
        for finding in findings:
            cost[finding.class_] += round(finding.cost_ns)
            first.setdefault(finding.class_, min(finding.ranks, default=-1))
        lines = []
        for name, kind, about, value in (
            ("findings_open", "gauge", "findings that hold now", lambda class_: open_[class_]),
            ("findings_total", "counter", "findings so far", lambda class_: self._begun[class_]),
            ("cost_seconds", "gauge", "what they cost per step", lambda class_: cost[class_] / 1e9),
            ("rank", "gauge", "a rank that is named, -1 for none", lambda class_: first.get(class_, -1)),
        ):
            lines += [f"# HELP dpro_{name} {about}", f"# TYPE dpro_{name} {kind}"]
            lines += [f'dpro_{name}{{class="{class_}"}} {value(class_)}' for class_ in CLASSES]
        for name, number in numbers.items():
            lines += [f"# TYPE dpro_{name} gauge", f"dpro_{name} {number}"]
        self._text = "\n".join(lines) + "\n"

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
