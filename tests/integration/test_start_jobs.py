"""A real job that is slow to start: what its start consisted of, and which rank it waited for."""

from __future__ import annotations

import json

import polars as pl
import pytest

pytest.importorskip("torch")

from dpro.schema import START_PARTS, STARTS
from tests.commands import dpro
from tests.jobs import TORCHRUN, record, script

# Rank 1 comes late to its second group. Both ranks import for long, and load what rank 0 has saved.
STARTS_SLOWLY = """
import os, time
import torch.distributed as dist
import slow_outer
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    time.sleep(2)
both = dist.new_group([0, 1], group_desc="both")
dist.new_group([1])
if rank == 0:
    torch.save(torch.zeros(1_000_000), "state.pt")
dist.barrier()
torch.load("state.pt")
for _ in range(5):
    train_step()
import slow_later
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_start_says_what_took_long_and_which_rank_it_waited_for(tmp_path):
    (tmp_path / "slow_outer.py").write_text("import time\ntime.sleep(1)\nimport slow_inner\n")
    (tmp_path / "slow_inner.py").write_text("import time\ntime.sleep(0.2)\n")
    (tmp_path / "slow_later.py").write_text("import time\ntime.sleep(0.2)\n")
    _, path = script(tmp_path, STARTS_SLOWLY)
    run, done = record(tmp_path, [*TORCHRUN, path])
    assert done.returncode == 0, done.stderr
    parts = run.table(START_PARTS).sort("start_ns")
    for rank in range(2):
        of_rank = parts.filter(pl.col("rank") == rank)
        imported = of_rank.filter(pl.col("kind") == "import")["name"].to_list()
        assert "slow_outer" in imported
        assert not {"slow_inner", "slow_later"} & {*imported}
        groups = of_rank.filter(pl.col("kind") == "process_group")
        assert groups["purpose"].to_list()[:2] == ["default_pg", "both"]
        assert groups["group_ranks"].to_list()[:2] == ["0,1", "0,1"]
        moments = run.table(STARTS).row(by_predicate=pl.col("rank") == rank, named=True)
        assert moments["imported_ns"] <= of_rank["start_ns"].min() <= moments["group_begin_ns"]
    document = json.loads(dpro("goodput", str(run.path), "--json").stdout)
    (start,) = document["starts"]
    stages = {stage["stage"]: stage for stage in start["stages"]}
    assert sum(stage["last_s"] for stage in start["stages"]) == pytest.approx(start["total_s"])
    assert stages["imports"]["longest_s"] > 1.2
    waited = next(part for part in stages["process_group"]["parts"] if '"both"' in part["what"])
    assert stages["process_group"]["rank"] == 0
    assert waited["waited_for"] == 1
    assert waited["waited_s"] > 1
    assert [part["what"].partition(" (")[0] for part in stages["load"]["parts"]] == [
        str(tmp_path / "state.pt")
    ]
    assert "of it until rank 1 came" in dpro("goodput", str(run.path)).stdout
