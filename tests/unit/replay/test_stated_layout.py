"""A layout that the user states: where it puts ranks, and what it must agree with."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dpro.analysis.graphs import fingerprint
from dpro.cli import cli
from dpro.errors import Unanswerable, UsageError
from dpro.members import members_text
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.kept import tables_written
from dpro.replay.mesh import mesh_of_run, places_along, with_layout
from dpro.replay.whatif.job import with_kept_tables
from dpro.replay.whatif.registry import parse_edit
from dpro.store import Run
from tests.builders import TinyRun
from tests.jobs import ROOT

SAMPLE = str(ROOT / "sample_traces" / "slow_rank")


def run_of(folder, num_ranks: int, *groups: tuple[int, ...]) -> Run:
    """Ranks that do the same work, and are in groups."""
    run = TinyRun()
    for rank in range(num_ranks):
        run.op("work", 0, 100, rank)
        run.step(0, 0, 200, rank)
    for number, ranks in enumerate(groups):
        for rank in ranks:
            facts = {"group": str(number), "group_ranks": members_text(ranks), "bytes_in": 8, "bytes_out": 8}
            run.gloo((100, 110), (105, 150), rank, **facts)
    return run.write(folder)


def test_ranks_are_numbered_as_megatron_does_and_replicas_are_what_is_left(tmp_path):
    run = with_layout(run_of(tmp_path, 8), {"tp": 2, "pp": 2})
    mesh = mesh_of_run(run)
    assert (mesh.source, run.layout) == ("stated", {"tp": 2, "pp": 2, "dp": 2})
    assert places_along(mesh, "tp") == {rank: rank % 2 for rank in range(8)}
    assert places_along(mesh, "dp") == {rank: rank // 2 % 2 for rank in range(8)}
    assert places_along(mesh, "pp") == {rank: rank // 4 for rank in range(8)}


def test_ranks_are_numbered_so_that_groups_of_the_run_lie_along_axes(tmp_path):
    mesh = mesh_of_run(with_layout(run_of(tmp_path, 6, (0, 2, 4), (1, 3, 5)), {"tp": 3}))
    assert places_along(mesh, "tp") == {rank: rank // 2 for rank in range(6)}


def test_experts_divide_replicas(tmp_path):
    mesh = mesh_of_run(with_layout(run_of(tmp_path, 8), {"tp": 2, "ep": 2}))
    assert [(axis.name, axis.size) for axis in mesh.axes] == [("dp", 4), ("tp", 2)]
    (experts,) = mesh.overlays
    assert (experts.name, experts.over) == ("ep", ("dp",))
    assert experts.groups == {frozenset(pair) for pair in ((0, 2), (4, 6), (1, 3), (5, 7))}


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"tp": 3}, "has 3 ranks; the run has 8"),
        ({"dp": 2, "tp": 2}, "has 4 ranks; the run has 8"),
        ({"ep": 3}, "ep has to divide the 8 data-parallel ranks"),
        ({"tp": 4}, "the group of ranks 0, 1, 6 does not follow any axis"),
    ],
)
def test_a_layout_that_the_run_contradicts_is_refused(tmp_path, layout, why):
    run = run_of(tmp_path, 8, (0, 1, 6))
    with pytest.raises(UsageError, match=why):
        with_layout(run, layout)


def test_what_is_kept_of_a_run_is_kept_for_each_layout(tmp_path):
    built = TinyRun()
    for rank in range(2):
        built.op("work", 0, 100, rank)
        built.step(0, 0, 200, rank)
    graph = built.build(tmp_path).graph
    assert graph.run is not None
    stated = with_layout(graph.run, {"tp": 2})
    assert fingerprint(stated) != fingerprint(graph.run)
    assert tables_written(stated) != tables_written(graph.run)
    kept = with_kept_tables(type(graph)(**{**vars(graph), "run": stated})).run
    assert kept is not None
    assert kept.layout == stated.layout


@pytest.mark.slow
def test_commands_take_a_layout():
    def answer(*arguments: str) -> str:
        return CliRunner().invoke(cli, [*arguments], catch_exceptions=False).output

    assert json.loads(answer("info", SAMPLE, "--json"))["layout"]["line"] == "2 ranks = dp 2"
    assert (
        json.loads(answer("info", SAMPLE, "--json", "--layout", "tp=2"))["layout"]["line"] == "2 ranks = tp 2"
    )
    asked = ("whatif", SAMPLE, "-e", "accumulate:steps=2")
    assert "not answered" not in answer(*asked)
    assert "no reduction in the run is between data-parallel ranks" in answer(*asked, "--layout", "tp=2")
    with pytest.raises(UsageError, match="micro_batch is not an axis"):
        answer("explain", SAMPLE, "--layout", "micro_batch=2")


def test_a_rank_of_a_stated_axis_is_not_left_out(tmp_path):
    run = with_layout(run_of(tmp_path, 4, (0, 1, 2, 3)), {"tp": 2})
    graph = build_graph(run).graph
    with pytest.raises(Unanswerable, match=r"rank 3 is tensor-parallel rank 1 \(tp\)"):
        parse_edit("drop:rank=3").apply(graph)
