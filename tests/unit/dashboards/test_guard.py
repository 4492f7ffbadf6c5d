"""Who may ask: with a token those who know it, without one only this machine under its own name."""

from __future__ import annotations

import gzip

import pytest
from flask import Flask

from dpro.dashboards.guard import COOKIE, guard

TOKEN = "a-token-that-is-long-enough"


def _client(token):
    server = Flask(__name__)
    server.route("/")(lambda: "x" * 10_000)
    guard(server, token)
    return server.test_client()


@pytest.mark.parametrize("host", ["127.0.0.1:8050", "localhost:1", "[::1]:8050", "LOCALHOST"])
def test_this_machine_needs_no_token(host):
    assert _client(None).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8050", "10.0.0.1"])
def test_another_name_that_leads_to_this_machine_is_refused(host):
    assert _client(None).get("/", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=ä"])
def test_a_stranger_is_refused(query):
    answer = _client(TOKEN).get("/" + query)
    assert answer.status_code == 403
    assert TOKEN not in answer.text


def test_the_token_becomes_a_cookie_and_leaves_the_address():
    client = _client(TOKEN)
    first = client.get(f"/?view=timeline&token={TOKEN}&ranks=0,1")
    assert (first.status_code, first.location) == (302, "/?view=timeline&ranks=0,1")
    assert {"HttpOnly", "SameSite=Strict"} <= set(first.headers["Set-Cookie"].split("; "))
    assert client.get("/").status_code == 200
    client.set_cookie(COOKIE, "wrong")
    assert client.get("/").status_code == 403


def test_nothing_is_loaded_from_elsewhere_and_long_answers_are_compressed():
    plain, packed = (_client(None).get("/", headers=each) for each in ({}, {"Accept-Encoding": "gzip"}))
    assert "default-src 'self'" in plain.headers["Content-Security-Policy"]
    assert "http" not in plain.headers["Content-Security-Policy"]
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.data) == plain.data
