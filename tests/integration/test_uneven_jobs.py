"""Real two-rank jobs whose ranks get batches of different sizes: which rank is blamed, and which is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.schema import COUNTERS
from dpro.store import open_run
from tests.jobs import PATIENCE_S

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
BATCH, LENGTH, STEPS_RUN = 4, 60, 26

# Work sleeps for as long as the batch is: other work on the machine then matters little. Sequences are padded
# to the longest of a batch, as usual; the last sample of each batch is its longest.
JOB = f"""
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

KIND = sys.argv[1]
dist.init_process_group("gloo")
RANK = dist.get_rank()

class Text(Dataset):
    def __len__(self):
        return {BATCH * STEPS_RUN}

    def __getitem__(self, index):
        step, sample = divmod(index, {BATCH})
        draw = torch.Generator().manual_seed(100 * RANK + step)
        longest = {LENGTH}
        if KIND == "varying":
            longest = int({LENGTH} * (1 + 2 * torch.rand((), generator=draw)))
        if KIND == "persistent" and RANK == 1:
            longest = 2 * {LENGTH}
        return torch.ones(longest if sample == {BATCH - 1} else longest // 2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, batch):
        time.sleep(0.0012 * batch.shape[1] * (2 if KIND == "slow" and RANK == 1 else 1))
        return self.linear(batch.mean().reshape(1, 1))

model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pad = lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True)
for batch in DataLoader(Text(), batch_size={BATCH}, collate_fn=pad):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def record(folder: Path, kind: str) -> Path:
    (folder / "job.py").write_text(JOB)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "dpro", "record", "-o", str(folder / "run"), "--skip", "1000", "--"]
    done = subprocess.run(
        [*command, *TORCHRUN, str(folder / "job.py"), kind],
        env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run"


def found(run: Path) -> dict[str, dict[str, Any]]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "dpro", "diagnose", str(run), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return {each["class"]: each for each in findings if each["component"]["kind"] != "host"}  # others use it


@pytest.mark.slow
def test_rank_that_always_has_longer_sequences_is_not_blamed(tmp_path):
    run = record(tmp_path, "persistent")
    findings = found(run)
    counted = open_run(run).table(COUNTERS).filter(pl.col("counter") == "step_input_elements")
    assert counted.height > 2 * (STEPS_RUN - 4)
    per_rank = {rank: set(rows["value"]) for (rank,), rows in counted.group_by("rank")}
    assert per_rank == {0: {BATCH * LENGTH}, 1: {BATCH * 2 * LENGTH}}
    assert findings["imbalance.data"]["ranks"] == [0, 1]
    assert not {"slow.compute", "slow.host"} & findings.keys()


@pytest.mark.slow
def test_sequences_that_vary_from_step_to_step_are_uneven_work(tmp_path):
    findings = found(record(tmp_path, "varying"))
    assert findings["imbalance.data"]["component"] == {"kind": "job", "id": "the ranks' batches"}
    assert findings["imbalance.data"]["severity"] > 0.05
    assert not {"slow.compute", "slow.host"} & findings.keys()


@pytest.mark.slow
def test_slow_rank_with_sequences_as_long_as_the_others_is_blamed(tmp_path):
    findings = found(record(tmp_path, "slow"))
    assert "imbalance.data" not in findings
    assert findings["slow.host"]["ranks"] == [1]


@pytest.mark.slow
def test_equal_work_is_no_finding(tmp_path):
    assert "imbalance.data" not in found(record(tmp_path, "equal"))


EXPERTS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()

class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, sent, got):
        ctx.sizes = sent, got
        return exchanged(given, sent, got)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, *ctx.sizes[::-1]), None, None

def exchanged(given, sent, got):
    out = given.new_empty(sum(got), given.shape[1])
    dist.all_to_all_single(out, given.contiguous(), got, sent)
    return out

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))

    def forward(self, tokens):
        first = int(len(tokens) * self.share())
        sent = [first, len(tokens) - first]
        got = [sent[rank]] * 2
        mine = Exchange.apply(tokens, sent, got)
        ends = torch.tensor([len(mine) // 2, len(mine)], dtype=torch.int32)
        return tokens + Exchange.apply(torch._grouped_mm(mine, self.weight, offs=ends), got, sent)

model = torch.nn.Sequential(Experts(), Experts())
draw = torch.Generator().manual_seed(1)
model[0].share = lambda: 0.5
model[1].share = lambda: 0.5 + 0.5 * float(torch.rand((), generator=draw))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(26):
    model(torch.randn(64, 16, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_layer_whose_experts_get_uneven_tokens_shows_in_all_to_alls_and_grouped_products(tmp_path):
    (tmp_path / "job.py").write_text(EXPERTS)
    options = ["--every", "6", "--window-steps", "5", "--modules", "--shapes"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    dpro, run = [sys.executable, "-m", "dpro"], tmp_path / "run"
    command = [*dpro, "record", "-o", str(run), *options, "--", *TORCHRUN, "job.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=PATIENCE_S)
    layers = json.loads(subprocess.check_output([*dpro, "report", str(run), "--json"], env=environment))[
        "layers"
    ]
    times = {(layer["source"], layer["layer"]): (layer["busiest"], layer["imbalance"]) for layer in layers}
    assert times["grouped products", "1"][0] == times["all_to_all", "1"][0] == 0
    assert 1.3 < times["grouped products", "1"][1] < 1.9
    assert times["grouped products", "0"][1] == 1.0
