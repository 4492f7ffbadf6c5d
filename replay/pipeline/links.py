"""Which stages of a pipeline hand on to which, by the messages that their ranks send each other.

In: an opened run, and where its ranks are. Out: pairs of stages. Stages of a model without branches are a
chain; those of branches that work side by side are not linked.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from dpro.replay.graph import MeshPosition
from dpro.schema import COLLECTIVES
from dpro.store import Run

Links = Mapping[tuple[int, int], int]  # how many messages, by the stages of their ends, the lower one first


def recorded_links(run: Run, places: Mapping[int, MeshPosition]) -> Links:
    """How many messages stages sent each other; none where peers were not recorded."""
    stage = {rank: place.stage for rank, place in places.items()}
    sent = run.table(COLLECTIVES, ["rank", "op", "peer"]).filter(
        (pl.col("op") == "send") & (pl.col("peer") >= 0)
    )
    ends = [pl.col(end).replace_strict(stage, default=-1, return_dtype=pl.Int64) for end in ("rank", "peer")]
    pairs = sent.select(low=pl.min_horizontal(ends), high=pl.max_horizontal(ends))
    known = pairs.filter((pl.col("low") >= 0) & (pl.col("low") < pl.col("high")))
    counts = known.group_by("low", "high").len().sort("low", "high")
    return {(low, high): count for low, high, count in counts.iter_rows()}


def is_connected(links: Links, num_stages: int) -> bool:
    """Whether each stage but the first is handed something by one before it: no link is missing.

    Args:
        links: as from `recorded_links`.
    """
    return {high for _, high in links} == set(range(1, num_stages))
