"""Every collective call of a real job is a row, however small the ring that PyTorch keeps them in."""

import polars as pl
import pytest

from dpro.collectors.convert.calls import LOST
from dpro.schema import COLLECTIVES
from tests.jobs import TWO_RANKS, record, script

pytest.importorskip("torch")

STEPS, EACH, RING = 200, 6, 400

JOB = f"""
import time
import torch.distributed as dist
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
tensor = torch.ones(6)
for _ in range({STEPS}):
    train_step()
    dist.all_reduce(tensor, group=pair)
    for _ in range({EACH} - 1):
        dist.all_reduce(tensor)
    time.sleep(0.004)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    options = ["--every", "60"]
    return record(folder, [*TWO_RANKS, script(folder, JOB)[1]], *options, TORCH_FR_BUFFER_SIZE=RING)[0]


def test_every_call_is_one_row_with_its_facts(run):
    collectives = run.table(COLLECTIVES).sort("rank", "group", "sequence")
    counts = collectives.group_by("rank", "group").len().sort("rank", "group")["len"].to_list()
    assert counts == [STEPS * (EACH - 1), STEPS] * 2
    assert run.manifest.skipped.get(LOST, 0) == 0
    for _, rows in collectives.group_by("rank", "group"):
        assert rows["sequence"].to_list() == list(range(1, rows.height + 1))
        assert rows["enqueued_ns"].is_sorted()
    assert collectives.select("op", "bytes_in", "dtype").unique().rows() == [("all_reduce", 24, "float32")]
    assert collectives["group_ranks"].to_list() == ["0,1"] * collectives.height


def test_only_calls_within_windows_have_durations_on_gloo(run):
    collectives = run.table(COLLECTIVES)
    known = collectives.filter(pl.col("duration_ns") >= 0)
    assert set(known["window"]) == {0, 1, 2, 3}
    assert (collectives.filter(window=-1)["duration_ns"] == -1).all()


@pytest.mark.slow
def test_calls_that_outran_the_recorder_are_counted(tmp_path):
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    for _ in range(3): train_step()
    for _ in range(500): dist.all_reduce(torch.ones(1))
    """
    run, done = record(tmp_path, script(tmp_path, body), TORCH_FR_BUFFER_SIZE=20)
    assert done.returncode == 0, done.stderr
    assert run.table(COLLECTIVES).height + run.manifest.skipped[LOST] == 500
    assert run.manifest.skipped[LOST] > 0
