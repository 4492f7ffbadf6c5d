"""`dpro report` when it writes reports to send."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dpro.cli.report import report
from dpro.errors import UsageError
from tests.builders import cpu_job


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    return str(cpu_job().write(tmp_path_factory.mktemp("runs") / "job").path)


def test_markdown_goes_to_stdout_or_into_a_file(run, tmp_path):
    printed = CliRunner().invoke(report, [run, "--markdown"])
    assert printed.output.startswith("# dpro: job\n")
    file = tmp_path / "report.md"
    done = CliRunner().invoke(report, [run, "--markdown", str(file)])
    assert file.read_text() == printed.output
    assert str(file) in done.output


def test_both_are_written_and_json_says_where(run, tmp_path):
    html, markdown = tmp_path / "report.html", tmp_path / "report.md"
    done = CliRunner().invoke(report, [run, "--html", str(html), "--markdown", str(markdown), "--json"])
    assert json.loads(done.output)["files"] == [str(html), str(markdown)]
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_a_file_that_cannot_be_written_is_named(run, tmp_path):
    error = CliRunner().invoke(report, [run, "--html", str(tmp_path / "nowhere" / "x.html")]).exception
    assert isinstance(error, UsageError)
    assert "nowhere" in str(error)
    error = CliRunner().invoke(report, [run, "--markdown", "--json"]).exception
    assert isinstance(error, UsageError)
