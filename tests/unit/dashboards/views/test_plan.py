"""Layouts of a recorded job as a figure: its own is a star, the best are joined."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.app import make_app
from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.errors import UsageError
from dpro.extensions.plan.view import VIEW, _best, job_of, layouts_figure, layouts_info
from dpro.store import Run, open_run, write_manifest
from tests.unit.dashboards.test_app import ask, dimmed, navigate


@pytest.fixture(scope="module")
def loaded(layered: Run) -> Loaded:
    return load(layered)


def test_what_costs_no_more_and_gains_more_is_best() -> None:
    cost, gain = np.array([1.0, 2.0, 2.0, 3.0, 3.0]), np.array([5.0, 4.0, 6.0, 6.0, 9.0])
    assert _best(cost, gain).tolist() == [True, False, True, False, True]


def test_the_run_s_own_layout_is_a_star_at_its_measured_step(loaded: Loaded) -> None:
    rows = layouts_info(job_of(loaded), (1, 2))
    assert rows.filter("own")["step_ms"].to_list() == pytest.approx([job_of(loaded).step_ms])
    assert set(rows["gpus"]) == {1, 2}
    assert rows.filter("best").height >= 1
    figure = layouts_figure(rows, "memory", "light")
    (star,) = (trace for trace in figure.data if trace.marker.symbol == "star")
    assert list(star.x) == rows.filter("own")["memory_gb"].to_list()
    line = figure.data[-1]
    assert line.mode == "lines"
    assert list(line.y) == sorted(line.y)


def test_a_job_without_a_layout_on_any_multiple_is_refused(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> pl.DataFrame:
        raise UsageError("no layout divides the model")

    monkeypatch.setattr("dpro.extensions.plan.view.ranked", refuse)
    with pytest.raises(UsageError, match="no layout divides the model"):
        layouts_info(job_of(loaded), (1, 2, 4))


def test_steps_are_drawn_against_gpus(loaded: Loaded) -> None:
    rows = layouts_info(job_of(loaded), (1, 2))
    figure = layouts_figure(rows, "gpus", "dark")
    assert sum(len(trace.x) for trace in figure.data) == rows.height


def test_the_link_says_how_many_gpus_and_against_what(loaded: Loaded) -> None:
    rows = VIEW.tables["layouts"](loaded, parse_link("?view=plan&times=2"))
    assert set(rows["gpus"]) == {2}
    app = make_app(loaded)
    for query in ("", "&times=2", "&against=gpus", "&times=x&against=y"):
        text = ask(app, "plan-ranked", f"?view=plan{query}")
        assert json.loads(text)["response"]["plan-ranked"]["children"]
        assert "plan-figure" in text
    assert "Plan" not in dimmed(navigate(app, "?view=plan"))


def test_all_rows_have_an_interval_around_their_step(loaded: Loaded) -> None:
    rows = layouts_info(job_of(loaded), (1,))
    assert rows.filter(
        (pl.col("low_ms") > pl.col("step_ms")) | (pl.col("high_ms") < pl.col("step_ms"))
    ).is_empty()


def test_layouts_are_not_offered_where_shapes_or_the_layout_are_not_known(
    layered: Run, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(layered.path, tmp_path / "copy"))
    write_manifest(copy, dataclasses.replace(layered.manifest, world_size=6))
    why = VIEW.missing(Loaded(open_run(copy)), Link())
    assert why.startswith("The layout of its 6 ranks is not known")
    assert why.endswith(".")
    for part in (copy / "spans").glob("*.parquet"):
        pl.read_parquet(part).with_columns(shapes=pl.lit("")).write_parquet(part)
    assert "`dpro record --shapes`" in VIEW.missing(Loaded(open_run(copy)), Link())
