"""Runs that several tests of the dashboard share."""

from __future__ import annotations

import pytest

from dpro.dashboards.command import offered_runs
from tests.builders import cpu_job


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder of runs: two that are whole, a damaged one, what is no run, and a link to one elsewhere."""
    folder = tmp_path_factory.mktemp("runs")
    cpu_job().write(folder / "after")
    cpu_job(extra=0).write(folder / "before")
    cpu_job().write(folder.with_name("elsewhere"))
    (folder / "broken").mkdir()
    (folder / "broken" / "manifest.json").write_text("{")
    (folder / "notes").mkdir()
    (folder / "link").symlink_to(folder.with_name("elsewhere"), target_is_directory=True)
    return folder


@pytest.fixture(scope="session")
def several(folder):
    return offered_runs([str(folder / "after")])
