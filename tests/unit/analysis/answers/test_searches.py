"""What a search found is kept for a run, and for nothing else."""

from __future__ import annotations

import multiprocessing
import os

import polars as pl
import pytest

from dpro.analysis import graphs
from dpro.analysis.analysis import Analysis
from dpro.analysis.answers import whatif
from dpro.cache import cache_folder
from dpro.dashboards.loaded import Loaded
from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.replay.cost.tables import read_frame
from dpro.replay.whatif.predict import Prediction, Refusal
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import Interaction, SearchResult, SmallGain
from dpro.selection import Selection
from dpro.store import open_run
from dpro.topology.file import FILE as TOPOLOGY
from dpro.topology.file import write
from dpro.topology.kept import PATHS as PATHS
from dpro.topology.kept import write_paths
from tests.ddp import ddp_job


@pytest.fixture
def run(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "WORTH_SAVING", 1)
    ddp_job(num_steps=4).build(tmp_path / "run")
    return tmp_path / "run"


FOUND = SearchResult(
    [
        Prediction(
            (parse_edit("bucket:mb=1"),), 2e6, 1.5, 1e6, float("inf"), ("a note",), True, 1.0, -1.0, 1e5
        )
    ],
    [Refusal("workers", "no loader")],
    [Interaction(["bucket:mb=1", "overlap:mode=full"], 3.0, 4.0)],
    ["priority:mb=4"],
    [SmallGain("scale:name=aten::mm,factor=0.3333333333333333", 1 / 3)],
)


@pytest.fixture
def made(monkeypatch):
    """The searches that were made, which all find the same."""
    calls = []
    monkeypatch.setattr(whatif, "explore", lambda *words, **_: calls.append(words) or FOUND)
    return calls


def ask(run, network=None, **options):
    analysis = Analysis(open_run(run), network)
    return whatif.what_if(analysis, **options)


def test_a_second_search_of_an_unchanged_run_reads_what_the_first_found(run, made):
    first, second = ask(run), ask(run)
    assert len(made) == 1
    assert second == first
    assert first.predictions


def test_pages_and_reports_show_what_the_command_finds_of_the_usual_steps(run, made):
    analysis = Analysis(open_run(run))
    found = whatif.search_once(analysis)
    assert (found.predictions, [*map(str, found.refused)]) == (
        ask(run).predictions,
        [*map(str, FOUND.refused)],
    )
    (made_with,) = made
    assert any(words is analysis.baseline for words in made_with)


def test_another_budget_other_steps_and_a_measured_network_are_searched_again(run, made, tmp_path):
    (tmp_path / "network.csv").write_text(
        "op,num_ranks,bytes,time_ns\n" + "".join(f"all_reduce,2,{1 << at},{9 << at}\n" for at in range(8, 26))
    )
    network = read_frame(tmp_path / "network.csv")
    for options in ({}, {"budget": 3}, {"selection": Selection(((1, 1),))}, {"network": network}):
        ask(run, **options)
    assert len(made) == 4


def test_a_run_to_which_a_topology_or_paths_come_is_searched_again(run, made):
    ask(run)
    write(fat_tree(FabricSize(2)), run / TOPOLOGY)
    ask(run)
    write_paths([], run / PATHS)
    ask(run)
    assert len(made) == 3


def test_a_run_whose_tables_change_is_searched_again(run, made):
    ask(run)
    part = next((run / "spans").glob("*.parquet"))
    pl.read_parquet(part).head(-1).write_parquet(part)
    ask(run)
    assert len(made) == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"predictions": [{"edits": ["nonsense"]}]}'])
def test_a_damaged_file_is_replaced(run, made, tmp_path, content):
    first = ask(run)
    kept = next((tmp_path / "cache" / "searches").glob("*.json"))
    kept.write_text(content)
    assert [ask(run), ask(run)] == [first, first]
    assert len(made) == 2


def test_the_searches_used_last_are_kept(run, made, tmp_path, monkeypatch):
    monkeypatch.setattr(whatif, "KEPT", 2)
    for budget in (1, 2, 3):
        ask(run, budget=budget)
        for at, file in enumerate((tmp_path / "cache" / "searches").glob("*.json")):
            os.utime(file, (at, at)) if budget < 3 else None
    assert len(list((tmp_path / "cache" / "searches").glob("*.json"))) == 2


def test_a_page_has_the_search_of_many_spans_made_by_a_process_that_ends(run):
    here, elsewhere = Loaded(open_run(run)), Loaded(open_run(run))
    elsewhere.min_searched_elsewhere = 0
    found = whatif.search_once(elsewhere)
    assert not multiprocessing.active_children()
    for kept in cache_folder("searches").glob("*.json"):
        kept.unlink()
    assert found == whatif.search_once(here)
    assert found.predictions
