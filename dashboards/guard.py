"""Access control by token, and the security headers of every response.

Changes the web server: it refuses requests without the token, and sends a content security policy that
forbids content of other origins and every script that the server does not serve. A token in the link is
exchanged for a cookie and removed from the address bar at once. Without a token, the request's Host header
must name this machine; this stops DNS rebinding, by which a page of another origin reaches 127.0.0.1.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Collection, Sequence
from hmac import compare_digest
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from dash import Dash
from dash.exceptions import DependencyException
from flask import Flask, Response, abort, redirect, request
from isal import igzip

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_COMPRESSED_FROM = 4096  # bytes
_TEXT = ("application/json", "text/", "application/javascript")
# Plotly compiles its WebGL code at run time, which needs unsafe-eval. Dash's components and Plotly insert a
# dozen style sheets, whose text changes with their versions, and Plotly's heatmaps set style attributes.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval' {scripts}; "
    "style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data:; worker-src 'self' blob:; "
    "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def guard(server: Flask, token: str | None, names: Collection[str] | None = LOOPBACK) -> None:
    """Refuse every request that is not authorised.

    Args:
        token: the secret that a request must carry; None to authorise by host name alone.
        names: host names accepted if there is no token; None for any.
    """

    @server.before_request
    def check() -> Response | None:
        if token is None:
            is_accepted = names is None or urlsplit(f"//{request.host}").hostname in names
            return None if is_accepted else _refusal("open the address that `dpro dashboard` printed")
        if _is_token(request.args.get("token", ""), token):
            return _exchange_token(token) if request.method == "GET" else None
        if _is_token(request.cookies.get(cookie_of(token), ""), token):
            return None
        return _refusal("open the address with the token that `dpro dashboard` printed")


def cookie_of(token: str) -> str:
    """Return the name of a token's cookie; it differs per token, since all ports of a host share cookies."""
    return f"dpro_{hashlib.sha256(token.encode()).hexdigest()[:12]}"


def _exchange_token(token: str) -> Response:
    """Redirect to the address without the token, and set the cookie that replaces it."""
    rest = [pair for pair in request.args.items(multi=True) if pair[0] != "token"]
    query = "?" + urlencode(rest, safe=",~:=*") if rest else ""
    path = quote(request.path.lstrip("/"))  # a leading `//` would lead to another host
    answer = redirect(f"/{path}{query}")
    # Lax: with Strict, a link in a chat, or the file that opens the browser, would be refused.
    answer.set_cookie(cookie_of(token), token, httponly=True, samesite="Lax")
    return answer  # type: ignore[return-value]


def harden(server: Flask, scripts: Sequence[str]) -> None:
    """Set the security headers of every response.

    Args:
        scripts: hashes of the scripts within the page, as from `hash_of`.
    """
    policy = _POLICY.format(scripts=" ".join(scripts))

    @server.after_request
    def headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return _compressed(response)


def hash_of(script: str) -> str:
    """Return the source expression by which a content security policy allows an inline script."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _is_token(given: str, token: str) -> bool:
    return compare_digest(given.encode(errors="replace"), token.encode())


def _refusal(what_to_do: str) -> Response:
    return Response(f"dpro dashboard: access denied; {what_to_do}\n", 403, mimetype="text/plain")


def _compressed(response: Response) -> Response:
    """Compress large text responses with gzip where the client accepts it."""
    wanted = "gzip" in request.headers.get("Accept-Encoding", "")
    text = (response.mimetype or "").startswith(_TEXT)
    if not wanted or not text or response.direct_passthrough or "Content-Encoding" in response.headers:
        return response
    body = response.get_data()
    if len(body) >= _COMPRESSED_FROM:
        response.set_data(igzip.compress(body, 1))
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Vary"] = "Accept-Encoding"
    return response


# Validation of request bodies: their size is bounded, and they must match an existing callback.

MAX_BODY_BYTES = 1 << 20
_CALLBACKS = "/_dash-update-component"
_TYPES = {"search": (str, type(None))}  # types of a property's values; properties not listed take any value


def check_bodies(app: Dash) -> None:
    """Refuse invalid bodies before any callback sees them."""
    app.server.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES

    @app.server.before_request  # type: ignore[untyped-decorator]
    def check() -> None:
        if request.path != _CALLBACKS or request.method != "POST":
            return
        try:
            body = request.get_json()  # aborts where the body is too large or is not JSON
        except RecursionError:
            abort(400)
        if not _is_for_a_callback(body, app.callback_map):
            abort(400)

    @app.server.errorhandler(DependencyException)  # type: ignore[untyped-decorator]
    def no_such_file(_error: Exception) -> tuple[str, int]:
        return "no such file\n", 404


def _is_for_a_callback(body: Any, callbacks: dict[str, Any]) -> bool:
    """Return whether a body names a callback with all its inputs and outputs, and gives values for them."""
    if not isinstance(body, dict) or not isinstance(body.get("output"), str):
        return False
    callback = callbacks.get(body["output"], {})
    if "callback" not in callback:
        return False
    outputs, changed = body.get("outputs"), body.get("changedPropIds", [])
    return (
        _ids_and_properties(outputs if isinstance(outputs, list) else [outputs])
        == _split_output(body["output"])
        and _are_values(body.get("inputs", []), callback["inputs"])
        and _are_values(body.get("state", []), callback["state"])
        and isinstance(changed, list)
        and all(isinstance(name, str) for name in changed)
    )


def _split_output(output: str) -> list[tuple[str, str]]:
    """Split `a.children` or `..a.figure...b.style..` into ids and properties."""
    several = output.removeprefix("..").removesuffix("..").split("...") if output[:2] == ".." else [output]
    return [(name, prop) for name, _, prop in (part.rpartition(".") for part in several)]


def _ids_and_properties(given: Sequence[Any]) -> list[Any]:
    return [(entry.get("id"), entry.get("property")) if isinstance(entry, dict) else None for entry in given]


def _are_values(given: Any, wanted: Sequence[dict[str, Any]]) -> bool:
    return (
        isinstance(given, list)
        and _ids_and_properties(given) == _ids_and_properties(wanted)
        and all(isinstance(entry.get("value"), _TYPES.get(entry["property"], object)) for entry in given)
    )
