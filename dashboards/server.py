"""Serve the application until it is interrupted.

Takes a run, an address and port, and the token that requests must carry; returns on Ctrl-C or SIGTERM. The
token never appears in the process list, which every user of the machine can read: the browser is started with
a file.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import secrets
import signal
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from html import escape
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from flask import Response, request
from werkzeug.serving import BaseWSGIServer, ThreadedWSGIServer, WSGIRequestHandler

from dpro.dashboards.app import make_app, page_of
from dpro.dashboards.guard import LOOPBACK
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import Runs, ShownRun, first_link, runs_of
from dpro.errors import UsageError

M_ARENA_MAX = -8  # of glibc's malloc.h
FIRST_S = 3.0  # nothing is computed ahead for this long, unless the first page was requested before
IDLE_S = 60.0  # after this time without traffic a connection is closed


MAX_AT_ONCE = 256  # connections served at once; others wait until one is closed
OWN_DESCRIPTORS = 96  # for runs, the cache and the interpreter
PER_CONNECTION = 2  # a socket, and one to wait for it


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S


class _Server(ThreadedWSGIServer):
    """A server that accepts no more connections than the process has descriptors for."""

    def __init__(self, host: str, port: int, app: Any) -> None:
        super().__init__(host, port, app, _Handler)
        self._free = threading.BoundedSemaphore(most_at_once())

    def process_request(self, *connection: Any) -> None:
        self._free.acquire()
        try:
            super().process_request(*connection)
        except BaseException:  # no thread was started that would release it
            self._free.release()
            raise

    def process_request_thread(self, *connection: Any) -> None:
        try:
            super().process_request_thread(*connection)
        finally:
            self._free.release()


def most_at_once() -> int:
    """Raise the limit of open files to its maximum; return how many connections it allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a kernel or container may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MAX_AT_ONCE
    return max(1, min(MAX_AT_ONCE, (allowed - OWN_DESCRIPTORS) // PER_CONNECTION))


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(24)


def serve(
    run: Loaded | ShownRun | Runs,
    host: str,
    port: int,
    token: str | None,
    *,
    browser: bool,
    say: Callable[[str], None],
) -> None:
    """Serve a run's dashboard.

    Args:
        say: called with the address once the server listens.

    Raises:
        UsageError: the address or port is not available.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line per request
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # else each thread keeps the memory that it once used
    runs = runs_of(run)
    shown = runs.opened
    server, address = listen(runs, host, port, token)
    say(address)
    work = shown.follow if shown.lives else partial(_warm, runs, _first_answer(server.app))
    threading.Thread(target=work, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGHUP):  # removes the file with the token
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP, which must stay so
            signal.signal(number, signal.default_int_handler)
    try:
        with way_in(address) as file:
            if browser:
                threading.Thread(target=webbrowser.open, args=(file.as_uri(),), daemon=True).start()
            server.serve_forever()
    except KeyboardInterrupt:
        return
    finally:
        server.server_close()


def _first_answer(app: Any) -> threading.Event:
    """Return an event that is set once the server has answered a callback of the page."""
    answered = threading.Event()

    @app.after_request  # type: ignore[untyped-decorator]
    def note(response: Response) -> Response:
        if request.method == "POST":
            answered.set()
        return response

    return answered


def _warm(runs: Runs, answered: threading.Event) -> None:
    """Compute the page around the first view while the browser starts, and slow results after it."""
    page_of(runs, first_link(runs), {})
    answered.wait(FIRST_S)
    runs.opened.loaded.warm()


def listen(
    run: Loaded | ShownRun | Runs, host: str, port: int, token: str | None
) -> tuple[BaseWSGIServer, str]:
    """Start to listen; return the server and the address to open.

    Args:
        port: port to listen on, 0 for any that is free.
        token: the secret that requests must carry; None lets every client that reaches the port read the run.

    Raises:
        UsageError: the address or port is not available.
    """
    runs = runs_of(run)
    app = make_app(runs, token, LOOPBACK if host in LOOPBACK else None)
    try:
        server = _Server(host, port, app.server)
    except (OSError, SystemExit) as error:  # werkzeug exits if the port is in use
        raise UsageError(
            f"cannot listen on {host} port {port}: choose others with --host and --port"
        ) from error
    named = f"[{host}]" if ":" in host else host
    query = "&".join([*([f"token={token}"] if token else []), *first_link(runs).split("?")[1:]])
    return server, f"http://{named}:{server.server_port}/" + (f"?{query}" if query else "")


@contextmanager
def way_in(address: str) -> Iterator[Path]:
    """Provide a file that redirects a browser to an address; only this user can read it."""
    page = f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={escape(address)}">'
    with NamedTemporaryFile("w", prefix="dpro-", suffix=".html") as file:
        file.write(page)
        file.flush()
        yield Path(file.name)
