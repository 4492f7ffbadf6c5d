import numpy as np
import polars as pl
import pytest

from dpro.detect.uneven_work import workloads_in_windows
from dpro.replay.construction.graph_builder import build_graph
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS, TABLES
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from tests.reference.training_jobs import Job, run_job
from tests.reference.training_records import Recording, frames_of
from tests.unit.detect.jobs import found_in_graph

WINDOWS = ((2, 2), (5, 2), (8, 2))


def job(layout: str) -> Job:
    return Job(
        layout, 4, 12, gpu=True, noise="1%", windows=WINDOWS, fault="imbalance", severity=2.0, how="varying",
        batches="sized",
    )  # fmt: skip


def run_of(folder, layout: str, evidence: str) -> Run:
    """A run of uneven work that is shown only by the evidence that is asked for."""
    frames = frames_of(job(layout), run_job(job(layout)), Recording())
    counted = frames[COUNTERS.name].filter(pl.col("counter") == "step_input_elements")
    amounts = counted.join(frames[STEPS.name], left_on=["rank", "time_ns"], right_on=["rank", "start_ns"])
    amounts = amounts.filter(pl.col("window") >= 0).select("rank", "time_ns", pl.col("value").cast(pl.Int64))

    def in_step(name: str) -> pl.Series:
        """Of each row the amount of its step."""
        rows = frames[name].with_row_index().sort("start_ns")
        joined = rows.join_asof(
            amounts.sort("time_ns"), left_on="start_ns", right_on="time_ns", by="rank",
            check_sortedness=False,
        )  # fmt: skip
        return joined.sort("index")["value"].fill_null(0)

    if evidence != "batches":
        frames[COUNTERS.name] = frames[COUNTERS.name].filter(pl.col("counter") != "step_input_elements")
    if evidence == "shapes":
        text = "[[8, " + in_step(SPANS.name).cast(pl.String) + "], [[64, 64], []], []]"
        operator = (frames[SPANS.name]["kind"] == "cpu_op").to_list()
        shapes = pl.select(pl.when(pl.Series(operator)).then(pl.Series(text)).otherwise(pl.lit("")))
        frames[SPANS.name] = frames[SPANS.name].with_columns(shapes=shapes.to_series())
    if evidence == "bytes":
        frames[COLLECTIVES.name] = frames[COLLECTIVES.name].with_columns(bytes_out=in_step(COLLECTIVES.name))
    for name, frame in frames.items():
        write_part(folder / "run", TABLES[name], "ranks", frame)
    write_manifest(folder / "run", Manifest(world_size=4, ranks=[0, 1, 2, 3]))
    return open_run(folder / "run")


@pytest.mark.parametrize(
    ("layout", "evidence", "what"),
    [
        ("dp", "batches", "elements in its batches"),
        ("dp", "shapes", "elements in the inputs of its operators"),
        ("moe", "bytes", "bytes from all_to_all"),
    ],
)
def test_uneven_work_is_inferred_from_whatever_shows_the_workload(tmp_path, layout, evidence, what):
    run = run_of(tmp_path, layout, evidence)
    assert what in workloads_in_windows(run)
    (finding,) = found_in_graph(build_graph(run).graph)
    assert finding.class_ == "imbalance.data"
    assert what in finding.evidence[0]
    layers = [one for one in finding.observations if one.kind == "uneven-layer"]
    assert bool(layers) == (evidence == "bytes")
    assert all(one.text.endswith("times the mean of 4, by all_to_all") for one in layers)


def test_workloads_are_those_of_the_step_that_they_are_in(tmp_path):
    # Each operator reads 8 times the amount and 64 x 64 elements; a step has as many on all ranks.
    amounts = workloads_in_windows(run_of(tmp_path, "dp", "shapes"))[
        "elements in the inputs of its operators"
    ]
    elements = {
        (rank, step): of_rank
        for step, of_step in enumerate(run_job(job("dp")).elements)
        for rank, of_rank in enumerate(of_step)
    }
    assert amounts.height == 4 * 2 * len(WINDOWS)
    operators = {
        amount / (8 * elements[rank, step] + 64 * 64)
        for rank, step, amount in amounts.sort("step").iter_rows()
    }
    assert np.ptp([*operators]) == pytest.approx(0, abs=1e-9)


def test_where_nothing_shows_the_workload_no_uneven_work_is_reported(tmp_path):
    run = run_of(tmp_path, "dp", "none")
    assert workloads_in_windows(run) == {}
    assert found_in_graph(build_graph(run).graph) == []


@pytest.mark.parametrize(
    "shapes", ["[[9223372036854775807, 3]]", "[[-8, 3]]", "[" * 100_000, "not JSON", '{"a": 1}']
)
def test_shapes_that_no_tensor_has_count_as_none(tmp_path, shapes):
    spans = pl.DataFrame(
        {"rank": 0, "window": 0, "kind": "cpu_op", "start_ns": [10, 20], "shapes": ["[[4, 8]]", shapes]}
    )
    steps = pl.DataFrame({"rank": [0], "step": 1, "window": 0, "start_ns": 0, "duration_ns": 100})
    for table, frame in ((SPANS, spans), (STEPS, steps)):
        write_part(tmp_path / "run", table, "rank00000", frame)
    write_manifest(tmp_path / "run", Manifest(world_size=1, ranks=[0]))
    amounts = workloads_in_windows(open_run(tmp_path / "run"))
    assert amounts["elements in the inputs of its operators"]["workload"].to_list() == [32.0]
