"""An import in shards leaves the ranks of a large run condensed."""

from __future__ import annotations

import json

from click.testing import CliRunner

from dpro.analysis import graphs
from dpro.cli import cli
from tests.traces import write_rank


def answer(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_last_shard_condenses_the_ranks_of_a_large_run(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    condensed = []
    monkeypatch.setattr(graphs, "condensed_of", lambda run, report: condensed.append(run))
    for rank in range(2):
        write_rank(tmp_path / "in", rank, 2)
    words = ("import", str(tmp_path / "in"), "-o", str(tmp_path / "run"), "--shard")
    answer(*words, "0/2")
    assert not condensed
    answer(*words, "1/2")
    assert [run.path for run in condensed] == [tmp_path / "run"]
