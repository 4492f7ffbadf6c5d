"""What people ask of real traces, put to the tools that agents use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.jobs import ROOT


@pytest.mark.slow
def test_tools_answer_what_people_ask_of_real_traces_in_three_calls(traces):
    command = [sys.executable, "-m", "benchmarks.questions", "--traces", str(traces), "--list", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True)
    answers = json.loads(done.stdout)
    assert answers["all"]["n"] >= 60
    assert answers["all"]["holds"], done.stderr
    assert answers["steps"]["right_pct"] == answers["kernels"]["right_pct"] == 100.0, done.stderr
