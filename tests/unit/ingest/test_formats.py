"""Formats recognised by content, and importers of other distributions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpro.ingest.formats import FORMATS, registry, why_passed_over
from dpro.ingest.importer import import_sources
from dpro.plugins import installed
from dpro.schema import SPANS
from dpro.store import open_run
from tests.traces import cpu_op, write

PLUGIN = """
import polars as pl
from dpro.errors import InputError
from dpro.ingest.trace import RankTrace

class PanicException(BaseException):
    pass

class Ticks:
    name = "ticks"

    def matches(self, head):
        return head.startswith(b"TICKS")

    def read(self, path, *, rank=None):
        words = path.read_text().split()[1:]
        if "interrupted" in words:
            raise PanicException("no NumPy: PyErr { type: <class 'KeyboardInterrupt'> }")
        if "bad" in words:
            raise ValueError("no ticks\\nat all")
        known = int(words[0]) if rank is None else rank
        starts = [int(word) for word in words[1:]]
        spans = {"span_id": range(len(starts)), "rank": known, "name": "tick", "start_ns": starts}
        return [RankTrace(known, -1, {"spans": pl.DataFrame(spans).with_columns(duration_ns=pl.lit(1))})]

def broken():
    raise RuntimeError

nameless = object()
"""


def forget() -> None:
    installed.cache_clear()
    registry.cache_clear()


@pytest.fixture
def install(monkeypatch, tmp_path) -> Callable[[str], None]:
    """Makes a distribution with entry points that looks installed, also to processes that are started."""

    def make(entries: str) -> None:
        site = tmp_path / "site"
        info = site / "dpro_ticks-1.dist-info"
        info.mkdir(parents=True)
        importers = dict(line.split(" = ") for line in entries.splitlines())
        declared = f"EXTENSION = Extension(importers={importers!r})"
        (site / "dpro_ticks.py").write_text(f"{PLUGIN}\nfrom dpro.plugins import Extension\n{declared}\n")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dpro-ticks\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[dpro.extensions]\nticks = dpro_ticks:EXTENSION\n")
        monkeypatch.syspath_prepend(str(site))
        forget()

    yield make
    monkeypatch.undo()
    forget()
    sys.modules.pop("dpro_ticks", None)


def _ticks(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"TICKS {text}", encoding="utf-8")
    return path


@pytest.mark.parametrize("entry", ["dpro_ticks:Ticks", "dpro_ticks:TICKS"])
def test_an_importer_of_another_distribution_is_used(entry, install, tmp_path):
    install(f"ticks = {entry}".replace("TICKS", "Ticks"))
    _ticks(tmp_path / "in" / "b", "1 10 20")
    write(tmp_path / "in" / "rank0.json", [cpu_op("a", 1, 2)])
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    assert manifest.ranks == [0, 1]
    assert manifest.warnings == []
    assert manifest.sources["spans"] == "kineto, ticks"
    assert open_run(tmp_path / "run").table(SPANS).filter(rank=1)["start_ns"].to_list() == [10, 20]


def test_worker_processes_know_the_importers_too(install, tmp_path):
    install("ticks = dpro_ticks:Ticks")
    for rank in range(3):
        _ticks(tmp_path / "in" / str(rank), f"{rank} 10")
    assert import_sources([tmp_path / "in"], tmp_path / "run", jobs=2).ranks == [0, 1, 2]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("ticks = nowhere_at_all:Ticks", "ModuleNotFoundError"),
        ("ticks = dpro_ticks:missing", "AttributeError"),
        ("ticks = dpro_ticks:nameless", "it has no name, matches, read"),
    ],
)
def test_a_broken_importer_is_one_warning_and_the_rest_is_imported(entry, what, install, tmp_path):
    install(entry)
    write(tmp_path / "in" / "rank0.json", [cpu_op("a", 1, 2)])
    (warning,) = import_sources([tmp_path / "in"], tmp_path / "run").warnings
    assert what in warning
    assert warning.startswith("importer ticks (")


def test_two_importers_of_one_name_are_a_warning(install):
    install("a = dpro_ticks:Ticks\nb = dpro_ticks:Ticks")
    assert [importer.name for importer in registry().importers].count("ticks") == 1
    (warning,) = registry().warnings
    assert "there is a format of the name 'ticks' already" in warning


def test_importers_that_ask_for_more_evidence_are_tried_first_whatever_their_extension(install):
    install("ticks = dpro_ticks:Ticks")
    names = [importer.name for importer in registry().importers]
    signed, keyed, unstated = (
        ["nsys", "op-level parquet"],
        ["flight recorder", "pipeline timeline"],
        ["ticks"],
    )
    order = [*signed, *keyed, *unstated, "Perfetto", "kineto"]
    assert [name for name in names if name in order] == order


def test_an_importer_that_fails_on_a_file_is_one_line_that_names_it(install, tmp_path):
    install("ticks = dpro_ticks:Ticks")
    path = _ticks(tmp_path / "in" / "b", "bad")
    write(tmp_path / "in" / "rank0.json", [cpu_op("a", 1, 2)])
    (warning,) = import_sources([tmp_path / "in"], tmp_path / "run").warnings
    assert warning.startswith(f"left out: {path}: the ticks importer failed on it (ValueError: no ticks, ")
    assert "dpro_ticks.py" in warning


def test_ctrl_c_that_became_a_panic_ends_the_import(install, tmp_path):
    install("ticks = dpro_ticks:Ticks")
    _ticks(tmp_path / "in", "interrupted")
    with pytest.raises(KeyboardInterrupt):
        import_sources([tmp_path / "in"], tmp_path / "run")


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"", "empty or damaged files"),
        (b"SQLite format 3\0", "SQLite databases that are not traces"),
        (b'[{"model_chunk": 1, "mb_id": 2, "seq_id": 3}]', "timelines drawn from an analysis"),
        (b'{"a": 1}', "JSON files that are not traces"),
        (b"hello", "files that are not traces"),
    ],
)
def test_what_is_passed_over_has_a_name(head, what):
    assert registry().find(head) is None
    assert why_passed_over(Path("file"), head) == (what, "")


def test_readers_are_loaded_only_when_a_file_needs_them():
    code = (
        "import json, sys\n"
        "from dpro.ingest.formats import registry\n"
        "registry().find(b'hello')\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('dpro.ingest.')]))\n"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    readers = {importer.module for importer in FORMATS}
    assert len(readers) == len(FORMATS)
    assert readers.isdisjoint(loaded)
