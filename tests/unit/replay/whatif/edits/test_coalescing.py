"""One collective in place of several that are called in a row, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.errors import Unanswerable
from dpro.replay.whatif.edits.coalescing import series_of
from tests.builders import WORKER, TinyRun
from tests.edits import step_us

CALL, LATENCY, US_PER_BYTE = 10.0, 100.0, 1e-3


def series_job(
    sizes: tuple[int, ...] = (4,) * 5,
    *,
    between: str = "aten::mean",
    op: str = "all_gather",
    dtypes: tuple[str, ...] = ("float32",),
    asked: bool = True,
    around: str = "",
    steps: int = 3,
) -> TinyRun:
    """Two ranks that work for 1 ms, reduce 100 kB, and then call collectives in a row, 50 us of work apart.

    Args:
        sizes: bytes of each.
        between: the operator after each.
        op: what each does.
        dtypes: of which each has the next one, in turn.
        asked: whether each is waited for before the next is called.
        around: range that each is in.
    """
    run, at = TinyRun(), 0.0
    for step in range(steps):
        begin, number = at, 100 * step
        for rank in (0, 1):
            run.op("aten::mm", at, at + 1000, rank)
        at += 1000
        pieces = [("all_reduce", 100_000, "float32")]
        pieces += [(op, size, dtypes[index % len(dtypes)]) for index, size in enumerate(sizes)]
        moved = at
        for what, size, dtype in pieces:
            lasts = LATENCY + US_PER_BYTE * size
            begins, waits = max(at + CALL, moved), asked or what == "all_reduce"
            moved, number = begins + lasts, number + 1
            for rank in (0, 1):
                called = run.op(f"c10d::{what}", at, at + CALL, rank)
                ran = run.mark(f"gloo:{what}", begins, moved, rank, tid=WORKER)
                facts = {"group": "dp", "group_ranks": "0,1", "bytes_in": size, "bytes_out": size}
                run.member(ran, what, launched_by=called, sequence=number, dtype=dtype, **facts)
                if around:
                    run.mark(around, at, moved, rank)
            at = moved if waits else at + CALL
            for rank in (0, 1):
                run.op(between, at, at + 50, rank)
            at += 50
        at = max(at, moved)
        for rank in (0, 1):
            run.op("aten::add_", at, at + 20, rank)
            run.step(step, begin, at + 20, rank)
        at += 20
    return run


def test_one_of_five_is_left_which_moves_what_all_do(tmp_path: Path):
    graph = series_job().build(tmp_path / "run").graph
    series = series_of(graph)
    assert series.height == 4 * 2 * 3  # collectives, ranks, steps
    gained = step_us(graph) - step_us(graph, "coalesce")
    assert gained == pytest.approx(4 * (CALL + LATENCY), abs=2)  # the work between stays


OBJECTS = {"sizes": (8, 47) * 4, "dtypes": ("int64", "uint8")}  # sizes, then what is of that size


@pytest.mark.parametrize(
    ("job", "gone", "kept"),
    [
        ({}, 4, 1),
        ({"op": "broadcast"}, 4, 1),
        ({"sizes": (4, 4, 1_000_000, 4)}, 2, 1),  # the large one between them is none of them
        (OBJECTS, 6, 2),
    ],
)
def test_those_of_one_type_become_one(tmp_path: Path, job, gone, kept):
    series = series_of(series_job(**job).build(tmp_path / "run").graph)
    of_all = 2 * 3  # ranks and steps
    assert (series.height, series["last"].n_unique()) == (gone * of_all, kept * of_all)


@pytest.mark.parametrize(
    "job",
    [
        {"between": "aten::mm"},  # layers: each needs the one before
        {"between": "aten::convolution"},
        {"asked": False},
        {"sizes": (4,)},
        {"sizes": (1_000_000,) * 5},  # they take what their bytes take
        {"sizes": (-1,) * 5},  # it is not known what they take
        {"op": "all_to_all"},
        {"sizes": (8, 47), "dtypes": ("int64", "uint8")},
        {"around": "FSDP::all_gather (0)"},
    ],
    ids=str,
)
def test_what_is_no_series_is_left_alone(tmp_path: Path, job):
    with pytest.raises(Unanswerable, match="no two collectives of one kind are in a row"):
        series_of(series_job(**job).build(tmp_path / "run").graph)


def test_a_series_that_only_one_rank_sees_is_none(tmp_path: Path):
    run = series_job()
    for row in [row for row in run.rows["spans"] if row["name"] == "aten::mean" and row["rank"] == 1]:
        row["name"] = "aten::mm"
    with pytest.raises(Unanswerable, match="no two collectives"):
        series_of(run.build(tmp_path / "run").graph)
