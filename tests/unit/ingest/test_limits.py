"""Small files that would take all memory, or for ever: refused in one line; what only looks large is read."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile

import pytest
import zstandard

from dpro import limits
from dpro.errors import DproError, InputError
from dpro.ingest import flight_recorder, kineto
from dpro.ingest.importer import import_sources
from dpro.ingest.reading import files
from dpro.ingest.reading.files import Source, blocks, heads, read_bytes
from tests.fuzz.seeds import SEEDS
from tests.traces import write_rank

HEADS = {
    "kineto": b'{"schemaVersion": 1, "traceEvents": [',
    "flight recorder": b'{"pg_config": {}, "entries": [',
    "NCCL Inspector": b'{"coll_perf": {',
    "NCCL RAS": b'{"communicators_count": 1, "communicators": [',
    "execution trace": b'{"rf_id": 1, "nodes": [',
    "pipeline timeline": b'[{"microbatch": 1},',
    "Perfetto": 3 * b"\n\x02\x08\x01",
    "nsys": b"SQLite format 3\0 StringIds",
}


def zipped(content: bytes, method: int) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", method) as opened:
        opened.writestr("rank0", content)
    return archive.getvalue()


def tarred(content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as opened:
        info = tarfile.TarInfo("rank0")
        info.size = len(content)
        opened.addfile(info, io.BytesIO(content))
    return archive.getvalue()


PACKED = {
    "gz": lambda content: gzip.compress(content, 9),
    "zst": lambda content: zstandard.compress(content, 19),
    "zip": lambda content: zipped(content, zipfile.ZIP_DEFLATED),
    "zip with xz": lambda content: zipped(content, zipfile.ZIP_LZMA),
    "gz in zip": lambda content: zipped(gzip.compress(content), zipfile.ZIP_STORED),
    "tar.gz": lambda content: gzip.compress(tarred(content)),
    "tar.zst": lambda content: zstandard.compress(tarred(content)),
}


@pytest.fixture
def small_limits(monkeypatch):
    """The same limits, at a size that takes no time."""
    monkeypatch.setattr(limits, "MIN_BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(files, "MAX_BLANK_BYTES", 1 << 22)


@pytest.mark.few(14)
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_bomb_is_one_line_and_the_other_ranks_are_imported(tmp_path, small_limits, head, packed):
    folder = tmp_path / "in"
    write_rank(folder, 1)
    (folder / "rank0").write_bytes(packed(head + b"[1],[1]," * (1 << 19)))
    manifest = import_sources([folder], tmp_path / "run", jobs=1)
    assert manifest.ranks == [1]
    left = [line for line in manifest.warnings if line.startswith("left out")]
    assert left
    assert all(f"{folder}/rank0" in line and "internal error" not in line for line in left)


def test_a_bomb_says_how_far_it_swells(tmp_path, small_limits):
    path = tmp_path / "rank0"
    path.write_bytes(gzip.compress(b" " * (1 << 21)))
    with pytest.raises(InputError, match=r"rank0: expands from .* to more than .*, over 400 times"):
        list(blocks(Source(str(path), path), []))


def test_what_shrinks_a_hundredfold_is_read(tmp_path, small_limits):
    """Steps that are the same over and over."""
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1}
    text = b'{"traceEvents":[' + b",".join([json.dumps(event).encode()] * 50_000) + b"]}"
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(text, 9))
    assert 100 < len(text) / path.stat().st_size < limits.MAX_EXPANSION
    assert kineto.read_trace(path).frames["spans"].height == 50_000


@pytest.mark.parametrize("filler", [b"\0", b" "], ids=["zeros", "blanks"])
def test_what_is_nothing_but_blanks_for_long_is_damage(tmp_path, small_limits, filler):
    path = tmp_path / "rank0"
    path.write_bytes(b'{"pg_config": {}, "entries": [' + filler * (1 << 23))
    with pytest.raises(InputError, match="nothing but blanks or zeros"):
        flight_recorder.read_dump(path)
    events = b'{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"pid":1,"tid":1},'
    path.write_bytes(events + filler * (1 << 23))
    trace = kineto.read_trace(path)
    assert trace.frames["spans"].height == 1
    assert any("nothing but blanks or zeros" in warning for warning in trace.warnings)


def test_a_file_of_blanks_is_not_held_in_memory(tmp_path):
    path = tmp_path / "rank0"
    with path.open("wb") as file:
        file.truncate(8 << 30)  # takes no room on the disk
    with pytest.raises(InputError, match="no trace found"):
        import_sources([path], tmp_path / "run")


def test_facts_without_an_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dpro.ingest.kineto.events.MAX_FACTS_BYTES", 1 << 20)
    path = tmp_path / "rank0"
    path.write_bytes(b'{"schemaVersion": 1, "x": "' + os.urandom(1 << 20).hex().encode())
    with pytest.raises(InputError, match="no list of traceEvents in its first"):
        kineto.read_trace(path)


def test_an_event_of_megabytes_is_not_kept(tmp_path):
    """What follows it is read."""
    event = b'{"ph":"X","cat":"cpu_op","name":"%s","ts":1,"dur":1,"pid":1,"tid":1}'
    path = tmp_path / "rank0"
    names = (b"a", b"x" * (9 << 20), b"b")
    path.write_bytes(b'{"traceEvents":[' + b",\n".join(event % name for name in names) + b"]}")
    trace = kineto.read_trace(path)
    assert trace.frames["spans"]["name"].to_list() == ["a", "b"]


def test_many_small_values_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MIN_DECODED_BYTES", 1 << 20)
    path = tmp_path / "rank0"
    path.write_bytes(gzip.compress(b'{"pg_config": {}, "entries": [' + b"[]," * (1 << 19)))
    with pytest.raises(InputError, match=r"rank0: .* would take some .* of memory"):
        read_bytes(path)
    path.write_bytes(b'{"pg_config": {}, "entries": [' + b"[]," * (1 << 19))  # as large as it looks
    assert read_bytes(path)


def test_a_format_that_is_read_as_a_whole_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_WHOLE_BYTES", 1000)
    (tmp_path / "rank0").write_bytes(b"{" * 2000)
    with pytest.raises(InputError, match="too large to read as a whole"):
        read_bytes(tmp_path / "rank0")


# What archives may call their members.


@pytest.mark.parametrize(
    "name", ["a/..", "..", "../rank0", "/rank0", "a\nb/rank0", "x" * 300, "rank0\udcff", "rank0/", "."]
)
@pytest.mark.parametrize("packed", [False, True], ids=["tar", "tar.gz"])
def test_a_member_may_be_called_anything(tmp_path, name, packed):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as opened:
        for called, rank in ((name, 0), ("job/rank1", 1)):
            content = SEEDS["flight recorder (pickle)"](rank, 3)
            info = tarfile.TarInfo(called)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    (tmp_path / "in").mkdir()
    data = archive.getvalue()
    (tmp_path / "in" / "dumps").write_bytes(gzip.compress(data) if packed else data)
    manifest = import_sources([tmp_path / "in"], tmp_path / "run", jobs=1)
    assert 1 in manifest.ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "run"]


def _tar_header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("rank0")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _zip_with_a_name_in_broken_utf8() -> bytes:
    return (
        zipped(b"{}", zipfile.ZIP_STORED)
        .replace(b"rank0", b"ran\xff0")
        .replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x00\x08")
    )


ARCHIVES: dict[str, bytes] = {
    "a header of gigabytes": _tar_header(tarfile.XHDTYPE, 8 << 30) + b"\0" * (1 << 16),
    "a name of gigabytes": _tar_header(tarfile.GNUTYPE_LONGNAME, 8 << 30) + b"\0" * (1 << 16),
    "a link to itself": _tar_header(tarfile.SYMTYPE, 0) + b"\0" * 1024,
    "a FIFO": _tar_header(tarfile.FIFOTYPE, 0) + b"\0" * 1024,
    "a device": _tar_header(tarfile.CHRTYPE, 0) + b"\0" * 1024,
    "a zip name in broken UTF-8": _zip_with_a_name_in_broken_utf8(),
    "xz with a window of gigabytes": zipped(b"{}" * 99, zipfile.ZIP_LZMA).replace(
        b"\x5d\x00\x00\x80\x00", b"\x5d\xff\xff\xff\xff"
    ),
    "damaged xz": zipped(b'{"traceEvents":[]}' * 99, zipfile.ZIP_LZMA)[:60] + b"x" * 20,
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("content", ARCHIVES.values(), ids=ARCHIVES)
def test_an_odd_archive_takes_nothing_from_the_other_files(tmp_path, content, packed):
    folder = tmp_path / "in"
    write_rank(folder, 1)
    (folder / "archive").write_bytes(gzip.compress(content) if packed else content)
    manifest = import_sources([folder], tmp_path / "run", jobs=1)
    assert manifest.ranks == [1]
    assert all("\n" not in line and "internal" not in line for line in manifest.warnings)


def test_an_archive_of_too_many_members_is_refused_after_those_before(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_MEMBERS", 2)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for rank in range(4):
            archive.writestr(f"rank{rank}", b"{}")
    found = heads(tmp_path / "a.zip")
    assert [next(found)[0].member for _ in range(2)] == ["rank0", "rank1"]
    with pytest.raises(InputError, match="more than 2 members"):
        next(found)


def test_what_is_no_file_is_never_opened(tmp_path):
    """A pipe would wait for ever, a device may never end."""
    folder = write_rank(tmp_path / "in", 1).parent
    os.mkfifo(folder / "rank0")
    (folder / "rank2").symlink_to("/dev/zero")
    (folder / "rank3").symlink_to(folder / "rank0")
    (folder / "rank4").symlink_to(folder / "rank4")
    assert import_sources([folder], tmp_path / "run", jobs=1).ranks == [1]
    for name in ("rank0", "rank2", "rank3", "rank4"):
        with pytest.raises(DproError, match=name):
            import_sources([folder / name], tmp_path / "other")


def test_names_that_no_text_can_hold_are_read_with_a_warning(tmp_path):
    folder = tmp_path / os.fsdecode(b"in\xff")
    write_rank(folder, 0).rename(folder / os.fsdecode(b"rank\xfe0.json.gz"))
    (folder / os.fsdecode(b"rank\xfe1")).write_bytes(b'{"traceEvents": [')
    manifest = import_sources([folder], tmp_path / "run", jobs=1)
    assert manifest.ranks == [0]
    assert any("1: JSON cut short" in line for line in manifest.warnings)


def test_what_can_be_read_is_said_in_a_line_where_nothing_is_a_trace(tmp_path):
    (tmp_path / "notes.txt").write_text("no trace")
    with pytest.raises(InputError) as caught:
        import_sources([tmp_path], tmp_path / "run")
    assert "; dpro reads PyTorch profiler traces and " in str(caught.value)
    assert str(caught.value).endswith(" other formats (docs/formats.md)")
