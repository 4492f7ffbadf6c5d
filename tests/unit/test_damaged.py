"""What is left of a run with damaged files: a rank, or what one table holds of it, and never the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dpro import damaged
from dpro.damaged import without_damaged
from dpro.dashboards.command import offered_runs
from dpro.errors import InputError
from dpro.opening import open_path
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.store import open_run
from tests.unit.test_project import ROOT


@pytest.fixture
def run(tmp_path):
    """Two ranks with one part of `spans` each, and three of `counters`, one of them the host's."""
    shutil.copytree(ROOT / "sample_traces" / "healthy", tmp_path / "run")
    return tmp_path / "run"


def part_of(run: Path, table: str, named: str) -> Path:
    (part,) = (run / table).glob(f"{named}*.parquet")
    return part


def cut(part: Path) -> Path:
    """Keep the first half, as an interrupted copy does."""
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    return part


def spoil(part: Path) -> Path:
    """Overwrite some bytes in the middle: its footer still reads."""
    content = bytearray(part.read_bytes())
    content[100:200] = bytes(100)
    part.write_bytes(content)
    return part


@pytest.mark.parametrize("damage", [cut, spoil])
def test_a_rank_whose_spans_are_damaged_is_left_out_of_all_tables(run, damage):
    part = damage(part_of(run, "spans", "rank00001"))
    opened = open_path(run)
    assert opened.manifest.ranks == [0]
    assert opened.manifest.missing_ranks == [1]
    for table in (SPANS, STEPS, COLLECTIVES):
        assert opened.table(table)["rank"].unique().to_list() == [0]
    (line,) = opened.damage
    assert line == f"left out: rank 1: {part}: not readable as Parquet (it is damaged or cut short)"
    assert opened.manifest.warnings[-1:] == [line]


def test_other_tables_cost_what_they_held_of_the_rank(run):
    samples = open_path(run).num_rows(COUNTERS)
    part = cut(part_of(run, "counters", "rank00001"))
    opened = open_path(run)
    assert opened.manifest.ranks == [0, 1]
    assert opened.table(SPANS)["rank"].n_unique() == 2
    assert 0 < opened.num_rows(COUNTERS) < samples
    (line,) = opened.damage
    assert line.startswith(f"left out: table counters of rank 1: {part}: ")


def test_a_file_of_no_rank_costs_a_part_of_its_table(run):
    part = cut(part_of(run, "counters", "telemetry"))
    (line,) = open_path(run).damage
    assert line.startswith(f"left out: a part of table counters: {part}: ")


def test_several_damaged_files_of_a_rank_are_one_line(run):
    first = cut(part_of(run, "spans", "rank00001"))
    cut(part_of(run, "steps", "rank00001"))
    (line,) = open_path(run).damage
    assert str(first) in line
    assert line.endswith(", and 1 more file")


def test_a_run_without_a_readable_rank_is_refused_in_one_line(run):
    for part in (run / "spans").iterdir():
        cut(part)
    with pytest.raises(InputError, match="no rank is left, since 2 files of it cannot be read; copy the run"):
        open_path(run)


def test_large_tables_are_checked_by_their_footers(run, monkeypatch):
    monkeypatch.setattr(damaged, "MAX_CHECKED_BYTES", 0)
    spoil(part_of(run, "spans", "rank00000"))
    cut(part_of(run, "spans", "rank00001"))
    assert without_damaged(open_run(run)).manifest.ranks == [0]


def test_a_whole_run_is_as_it_was(run):
    opened = open_run(run)
    assert without_damaged(opened) is opened


def test_the_dashboard_opens_what_is_left_and_says_so(run, capsys):
    cut(part_of(run, "spans", "rank00001"))
    shown = offered_runs([str(run)], None).opened.loaded
    assert shown.run.manifest.ranks == [0]
    assert "left out: rank 1: " in capsys.readouterr().err
