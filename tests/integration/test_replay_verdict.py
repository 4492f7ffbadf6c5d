"""What a good replay is held to, on every multi-rank folder there is: kept, or the verdict says where not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.replay import replay_document
from dpro.cli.analysis import analyse
from dpro.documents import plain
from dpro.replay.alignment.match import Matching, match_collectives
from dpro.schema import COLLECTIVES, SPANS
from dpro.units import NS_PER_US, format_duration

ROOT = Path(__file__).parents[2]
TRACES = Path(os.environ.get("DPRO_TRACES", ROOT.parent / "shared" / "traces")) / "multirank"
MS = 1_000_000


def _folders() -> list[Path]:
    """Every folder of traces of several ranks, and every run that ships."""
    others = [folder for folder in TRACES.iterdir() if folder.is_dir()] if TRACES.is_dir() else []
    return sorted(others) + sorted(path.parent for path in (ROOT / "sample_traces").glob("*/manifest.json"))


@pytest.fixture(scope="module", params=_folders(), ids=lambda folder: folder.name)
def analysis(request: pytest.FixtureRequest) -> Analysis:
    return analyse(str(request.param))


def test_there_are_folders_to_look_at():
    assert len(_folders()) >= 3


def _missed(document: dict[str, Any]) -> list[str]:
    """What each bar that is missed must be said with."""
    mean_step_us = 1e3 * float(np.mean([row["measured_ms"] for row in document["steps"]] or [0]))
    starts = document["span_start_error_us"]
    unexplained = document["coverage"]["time_unexplained"]
    missed = []
    if document["error_pct"] > 1:
        missed.append(f"off by {document['error_pct']:.1f}%")
    if starts["p50"] > 0.002 * mean_step_us:
        missed.append(f"half of the starts are off by {format_duration(starts['p50'] * NS_PER_US)}")
    if starts["p95"] > 0.02 * mean_step_us:
        missed.append(f"one in twenty of the starts are off by {format_duration(starts['p95'] * NS_PER_US)}")
    if unexplained > 0.01:
        missed.append(f"does not explain {unexplained:.1%} of the time")
    return missed


def test_a_replay_keeps_to_every_bar_or_its_verdict_says_which_it_misses_and_by_how_much(analysis):
    document = plain(replay_document(analysis))
    reasons = "\n".join(document["reasons"])
    assert [line for line in _missed(document) if line not in reasons] == []
    # And the verdict does not complain of a bar that is kept.
    assert ("does not explain" in reasons) == (document["coverage"]["time_unexplained"] > 0.01)


def test_shares_of_what_starts_rest_on_are_reported_and_add_up(analysis):
    document = plain(replay_document(analysis))
    starts = document["evidence"]["starts"]
    assert sum(starts.values()) == pytest.approx(1)
    assert starts["anchored"] + starts["fitted"] == pytest.approx(document["coverage"]["starts_anchored"])
    counted = sum(row["recorded"] + row["inferred"] for row in document["evidence"]["edges"])
    assert counted == analysis.built.graph.edges.source.size
    assert [row["rank"] for row in document["ranks"]] == analysis.run.manifest.ranks


def test_how_much_overlap_slows_kernels_down_is_reported_where_the_run_shows_it(analysis):
    overlap, reported = analysis.trust.overlap, plain(replay_document(analysis))["overlap_slowdown"]
    assert (reported is None) == (overlap is None)
    if reported is not None:
        assert 1 < reported["low"] <= reported["factor"] <= reported["high"]
        assert reported["factor"] == overlap.factor


def _pairs(matching: Matching) -> set[frozenset[tuple[int, int]]]:
    """Which rows are one collective, however instances are numbered."""
    rows = matching.rows.group_by("instance").agg(pl.struct("rank", "collective_id"))
    return {
        frozenset((row["rank"], row["collective_id"]) for row in members) for _, members in rows.iter_rows()
    }


def test_every_collective_that_all_present_ranks_hold_is_matched_or_the_verdict_says_that_it_is_not(analysis):
    rows = analysis.built.matching.rows
    held = rows.group_by("window", "key", "rank").len().group_by("window", "key")
    # No rank holds fewer than what all hold: windows of one group are clipped at one end.
    fewest = held.agg(pl.col("len").min(), ranks=pl.len())
    matched = (
        rows.group_by("window", "key", "instance")
        .agg(members=pl.len())
        .join(fewest.select("window", "key", "ranks"), on=["window", "key"])
        .group_by("window", "key")
        .agg(found=(pl.col("members") == pl.col("ranks")).sum())
    )
    missed = fewest.join(matched, on=["window", "key"]).filter(pl.col("found") < pl.col("len"))
    assert missed.is_empty() or analysis.built.matching.refused
    for line in analysis.built.matching.refused:
        assert any(line in reason for reason in analysis.trust.reasons)


@pytest.mark.parametrize("shift_ms", [0.2, -0.2, 5, -5, 50, -50])
def test_a_clock_that_is_off_by_any_amount_changes_no_pair(analysis, shift_ms):
    ranks = analysis.run.manifest.ranks
    collectives, spans = analysis.run.table(COLLECTIVES), analysis.run.table(SPANS)
    plain = _pairs(match_collectives(collectives, spans))
    for rank in (ranks[0], ranks[-1]):
        late = pl.when(pl.col("rank") == rank).then(round(shift_ms * MS)).otherwise(0)
        moved = collectives.with_columns(pl.col("start_ns") + late)
        assert _pairs(match_collectives(moved, spans)) == plain
