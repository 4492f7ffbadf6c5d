"""Who may ask, those who know the token; and what a page may load and run, nothing from elsewhere.

In: the web server. Out: it answers nobody else, and tells browsers to load nothing from elsewhere and run no
script but those it serves. A token in the link is exchanged for a cookie and leaves the address bar at once.
Without a token the name that was asked for must be this machine's own: a page of another name that leads to
127.0.0.1 gets nothing.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Collection, Sequence
from hmac import compare_digest
from urllib.parse import urlencode, urlsplit

from flask import Flask, Response, redirect, request
from isal import igzip

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_COMPRESSED_FROM = 4096  # bytes
_TEXT = ("application/json", "text/", "application/javascript")
# Plotly compiles what it draws with WebGL at run time. Dash's components and plotly insert a dozen style
# sheets of their own, whose text changes with their versions, and plotly's heatmaps set style attributes.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval' {scripts}; "
    "style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data:; worker-src 'self' blob:; "
    "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def guard(server: Flask, token: str | None, names: Collection[str] | None = LOOPBACK) -> None:
    """Refuse strangers, whatever they ask for.

    Args:
        server: gets a check before each request.
        token: what a stranger does not know; None where all may ask who use one of the names.
        names: by which this server may be asked for without a token; None for any.
    """

    @server.before_request
    def check() -> Response | None:
        if token is None:
            known = names is None or urlsplit(f"//{request.host}").hostname in names
            return None if known else _refusal("open the address that `dpro dashboard` printed")
        if _same(request.args.get("token", ""), token):
            return _exchanged(token) if request.method == "GET" else None
        if _same(request.cookies.get(cookie_of(token), ""), token):
            return None
        return _refusal("open the address with the token that `dpro dashboard` printed")


def cookie_of(token: str) -> str:
    """The name of the cookie that keeps a token: browsers send the cookies of all ports of a host to each."""
    return f"dpro_{hashlib.sha256(token.encode()).hexdigest()[:12]}"


def _exchanged(token: str) -> Response:
    """The same address without the token, and a cookie in its place."""
    rest = [pair for pair in request.args.items(multi=True) if pair[0] != "token"]
    query = "?" + urlencode(rest, safe=",~:=*") if rest else ""
    answer = redirect("/" + request.path.lstrip("/") + query)  # never to another host, as `//` would be
    # Lax: with Strict a link in a chat, or the file that opens the browser, would lead to a refusal.
    answer.set_cookie(cookie_of(token), token, httponly=True, samesite="Lax")
    return answer  # type: ignore[return-value]


def harden(server: Flask, scripts: Sequence[str]) -> None:
    """Set headers that keep a page to itself.

    Args:
        server: gets headers after each request.
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
    """A script within a page, as a content security policy allows it."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _same(given: str, token: str) -> bool:
    return compare_digest(given.encode(), token.encode())


def _refusal(what_to_do: str) -> Response:
    return Response(f"dpro dashboard: not for you; {what_to_do}\n", 403, mimetype="text/plain")


def _compressed(response: Response) -> Response:
    """Large texts gzipped, for those who take that."""
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
