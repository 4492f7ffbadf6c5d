"""Jobs of a real Slurm: steps over nodes, arrays, a host that is taken out, and a prolog for all jobs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from dpro.schema import SPANS, WORKERS
from dpro.store import open_run
from tests.commands import in_own_process
from tests.hang_jobs import kill_ranks
from tests.jobs import (
    COMPILER,
    PATIENCE_S,
    RECORD,
    environment,
    opened,
    script,
    wait_for,
    wait_until,
)
from tests.slurm import ON_NODE, cluster, said, why_none

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_none()), reason=why_none())]
pytest.importorskip("torch")

# What Slurm says of ranks is not what torch reads.
RANKS = """
import os, time
os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"]}
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=int(os.environ["RANK"]),
                        world_size=int(os.environ["WORLD_SIZE"]))
model = torch.nn.parallel.DistributedDataParallel(model)
"""
TRAIN = RANKS + "for _ in range(12): train_step()\n"
# One host is slow; the job goes on for ever there, and ends without it.
SLOW_HOST = (
    RANKS
    + """
slow = os.environ["SLURMD_NODENAME"] == "n1"
for _ in range(20 if os.environ["SLURM_RESTART_COUNT"] == "1" else 100000):
    time.sleep(0.15 if slow else 0.05)
    train_step()
"""
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A cluster of three nodes, whose tasks can be looked into by `dpro attach`."""
    with cluster(3, prolog="echo export KINETO_USE_DAEMON=1; echo export KINETO_LOG_LEVEL=99") as variables:
        yield variables


def srun(num_nodes: int, command: list[str]) -> list[str]:
    return ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", *ON_NODE, *command]


def batch(folder: Path, slurm: dict[str, str], command: str, *options: str) -> str:
    """Submit a batch script; return the id of the job."""
    (folder / "job.sh").write_text(f"#!/bin/sh\n{command}\n")
    submit = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/out-%j-%a", *options, "job.sh"]
    done = subprocess.run(
        submit, cwd=folder, env=environment(**slurm), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def ended(job: str, slurm: dict[str, str]) -> bool:
    return not said(["squeue", "--noheader", f"--jobs={job}"], slurm)


def test_the_tasks_of_a_step_on_several_nodes_are_one_run(tmp_path, slurm):
    job = script(tmp_path, TRAIN, COMPILER)
    windows = ["--skip", "3", "--every", "4", "--window-steps", "1", "--keep-windows", "1"]
    command = srun(2, [*RECORD, "-o", "run", *windows, "--", *job])
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(**slurm, STORE=tmp_path / "store"), capture_output=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    run = opened(tmp_path / "run")
    assert (run.manifest.ranks, run.manifest.missing_ranks) == ([0, 1], [])
    assert run.table(WORKERS)["host"].to_list() == ["n0", "n1"]
    assert run.manifest.environment["SLURM_STEP_ID"] == "0"
    kept = run.table(SPANS).group_by("rank").agg(pl.col("window").unique())["window"].to_list()
    assert len(kept) == 2
    assert kept[0] == kept[1]
    assert len(kept[0]) == 1
    assert in_own_process("explain", tmp_path / "run").returncode == 0


def test_each_task_of_an_array_is_a_run_and_goodput_accounts_for_a_chain_of_them(tmp_path, slurm):
    job = shlex.join(script(tmp_path, TRAIN, COMPILER))
    record = shlex.join(RECORD)
    command = (
        f'export STORE="$PWD/store$SLURM_ARRAY_TASK_ID"\nsrun {record} -o "run$SLURM_ARRAY_TASK_ID" -- {job}'
    )
    array = batch(tmp_path, slurm, command, "--array=0-2%1", "--ntasks=1")
    wait_until(lambda: ended(array, slurm), "the array never ended")
    runs = [tmp_path / f"run{task}" for task in range(3)]
    assert [opened(run).manifest.ranks for run in runs] == [[0]] * 3
    done = in_own_process("goodput", *runs)
    assert done.returncode == 0, done.stderr


def test_a_slow_host_is_drained_and_the_job_goes_on_without_it(tmp_path, slurm):
    job = script(tmp_path, SLOW_HOST, COMPILER)
    recorded = shlex.join(srun(2, [*RECORD, "--no-windows", "-o", "run", "--", *job]))
    command = f'export STORE="$PWD/store${{SLURM_RESTART_COUNT:=0}}" SLURM_RESTART_COUNT\n{recorded}'
    number = batch(tmp_path, slurm, command, "--requeue", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
                   "--nodelist=n0,n1")  # fmt: skip
    try:
        wait_until(lambda: list(tmp_path.glob("run/.raw/*/*/records.bin")), "the job never began")
        hook = in_own_process("recipe", "slurm").stdout
        watch = [sys.executable, "-m", "dpro", "watch", "run", "--on-finding", hook, "--classes", "slow.host",
                 "--min-confidence", "0.5", "--no-history"]  # fmt: skip
        settings = environment(**slurm, JOB=number)
        watcher = subprocess.run(watch, cwd=tmp_path, env=settings, capture_output=True, timeout=PATIENCE_S)
        assert b"slow.host" in watcher.stderr, watcher.stderr.decode()
        shown = said(["scontrol", "show", "job", number], slurm)
        assert "ExcNodeList=n1" in shown
        assert "Restarts=1" in shown
        assert "dpro: slow.host" in said(["scontrol", "show", "node", "n1"], slurm)
        wait_until(lambda: ended(number, slurm), "the job never went on")
        first, last = (opened(tmp_path / name) for name in ("run", "run-restart1"))
        assert last.table(WORKERS)["host"].to_list() == ["n0", "n2"]
        assert first.table(WORKERS)["host"].to_list() == ["n0", "n1"]
        assert last.manifest.exit_status == 0
        account = in_own_process("goodput", first.path, last.path, "--json")
        assert len(json.loads(account.stdout)["attempts"]) == 2
    finally:
        kill_ranks(tmp_path / "run")


UNRECORDED = (
    RANKS
    + """
while not os.path.exists("stop"):
    train_step()
    time.sleep(0.03)  # the request is for one of the next 100 steps, and has to come before it
    open(f"pid{os.environ['RANK']}", "w").write(str(os.getpid()))
"""
)


def test_a_line_in_the_prolog_lets_every_job_be_looked_into_without_dpro_in_it(tmp_path, slurm):
    command = srun(1, script(tmp_path, UNRECORDED, COMPILER))
    with subprocess.Popen(command, cwd=tmp_path, env=environment(**slurm, STORE=tmp_path / "store")) as job:
        try:
            wait_for(tmp_path / "pid0")
            attach = ("--pid", (tmp_path / "pid0").read_text(), "--steps", "3", "-o", tmp_path / "run")
            done = in_own_process("attach", *attach)
            assert done.returncode == 0, done.stderr
        finally:
            (tmp_path / "stop").touch()
        assert job.wait(PATIENCE_S) == 0
    spans = open_run(tmp_path / "run").table(SPANS)
    assert spans.filter(pl.col("name") == "aten::addmm").height >= 2
