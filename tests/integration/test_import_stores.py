"""Imports into object stores: one in memory, and a real S3 server that several shards write to at once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from dpro.errors import InputError, UsageError
from dpro.extensions.remote.imports import import_to_store
from dpro.ingest.importer import import_sources
from dpro.ingest.shards import Shard, WaitingImport, stage_part
from dpro.opening import open_path
from tests.integration.test_import_parallel import digests
from tests.stores import empty_store
from tests.traces import write_rank

fsspec = pytest.importorskip("fsspec")
URL = "memory://bucket/run"
RANKS = 5


@pytest.fixture
def store(monkeypatch, tmp_path):
    return empty_store(monkeypatch, tmp_path)


@pytest.fixture
def source(tmp_path):
    """Traces of some ranks."""
    for rank in range(RANKS):
        write_rank(tmp_path / "in", rank, RANKS)
    return tmp_path / "in"


@pytest.fixture
def expected(source, tmp_path):
    """Digests of the run that is made in a folder."""
    import_sources([source], tmp_path / "expected")
    return digests(tmp_path / "expected")


def _import(source, here, shard=None, url=URL):
    here.mkdir()
    return import_to_store([source], url, shard, here)


def _digests(store, root: str) -> dict[str, str]:
    """sha256 of every file below a path of a store."""
    files = {path.removeprefix(root).lstrip("/"): store.cat_file(path) for path in store.find(root)}
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def test_a_run_in_a_store_has_the_same_bytes_as_one_in_a_folder(store, source, expected, tmp_path):
    run = _import(source, tmp_path / "here")
    assert run.label == URL
    assert _digests(store, "/bucket/run") == expected
    assert open_path(URL).manifest == run.manifest


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 0, 2]])
def test_shards_in_any_order_make_the_same_bytes(store, source, expected, tmp_path, order):
    outcomes = [_import(source, tmp_path / f"here{n}", Shard(index, 3)) for n, index in enumerate(order)]
    assert all(isinstance(outcome, WaitingImport) for outcome in outcomes[:-1])
    assert outcomes[0].missing == [index for index in range(3) if index != order[0]]
    assert outcomes[-1].manifest.ranks == list(range(RANKS))
    assert _digests(store, "/bucket/run") == expected
    assert store.find("/bucket/run.importing") == []


def test_two_shards_that_end_together_both_have_the_run(store, source, expected, tmp_path, monkeypatch):
    # What the first has staged is gone when the second fetches it, since a third has made the run meanwhile.
    _import(source, tmp_path / "first", Shard(0, 2))
    kept = {path: store.cat_file(path) for path in store.find("/bucket/run.importing")}
    _import(source, tmp_path / "second", Shard(1, 2))
    made = {path: store.cat_file(path) for path in store.find("/bucket/run")}
    store.rm("/bucket/run", recursive=True)
    for path, content in kept.items():
        store.pipe_file(path, content)
    real = type(store).get

    def overtaken(self, *arguments, **options):
        store.rm("/bucket/run.importing", recursive=True)
        for path, content in made.items():
            store.pipe_file(path, content)
        return real(self, *arguments, **options)

    monkeypatch.setattr(type(store), "get", overtaken)
    run = _import(source, tmp_path / "late", Shard(1, 2))
    assert run.manifest.ranks == list(range(RANKS))
    assert _digests(store, "/bucket/run") == expected


def test_other_sources_and_an_existing_run_are_refused(store, source, tmp_path):
    _import(source, tmp_path / "first", Shard(0, 2))
    write_rank(source, RANKS, RANKS + 1)
    with pytest.raises(UsageError, match=r"^memory://.*/run\.importing: started as .*same sources"):
        _import(source, tmp_path / "second", Shard(1, 2))
    store.pipe("/bucket/other/manifest.json", b"{}")
    with pytest.raises(UsageError, match="exists already"):
        _import(source, tmp_path / "third", url="memory://bucket/other")


@pytest.mark.parametrize("name", ["run*", "run[1]", "run?", "..", "a/./run"])
def test_a_place_that_names_others_too_is_refused(store, source, tmp_path, name):
    _import(source, tmp_path / "first", Shard(0, 2), url="memory://bucket/run1")
    staged = store.find("/bucket")
    with pytest.raises(UsageError, match="which match other paths, too"):
        _import(source, tmp_path / "second", Shard(0, 1), url=f"memory://bucket/{name}")
    assert store.find("/bucket") == staged


def test_a_run_may_be_called_as_staged_files_are(store, source, expected, tmp_path):
    _import(source, tmp_path / "here", Shard(0, 1), url="memory://bucket/.importing")
    assert _digests(store, "/bucket/.importing") == expected


def test_shards_are_to_be_run_again_if_what_they_staged_is_gone(store, source, expected, tmp_path):
    _import(source, tmp_path / "first", Shard(0, 2))
    store.rm(store.find("/bucket/run.importing/files")[0])
    with pytest.raises(InputError, match="run every shard again"):
        _import(source, tmp_path / "second", Shard(1, 2))
    _import(source, tmp_path / "third", Shard(0, 2))
    assert _digests(store, "/bucket/run") == expected


def test_other_sources_are_refused_while_the_first_shard_reads_its_files(
    store, source, tmp_path, monkeypatch
):
    def reading(*given):
        with pytest.raises(UsageError, match="same sources"):
            _import(source, tmp_path / "second", Shard(1, 3))
        return stage_part(*given)

    monkeypatch.setattr("dpro.extensions.remote.imports.stage_part", reading)
    assert isinstance(_import(source, tmp_path / "first", Shard(0, 2)), WaitingImport)


def test_a_store_that_fails_is_one_line_and_leaves_no_run(store, source, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("quota exceeded\nand more")

    monkeypatch.setattr(type(store), "put", full)
    with pytest.raises(InputError, match=r"run: cannot be read or written \(quota exceeded\)"):
        _import(source, tmp_path / "here")
    assert not store.exists("/bucket/run/manifest.json")


@pytest.mark.slow
def test_shards_write_to_an_s3_server_at_once(source, expected, tmp_path, monkeypatch):
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    served = server.ThreadedMotoServer(port=0)
    served.start()
    try:
        host, port = served.get_host_and_port()
        facts = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
            "DPRO_CACHE": str(tmp_path / "cache"), "no_proxy": "*",
        }  # fmt: skip
        for name, value in facts.items():
            monkeypatch.setenv(name, value)
        s3 = fsspec.filesystem("s3", skip_instance_cache=True)
        s3.mkdir("bucket")
        s3.put(str(source), "bucket/traces", recursive=True)
        command = [sys.executable, "-m", "dpro", "import", source, "-o", "s3://bucket/runs/today"]
        running = [
            subprocess.Popen(
                [*command, "--shard", f"{index}/3"], stderr=subprocess.PIPE, text=True, env=os.environ
            )
            for index in range(3)
        ]
        for process in running:
            assert process.wait(timeout=240) == 0, process.stderr.read()
        s3.invalidate_cache()
        assert _digests(s3, "bucket/runs/today") == expected
        assert s3.find("bucket/runs/today.importing") == []
        whole = [sys.executable, "-m", "dpro", "import", "s3://bucket/traces", "-o", "s3://bucket/again"]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "s3://bucket/again: 5 of 5 ranks" in done.stdout
        assert open_path("s3://bucket/again").manifest.ranks == list(range(RANKS))
    finally:
        served.stop()
