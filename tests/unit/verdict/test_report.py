"""What a report says, and that its Markdown says it whatever names are in the trace."""

from __future__ import annotations

import dataclasses
import re

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.whatif import search_once
from dpro.analysis.summary import stands_out
from dpro.detect.findings import Finding
from dpro.detect.hang.evidence import advice_in_words
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, STEPS, WORKERS, conform
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.verdict.report import MAX_KERNELS, MAX_PREDICTIONS, make_report, markdown_of
from dpro.verdict.verdict import advised_predictions
from tests.builders import TinyRun, cpu_job
from tests.unit.detect.hanging import OPEN, Job, _frame

EVIL = [
    "<script>alert(1)</script>",
    "a | b",
    "`tick`",
    "@everyone",
    "[link](http://x)",
    "__b__ *c*",
    "l\nr",
    "\x1b]0;t\x07\x9b\u202e",
]


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Analysis:
    return Analysis(cpu_job().write(tmp_path_factory.mktemp("slow")))


def test_run_of_requests_alone_claims_nothing_of_ranks(tmp_path):
    write_manifest(tmp_path / "run", Manifest(world_size=0, ranks=[]))
    report = make_report(Analysis(open_run(tmp_path / "run")))
    assert report.verdict == "Only requests of a server were recorded"


def _stepless(folder) -> Run:
    rows = pl.DataFrame({"rank": [0, 0], "step": [0, 1], "start_ns": [0, 5], "duration_ns": [5, 6]})
    write_part(folder, STEPS, "rank0", conform(STEPS, rows.with_columns(window=-1)))
    write_manifest(folder, Manifest(world_size=1, ranks=[0]))
    return open_run(folder)


def _evil(folder) -> Run:
    run = TinyRun()
    for step in range(3):
        for number, name in enumerate(EVIL):
            at = 1000 * step + 100 * number
            run.call(at, at + 5, 100 * step + number)
            run.kernel(name, at + 10, at + 90, 100 * step + number)
        run.step(step, 1000 * step, 1000 * step + 990)
    return run.write(folder)


def test_a_report_names_the_slow_rank_its_cost_and_what_would_help(slow):
    report = make_report(slow)
    assert report.state == "bad"
    assert report.verdict.startswith("slow host work: rank 1 (the input pipeline) costs")
    (finding,) = report.findings
    assert finding.title == "slow host work: rank 1 (the input pipeline)"
    assert list(finding.evidence) == list(slow.verdict[0][0].evidence)
    assert 0 < len(report.gains) <= MAX_PREDICTIONS
    advised = [gain for gain in advised_predictions(slow) if stands_out(gain)]
    assert advised
    assert report.gains[: len(advised)] == advised
    best = next(gain for gain in search_once(slow).predictions if gain not in advised)
    assert report.gains[len(advised)] == best
    assert report.trust is not None
    assert report.trust.startswith("Predictions from this run: ")
    assert dict(report.fit)["collectives found on all ranks"] == "100.0%"


def test_shares_of_the_breakdown_add_up_to_the_step(slow):
    table = make_report(slow).tables[0]
    assert [row[0] for row in table.rows] == ["0", "1", "2"]
    for row in table.rows:
        assert sum(float(cell.rstrip("%")) for cell in row[2:6]) == pytest.approx(100, abs=0.2)


def test_the_same_run_gives_the_same_report_wherever_it_lies(tmp_path):
    texts = set()
    for place in ("here", "there"):
        run = cpu_job().write(tmp_path / place / "run")
        texts.add(markdown_of(make_report(Analysis(run))))
    (text,) = texts
    assert str(tmp_path) not in text


def test_what_a_run_cannot_answer_is_said_in_its_place(tmp_path):
    report = make_report(Analysis(_stepless(tmp_path)))
    assert (report.trust, report.of_step, report.tables) == (None, "", [])
    assert report.state == "unknown"
    (doubt,) = report.doubts
    assert "nothing was replayed: the run holds no spans" in doubt
    assert "holds no spans" in markdown_of(report)


def test_the_process_to_look_into_is_named_in_the_command():
    hang = Finding("hang.host", "rank", "2", (2,), 0.0, 0.9, 0.0, ())
    workers = conform(WORKERS, pl.DataFrame({"rank": [2], "pid": [42], "host": ["n1"]}))
    do = advice_in_words(hang, workers)
    assert "py-spy dump --pid 42`" in do
    assert "(rank 2: pid 42)" in do


def test_a_hang_comes_with_what_to_do(tmp_path):
    job = Job(3)
    job.call((0, 1, 2), (0, 1, 2))
    job.call((0, 1), (0, 1, 2), OPEN)
    for table, rows in ((COLLECTIVES, job.rows), (PROCESS_GROUPS, job.groups)):
        write_part(tmp_path, table, "rows", _frame(table, rows))
    write_manifest(tmp_path, Manifest(world_size=3, ranks=[0, 1, 2]))
    report = make_report(Analysis(open_run(tmp_path)))
    assert "The job is stuck" in report.verdict
    assert "py-spy dump" in report.findings[0].do
    assert "py-spy dump" in markdown_of(report)


def test_names_from_a_trace_are_text_in_markdown(tmp_path):
    text = markdown_of(make_report(Analysis(_evil(tmp_path))))
    assert "<script" not in text
    assert "@everyone" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| 3 | 0." in line]
    assert len(rows) == len(EVIL) <= MAX_KERNELS
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 5
    assert r"a \| b" in text
    assert r"\[link\](http" in text
    assert r"\`tick\`" in text
    assert "| l r |" in text
    assert r"\\x1b\]0;t\\x07\\x9b\\u202e" in text
    assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_the_verdict_of_a_report_keeps_to_its_lines_and_controls_no_terminal(tmp_path):
    report = make_report(Analysis(cpu_job().write(tmp_path)))
    shown = markdown_of(dataclasses.replace(report, in_short=["FAULT  a\x1b[31m", "b\n# c"]))
    assert "    FAULT  a\\x1b[31m" in shown.splitlines()
    assert "    b # c" in shown.splitlines()
