"""Files, compressed files and archives as sources."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dpro.errors import InputError, MissingExtra
from dpro.ingest.kineto import read_trace
from dpro.ingest.reading.files import Source, blocks, heads, read_bytes, read_head
from tests.traces import cpu_op, write

CONTENT = bytes(range(256)) * 20_000


def _tar(path: Path, mode: str, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def _zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/", b"")
        for name, content in members.items():
            archive.writestr(name, content)
    return path


MEMBERS = {"job/rank1.json": CONTENT, "job/rank0.json.gz": gzip.compress(CONTENT)}
ARCHIVES = {
    "plain.tar": lambda path: _tar(path, "w", MEMBERS),
    "packed.tar.gz": lambda path: _tar(path, "w:gz", MEMBERS),
    "packed.zip": lambda path: _zip(path, MEMBERS),
}


def expand(path: Path) -> list[Source]:
    return sorted(source for source, _ in heads(path))


def _whole(source: Source) -> bytes:
    damage: list[str] = []
    content = b"".join(blocks(source, damage))
    assert damage == []
    return content


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])]
)
def test_a_file_is_one_source_whatever_packs_it(pack, tmp_path):
    path = tmp_path / "rank0.json"
    path.write_bytes(pack(CONTENT))
    (source,) = expand(path)
    assert (source.label, source.name) == (str(path), "rank0.json")
    assert _whole(source) == read_bytes(path) == source.open().read() == CONTENT
    assert source.head() == read_head(path) == CONTENT[: 1 << 16]


def test_zeros_behind_a_gzip_file_are_no_damage(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(CONTENT) + b"\0" * 600)
    assert read_bytes(path) == CONTENT


@pytest.mark.parametrize("name", ARCHIVES)
def test_the_members_of_an_archive_are_sources_in_order_of_their_names(name, tmp_path):
    path = ARCHIVES[name](tmp_path / name)
    sources = expand(path)
    assert [source.label for source in sources] == [
        f"{path}!job/rank0.json.gz",
        f"{path}!job/rank1.json",
    ]
    assert [source.name for source in sources] == ["rank0.json.gz", "rank1.json"]
    assert [_whole(source) == CONTENT for source in sources] == [True, True]
    assert [source.head() for source in sources] == [CONTENT[: 1 << 16]] * 2
    assert [head for _, head in heads(path)] == [CONTENT[: 1 << 16]] * 2


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_trace_is_read_from_an_archive(name, tmp_path):
    trace = write(tmp_path / "rank5.json.gz", [cpu_op("a", 1, 2)]).read_bytes()
    members = {"logs/rank5.json.gz": trace}
    path = tmp_path / name
    _zip(path, members) if name.endswith("zip") else _tar(
        path, "w:gz" if name.endswith("gz") else "w", members
    )
    (source,) = expand(path)
    read = read_trace(source)
    assert (read.rank, read.frames["spans"].height) == (5, 1)


def test_a_truncated_archive_still_gives_the_members_before_its_end(tmp_path):
    path = _tar(tmp_path / "packed.tar.gz", "w:gz", {"a": os.urandom(300_000), "b": os.urandom(300_000)})
    path.write_bytes(path.read_bytes()[:450_000])
    found, sources = heads(path), []
    with pytest.raises(InputError, match=r"damaged archive .* after 2 files"):
        sources.extend(source for source, _ in found)
    sources = [Source(member, path, member) for member in "ab"]
    assert len(_whole(sources[0])) == 300_000
    assert 100_000 < len(_whole(sources[1])) < 300_000


def test_zstandard_is_read_where_its_library_is(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "rank0.json.zst"
    path.write_bytes(zstandard.compress(CONTENT))
    assert read_bytes(path) == CONTENT


def test_zstandard_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "rank0.json.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"more")
    with pytest.raises(MissingExtra, match="zstandard"):
        read_bytes(path)


def test_a_damaged_file_shows_what_is_wrong_after_all_that_can_be_read(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(os.urandom(200_000))[:100_000])
    damage: list[str] = []
    content = b"".join(blocks(Source(str(path), path), damage))
    assert len(content) > 99_000
    assert damage == ["gzip stream cut short"]
    with pytest.raises(InputError, match="truncated or damaged"):
        read_bytes(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "empty file"), (b"\x1f\x8b\x08\x00garbage", "damaged"), (None, "cannot be read")],
)
def test_a_file_without_content_is_one_line(content, what, tmp_path):
    path = tmp_path / "rank0.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"rank0.json.*{what}"):
        read_bytes(path)


@pytest.mark.parametrize("content", [b"PK\x03\x04garbage", b"\0" * 257 + b"ustar" + b"\0" * 300])
def test_a_broken_archive_is_one_line(content, tmp_path):
    path = tmp_path / "packed"
    path.write_bytes(content)
    with pytest.raises(InputError, match="packed: damaged archive"):
        expand(path)
