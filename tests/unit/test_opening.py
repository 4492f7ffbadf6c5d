"""What is said of a path that names no run: what may have been meant, and what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpro import plugins
from dpro.analysis.analysis import Analysis
from dpro.collectors.launch.recording import Launch
from dpro.errors import InputError, Unanswerable
from dpro.ingest.formats import registry
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


def test_a_folder_that_vanishes_while_it_is_scanned_costs_nothing(tmp_path, monkeypatch):
    write_rank(tmp_path / "traces", 0)
    (tmp_path / "traces" / "gone").mkdir()
    (tmp_path / "traces" / "gone" / "file").touch()
    scan = os.scandir

    def vanishing(path: Any = ".") -> Any:
        if str(path).endswith("gone"):
            shutil.rmtree(path, ignore_errors=True)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert open_path(tmp_path / "traces").manifest.ranks == [0]


def test_a_folder_of_runs_is_answered_with_their_names(tmp_path):
    for name in ("b", "a"):
        cpu_job().write(tmp_path / name)
    (tmp_path / "train.py").write_text("import torch")
    assert _said(tmp_path) == f"{tmp_path}: 2 runs here; choose one: {tmp_path / 'a'}, {tmp_path / 'b'}"
    write_rank(tmp_path / "in", 0)
    with_traces = open_path(tmp_path).manifest
    assert with_traces.ranks == [0]
    assert with_traces.warnings[0] == "only traces are read, not 2 runs in the same place: a, b"


def test_a_folder_with_a_run_that_is_being_recorded_is_answered_with_its_name(tmp_path):
    cpu_job().write(tmp_path / "b")
    recording = Launch(tmp_path / "a", "host-1-abcdef")
    recording.marker.parent.mkdir(parents=True)
    recording.marker.touch()
    write_rank(recording.raw / "host-1", 0)
    assert _said(tmp_path) == f"{tmp_path}: 2 runs here; choose one: {tmp_path / 'a'}, {tmp_path / 'b'}"


def test_a_run_of_calls_alone_says_what_it_is_enough_for(tmp_path):
    job = Job(2)
    job.call((0, 1), (0, 1))
    write_part(tmp_path, COLLECTIVES, "rows", _frame(COLLECTIVES, job.rows))
    write_manifest(tmp_path, Manifest(world_size=2, ranks=[0, 1]))
    with pytest.raises(Unanswerable, match="calls are enough for `dpro diagnose`"):
        _ = Analysis(open_run(tmp_path)).built


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", os.fsdecode(b"\xff"), "file.json/deeper"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path, name):
    (tmp_path / "file.json").touch()
    with pytest.raises(InputError) as caught:
        open_path(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_traces_whose_names_no_text_can_hold_are_imported_once(tmp_path):
    folder = tmp_path / os.fsdecode(b"traces\xff")
    write_rank(folder, 0).rename(folder / os.fsdecode(b"rank0\xfe.json.gz"))
    assert open_path(folder).path == open_path(folder).path


def test_what_is_neither_file_nor_folder_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(InputError, match="a device, pipe or socket"):
            open_path(path)


@pytest.fixture
def ticks(tmp_path, monkeypatch) -> Iterator[Path]:
    """The reader of an extension that is installed."""
    package = tmp_path / "site" / "my_ticks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from dpro.plugins import Extension\n"
        "EXTENSION = Extension(importers={'ticks': 'my_ticks.importers:TICKS'})\n"
    )
    (package / "importers.py").write_text(
        "from dpro.ingest.formats import Format\n"
        "TICKS = Format('ticks', 'my_ticks.reader', 'read', (b'TICKS',))\n"
    )
    (package / "reader.py").write_text("def read(path, *, rank=None): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    known = [*plugins.entries(), plugins.Entry("ticks", "my_ticks:EXTENSION")]
    monkeypatch.setattr(plugins, "entries", lambda: known)
    for cached in (plugins.installed, registry):
        cached.cache_clear()
    yield package / "reader.py"
    monkeypatch.undo()
    for cached in (plugins.installed, registry):
        cached.cache_clear()


def test_traces_are_imported_again_when_the_code_of_an_extensions_reader_changes(ticks, tmp_path):
    assert "ticks" in {importer.name for importer in registry().importers}
    write_rank(tmp_path / "in", 0)
    before = open_path(tmp_path / "in").path
    assert open_path(tmp_path / "in").path == before
    ticks.write_text("def read(path, *, rank=None): return []\n")
    assert open_path(tmp_path / "in").path != before
