"""Runs of every format since the first release open, and one of a later format says what it needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from dpro._version import __version__
from dpro.errors import InputError
from dpro.schema import TABLES
from dpro.store import FORMAT_VERSION, open_run
from tests.commands import dpro
from tests.formats.keep import SAMPLES, totals

FIRST_RELEASED = 2
KEPT = sorted(path for path in SAMPLES.iterdir() if path.name.isdigit())


@pytest.fixture
def job(tmp_path) -> Path:
    """A copy of the recorded run of the current format."""
    return shutil.copytree(SAMPLES / str(FORMAT_VERSION) / "job", tmp_path / "job")


def changed(run: Path, **fields: object) -> Path:
    path = run / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return run


def test_a_sample_of_every_format_since_the_first_release_is_kept():
    assert [int(path.name) for path in KEPT] == list(range(FIRST_RELEASED, FORMAT_VERSION + 1))


@pytest.mark.parametrize("sample", KEPT, ids=lambda path: path.name)
def test_all_columns_of_a_kept_run_are_read_as_they_were(sample):
    expected = json.loads((sample / "read.json").read_text())
    rows, job = open_run(sample / "rows"), open_run(sample / "job")
    assert rows.manifest.format_version == job.manifest.format_version == int(sample.name)
    for name, values in expected["rows"].items():
        assert rows.table(TABLES[name]).select(*values).row(0, named=True) == values
    for name, sums in expected["job"].items():
        columns = [column for column in sums if column != "rows"]
        assert totals(job.table(TABLES[name]).select(columns)) == sums


@pytest.mark.parametrize("sample", KEPT, ids=lambda path: path.name)
def test_every_answer_about_a_kept_run_is_given(sample, tmp_path):
    run = sample / "job"
    for command in (
        ("info", run), ("explain", run), ("report", run), ("replay", run), ("diagnose", run),
        ("goodput", run), ("whatif", run, "--edit", "no-comm"), ("diff", run, run),
        ("export", run, "--chrome", tmp_path / "trace.json"),
    ):  # fmt: skip
        done = dpro(*command)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("created_by", ["dpro record 0.2.0", "dpro 0.2.0 import", "dpro 0.2.0"])
def test_a_run_of_a_later_format_says_which_dpro_it_needs(job, created_by):
    later = FORMAT_VERSION + 1
    changed(job, format_version=later, created_by=created_by, world_size="of another type")
    with pytest.raises(InputError) as caught:
        open_run(job)
    assert str(caught.value) == (
        f"{job}: has run format {later}, which needs dpro 0.2.0 or newer; "
        f"this is dpro {__version__}, which supports formats up to {FORMAT_VERSION}"
    )


@pytest.mark.parametrize("created_by", [None, "", 7, {"dpro": 1}, "dpro watch", "x" * 10_000, "\n\n1.2"])
def test_a_later_format_of_an_unknown_writer_needs_a_newer_dpro(job, created_by):
    changed(job, format_version=1_000, created_by=created_by)
    with pytest.raises(InputError, match=r": has run format 1000, which needs a newer dpro; this is"):
        open_run(job)


@pytest.mark.parametrize(
    "command", ["info", "explain", "report", "replay", "diagnose", "whatif", "goodput", "serving"]
)
def test_commands_refuse_a_later_format_in_one_line(job, command):
    done = dpro(command, changed(job, format_version=FORMAT_VERSION + 1, created_by="dpro record 0.2.0"))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "which needs dpro 0.2.0 or newer" in line


@pytest.mark.parametrize("version", [0, -1, True, None, "2", 2.5, [2], 1e999])
def test_what_is_no_version_of_a_format_is_a_damaged_manifest(job, version):
    with pytest.raises(InputError, match="not a run manifest"):
        open_run(changed(job, format_version=version))


def test_tables_and_columns_that_come_later_are_left_out(job):
    (job / "clouds").mkdir()
    shutil.copy(next((job / "steps").glob("*.parquet")), job / "clouds" / "rank00000.parquet")
    for part in (job / "steps").glob("*.parquet"):
        pl.read_parquet(part).with_columns(weather=pl.lit("fair")).write_parquet(part)
    expected = open_run(SAMPLES / str(FORMAT_VERSION) / "job").table(TABLES["steps"])
    assert open_run(changed(job, weather={"fair": True})).table(TABLES["steps"]).equals(expected)
