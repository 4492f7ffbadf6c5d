"""The commands that an answer names at its end."""

from __future__ import annotations

import dataclasses

import pytest

from dpro.analysis.analysis import Analysis
from dpro.cli.following import print_following
from dpro.store import CUT
from tests.builders import gpu_job


@pytest.mark.parametrize(
    ("skipped", "names"), [({}, ["report", "diagnose", "whatif"]), ({CUT: 1}, ["report"])]
)
def test_commands_that_traces_cut_short_leave_without_an_answer_are_not_named(
    capsys, tmp_path, skipped, names
):
    run = gpu_job().write(tmp_path / "run")
    cut = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, skipped=skipped))
    print_following("RUN", Analysis(cut), ["report", "diagnose", "whatif"])
    assert [
        word for word in capsys.readouterr().out.split() if word in ("report", "diagnose", "whatif")
    ] == names
