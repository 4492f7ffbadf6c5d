"""Real jobs that are killed and restarted: where all their time went."""

from __future__ import annotations

import polars as pl
import pytest

pytest.importorskip("torch")

from dpro.extensions.goodput.account import account, totals
from dpro.extensions.goodput.attempts import attempts_of
from dpro.schema import CHECKPOINTS
from tests.jobs import OWN_STORE, TORCHRUN, opened, record, script

# Steps of 20 ms; rank 0 saves every five, under another name first; rank 1 is killed once in step 12.
KILLED = f"""
import os, signal, time
import torch.distributed as dist
{OWN_STORE}
again = attempt != "0"
done = torch.load("last.pt")["done"] if again else 0
for step in range(done, 20):
    dist.barrier()
    train_step()
    time.sleep(0.02)
    if (step + 1) % 5 == 0:
        if rank == 0:
            torch.save({{"done": step + 1}}, "last.tmp")
            time.sleep(0.1)
            os.replace("last.tmp", "last.pt")
    if step == 12 and rank == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""

# Shards of all ranks, saved in the background, and loaded by the next start of the job.
SHARDED = """
import os, time
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
dist.init_process_group("cpu:gloo")
state = {"done": torch.zeros(1, dtype=torch.int64), "rank" + str(dist.get_rank()): torch.zeros(100_000)}
if os.path.exists("shards"):
    dcp.load(state, checkpoint_id="shards")
done = int(state["done"])
for step in range(done, done + 8):
    train_step()
    state["done"] += 1
    if step == 3:
        saved = dcp.async_save(state, checkpoint_id="shards")
    time.sleep(0.02)
if not done:
    saved.result()
dist.destroy_process_group()
"""


# The second start of the job ends while rank 0 waits for its process group, since rank 1 was killed before.
KILLED_JOINING = f"""
import os, signal, time
import torch.distributed as dist
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "1":
    while not os.path.exists("joins"):
        time.sleep(0.02)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    open("joins", "w").close()
{OWN_STORE}
for step in range(10):
    dist.barrier()
    train_step()
    time.sleep(0.02)
    if step == 5 and rank == 1 and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""

# An optimizer that waits without gradients, in step 6 for long; and a loop that evaluates after step 12.
EVALUATED = """
import time
class Waits(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def add_param_group(self, group):
        self.param_groups.append(group)
    @torch.no_grad()
    def step(self):
        time.sleep(0.5 if step == 6 else 0.01)
        for parameter in self.param_groups[0]["params"]:
            parameter -= 1e-3 * parameter.grad
            parameter.grad = None
module = torch.nn.Linear(8, 8)
optimizer = Waits(list(module.parameters()))
for step in range(20):
    module.train()
    time.sleep(0.02)
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 12:
        module.eval()
        for _ in range(4):
            time.sleep(0.1)
            with torch.no_grad():
                module(torch.ones(2, 8))
                time.sleep(0.05)
"""


@pytest.mark.slow
def test_loop_that_evaluates_is_evaluation_and_an_optimizer_that_waits_is_none(tmp_path):
    run, done = record(tmp_path, script(tmp_path, EVALUATED))
    assert done.returncode == 0, done.stderr
    pieces, _ = account(attempts_of([run]), {})
    evaluated = pieces.filter(pl.col("class") == "evaluation")
    assert evaluated["step"].to_list() == [13]
    assert 0.6 <= evaluated["duration_ns"].sum() / 1e9 < 0.75


@pytest.mark.slow
def test_start_that_never_got_its_process_group_is_an_attempt_that_waited_for_it(tmp_path):
    command = [*TORCHRUN, "--max-restarts", "3", script(tmp_path, KILLED_JOINING)[1]]
    run, done = record(tmp_path, command)
    assert done.returncode == 0, done.stderr
    attempts = attempts_of([run])
    assert [each.steps["step"].n_unique() for each in attempts] == [5, 0, 9]
    assert [each.ended_well for each in attempts] == [False, False, True]
    pieces, _ = account(attempts, {})
    waited = pieces.filter((pl.col("attempt") == 1) & (pl.col("class") == "process_group"))
    assert waited["rank"].to_list() == [0]
    assert 0.4 < waited["duration_ns"].sum() / 1e9 < 5


@pytest.mark.slow
def test_killed_job_resumes_from_its_last_checkpoint_and_all_its_time_is_accounted_for(tmp_path):
    command = [*TORCHRUN, "--max-restarts", "3", script(tmp_path, KILLED)[1]]
    run, done = record(tmp_path, command)
    assert done.returncode == 0, done.stderr
    attempts = attempts_of([run])
    assert [each.first_step for each in attempts] == [0, 10]
    assert [each.notes for each in attempts] == [(), ()]
    pieces, notes = account(attempts, {})
    assert notes == []
    by_class = dict(totals(pieces).select("class", "duration_ns").iter_rows())
    again = pieces.filter((pl.col("class") == "repeated") & (pl.col("rank") == 0) & (pl.col("step") >= 0))
    assert again["step"].unique().sort().to_list() == [10, 11, 12]
    assert {"imports", "process_group", "set_up", "down", "launch", "productive"} <= set(by_class)
    assert pieces.filter(pl.col("class") == "productive")["step"].unique().sort().to_list() == list(range(20))


@pytest.mark.slow
def test_shards_that_were_saved_in_the_background_are_what_the_next_run_resumes_from(tmp_path):
    command = [*TORCHRUN, "--standalone", script(tmp_path, SHARDED)[1]]
    runs = []
    for name in ("first", "second"):
        _, done = record(tmp_path, command)
        assert done.returncode == 0, done.stderr
        (tmp_path / "run").rename(tmp_path / name)
        runs.append(opened(tmp_path / name))
    first, second = attempts_of(runs)
    assert (first.first_step, second.first_step) == (0, 4)
    saves = runs[0].table(CHECKPOINTS).filter(pl.col("kind") == "save")
    assert sorted(saves["rank"].to_list()) == [0, 1]
    assert (saves["duration_ns"] >= saves["stall_ns"]).all()
    assert (saves["bytes"] > 400_000).all()
    assert runs[1].table(CHECKPOINTS)["kind"].unique().to_list() == ["load"]
