"""`dpro diagnose` on a folder of flight recorder dumps: what programs get, and what people read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpro.cli import cli
from tests.reference.hanging_dumps import Dumping, write_dumps
from tests.reference.hanging_jobs import run_job


@pytest.fixture
def diagnose(empty_cache):
    def run(folder: Path, *options: str) -> Result:
        done = CliRunner().invoke(cli, ["diagnose", str(folder), *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done

    return run


def dumps_of(folder: Path, kind: str | None, missing: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Leave the dumps of a job of 8 ranks; returns the ranks at fault."""
    rng = random.Random(11)
    job = run_job(rng, "tp_pp", 8, kind)
    folder.mkdir()
    dumping = Dumping(
        "2.9", as_json=False, active_only=False, ring=2000, timing=False, early={}, stamped=False
    )
    write_dumps(rng, job, dumping, folder, missing=missing)
    return job.fault.ranks if job.fault else ()


def test_a_hang_is_one_object_for_programs(tmp_path, diagnose):
    guilty = dumps_of(tmp_path / "dumps", "host")
    document = json.loads(diagnose(tmp_path / "dumps", "--json").stdout)
    (finding,) = document["findings"]
    assert document["schema_version"] == 2
    assert document["healthy"] is False
    assert finding["class"] == "hang.host"
    assert finding["component"] == {"kind": "rank", "id": str(guilty[0])}
    assert finding["ranks"] == list(guilty)
    assert (finding["severity"], finding["cost_ms_per_step"]) == (1.0, None)
    assert finding["evidence"]


def test_people_read_the_verdict_first_and_what_to_do_last(tmp_path, diagnose):
    (guilty,) = dumps_of(tmp_path / "dumps", "host")
    lines = diagnose(tmp_path / "dumps").stdout.splitlines()
    assert lines[0].startswith(
        f"hang: rank {guilty}: its host code has not reached the call that its peers wait in; confidence "
    )
    assert lines[1] == f"  - rank {guilty} has nothing unfinished of its own" or lines[1].startswith(
        "  - rank"
    )
    assert lines[-1].startswith(f"  do: see what rank {guilty} does")


def test_a_job_that_finished_is_healthy(tmp_path, diagnose):
    dumps_of(tmp_path / "dumps", None)
    document = json.loads(diagnose(tmp_path / "dumps", "--json").stdout)
    assert (document["findings"], document["healthy"]) == ([], True)
    assert diagnose(tmp_path / "dumps").stdout.startswith("No hang found")


def test_a_finished_job_of_which_a_dump_is_missing_is_not_called_healthy(tmp_path, diagnose):
    dumps_of(tmp_path / "dumps", None, missing=(5,))
    document = json.loads(diagnose(tmp_path / "dumps", "--json").stdout)
    assert (document["findings"], document["healthy"]) == ([], False)
    assert document["reasons"] == ["what rank 5 did: no dump of them was given"]


def test_a_damaged_dump_is_one_line_and_the_rest_is_analysed(tmp_path, diagnose):
    (guilty,) = dumps_of(tmp_path / "dumps", "host")
    victim = next(path for path in sorted((tmp_path / "dumps").iterdir()) if str(guilty) not in path.name)
    victim.write_bytes(victim.read_bytes()[:300])
    document = json.loads(diagnose(tmp_path / "dumps", "--json").stdout)
    assert guilty in document["findings"][0]["ranks"]
    (damaged,) = [line for line in document["reasons"] if victim.name in line]
    assert "not readable as a flight recorder dump" in damaged
