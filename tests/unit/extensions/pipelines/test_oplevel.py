"""Operation-level Parquet: small tables made here, and real traces against plain group-bys."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.errors import InputError
from dpro.extensions.pipelines.oplevel import is_oplevel, read_oplevel
from dpro.ingest.importer import import_sources
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform

# As the recorder writes them: ranks and stages overflow when multiplied, times are rounded to 7 digits.
NARROW = {
    "dp_rank": pl.Int8,
    "stage": pl.Int8,
    "rank": pl.Int16,
    "step": pl.Int64,
    "optype": pl.Categorical,
    "start_ts": pl.Float32,
    "duration": pl.Float32,
    "seq_id": pl.Int32,
    "mc": pl.Int8,
    "mb_id": pl.Int8,
}


def op(optype: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    row = {"dp_rank": 0, "stage": 0, "rank": 0, "step": 5, "seq_id": 0, "mc": -1, "mb_id": -1}
    return row | {"optype": optype, "start_ts": start, "duration": duration} | more


def write(tmp_path: Path, rows: list[dict[str, Any]], name: str = "trace-X.parquet") -> Path:
    schema = {column: dtype for column, dtype in NARROW.items() if any(column in row for row in rows)}
    pl.DataFrame(rows, schema=schema, strict=False).write_parquet(tmp_path / name)
    return tmp_path / name


def tables(traces: list[RankTrace], name: str) -> pl.DataFrame:
    return pl.concat([conform(TABLES[name], trace.frames[name]) for trace in traces if name in trace.frames])


def two_by_two() -> list[dict[str, Any]]:
    """Two stages of two data-parallel ranks; one rank in four of the job is recorded."""
    rows = []
    for stage, dp in ((0, 0), (0, 1), (1, 0), (1, 1)):
        place = {"stage": stage, "dp_rank": dp, "rank": 100 * stage + 4 * dp}
        for number in range(3):
            more = place | {"seq_id": number}
            rows.append(op("forward-compute", number, 0.5, **more, mb_id=number, mc=0))
            rows.append(op("forward-send" if stage == 0 else "forward-recv", number + 0.5, 0.1, **more))
            rows.append(op("backward-recv" if stage == 0 else "backward-send", number + 0.7, 0.1, **more))
        for start, name in enumerate(
            (
                *("params-all-gather", "layernorm-grads-all-reduce", "embedding-grads-all-reduce"),
                *("grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer"),
            )
        ):
            rows.append(op(name, 4 + start, 0.25, **place))
    return rows


def test_operations_are_kernels_on_streams_by_what_they_are(tmp_path):
    spans = tables(read_oplevel(write(tmp_path, two_by_two())), "spans")
    assert spans["kind"].unique().to_list() == ["kernel"]
    streams = dict(spans.select("name", "stream").unique().rows())
    assert streams["forward-compute"] == streams["optimizer"] == 0
    point_to_point = ("forward-send", "forward-recv", "backward-send", "backward-recv")
    assert [streams[name] for name in point_to_point] == [1, 2, 3, 4]
    assert streams["params-all-gather"] == streams["optimizer-clip-main-grad"] == 5


def test_micro_batch_and_chunk_are_kept(tmp_path):
    spans = tables(read_oplevel(write(tmp_path, two_by_two())), "spans").filter(
        pl.col("name") == "forward-compute", pl.col("rank") == 0
    )
    assert spans.select("micro_batch", "model_chunk").rows() == [(0, 0), (1, 0), (2, 0)]


def test_seconds_become_nanoseconds_without_the_rounding_of_float32(tmp_path):
    rows = [op("forward-compute", 0.0, 0.125), op("optimizer", 46.670094, 0.25)]
    spans = tables(read_oplevel(write(tmp_path, rows)), "spans")
    recorded = pl.Series([46.670094], dtype=pl.Float32).cast(pl.Float64)[0]
    assert spans["start_ns"].to_list() == [0, round(recorded * 1e9)]
    assert spans["duration_ns"].to_list() == [125_000_000, 250_000_000]


def test_steps_lie_one_behind_the_other_and_are_equal_on_all_ranks(tmp_path):
    rows = [
        op("forward-compute", 0.0, 1.0, step=7),
        op("forward-compute", 0.5, 2.0, step=7, rank=1, dp_rank=1),
        op("forward-compute", 0.0, 4.0, step=9),
        op("forward-compute", 0.0, 1.0, step=9, rank=1, dp_rank=1),
    ]
    traces = read_oplevel(write(tmp_path, rows))
    whole = [(7, 0, 2_500_000_000), (9, 2_500_000_000, 4_000_000_000)]
    for trace in traces:
        assert (
            conform(TABLES["steps"], trace.frames["steps"]).select("step", "start_ns", "duration_ns").rows()
            == whole
        )
    assert tables(traces, "spans").filter(pl.col("rank") == 1)["start_ns"].to_list() == [
        500_000_000,
        2_500_000_000,
    ]


def test_a_send_and_its_receive_share_their_group_and_number(tmp_path):
    collectives = tables(read_oplevel(write(tmp_path, two_by_two())), "collectives")
    ends = collectives.filter(pl.col("op").is_in(["send", "recv"]))
    assert ends["peer"].min() >= 0
    pairs = ends.group_by("group", "group_ranks", "sequence").agg(
        pl.col("op").sort(), pl.col("rank").sort(), peers=pl.col("peer").sort()
    )
    assert pairs["op"].to_list() == [["recv", "send"]] * 12
    assert pairs["rank"].to_list() == pairs["peers"].to_list()


def test_the_last_stage_sends_forward_to_the_first_where_chunks_go_round(tmp_path):
    rows = [
        op("forward-send", 1, 1, stage=2, rank=2),
        op("forward-recv", 1, 1, stage=0, rank=0),
        op("forward-compute", 1, 1, stage=1, rank=1),
    ]
    collectives = tables(read_oplevel(write(tmp_path, rows)), "collectives")
    assert collectives.select("rank", "op", "peer").rows() == [(0, "recv", 2), (2, "send", 0)]


def test_groups_are_those_who_ran_the_operation_together(tmp_path):
    collectives = tables(read_oplevel(write(tmp_path, two_by_two())), "collectives")
    mine = {
        row["group"].split(" ")[0]: (row["op"], row["group_ranks"])
        for row in collectives.filter(pl.col("rank") == 104).rows(named=True)
    }
    assert mine["params-all-gather"] == ("all_gather", "100,104")
    assert mine["grads-reduce-scatter"] == ("reduce_scatter", "100,104")
    assert mine["embedding-grads-all-reduce"] == ("all_reduce", "4,104")
    assert mine["optimizer-clip-main-grad"] == ("all_reduce", "0,4,100,104")
    assert mine["layernorm-grads-all-reduce"] == ("all_reduce", "")  # within the tensor-parallel group


def test_sequence_numbers_go_on_where_the_recorded_ones_restart(tmp_path):
    rows = [op("params-all-gather", 0, 1, step=step, seq_id=seq) for step in (3, 8) for seq in (0, 1)]
    collectives = tables(read_oplevel(write(tmp_path, rows)), "collectives")
    assert sorted(collectives["sequence"].to_list()) == [0, 1, 2, 3]


def test_workers_have_their_place_in_the_mesh(tmp_path):
    workers = tables(read_oplevel(write(tmp_path, two_by_two())), "workers")
    assert workers.select("rank", "dp", "pp").rows() == [(0, 0, 0), (4, 1, 0), (100, 0, 1), (104, 1, 1)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_file_beside_the_trace_states_the_size_of_the_job(tmp_path, suffix):
    path = write(tmp_path, two_by_two())
    text = b"trial_name: X\ntp_size: 4\nworld_size: 16\n"
    (tmp_path / f"meta-X.yaml{suffix}").write_bytes(gzip.compress(text) if suffix else text)
    traces = read_oplevel(path)
    assert {trace.world_size for trace in traces} == {16}
    assert "4 of 16 ranks are recorded, one per tensor-parallel group" in traces[0].warnings[0]
    assert not traces[1].warnings


def missing_in(tmp_path: Path, rows: list[dict[str, Any]]) -> tuple[list[int], list[str]]:
    """Import a trace of a job of 16 ranks; return its missing ranks and the warnings on them."""
    (tmp_path / "meta-X.yaml").write_bytes(b"trial_name: X\ntp_size: 4\nworld_size: 16\n")
    manifest = import_sources([write(tmp_path, rows)], tmp_path / "run")
    return manifest.missing_ranks, [warning for warning in manifest.warnings if "ranks are" in warning]


def test_ranks_of_a_recorded_tensor_parallel_group_are_not_missing(tmp_path):
    rows = [row | {"rank": 8 * row["stage"] + 4 * row["dp_rank"]} for row in two_by_two()]
    missing, warnings = missing_in(tmp_path, rows)
    assert not missing
    recorded = "4 of 16 ranks are recorded, one per tensor-parallel group"
    assert warnings == [f"trace-X.parquet: {recorded}; none is missing"]


def test_ranks_of_a_tensor_parallel_group_without_a_record_are_missing(tmp_path):
    rows = [row | {"rank": 8 * row["stage"] + 4 * row["dp_rank"]} for row in two_by_two()]
    missing, warnings = missing_in(tmp_path, [row for row in rows if row["rank"] != 12])
    assert len(missing) == 13
    assert [warning.partition("; ")[2] for warning in warnings] == ["", ""]
    assert warnings[1].startswith("13 of 16 ranks are missing: 1, 2, 3, 5")


def test_an_operation_of_an_unknown_name_computes_and_is_named(tmp_path):
    (trace,) = read_oplevel(write(tmp_path, [op("gradient-check", 0, 1)]))
    assert conform(TABLES["spans"], trace.frames["spans"])["stream"].to_list() == [0]
    assert "gradient-check" in trace.warnings[-1]


def test_operations_without_a_time_are_counted(tmp_path):
    rows = [op("forward-compute", 0, 1), op("forward-compute", float("nan"), 1), op("gc", 2, None)]
    (trace,) = read_oplevel(write(tmp_path, rows))
    assert trace.frames["spans"].height == 1
    assert trace.skipped == {"operations without a time": 2}


def test_without_places_and_numbers_peers_and_sequences_are_unknown(tmp_path):
    rows = [{"rank": 0, "step": 1, "optype": "forward-send", "start_ts": 0.0, "duration": 1.0}]
    collectives = tables(read_oplevel(write(tmp_path, rows)), "collectives")
    assert collectives.select("peer", "sequence").rows() == [(-1, -1)]
    assert collectives["group_ranks"].to_list() == [""]


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        read_oplevel(path)
    assert len(str(refused.value).splitlines()) == 1
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_a_table_without_the_columns_is_refused(tmp_path):
    path = tmp_path / "other.parquet"
    pl.DataFrame({"rank": [0], "loss": [1.0]}).write_parquet(path)
    assert "no column step, optype, start_ts, duration" in refusal(path)


def test_a_column_of_the_wrong_type_is_refused(tmp_path):
    path = tmp_path / "trace.parquet"
    pl.DataFrame([op("forward-compute", 0, 1, rank="first")]).write_parquet(path)
    assert "wrong type" in refusal(path)


@pytest.mark.parametrize("name", ["rank", "step", "start_ts", "duration", "optype", "mb_id"])
@pytest.mark.parametrize(
    "odd",
    [
        pl.col("step").cast(pl.Int128),
        pl.struct("step"),
        pl.concat_list("step"),
        pl.lit(b"\xff"),
        pl.lit(None),
        pl.lit("many"),
        pl.lit(2**62),
        pl.lit(1e300),
        pl.col("step").cast(pl.Decimal(38, 2)),
        pl.col("step").cast(pl.Date),
        pl.lit(True),
        pl.lit(["a"], dtype=pl.List(pl.Categorical)),
    ],
    ids=str,
)
def test_a_column_of_any_type_is_read_or_refused_in_one_line(tmp_path, name, odd, capfd):
    path = write(tmp_path, [op("forward-compute", 0, 1), op("forward-send", 1, 1, mb_id=3)])
    pl.read_parquet(path).with_columns(odd.alias(name)).write_parquet(path)
    try:
        traces = read_oplevel(path)
    except InputError as error:
        traces = str(error)
    if isinstance(traces, str):
        assert str(path) in traces
        assert "\n" not in traces
    assert capfd.readouterr().err == ""


def test_more_rows_than_a_file_of_its_size_can_hold_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dpro.extensions.pipelines.oplevel.MIN_ROWS", 100)
    path = write(tmp_path, [op("gc", 0, 0)] * 100_000)
    with pytest.raises(InputError, match="claims to have 100000 rows"):
        read_oplevel(path)


def test_a_file_cut_short_is_refused(tmp_path):
    path = write(tmp_path, two_by_two())
    path.write_bytes(path.read_bytes()[:-50])
    assert refusal(path).endswith("not readable as Parquet (it is damaged or cut short)")


def test_a_trace_without_operations_is_refused(tmp_path):
    path = write(tmp_path, [op("forward-compute", 0, None)])
    assert "no operation" in refusal(path)


@pytest.fixture(scope="module", params=["AR", "ST"])
def real(request, traces) -> tuple[str, pl.DataFrame, list[RankTrace]]:
    path = traces / "straggler_parquet" / f"trace-{request.param}.parquet"
    plain = pl.read_parquet(path).with_columns(
        pl.col("optype").cast(pl.String), pl.col("start_ts", "duration").cast(pl.Float64)
    )
    return request.param, plain, read_oplevel(path)


def test_all_operations_of_a_real_trace_are_there(real):
    _, plain, read = real
    spans = tables(read, "spans")
    found = spans.group_by("rank", pl.col("name").alias("optype")).agg(
        count=pl.len(), seconds=pl.col("duration_ns").sum() / 1e9
    )
    truth = plain.group_by(pl.col("rank").cast(pl.Int32), "optype").agg(
        recorded=pl.len(), total=pl.col("duration").sum()
    )
    both = truth.join(found, on=["rank", "optype"], how="full", coalesce=True)
    assert both.filter(pl.col("count") != pl.col("recorded")).is_empty()
    assert both.null_count().sum_horizontal().sum() == 0
    assert both.select((pl.col("seconds") - pl.col("total")).abs().max()).item() < 1e-6


def test_collectives_of_a_real_trace_by_operation(real):
    _, plain, read = real
    counted = dict(plain.group_by("optype").len().rows())
    ops = dict(tables(read, "collectives").group_by("op").len().rows())
    assert ops == {
        "send": counted["forward-send"] + counted["backward-send"],
        "recv": counted["forward-recv"] + counted["backward-recv"],
        "all_gather": counted["params-all-gather"],
        "reduce_scatter": counted["grads-reduce-scatter"],
        "all_reduce": sum(counted[name] for name in counted if name.endswith("all-reduce"))
        + counted["optimizer-clip-main-grad"],
    }


def test_both_ends_of_a_real_send_end_together(real):
    _, _, read = real
    ends = tables(read, "collectives").filter(pl.col("op").is_in(["send", "recv"]))
    pairs = ends.group_by(
        "group",
        pl.min_horizontal("rank", "peer").alias("low"),
        pl.max_horizontal("rank", "peer").alias("high"),
        "sequence",
    ).agg(pl.col("op").sort(), end=pl.col("start_ns") + pl.col("duration_ns"))
    assert pairs.filter(pl.col("op").list.join(" ") != "recv send").is_empty()
    assert pairs.select((pl.col("end").list.max() - pl.col("end").list.min()).max()).item() < 3_000_000


def test_steps_of_a_real_trace_are_as_long_as_published(real):
    name, plain, read = real
    truth = plain.group_by("step").agg(length=(pl.col("start_ts") + pl.col("duration")).max()).sort("step")
    for trace in read:
        steps = conform(TABLES["steps"], trace.frames["steps"])
        assert steps["step"].to_list() == truth["step"].to_list()
        assert (steps["duration_ns"] / 1e9 - truth["length"]).abs().max() < 1e-8
    published = {"AR": 46.649174, "ST": 2.214448}
    assert steps["duration_ns"].mean() / 1e9 == pytest.approx(published[name], rel=1e-6)


def test_analyses_beside_a_real_trace_are_not_taken_for_one(traces):
    folder = traces / "straggler_parquet"
    assert is_oplevel((folder / "trace-ST.parquet").read_bytes()[:65536])
    for path in folder.glob("*.json.gz"):
        assert not is_oplevel(gzip.decompress(path.read_bytes())[:65536])
