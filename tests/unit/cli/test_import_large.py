"""An import with an executor leaves the ranks of a large run condensed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from dpro.analysis import graphs
from dpro.cli import cli, import_
from tests.traces import write_rank


@contextmanager
def threads(_: str) -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def answer(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_last_shard_condenses_the_ranks_of_a_large_run(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "LARGE", 1)
    condensed = []
    monkeypatch.setattr(
        graphs, "condensed_of", lambda run, report, executor: condensed.append((run, executor))
    )
    for rank in range(2):
        write_rank(tmp_path / "in", rank, 2)
    words = ("import", str(tmp_path / "in"), "-o", str(tmp_path / "run"), "--shard")
    answer(*words, "0/2")
    assert not condensed
    answer(*words, "1/2")
    ((run, executor),) = condensed
    assert (run.path, executor) == (tmp_path / "run", None)


@pytest.mark.parametrize("large", [1, 10**9])
def test_an_import_with_an_executor_condenses_the_ranks_of_a_large_run(
    empty_cache, tmp_path, monkeypatch, large
):
    monkeypatch.setattr(import_, "_executor", threads)
    monkeypatch.setattr(graphs, "LARGE", large)
    for rank in range(2):
        write_rank(tmp_path / "in", rank, 2)
    run = str(tmp_path / "run")
    answer("import", str(tmp_path / "in"), "-o", run, "--executor", "ray")
    kept = list((tmp_path / "cache").rglob("*-ranks.npz"))
    assert bool(kept) == (large == 1)
    assert not list(tmp_path.glob(".run-shares-*"))
    if kept:
        monkeypatch.setattr("dpro.replay.fidelity.by_rank.condense_run", None)  # not needed any more
        assert answer("replay", run)["ranks"]
