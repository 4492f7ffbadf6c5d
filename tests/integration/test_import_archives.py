"""`dpro import` of archives, whole and damaged."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from dpro.ingest.importer import import_sources
from dpro.ingest.reading.files import Source
from dpro.schema import COLLECTIVES, SPANS, WORKERS
from dpro.store import open_run
from tests.commands import dpro, refused
from tests.traces import write_dump, write_rank


@pytest.mark.parametrize("suffix", ["zip", "tar", "tar.gz"])
def test_an_archive_is_the_files_in_it(suffix, tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path / "in", rank)
        write_dump(tmp_path / "in", rank)
    (tmp_path / "in" / "notes.txt").write_text("hello")
    form = {"zip": "zip", "tar": "tar", "tar.gz": "gztar"}[suffix]
    archive = shutil.make_archive(str(tmp_path / "traces"), form, tmp_path / "in")
    manifest = import_sources([Path(archive)], tmp_path / "run")
    plain = import_sources([tmp_path / "in"], tmp_path / "plain")
    assert manifest == plain
    assert manifest.skipped == {"files that are not traces": 1}
    for table in (SPANS, COLLECTIVES, WORKERS):
        assert open_run(tmp_path / "run").table(table).equals(open_run(tmp_path / "plain").table(table))


def test_a_damaged_member_of_an_archive_is_named_as_such(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    (tmp_path / "in" / "_dump_1").write_text('{"pg_config": {}, "entries": [3]}')
    archive = shutil.make_archive(str(tmp_path / "traces"), "zip", tmp_path / "in")
    (warning,) = import_sources([Path(archive)], tmp_path / "run").warnings
    assert warning.startswith(f"left out: {archive}!_dump_1: ")


def test_a_damaged_archive_among_others_is_left_out(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    (tmp_path / "in" / "more.zip").write_bytes(b"PK\x03\x04 and so on")
    (warning,) = import_sources([tmp_path / "in"], tmp_path / "run").warnings
    assert "more.zip: damaged archive" in warning
    line = refused(dpro("import", tmp_path / "in" / "more.zip", "-o", tmp_path / "other"), 1)
    assert "damaged archive" in line


def test_a_compressed_tar_is_opened_as_often_whatever_it_holds(monkeypatch, tmp_path):
    opened: list[str] = []
    real = Source.open
    monkeypatch.setattr(Source, "open", lambda source: opened.append(source.label) or real(source))
    for num_members in (2, 7):
        archive = tmp_path / f"{num_members}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for rank in range(num_members):
                tar.add(write_rank(tmp_path / "in", rank, num_members), f"job/rank{rank}.json.gz")
        run = tmp_path / "out" / f"run{num_members}"
        assert import_sources([archive], run, jobs=1).ranks == list(range(num_members))
    assert opened.count(str(tmp_path / "2.tar.gz")) == opened.count(str(tmp_path / "7.tar.gz"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"run2", "run7"}


def test_the_members_before_the_end_of_a_truncated_tar_are_imported_and_the_rest_is_said(tmp_path):
    packed, noise = tmp_path / "traces.tar.gz", tmp_path / "noise.json"
    noise.write_bytes(os.urandom(300_000))
    with tarfile.open(packed, "w:gz") as tar:
        for path in (write_rank(tmp_path / "in", 0), noise, write_rank(tmp_path / "in", 1)):
            tar.add(path, path.name)
    packed.write_bytes(packed.read_bytes()[:200_000])
    manifest = import_sources([packed], tmp_path / "run")
    assert manifest.ranks == [0]
    assert any("damaged archive" in line and "copy the file again" in line for line in manifest.warnings)
