"""What is said of a path that names no run: what may have been meant, and what to do."""

from __future__ import annotations

import pytest

from dpro.analysis.analysis import Analysis
from dpro.errors import InputError, Unanswerable
from dpro.opening import open_path
from dpro.schema import COLLECTIVES
from dpro.store import Manifest, open_run, write_manifest, write_part
from tests.builders import cpu_job
from tests.traces import write_rank
from tests.unit.detect.hanging import Job, _frame


def _said(path) -> str:
    with pytest.raises(InputError) as error:
        open_path(path)
    return str(error.value)


def test_a_path_that_does_not_exist_is_answered_with_its_neighbour(tmp_path):
    cpu_job().write(tmp_path / "slow_rank")
    said = _said(tmp_path / "slow_rnk")
    assert f"did you mean {tmp_path / 'slow_rank'}?" in said
    assert "dpro record" in said
    assert "did you mean" not in _said(tmp_path / "zzz" / "slow_rank")


def test_a_folder_of_runs_is_answered_with_one_of_them(tmp_path):
    for name in ("b", "a"):
        cpu_job().write(tmp_path / name)
    assert f"name one of the runs in it, such as {tmp_path / 'a'}" in _said(tmp_path)
    write_rank(tmp_path / "in", 0)
    assert open_path(tmp_path).manifest.ranks == [0]


def test_a_run_of_calls_alone_says_what_it_is_enough_for(tmp_path):
    job = Job(2)
    job.call((0, 1), (0, 1))
    write_part(tmp_path, COLLECTIVES, "rows", _frame(COLLECTIVES, job.rows))
    write_manifest(tmp_path, Manifest(world_size=2, ranks=[0, 1]))
    with pytest.raises(Unanswerable, match="is enough for `dpro diagnose`"):
        _ = Analysis(open_run(tmp_path)).built
