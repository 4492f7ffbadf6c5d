"""Runs that lie elsewhere: copied once, and again when they change; local ones never."""

from __future__ import annotations

import sys

import pytest

import dpro
from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import info_document
from dpro.errors import InputError, MissingExtra, UsageError
from dpro.opening import open_path
from dpro.remote import is_url, local_copy
from tests.builders import cpu_job
from tests.stores import empty_store
from tests.traces import write_rank

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def store(tmp_path, monkeypatch):
    return empty_store(monkeypatch, tmp_path)


def _put(store, folder, place: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe(f"{place}/{path.relative_to(folder)}", path.read_bytes())


def test_a_run_elsewhere_opens_like_one_here_and_goes_by_its_url(store, tmp_path):
    here = cpu_job().write(tmp_path / "run")
    _put(store, here.path, "/bucket/run")
    there = open_path("memory://bucket/run")
    assert there.rows() == here.rows()
    assert there.label == "memory://bucket/run"
    assert info_document(Analysis(there)).run == "memory://bucket/run"
    assert dpro.open("memory://bucket/run").diagnose()["component"].to_list() == ["rank 1"]


def test_it_is_copied_once_until_it_changes(store, tmp_path, monkeypatch):
    _put(store, cpu_job().write(tmp_path / "run").path, "/bucket/run")
    first = local_copy("memory://bucket/run")
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get", None)
        assert local_copy("memory://bucket/run") == first
    store.pipe("/bucket/run/steps/more.parquet", b"more")
    again = local_copy("memory://bucket/run")
    assert again != first
    assert (again / "steps" / "more.parquet").read_bytes() == b"more"
    assert list((tmp_path / "cache" / "remote").glob(".*")) == []


def test_traces_elsewhere_are_imported(store, tmp_path):
    for rank in range(2):
        write_rank(tmp_path / "in", rank)
    _put(store, tmp_path / "in", "/bucket/traces")
    assert open_path("memory://bucket/traces").manifest.ranks == [0, 1]
    assert open_path("memory://bucket/traces/rank1.json.gz").manifest.ranks == [1]


def test_a_copy_that_fails_leaves_nothing_behind(store, tmp_path, monkeypatch):
    _put(store, cpu_job().write(tmp_path / "run").path, "/bucket/run")

    def fail(*_):
        raise OSError("the line is dead\nand more")

    monkeypatch.setattr(type(store), "get", fail)
    with pytest.raises(InputError, match=r"cannot be copied .*\(the line is dead\)"):
        local_copy("memory://bucket/run")
    assert list((tmp_path / "cache" / "remote").glob("*")) == []


def test_files_here_are_left_where_they_are(store, tmp_path):
    run = cpu_job().write(tmp_path / "a run")
    assert open_path((tmp_path / "a run").as_uri()).path == run.path
    assert not is_url(str(tmp_path))
    assert not is_url("C:/run")
    assert not (tmp_path / "cache").exists()


def test_a_local_path_does_not_load_fsspec(store, tmp_path, monkeypatch):
    cpu_job().write(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert open_path(tmp_path / "run").manifest.ranks == [0, 1, 2]
    with pytest.raises(MissingExtra, match=r"dpro-toolkit\[remote\]"):
        open_path("memory://bucket/run")


def test_a_file_that_leads_out_of_its_folder_is_refused(store, tmp_path, monkeypatch):
    found = {"/bucket/run/../../etc/x": {"name": "/bucket/run/../../etc/x", "size": 1}}
    monkeypatch.setattr(type(store), "find", lambda *_, **__: found)
    with pytest.raises(InputError, match="leads out of it"):
        local_copy("memory://bucket/run")


def test_what_cannot_be_reached_says_why(store):
    with pytest.raises(InputError, match=r"memory://bucket/nothing: no such file or folder"):
        open_path("memory://bucket/nothing")
    with pytest.raises(UsageError, match="nope"):
        open_path("nope://bucket/run")


@pytest.mark.skipif("s3fs" in sys.modules, reason="s3fs is loaded")
def test_a_store_whose_library_is_missing_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match="s3fs"):
        open_path("s3://bucket/run")


def test_what_only_looks_like_a_url_is_one_line(store):
    with pytest.raises(UsageError, match="is no URL"):
        local_copy("http://[")


def test_without_the_extension_a_url_is_one_line_that_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("dpro.remote.hooks_of", lambda occasion: iter(()))
    with pytest.raises(UsageError, match=r"^memory://bucket/run: URLs need dpro's extension `remote`"):
        open_path("memory://bucket/run")
    cpu_job().write(tmp_path / "run")
    assert open_path(f"file://{tmp_path / 'run'}").path == tmp_path / "run"
