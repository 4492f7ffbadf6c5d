"""Real traces of GPU jobs in the form of raw recordings: their conversion into tables."""

from __future__ import annotations

import json

import polars as pl
import pytest

from dpro.collectors.convert.calls import LOST
from dpro.collectors.finish import finish
from dpro.ingest.importer import import_sources
from dpro.opening import readers
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.timeline import replay
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, SPANS, STEPS, SYNCS
from dpro.store import open_run
from tests.recorder_output import EARLIER, STEP, as_recorded

JOBS = {
    "multirank/torchrec_v100_2r_kjt": 2,
    "multirank/param_dlrm_v100_8r": 8,
    "multirank/nanogpt_h100_8r_rs_ag": 2,
}


@pytest.fixture(scope="module", params=JOBS)
def both(request, traces, tmp_path_factory):
    """A job imported, and recorded; the first ranks of it."""
    folder = tmp_path_factory.mktemp("both")
    files = [traces / request.param / f"rank{rank}.pt.trace.json.gz" for rank in range(JOBS[request.param])]
    import_sources(files, folder / "imported")
    launch = as_recorded(folder / "recorded", files)
    finish(launch, readers(), 0, {})
    return open_run(folder / "imported"), open_run(folder / "recorded")


def test_nothing_of_the_recording_is_lost_or_complained_of(both):
    _, recorded = both
    assert recorded.manifest.warnings == []
    assert LOST not in recorded.manifest.skipped
    assert recorded.manifest.exit_status == 0


def test_spans_are_those_of_the_import(both):
    facts = ["rank", "kind", "name", "start_ns", "duration_ns", "device", "stream", "tid"]

    def spans(run):
        rows = run.table(SPANS).filter(~pl.col("name").str.starts_with(STEP))
        return rows.select(facts).sort(facts)

    imported, recorded = map(spans, both)
    assert recorded.equals(imported)
    assert both[1].table(SYNCS).height == both[0].table(SYNCS).height


def test_steps_are_those_of_the_import_and_lie_in_the_window(both):
    imported, recorded = (run.table(STEPS).sort("rank", "start_ns") for run in both)
    facts = ["rank", "start_ns", "duration_ns"]
    assert recorded.select("rank", "start_ns").equals(imported.select("rank", "start_ns"))
    assert recorded.select(facts).equals(imported.select(facts))
    assert (recorded["window"] == 0).all()


def test_collectives_are_those_of_the_import_with_what_the_flight_recorder_knew(both):
    imported, recorded = (
        run.table(COLLECTIVES).filter(pl.col("start_ns") >= 0).sort("rank", "start_ns", "op") for run in both
    )
    facts = ["rank", "op", "start_ns", "duration_ns"]
    assert recorded.select(facts).equals(imported.select(facts))
    known = recorded.filter(pl.col("launch_span_id") >= 0)
    assert known.height > recorded.height / 2
    assert (known["sequence"] >= 0).all()
    assert set(known["group"]) == {"0 default_pg"}
    for (rank,), rows in known.group_by("rank"):
        calls = both[1].table(SPANS).filter(rank=rank)
        entered = calls.filter(pl.col("name").str.starts_with("nccl:"), kind="annotation")["start_ns"].sort()
        launches = rows.join(calls, left_on="launch_span_id", right_on="span_id", suffix="_call")
        own = entered.search_sorted(launches["start_ns_call"], side="right") + EARLIER
        assert launches["sequence"].to_list() == own.to_list(), "each kernel has met its own call"
    bytes_known = imported["bytes_in"] >= 0
    assert recorded.filter(bytes_known)["bytes_in"].equals(imported.filter(bytes_known)["bytes_in"])


def test_every_call_is_one_row(both):
    _, recorded = both
    rows = recorded.table(COLLECTIVES).filter(pl.col("sequence") >= 0)
    assert not rows.select("rank", "group", "sequence").is_duplicated().any()
    assert not rows.select("rank", "collective_id").is_duplicated().any()
    for _, mine in rows.group_by("rank"):
        assert sorted(mine["sequence"]) == list(range(1, mine.height + 1))
    groups = recorded.table(PROCESS_GROUPS)
    assert set(groups["group"]) == {"0 default_pg"}
    assert groups["group_ranks"].unique().len() == 1


def test_replay_is_as_good_as_of_the_import(both):
    trusts = []
    for run in both:
        built = build_graph(run)
        trusts.append(assess(built, replay(built.graph), run.manifest))
    imported, recorded = trusts
    errors = [trust.error_pct for trust in trusts]
    assert errors[1] == pytest.approx(errors[0], abs=0.05)
    assert recorded.coverage.collectives_matched >= imported.coverage.collectives_matched - 1e-9
    assert recorded.coverage.starts_anchored == pytest.approx(imported.coverage.starts_anchored, abs=1e-3)
    assert json.loads(both[1].path.joinpath("manifest.json").read_text())["world_size"] >= 2
