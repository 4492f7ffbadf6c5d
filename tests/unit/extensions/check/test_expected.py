"""What a run says that an all-reduce between its hosts takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.errors import Unanswerable
from dpro.extensions.check.answer import run_bandwidth
from tests.fabrics import crossing_ring

ROOT = Path(__file__).parents[4]


def test_bus_bandwidth_is_that_of_the_curve_of_the_largest_all_reduces(tmp_path) -> None:
    crossing_ring(tmp_path / "run", lasts_us=1500)
    found = run_bandwidth(tmp_path / "run")
    # Of four ranks each sends 2 x 3/4 of 1 MB in 1.5 ms.
    assert found[:3] == pytest.approx((1.0, 1_000_000, 4), rel=0.01)
    assert found.hosts == {"node0", "node1", "node2", "node3"}
    assert (found.num_samples, found.misfit) == (12, 0)  # four members of three


def test_a_run_on_one_host_has_nothing_to_compare_with() -> None:
    with pytest.raises(Unanswerable, match="no all-reduce between hosts"):
        run_bandwidth(ROOT / "sample_traces" / "healthy")
