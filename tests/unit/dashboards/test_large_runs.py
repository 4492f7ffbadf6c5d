"""Views of runs whose ranks are condensed, against those of the whole graph."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal

from dpro.analysis import graphs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.views import collectives, matrix, whatif
from dpro.dashboards.views.whatif import prediction_info
from dpro.errors import Unanswerable
from dpro.extensions.fabric.view import traffic_of
from dpro.replay.whatif.registry import parse_edit
from dpro.store import Run
from tests.builders import gpu_job
from tests.fabrics import crossing_pairs

TABLES = [
    *(collectives.VIEW.tables[name] for name in ("transfers", "last")),
    *(matrix.VIEW.tables[name] for name in ("pairs", "hosts", "late")),
]


@contextmanager
def in_threads(_: Run) -> Iterator[tuple[Executor, Path]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as executor:
        yield executor, Path(folder)


def condense(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs are large from here on, and too large to be held as a whole."""
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    monkeypatch.setattr(graphs, "memory_left", lambda: 1)
    monkeypatch.setattr(graphs, "rank_processes", in_threads)


@pytest.fixture(params=["gpu", "fabric"])
def run(request, empty_cache, tmp_path) -> Run:
    made = gpu_job().write(tmp_path / "run") if request.param == "gpu" else None
    found = made or crossing_pairs(tmp_path / "run", 2000).run
    assert found is not None
    return found


def test_collectives_pairs_and_predictions_of_a_large_run_need_no_whole_graph(run, monkeypatch):
    edits = [parse_edit("slow:rank=1,factor=2"), parse_edit("network:bandwidth=2")]
    loaded = Loaded(run)
    whole = [each(loaded, Link()) for each in TABLES]
    prediction = prediction_info(loaded, edits)
    condense(monkeypatch)
    loaded = Loaded(run)
    for each, table in zip(TABLES, whole, strict=True):
        assert_frame_equal(each(loaded, Link()), table, check_row_order=False)
    assert sum(table.height > 0 for table in whole) > 2
    assert prediction_info(loaded, edits).predicted_ns == prediction.predicted_ns
    with pytest.raises(Unanswerable, match="spans at once"):
        prediction_info(loaded, [parse_edit("bucket:mb=1")])


def test_a_prediction_is_shown_where_the_path_that_it_changes_is_too_large(run, monkeypatch):
    condense(monkeypatch)
    shown = str(
        whatif.VIEW.sections["whatif-answer"](Loaded(run), Link(options={"edit": "network:bandwidth=2"}))
    )
    assert "prediction-figure" in shown
    assert "spans at once" in shown
    assert "changes-figure" not in shown


def test_what_a_large_run_loads_on_its_fabric_needs_no_whole_graph(empty_cache, tmp_path, monkeypatch):
    run = crossing_pairs(tmp_path / "run", 2000).run
    assert run is not None
    whole = traffic_of(Loaded(run))
    condense(monkeypatch)
    assert traffic_of(Loaded(run)) == whole
