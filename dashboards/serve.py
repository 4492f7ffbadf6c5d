"""Serve the application until it is interrupted.

In: a run, where to listen. Out: nothing, until Ctrl-C. From other machines it can be reached only
where a host is given, and then with a token that is new each time.
"""

from __future__ import annotations

import logging
import secrets
import threading
import webbrowser
from collections.abc import Callable

from werkzeug.serving import BaseWSGIServer, make_server

from dpro.dashboards.app import make_app
from dpro.dashboards.guard import LOOPBACK
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.shown import Shown
from dpro.errors import UsageError


def serve(run: Loaded | Shown, host: str, port: int, *, browser: bool, say: Callable[[str], None]) -> None:
    """Serve a run's dashboard.

    Args:
        run: the run.
        host: address to listen on.
        port: port to listen on, 0 for any that is free.
        browser: open it in a browser.
        say: told the address.

    Raises:
        UsageError: nothing can listen there.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request is of no use
    shown = run if isinstance(run, Shown) else Shown(run)
    server, address = listen(shown, host, port)
    say(address)
    work = shown.follow if shown.lives else shown.loaded.warm
    threading.Thread(target=work, daemon=True).start()
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return
    finally:
        server.server_close()


def listen(run: Loaded | Shown, host: str, port: int) -> tuple[BaseWSGIServer, str]:
    """A server that listens, and the address to open.

    Raises:
        UsageError: nothing can listen there.
    """
    token = None if host in LOOPBACK else secrets.token_urlsafe(24)
    app = make_app(run, token)
    try:
        server = make_server(host, port, app.server, threaded=True)
    except (OSError, SystemExit) as error:  # it ends the program where a port is taken
        raise UsageError(
            f"cannot listen on {host} port {port}: choose others with --host and --port"
        ) from error
    named = f"[{host}]" if ":" in host else host
    return server, f"http://{named}:{server.server_port}/" + (f"?token={token}" if token else "")
