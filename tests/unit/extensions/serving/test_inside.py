"""What changing the inside of iterations does to a server: two iterations of each kind, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.extensions.serving.changes import (
    ChangedIterations,
    GivenFacts,
    Server,
    changed_by_all,
    changed_iterations,
)
from dpro.extensions.serving.engine import Engine, IterationCost
from dpro.extensions.serving.predict import served_requests
from dpro.replay.graph import Graph
from dpro.replay.whatif.registry import parse_edit
from tests.builders import TinyRun

US = 1_000
# Of each iteration: tokens of prompts, and us of its two operators.
ITERATIONS = ((12, 30, 30), (0, 4, 16), (9, 10, 10), (0, 4, 16))


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Graph, pl.DataFrame]:
    """The graph of four iterations, and their rows; they are parts of two steps."""
    run, at, rows = TinyRun(), 0.0, []
    for number, (prompts, attention, product) in enumerate(ITERATIONS):
        run.op("aten::attention", at, at + attention)
        run.op("aten::mm", at + attention, at + attention + product)
        rows.append((round(at * US), round((attention + product) * US), prompts, 1))
        at += attention + product
        if number % 2:
            run.step(number // 2, rows[-2][0] / US, at)
    names = ["start_ns", "duration_ns", "prefill_tokens", "decode_tokens"]
    return run.build(tmp_path).graph, pl.DataFrame(rows, schema=names, orient="row")


def test_each_kind_of_iteration_changes_by_what_it_consists_of(recorded: tuple[Graph, pl.DataFrame]) -> None:
    found = changed_iterations(*recorded, [parse_edit("scale:name=aten::mm,factor=0.5")])
    assert found.prompts == pytest.approx((45 + 15) / (60 + 20))
    assert found.decodes == pytest.approx((12 + 12) / (20 + 20))
    assert found.doubt == pytest.approx(0.05 * np.log(20 / 12))


def test_edits_of_iterations_are_made_together(recorded: tuple[Graph, pl.DataFrame]) -> None:
    edits = [parse_edit(f"scale:name=aten::{name},factor=0.5") for name in ("mm", "attention")]
    found = changed_iterations(*recorded, edits)
    assert (found.prompts, found.decodes) == pytest.approx((0.5, 0.5))


def test_kind_of_iteration_that_windows_hold_once_is_left_as_it_is(
    recorded: tuple[Graph, pl.DataFrame],
) -> None:
    graph, iterations = recorded
    few = iterations.with_columns(prefill_tokens=pl.Series([12, 0, 0, 0]))
    found = changed_iterations(graph, few, [parse_edit("scale:name=aten::mm,factor=0.5")])
    assert found.prompts == 1.0
    assert found.decodes == pytest.approx((12 + 15 + 12) / (20 + 20 + 20))


def test_windows_with_hardly_an_iteration_are_refused(recorded: tuple[Graph, pl.DataFrame]) -> None:
    graph, iterations = recorded
    with pytest.raises(Unanswerable, match="hold 1 iteration"):
        changed_iterations(graph, iterations[:1], [parse_edit("scale:name=aten::mm,factor=0.5")])


def test_requests_are_scheduled_again_with_the_changed_iterations() -> None:
    # A prompt of two seconds and two decodes of one, of which the first takes half and the others a fourth.
    cost = IterationCost(1.0, 0.0, 0.1)
    requests = pl.DataFrame({"arrival_ns": [0], "prompt_tokens": [10], "output_tokens": [3]})
    server = Server(requests, Engine(), replace(cost, per_decode=0.0))
    faster = replace(server, given=GivenFacts(inside=ChangedIterations(0.5, 0.25, 0.1)))
    assert served_requests(server, 0.0)["end_ns"].item() == 4_000_000_000
    changed = changed_by_all(faster, ["replicas:count=1"])
    assert served_requests(changed, 0.0)["end_ns"].item() == 1_500_000_000
    assert changed.doubt == pytest.approx(0.1)
