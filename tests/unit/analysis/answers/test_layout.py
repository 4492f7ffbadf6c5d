import pytest

from dpro.analysis.answers.info import layout_document
from dpro.opening import open_path
from tests.jobs import ROOT

GOLDENS = {
    "flight_recorder/lock_gil_1st": ("16 ranks = dp 2 x pp 2 x tp 4, ep 8 over dp x tp", "descriptions"),
    "nccl_meta/nanogpt_h100_hook_rank0of8.json.gz": ("8 ranks = axis of 8", "algebra"),
    "multirank/torchrec_v100_2r_kjt": ("", ""),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_layouts_of_real_jobs(traces, name):
    layout = layout_document(open_path(traces / name))
    assert (layout.line, layout.source) == GOLDENS[name]


def test_every_rank_of_a_real_job_has_its_own_coordinates(traces):
    layout = layout_document(open_path(traces / "flight_recorder/lock_gil_1st"))
    assert [axis.name for axis in layout.axes] == ["dp", "pp", "tp"]
    assert layout.coordinates["13"] == [1, 1, 1]  # tp fastest, then dp, then pp: 13 = 8 + 4 + 1
    assert len({tuple(place) for place in layout.coordinates.values()}) == 16
    assert layout.ambiguity == []


def test_a_group_that_reduces_recorded_buckets_is_data_parallel():
    layout = layout_document(open_path(ROOT / "sample_traces" / "slow_rank"))
    assert (layout.line, layout.ambiguity) == ("2 ranks = dp 2", [])
