"""The nightly run: what counts as a result, and what is run again."""

import json
import sys

import pytest

from tests import nightly
from tests.nightly import Result, Stage, checks_in, page, said


@pytest.mark.parametrize(
    ("output", "checks"),
    [
        ("3 passed\n", {}),
        ('{"a": {"n": 1, "holds": true}, "b": {"holds": false}, "c": {"n": 2}}', {"a": True, "b": False}),
        ('campaign 1: {x}\n{\n "a": {"holds": false}\n}\n', {"a": False}),
        ('{"a": {"holds": null}}', {}),
        ("{", {}),
    ],
)
def test_checks_are_those_of_the_object_at_the_end(output, checks):
    assert checks_in(output) == checks


def result(code, checks=(), summary=""):
    return Result("abc", "2026-01-01 00:00", (0.0, 1.0), 60.0, code, dict(checks), summary)


def test_result_says_what_missed_and_what_failed():
    assert said(result(None)) == "**killed at its limit**"
    assert said(result(0, {"speed": True, "truth": False})) == "1 of 2 checks hold: missed truth"
    assert said(result(1, {}, "2 failed, 3 passed in 4s")) == "**exit code 1** 2 failed, 3 passed in 4s"
    assert "| tests | 2026-01-01 00:00 | 0.0 to 1.0 | 1.0 min |" in page({"tests": result(0)})


def test_stage_is_killed_at_its_limit_and_run_again_only_if_asked(tmp_path, monkeypatch, capsys):
    count = tmp_path / "count"
    writes = f"open({str(count)!r}, 'a').write('x')"
    stages = (
        Stage("quick", 1, (sys.executable, "-c", writes)),
        Stage("endless", 0.005, (sys.executable, "-c", "import time; time.sleep(60)")),
    )
    monkeypatch.setattr(nightly, "STAGES", stages)
    for arguments, times in (([], 1), ([], 1), (["--again", "--only", "quick"], 2)):
        monkeypatch.setattr(sys, "argv", ["nightly", "--folder", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as ended:
            nightly.main()
        assert ended.value.code == ("--only" not in arguments)
        assert len(count.read_text()) == times
    assert json.loads((tmp_path / "out" / "endless.json").read_text())["exit_code"] is None
    assert "killed" in (tmp_path / "out.md").read_text()
