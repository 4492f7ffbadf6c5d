"""Whoever waits for a graph sees how much of it is built."""

from __future__ import annotations

from dpro.analysis.graphs import make_graph
from tests.builders import cpu_job


def test_building_a_graph_reports_each_rank_until_the_last(tmp_path):
    run, seen = cpu_job().write(tmp_path / "run"), []
    make_graph(run, lambda done, total: seen.append((done, total)))
    (total,) = {total for _, total in seen}
    assert total == 3 + 2 * 3  # matching, aligning, joining; and each of three ranks twice
    assert [done for done, _ in seen] == list(range(total + 1))  # the bar ends with the graph
