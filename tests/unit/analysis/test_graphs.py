"""A graph is built once per run; what stands in the way of that costs time and no answer."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpro import plugins
from dpro.analysis import graphs
from dpro.analysis.graphs import fingerprint, graph_of
from dpro.cli import cli
from dpro.errors import DproError, Unanswerable
from dpro.replay.sharded import build_rank
from dpro.replay.timeline import replay
from dpro.store import Run, open_run
from tests.builders import cpu_job


@pytest.fixture
def run(empty_cache, tmp_path, monkeypatch) -> Run:
    monkeypatch.setattr(graphs, "WORTH_SAVING", 1)
    return cpu_job().write(tmp_path / "run")


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "graphs").glob("*"))


def test_a_graph_is_known_again_where_a_pipe_a_folder_and_a_device_are_among_its_tables(run):
    before = fingerprint(run)
    os.mkfifo(run.path / "spans" / "x.parquet")
    (run.path / "spans" / "y.parquet").mkdir()
    (run.path / "steps" / "z.parquet").symlink_to("/dev/zero")
    assert fingerprint(run) == before


def starts(run: Run) -> list[int]:
    built, trust = graph_of(run)
    assert built.graph.run is run
    assert trust.answerable
    return replay(built.graph).start.tolist()


def never(monkeypatch):
    """From now on a graph that is built fails the test."""

    def fail(_: Run, _report: object) -> None:
        raise AssertionError("the graph was built again")

    monkeypatch.setattr("dpro.replay.construction.graph_builder.build_graph", fail)


def test_the_second_command_on_a_run_does_not_build_its_graph_again(run, monkeypatch):
    first = starts(run)
    never(monkeypatch)
    assert starts(run) == first


def test_a_run_that_was_moved_or_copied_finds_its_graph(run, tmp_path, monkeypatch):
    first = starts(run)
    moved = shutil.copytree(run.path, tmp_path / "elsewhere")
    never(monkeypatch)
    assert starts(open_run(moved)) == first


def test_a_run_whose_tables_change_is_another_run(run, tmp_path):
    before = fingerprint(run)
    again = cpu_job(extra=500).write(tmp_path / "again")
    assert fingerprint(again) != before
    (run.path / "manifest.json").write_text((run.path / "manifest.json").read_text() + " ")
    assert fingerprint(run) != before


def test_what_was_kept_of_a_run_is_for_the_edits_that_there_are(run, monkeypatch):
    before, extensions = fingerprint(run), dict(plugins.installed().extensions)
    monkeypatch.setattr(plugins, "installed", lambda: plugins.Installed(extensions, ()))
    del extensions["query"]  # brings no edit
    assert fingerprint(run) == before
    del extensions["plan"]
    assert fingerprint(run) != before


def test_a_damaged_file_is_replaced(run, tmp_path, monkeypatch):
    first = starts(run)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    assert starts(run) == first
    never(monkeypatch)
    assert starts(run) == first


def test_without_a_place_for_the_cache_the_graph_is_built_each_time(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "file"))
    assert starts(run) == starts(run)


def test_nothing_is_written_into_the_run(run):
    before = sorted(run.path.rglob("*"))
    starts(run)
    assert sorted(run.path.rglob("*")) == before


def test_only_the_graphs_used_last_are_kept(run, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2)
    runs = [run, *(cpu_job(extra=extra).write(tmp_path / f"run{extra}") for extra in (500, 600))]
    for each in runs:
        starts(each)
    assert len(files(tmp_path)) == 2
    never(monkeypatch)
    starts(runs[2])
    with pytest.raises(AssertionError, match="again"):
        starts(runs[0])


def test_a_small_graph_is_not_kept(run, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "WORTH_SAVING", 1_000_000)
    starts(run)
    assert files(tmp_path) == []


def documents(run: Run, *options: str, command: str = "replay") -> dict[str, object]:
    done = CliRunner().invoke(cli, [command, str(run.path), *options, "--json"])
    assert done.exit_code == 0, done.output
    document: dict[str, object] = json.loads(done.stdout)
    return document


@pytest.fixture
def in_threads(monkeypatch):
    """Ranks are built in threads, which begin at once."""

    @contextmanager
    def threads(_: Run) -> Iterator[tuple[Executor, Path]]:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as executor:
            yield executor, Path(folder)

    monkeypatch.setattr(graphs, "rank_processes", threads)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [(), ("--step", "1"), ("--window", "0")])
def test_a_large_run_is_replayed_rank_by_rank_with_the_same_answer(run, options, monkeypatch, in_threads):
    whole = documents(run, *options)
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    never(monkeypatch)
    assert documents(run, *options) == whole
    assert documents(run, *options) == whole  # from the cache


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "edit",
    ["network:bandwidth=2", "slow:rank=1,factor=2", "remove:module=*", "heal:rank=1"],
)
def test_edits_of_a_large_run_are_predicted_rank_by_rank(run, edit, monkeypatch, in_threads):
    whole = documents(run, "--edit", edit, command="whatif")
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    never(monkeypatch)
    assert documents(run, "--edit", edit, command="whatif") == whole


def test_an_edit_that_needs_the_whole_graph_of_a_large_run_has_it_or_is_refused(run, monkeypatch, in_threads):
    whole = documents(run, "--edit", "batch:factor=2", command="whatif")
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    assert documents(run, "--edit", "batch:factor=2", command="whatif") == whole
    monkeypatch.setattr(graphs, "memory_left", lambda: 1000)
    done = CliRunner().invoke(cli, ["whatif", str(run.path), "--edit", "batch:factor=2"])
    assert done.exit_code == 1
    assert "spans at once takes some" in " ".join(done.stdout.split())


def test_what_needs_the_whole_graph_of_a_large_run_says_so_where_it_does_not_fit(
    run, monkeypatch, in_threads
):
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    monkeypatch.setattr(graphs, "memory_left", lambda: 1000)
    with pytest.raises(Unanswerable, match=r"the graph of all .* spans at once takes some .* are left"):
        graph_of(run)


def test_a_large_run_is_diagnosed_rank_by_rank_with_the_same_answer(run, monkeypatch, in_threads):
    whole = documents(run, command="diagnose")
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    never(monkeypatch)
    assert documents(run, command="diagnose") == whole


@pytest.mark.slow
def test_a_large_run_is_searched_by_rank_and_what_is_not_looked_at_is_said(run, monkeypatch, in_threads):
    whole = documents(run, command="whatif")
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    monkeypatch.setattr(graphs, "memory_left", lambda: 1000)
    never(monkeypatch)
    found = documents(run, command="whatif")
    left_out = {each["edit"] for each in found["refused"] if "all ranks at once" in each["reason"]}
    assert {"bucket", "data-parallel", "priority"} <= left_out
    known = {tuple(each["edits"]): each["predicted_ms"] for each in whole["predictions"]}
    same = {tuple(each["edits"]): each["predicted_ms"] for each in found["predictions"]}
    both = known.keys() & same.keys()
    assert len(both) > 2
    assert {edits: same[edits] for edits in both} == {edits: known[edits] for edits in both}


@pytest.mark.parametrize("command", ["diagnose", "whatif", "replay"])
def test_no_room_for_the_ranks_of_a_large_run_is_one_line(run, command, monkeypatch, in_threads):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    monkeypatch.setattr("dpro.replay.fidelity.by_rank.build_rank", full)
    with pytest.raises(DproError, match=r"No space left on device\): name a folder with more room"):
        CliRunner().invoke(cli, [command, str(run.path)], catch_exceptions=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["diagnose", "whatif"])
def test_a_command_builds_each_rank_of_a_large_run_once(run, command, monkeypatch, in_threads):
    built: list[int] = []

    def counting(*arguments):
        built.append(arguments[1].rank)
        return build_rank(*arguments)

    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    monkeypatch.setattr(graphs, "memory_left", lambda: 1000)
    for module in ("fidelity.by_rank", "whatif.condensed"):
        monkeypatch.setattr(f"dpro.replay.{module}.build_rank", counting)
    documents(run, command=command)
    assert sorted(built) == run.manifest.ranks


@pytest.mark.slow
def test_processes_build_the_ranks_of_a_large_run(run, monkeypatch):
    whole = documents(run)
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    never(monkeypatch)
    assert documents(run) == whole
    assert not list((run.path.parent / "cache" / "graphs").glob("shares-*"))
