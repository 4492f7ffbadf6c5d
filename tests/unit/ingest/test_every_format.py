"""What holds for every importer: files with nothing in them, with one row, and damaged ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from dpro.errors import DproError
from dpro.ingest.formats import Importer, registry
from dpro.ingest.importer import import_sources
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform
from dpro.store import open_run
from tests.fuzz.seeds import SEEDS, format_of

SIZES = {"empty": 0, "one row": 1, "some rows": 5}


@pytest.fixture(params=SEEDS, ids=lambda name: name.replace(" ", "_"))
def seed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def read(path: Path, importer: Importer | None = None) -> list[RankTrace] | DproError:
    importer = importer or registry().find(path.read_bytes()[:65536])
    assert importer is not None
    try:
        traces = importer.read(path)
    except DproError as error:
        return error
    return [traces] if isinstance(traces, RankTrace) else traces


def is_one_line_about(path: Path, error: DproError) -> bool:
    return str(path) in str(error) and "\n" not in str(error)


def test_every_format_has_seeds():
    own = {each.name for each in registry().importers if type(each).__module__.startswith("dpro.")}
    assert own == {format_of(name) for name in SEEDS}


@pytest.mark.parametrize("rows", SIZES.values(), ids=SIZES)
def test_importers_give_declared_columns_in_declared_types_however_few_rows_there_are(tmp_path, seed, rows):
    path = tmp_path / "rank0"
    path.write_bytes(SEEDS[seed](0, rows))
    assert registry().find(path.read_bytes()[:65536]).name == format_of(seed)
    traces = read(path)
    if isinstance(traces, DproError):
        assert rows == 0
        assert is_one_line_about(path, traces)
        return
    assert traces
    for trace in traces:
        assert trace.rank in (-1, 0, *range(rows))
        for name, frame in trace.frames.items():
            assert frame.schema.items() <= TABLES[name].dtypes.items()
            assert conform(TABLES[name], frame).schema == TABLES[name].dtypes
    assert not rows or any(frame.height for trace in traces for frame in trace.frames.values())


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_file_that_is_cut_short_is_read_in_part_or_refused_in_one_line(tmp_path, seed, kept, packed):
    content = SEEDS[seed](0, 5)
    whole = gzip.compress(content) if packed else content
    path = tmp_path / "rank0"
    path.write_bytes(whole[: int(kept * len(whole))])
    traces = read(path, registry().named(format_of(seed)))
    assert not isinstance(traces, DproError) or is_one_line_about(path, traces)


def test_a_rank_with_nothing_in_it_takes_nothing_from_the_others(tmp_path, seed):
    for rank, rows in enumerate((0, 5)):
        folder = tmp_path / "in" / f"job{rank}"  # Primus' files look at those beside them
        folder.mkdir(parents=True)
        (folder / f"rank{rank}").write_bytes(SEEDS[seed](rank, rows))
    manifest = import_sources([tmp_path / "in"], tmp_path / "run", jobs=1)
    run = open_run(tmp_path / "run")
    assert 1 in manifest.ranks or format_of(seed) == "NCCL RAS"  # which describes all ranks in one file
    assert any(run.rows().values())
    for table in TABLES.values():
        assert run.table(table).schema == table.dtypes
