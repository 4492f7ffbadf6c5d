"""Access control: requests need the token or, where there is none, a host name of this machine."""

from __future__ import annotations

import gzip

import pytest
from flask import Flask

from dpro.dashboards.guard import cookie_of, guard, harden, hash_of

TOKEN = "a-token-that-is-long-enough"


def _client(token, **names):
    server = Flask(__name__)
    server.route("/", methods=["GET", "POST"])(lambda: "x" * 10_000)
    guard(server, token, **names)
    harden(server, [hash_of("alert(1)")])
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
    assert {"HttpOnly", "SameSite=Lax"} <= set(first.headers["Set-Cookie"].split("; "))
    assert client.get("/").status_code == 200
    client.set_cookie(cookie_of(TOKEN), "wrong")
    assert client.get("/").status_code == 403


def test_what_else_is_in_the_address_stays_as_it_is():
    answer = _client(TOKEN).get("/", query_string={"edit": "scale:name=a&b #c,factor=2\n=x", "token": TOKEN})
    assert answer.location == "/?edit=scale:name=a%26b+%23c,factor=2%0A=x"


def test_the_token_leads_to_no_other_host():
    answer = _client(TOKEN).get(f"//evil.example/?token={TOKEN}", headers={"Host": "localhost"})
    assert answer.location in ("/evil.example/", "/")


def test_dashboards_of_one_host_do_not_take_each_other_s_cookie():
    assert cookie_of(TOKEN) != cookie_of(TOKEN + "x")
    assert TOKEN not in cookie_of(TOKEN)


def test_a_program_may_post_with_the_token_itself():
    assert _client(TOKEN).post(f"/?token={TOKEN}").status_code == 200
    assert _client(TOKEN).post("/?token=wrong").status_code == 403


def test_without_a_token_a_server_for_other_machines_goes_by_any_name():
    assert _client(None, names=None).get("/", headers={"Host": "node7:8050"}).status_code == 200


def test_no_script_runs_but_those_that_are_known():
    policy = _client(None).get("/").headers["Content-Security-Policy"]
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src "))
    assert scripts.split()[1:] == [
        "'self'",
        "'unsafe-eval'",
        "'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='",
    ]


def test_nothing_is_loaded_from_elsewhere_and_long_answers_are_compressed():
    plain, packed = (_client(None).get("/", headers=each) for each in ({}, {"Accept-Encoding": "gzip"}))
    assert "default-src 'self'" in plain.headers["Content-Security-Policy"]
    assert "http" not in plain.headers["Content-Security-Policy"]
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.data) == plain.data
