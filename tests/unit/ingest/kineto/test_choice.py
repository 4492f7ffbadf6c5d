"""Which traces are scanned."""

from __future__ import annotations

import gzip
import sys

import pytest

from dpro import compiled
from dpro.ingest.kineto import reader
from dpro.ingest.kineto.columns import Columns, Memory
from dpro.ingest.kineto.reader import scanner_of, text_bytes
from dpro.ingest.reading.files import Source


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch):
    monkeypatch.setattr(reader, "seen_bytes", 0)
    monkeypatch.setattr(reader, "MIN_FILE_BYTES", 1)
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)
    monkeypatch.setattr(compiled, "is_kept", lambda _: True)


def _source(path, content: bytes) -> Source:
    path.write_bytes(content)
    return Source(path.name, path)


def test_the_content_of_a_compressed_file_counts(tmp_path):
    text = b"[" + b" " * 100_000 + b"]"
    assert text_bytes(_source(tmp_path / "rank0.json", text)) == len(text)
    assert text_bytes(_source(tmp_path / "rank0.json.gz", gzip.compress(text))) == len(text)
    assert text_bytes(_source(tmp_path / "rank0.zst", b"\x28\xb5\x2f\xfd" + bytes(96))) == 400
    assert text_bytes(Source("absent", tmp_path / "absent")) == 0
    assert text_bytes(Source("member", tmp_path / "rank0.json", "member")) == 0


def test_small_files_are_decoded_and_large_ones_scanned(tmp_path, monkeypatch):
    source = _source(tmp_path / "rank0.json", bytes(1000))
    monkeypatch.setattr(reader, "MIN_BYTES", 1001)
    assert scanner_of(source, Columns(), Memory()) is None
    monkeypatch.setattr(reader, "MIN_BYTES", 1000)
    assert scanner_of(source, Columns(), Memory()) is not None


def test_a_process_that_has_seen_many_files_scans_the_next_ones_unless_they_are_tiny(tmp_path, monkeypatch):
    source, tiny = _source(tmp_path / "rank0.json", bytes(400)), _source(tmp_path / "rank1.json", bytes(9))
    monkeypatch.setattr(reader, "MIN_BYTES", 1000)
    monkeypatch.setattr(reader, "MIN_FILE_BYTES", 10)
    scanned = [scanner_of(each, Columns(), Memory()) is not None for each in [source] * 4 + [tiny]]
    assert scanned == [False, False, True, True, False]


def test_a_process_that_has_numba_scans_small_files_too(tmp_path, monkeypatch):
    source = _source(tmp_path / "rank0.json", bytes(1000))
    assert scanner_of(source, Columns(), Memory()) is None
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    assert scanner_of(source, Columns(), Memory()) is not None


def test_files_are_decoded_until_a_process_beside_has_compiled_the_scanner(tmp_path, monkeypatch):
    source, begun = _source(tmp_path / "rank0.json", bytes(1000)), []
    monkeypatch.setattr(reader, "MIN_BYTES", 0)
    monkeypatch.setattr(compiled, "is_kept", lambda _: bool(begun))
    monkeypatch.setattr(compiled, "run_beside", begun.append)
    assert scanner_of(source, Columns(), Memory()) is None
    assert begun == ["dpro.ingest.kineto.scanner"]
    assert scanner_of(source, Columns(), Memory()) is not None


def test_without_numba_every_file_is_decoded(tmp_path, monkeypatch):
    source = _source(tmp_path / "rank0.json", bytes(1000))
    monkeypatch.setattr(reader, "MIN_BYTES", 0)
    for module in ("dpro.ingest.kineto.scanner", "dpro.ingest.kineto.scan_kernel", "dpro.compiled"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert scanner_of(source, Columns(), Memory()) is None
