"""The command that starts the web views: what it needs, and what it says where that is not there."""

from __future__ import annotations

import socket
from importlib import import_module

import pytest
from click.testing import CliRunner

from dpro.dashboards.command import dashboard
from dpro.errors import InputError, MissingExtra, UsageError
from tests.missing import take_away


@pytest.mark.parametrize("library", ["dash", "plotly", "flask"])
def test_a_missing_library_is_one_line_that_says_what_to_install(monkeypatch, library):
    take_away(monkeypatch, library, "dpro.dashboards")
    error = CliRunner().invoke(dashboard, ["nowhere"]).exception
    assert isinstance(error, MissingExtra)
    assert str(error) == f'{library} is not installed: run `pip install "dpro-toolkit[dashboard]"`'


def test_a_run_that_is_not_there_is_said_before_anything_listens(tmp_path):
    result = CliRunner().invoke(dashboard, [str(tmp_path / "nowhere"), "--no-browser"])
    assert isinstance(result.exception, InputError)


@pytest.mark.parametrize(
    ("options", "has"), [([], True), (["--no-token"], False), (["--host", "0.0.0.0"], True)]
)
def test_there_is_a_token_unless_it_is_declined_which_is_warned_of(monkeypatch, repository, options, has):
    asked = []
    serve = import_module("dpro.dashboards.server")
    monkeypatch.setattr(serve, "serve", lambda *given, **_: asked.append(given[3]))
    result = CliRunner().invoke(dashboard, [str(repository / "sample_traces" / "healthy"), *options])
    assert result.exit_code == 0, result.output
    assert [token is not None for token in asked] == [has]
    assert ("including users of this machine" in result.stderr) == (not has)


def test_a_port_that_is_taken_is_refused_before_the_run_is_opened(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = CliRunner().invoke(dashboard, [str(tmp_path / "no such run"), "--port", str(port)])
    assert isinstance(done.exception, UsageError)
    assert f"cannot listen on 127.0.0.1 port {port}" in str(done.exception)
