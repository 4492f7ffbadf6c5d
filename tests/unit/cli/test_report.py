"""`dpro report` when it writes reports to send."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.cli.replay import replay
from dpro.cli.report import OVERLAPPING, report
from dpro.errors import InputError, UsageError
from dpro.extensions.goodput.command import goodput
from dpro.ingest.importer import import_sources
from tests.builders import TinyRun, cpu_job
from tests.reference.hanging_dumps import dumps_of_a_stuck_host


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
    asked = ["report", run, "--html", str(html), "--markdown", str(markdown), "--json"]
    done = CliRunner().invoke(cli, asked)  # which gives a command the options that extensions bring
    assert json.loads(done.output)["files"] == [str(html), str(markdown)]
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_a_file_that_cannot_be_written_is_named(run, tmp_path):
    error = CliRunner().invoke(cli, ["report", run, "--html", str(tmp_path / "nowhere" / "x")]).exception
    assert isinstance(error, UsageError)
    assert "nowhere" in str(error)
    error = CliRunner().invoke(report, [run, "--markdown", "--json"]).exception
    assert isinstance(error, UsageError)


LONG = "void at::native::(anonymous namespace)::softmax<at::Half, 4>(int*, float const*)"


@pytest.fixture(scope="module")
def with_every_column(tmp_path_factory) -> str:
    """A job with copies, and with communication that is matched on two ranks of which one lacks a member."""
    run = TinyRun()
    for rank in range(2):
        for step in range(2):
            at = 1000 * step
            for number, (name, begin, end, kind, stream) in enumerate([
                (LONG, 100, 300, "kernel", 7), ("Memcpy HtoD", 310, 330, "memcpy", 7),
                ("ncclDevKernel", 400, 500 + 100 * rank, "kernel", 20),
            ]):  # fmt: skip
                run.call(at + 10 * number, at + 10 * number + 5, 10 * step + number, rank)
                span = run.kernel(name, at + begin, at + end, 10 * step + number, rank, stream, kind)
            run.member(span, sequence=step if rank or step else -1)
            run.step(step, at, at + 990, rank)
    return str(run.write(tmp_path_factory.mktemp("columns") / "job").path)


def test_tables_fit_80_columns_and_cut_no_number(with_every_column):
    said = CliRunner().invoke(report, [with_every_column]).output
    table = said[said.index("Where the usual step of each rank goes (2 steps in depth)") :]
    table = table[: table.index("GPU kernels")].splitlines()
    assert max(map(len, said.splitlines()[said.splitlines().index(table[0]) :])) <= 80
    assert all("\u2026" not in line for line in table)
    assert [line.split()[0] for line in table if line.strip()[:1].isdigit()] == ["0", "1"]


def test_the_step_is_divided_once_and_as_it_runs(repository):
    said = CliRunner().invoke(report, [str(repository / "sample_traces" / "h200_gpt"), "--top", "1"]).output
    (usual_ms,) = re.findall(r"usual step ([\d.]+) ms", said)
    (compute, host) = re.findall(r"^(\d+)% compute \| (\d+)% host", said, re.MULTILINE)[0]
    row = next(line for line in said.splitlines() if line.startswith(" 0 ")).split()
    assert (f"{float(row[1]):.1f}", f"{float(row[2][:-1]):.0f}") == (usual_ms, compute)
    assert f"{float(row[6][:-1]):.0f}" == host
    assert "as recorded" not in said


def test_names_of_kernels_are_short_for_people_and_whole_in_json(with_every_column):
    for command in (report, replay):
        assert "softmax<Half, 4>" in CliRunner().invoke(command, [with_every_column]).output
    found = json.loads(CliRunner().invoke(report, [with_every_column, "--json"]).output)
    assert LONG in [kernel["name"] for kernel in found["kernels"]]


def test_how_a_job_ended_is_said_once_and_not_how_long_nothing_took(repository, tmp_path):
    hung = str(repository / "sample_traces" / "h200_hang")
    assert CliRunner().invoke(report, [hung]).output.count("The job hung at step 31") == 1
    error = CliRunner().invoke(goodput, [str(import_dumps(tmp_path))]).exception
    assert isinstance(error, InputError)
    assert str(error).endswith("when its ranks began and ended was not recorded")


def import_dumps(folder):
    dumps = folder / "dumps"
    dumps.mkdir()
    dumps_of_a_stuck_host(dumps)
    import_sources([dumps], folder / "run")
    return folder / "run"


def test_time_by_operator_is_a_line_where_hardly_any_operator_is_known(tmp_path):
    job = TinyRun()
    for step in range(3):
        job.kernel("gemm", 1000 * step, 1000 * step + 900, step)
        job.step(step, 1000 * step, 1000 * step + 990)
    text = CliRunner().invoke(report, [str(job.write(tmp_path / "job").path)]).output
    assert "GPU time by operator, all ranks: not known for 100.0% of it (3 kernels)\n" in text
    assert "no operator is known" not in text


def test_waits_of_collectives_are_said_to_differ_from_those_of_steps(repository):
    sample = str(repository / "sample_traces" / "slow_rank")
    said = CliRunner().invoke(report, [sample, "--top", "1"]).output
    assert " ".join(said.split()).count(OVERLAPPING) == 1
