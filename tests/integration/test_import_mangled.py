"""Whole folders of ranks, mangled: an import makes a run or says one line, and never fails otherwise."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import info_document
from dpro.cli.info import in_words
from dpro.errors import DproError
from dpro.ingest.importer import import_sources
from dpro.schema import TABLES
from dpro.store import Manifest, open_run
from tests.traces import write_rank

OF_RANKS = [table for table in TABLES.values() if "rank" in table.columns]  # requests are of a replica
RANKS = 4
# A mishap of a folder: the name of a function below, the rank that it affects, and a number for it to use.
MISHAPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["swap", "duplicate", "drop", "offset", "truncate", "cut_text", "flip", "claim", "blank", "nest"]
        ),
        st.integers(0, RANKS - 1),
        st.integers(0, 1 << 20),
    ),
    min_size=1,
    max_size=4,
)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json.gz"


def _edit(path: Path, **facts: Any) -> None:
    """Change facts of a trace that is whole."""
    try:
        document = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError):
        return
    path.write_bytes(gzip.compress(json.dumps(document | facts).encode()))


def swap(folder: Path, rank: int, number: int) -> None:
    one, other = _path(folder, rank), _path(folder, number % RANKS)
    if one.exists() and other.exists():
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)


def duplicate(folder: Path, rank: int, number: int) -> None:
    if _path(folder, rank).exists():
        shutil.copy(_path(folder, rank), folder / f"copy{number}.json.gz")


def drop(folder: Path, rank: int, number: int) -> None:
    _path(folder, rank).unlink(missing_ok=True)


def offset(folder: Path, rank: int, number: int) -> None:
    if _path(folder, rank).exists():
        _edit(_path(folder, rank), baseTimeNanoseconds=(number - (1 << 19)) << 43)


def truncate(folder: Path, rank: int, number: int) -> None:
    path = _path(folder, rank)
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: number % (len(data) + 1)])


def cut_text(folder: Path, rank: int, number: int) -> None:
    """As `truncate`, but of the text: the compressed stream is whole."""
    path = _path(folder, rank)
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError):
        return
    path.write_bytes(gzip.compress(data[: number % (len(data) + 1)]))


def flip(folder: Path, rank: int, number: int) -> None:
    """One byte of the text becomes another."""
    path = _path(folder, rank)
    try:
        data = bytearray(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError):
        return
    if data:
        data[number % len(data)] = number % 256
        path.write_bytes(gzip.compress(bytes(data)))


def claim(folder: Path, rank: int, number: int) -> None:
    """A file says that it is of another rank, or of a world of another size."""
    if _path(folder, rank).exists():
        _edit(_path(folder, rank), distributedInfo={"rank": number % 7 - 1, "world_size": number % 9 - 2})


def blank(folder: Path, rank: int, number: int) -> None:
    _path(folder, rank).write_bytes(b"" if number % 2 else b"[]")


def nest(folder: Path, rank: int, number: int) -> None:
    (folder / "deeper").mkdir(exist_ok=True)
    if _path(folder, rank).exists():
        _path(folder, rank).rename(folder / "deeper" / f"{number}.json.gz")


def _imported(folder: Path, run: Path) -> Manifest | str:
    """The manifest, or the line that says why there is none."""
    try:
        return import_sources([folder], run)
    except DproError as error:
        return str(error)


@pytest.mark.slow
@settings(max_examples=20)
@given(mishaps=MISHAPS)
def test_a_mangled_folder_is_a_run_or_one_line(mishaps):
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "in", Path(name) / "out"
        for rank in range(RANKS):
            write_rank(folder, rank, RANKS)
        for mishap, rank, number in mishaps:
            globals()[mishap](folder, rank, number)
        manifest = _imported(folder, out / "run")
        if isinstance(manifest, str):
            assert "\n" not in manifest
            assert not out.exists() or list(out.iterdir()) == []
            return
        assert all("\n" not in warning for warning in manifest.warnings)
        run = open_run(out / "run")
        assert run.manifest == manifest
        assert in_words(info_document(Analysis(run)))
        for table in OF_RANKS:
            rows = run.table(table)
            assert set(rows["rank"].unique()) <= set(manifest.ranks)
        spans = run.table(TABLES["spans"])
        assert spans.select("rank", "span_id").is_unique().all()


@pytest.mark.slow
@settings(max_examples=8)
@given(mishaps=MISHAPS)
def test_ranks_that_nothing_happened_to_are_as_they_were(mishaps):
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "in", Path(name) / "out"
        for rank in range(RANKS + 1):
            write_rank(folder, rank, RANKS + 1)
        import_sources([folder], out / "before")
        for mishap, rank, number in mishaps:
            if mishap not in ("claim", "flip", "cut_text"):  # these may make one rank pass for another
                globals()[mishap](folder, rank, number)
        after = _imported(folder, out / "after")
        if isinstance(after, str):
            assert "both are rank" in after
            return
        for table in OF_RANKS:
            whole, mangled = (
                open_run(out / name).table(table).filter(rank=RANKS) for name in ("before", "after")
            )
            assert whole.equals(mangled)
