"""Who may ask: on this machine only those who name it as such, from elsewhere only those who know the token.

In: the web server. Out: it answers nobody else, and tells browsers to load nothing from elsewhere. A token in
the link is exchanged for a cookie, so that it leaves the address bar at once. Without a token the name that
was asked for must be this machine's own: a page of another name that resolves to 127.0.0.1 gets nothing.
"""

from __future__ import annotations

from hmac import compare_digest
from urllib.parse import urlsplit

from flask import Flask, Response, redirect, request
from isal import igzip

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "dpro_token"
_COMPRESSED_FROM = 4096  # bytes
_TEXT = ("application/json", "text/", "application/javascript")
_POLICY = (  # plotly compiles what it draws with WebGL at run time, dash starts from a script in the page
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data:; worker-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def guard(server: Flask, token: str | None) -> None:
    """Refuse strangers, and set headers that keep a page to itself.

    Args:
        server: gets a check before each request and headers after it.
        token: what a stranger does not know; None where only this machine can ask.
    """

    @server.before_request
    def check() -> Response | None:
        if token is None:
            name = urlsplit(f"//{request.host}").hostname
            return None if name in LOOPBACK else _refusal("open the address that `dpro dashboard` printed")
        given = request.args.get("token", "")
        if given and _same(given, token):
            rest = [f"{key}={value}" for key, value in request.args.items(multi=True) if key != "token"]
            answer = redirect(request.path + ("?" + "&".join(rest) if rest else ""))
            answer.set_cookie(COOKIE, token, httponly=True, samesite="Strict")
            return answer  # type: ignore[return-value]
        if _same(request.cookies.get(COOKIE, ""), token):
            return None
        return _refusal("open the address with the token that `dpro dashboard` printed")

    @server.after_request
    def harden(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return _compressed(response)


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
