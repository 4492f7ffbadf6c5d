"""Along which axis slow transfers are: named where it is known, and one."""

from __future__ import annotations

from functools import partial

import numpy as np
import polars as pl
import pytest

from dpro.detect.findings import Finding, finding_document
from dpro.detect.network.traffic import Healed, Traffic, with_axis
from dpro.detect.observations import observe
from dpro.documents import encode
from tests.builders import TinyRun

SLOW = Finding("slow.link", "link", "0 - 1", (0, 1), 0.1, 0.9, 1_000_000, (observe("test", "slow"),))


def _nothing(_factor: pl.DataFrame) -> Healed:
    return Healed(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    """Four ranks: two replicas of two tensor-parallel ranks."""
    job = TinyRun()
    for rank in range(4):
        job.op("a", 0, 1, rank)
        job.worker(rank, "n1", dp=rank // 2, tp=rank % 2)
    of = partial(Traffic, pl.DataFrame(), {}, _nothing)
    return of(run=job.write(tmp_path_factory.mktemp("run")))


def test_groups_that_are_all_along_one_axis_name_it(traffic):
    found = with_axis(SLOW, traffic, ["0,1", "3,2"])
    assert (found.axis, found.evidence) == ("tp", ("slow", "these transfers are along tp"))
    assert with_axis(SLOW, traffic, ["0,2"]).axis == "dp"


def test_a_group_of_all_ranks_is_along_both_axes(traffic):
    assert with_axis(SLOW, traffic, ["0,1,2,3"]).axis == "dp x tp"


def test_groups_along_several_axes_and_unknown_ranks_name_none(traffic):
    assert with_axis(SLOW, traffic, ["0,1", "0,2"]) == SLOW
    assert with_axis(SLOW, traffic, ["0,9"]) == SLOW
    assert with_axis(SLOW, Traffic(pl.DataFrame(), {}, _nothing), ["0,1"]) == SLOW


def test_programs_get_the_axis_as_a_key_that_is_absent_where_there_is_none(traffic):
    assert '"axis": "tp"' in encode(finding_document(with_axis(SLOW, traffic, ["0,1"])))
    assert '"axis"' not in encode(finding_document(SLOW))
