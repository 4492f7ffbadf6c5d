"""Jobs of a real Ray: actors of several worker groups and workers of Ray Train, on clusters old and new."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpro.replay.phases import ROLLOUT, TRAINING, phases
from dpro.schema import COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.store import Run
from tests.jobs import PATIENCE_S, RECORD, environment, opened

pytestmark = pytest.mark.slow
pytest.importorskip("torch")
pytest.importorskip("ray", reason="needs Ray: pip install ray", exc_type=ImportError)

STEP_COUNT, TRAIN_STEPS = 40, 120
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
# A driver calls actors in turn, as that of verl does. An actor imports torch when it is made, or later.
DRIVER = """
import json, os, signal, socket, sys, time
import ray

def port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]

class Worker:
    def setup(self, rank, port):
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        return os.environ.get("MINE"), os.environ["PYTHONPATH"].split(":")

@ray.remote
class Rollout(Worker):
    def generate(self):
        time.sleep(0.03)
        return [0.5] * 64

@ray.remote(max_restarts=1)
class Trainer(Worker):
    def setup(self, rank, port):
        import torch
        facts = super().setup(rank, port)
        self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        return facts
    def update(self, values):
        import torch
        self.model(torch.tensor(values)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
    def fail(self): raise ValueError("no such batch")
    def die(self): os.kill(os.getpid(), signal.SIGKILL)

ADDRESS = os.environ.get("RAY_TEST_ADDRESS")
local = dict(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
local["_temp_dir"] = os.environ["SESSION"]
ray.init(runtime_env={"env_vars": {"MINE": "1"}}, **({"address": ADDRESS} if ADDRESS else local))

def made(kind, names=()):
    meeting = port()
    actors = [kind.options(name=name).remote() for name in names] or [kind.remote() for _ in range(2)]
    facts = ray.get([actor.setup.remote(rank, meeting) for rank, actor in enumerate(actors)])
    return actors, facts[0]

def trained(trainers, rollouts, count):
    for _ in range(count):
        values = ray.get([rollout.generate.remote() for rollout in rollouts])
        ray.get([trainer.update.remote(values[0]) for trainer in trainers])

trainers, facts = made(Trainer, ["trainer-0", "trainer-1"])
rollouts, _ = made(Rollout)
trained(trainers, rollouts, int(os.environ["STEPS"]))
"""
RAY_TRAIN = """
import os, time
import ray, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

def loop(config):
    model = prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(config["steps"]):
        time.sleep(0.04)
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

ray.init(address=os.environ["RAY_TEST_ADDRESS"])
config = RunConfig(storage_path=os.environ["SESSION"] + "/results")
scaling = ScalingConfig(num_workers=2)
steps = {"steps": int(os.environ["STEPS"]) * 3}
TorchTrainer(loop, train_loop_config=steps, scaling_config=scaling, run_config=config).fit()
"""


@pytest.fixture
def session() -> Iterator[str]:
    """The folder of a cluster: sockets lie deep in it, and their paths must be short."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


HOLDER = """
import os, sys
import ray
size = dict(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
print(ray.init(**size, _temp_dir=os.environ["SESSION"]).address_info["address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster(session) -> Iterator[str]:
    """The address of a cluster that was there before the job, with a search path of its own; one node."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=session, env=environment(**QUIET, SESSION=session, PYTHONPATH="/of/the/node"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        yield holder.stdout.readline().strip()
    finally:
        holder.stdin.close()
        holder.wait(PATIENCE_S)


def driven(folder: Path, session: str, script: str, *recorder: str, **given: str):
    """Run a driver; returns what became of it."""
    (folder / "driver.py").write_text(script)
    variables = environment(**QUIET, SESSION=session, STEPS=str(STEP_COUNT), **given)
    return subprocess.run(
        [*recorder, sys.executable, "driver.py"],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


INTO_RUN = [*RECORD, "--ray", "-o", "run", "--every", "10", "--"]


def workers(run: Run) -> list[tuple[object, ...]]:
    columns = ["rank", "role", "exit_code", "exit_signal"]
    return run.table(WORKERS, columns).sort("rank").select(columns).rows()


def test_groups_of_actors_are_runs_with_each_others_phases(tmp_path, cluster, session):
    script = DRIVER + "print(facts[0], facts[1][-1])\n"
    plain = driven(tmp_path, session, script, RAY_TEST_ADDRESS=cluster)
    done = driven(tmp_path, session, script, *INTO_RUN, RAY_TEST_ADDRESS=cluster)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (0, "1 /of/the/node\n"), (
        done.stderr
    )
    run = opened(tmp_path / "run")
    assert workers(run) == [(rank, "trainer", 0, -1) for rank in (0, 1)]
    assert run.table(STEPS, ["step"])["step"].n_unique() == STEP_COUNT - 1
    taken = phases(run.table(SPANS), run.table(COLLECTIVES), run.table(STEPS)).select("phase", "share")
    shares = dict(taken.iter_rows())
    assert shares[ROLLOUT] > shares[TRAINING] > 0
    assert any("2 worker groups" in warning for warning in run.manifest.warnings)
    assert workers(opened(tmp_path / "run" / "groups" / "Rollout")) == [
        (0, "Rollout", 0, -1),
        (1, "Rollout", 0, -1),
    ]


@pytest.mark.parametrize(
    ("end", "error", "signals"),
    [
        ("ray.get(trainers[1].fail.remote())", "ValueError: no such batch (driver.py:", [-1, -1]),
        ("ray.get(trainers[1].die.options(max_task_retries=0).remote())", "", [-1, signal.SIGKILL]),
    ],
)
def test_failures_of_actors_are_named_and_reach_the_driver(tmp_path, session, end, error, signals):
    script = DRIVER.replace("max_restarts=1", "max_restarts=0") + end + "\n"
    done = driven(tmp_path, session, script, *INTO_RUN)
    assert done.returncode == 1
    assert "collectors" not in done.stderr
    run = opened(tmp_path / "run")
    assert run.manifest.error.startswith(error)
    assert [ended[-1] for ended in workers(run)] == signals


def test_actors_that_are_made_again_are_another_attempt(tmp_path, session):
    again = """
for actor in trainers: ray.kill(actor)
trainers, _ = made(Trainer)
trained(trainers, rollouts, 3)
"""
    assert driven(tmp_path, session, DRIVER + again, *INTO_RUN).returncode == 0
    run = opened(tmp_path / "run")
    assert run.table(STEPS, ["step"])["step"].n_unique() == STEP_COUNT - 1
    assert workers(opened(tmp_path / "run" / "groups" / "Trainer"))[0][:2] == (0, "Trainer")


def test_workers_of_ray_train_are_ranks(tmp_path, cluster, session):
    pytest.importorskip("ray.train", reason="needs ray[train]", exc_type=ImportError)
    done = driven(tmp_path, session, RAY_TRAIN, *INTO_RUN, RAY_TEST_ADDRESS=cluster)
    assert done.returncode == 0, done.stderr
    run = opened(tmp_path / "run")
    assert workers(run) == [(rank, "RayTrainWorker", 0, -1) for rank in (0, 1)]
    assert run.table(STEPS, ["step"])["step"].n_unique() == TRAIN_STEPS - 1
    assert run.table(SPANS, ["rank"])["rank"].n_unique() == 2
    assert run.table(COLLECTIVES, ["rank"])["rank"].n_unique() == 2
