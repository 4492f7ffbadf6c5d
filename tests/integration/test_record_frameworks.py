"""Steps, groups and meshes of training loops of torch alone, seen by the recorder.

Jobs are forked from one process that has imported torch, some at a time, each with a recording of its own:
that saves the import.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import asdict

import polars as pl
import pytest

from dpro.collectors.inside.kernel import process_identity
from dpro.collectors.launch.recording import MARKERS, RAW
from dpro.collectors.launch.start import RecordOptions
from dpro.opening import ensure_finished
from dpro.schema import BUCKETS, COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.store import Run, open_run
from tests.jobs import imports
from tests.loops import (
    ALONE,
    EVERY,
    ROOT,
    SKIP,
    TOGETHER,
    WINDOW_STEPS,
    check_that_ranks_agree,
    environment,
    values,
)

pytest.importorskip("torch")

NAMED = ("range", "range_beside", "function")

JOBS = """
import contextlib, importlib, json, math, os, pathlib, signal, time, warnings
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

sys.path.insert(0, PACKAGES)
hooks = importlib.import_module("inside.hooks")
torch.set_num_threads(1)

def iteration(model):
    model(torch.ones(2, 4)).sum().backward()

def begin(run, rank, body):
    inference = importlib.import_module("inside.steps.inference")
    hooks.install(str(run / ".raw" / "job"))
    if body in TOGETHER:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("gloo", init_method=f"file://{run.absolute()}.store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    data = torch.ones(2, 4)
    names = globals() | locals()
    exec(COMMON, names)
    exec(BODIES[body], names)
    if dist.is_initialized():
        dist.destroy_process_group()

COMMON = '''
optimizer = SGD(model.parameters(), lr=0.1)

def loss():
    return model(data).sum()

def update():
    optimizer.step()
    optimizer.zero_grad()

def step():
    loss().backward()
    update()
'''

def fork(name, rank):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(ProcessLookupError):
            begin(pathlib.Path(name), rank, name)
        sys.exit()
    return child

gc.freeze()  # children that leave it alone are quick
children, codes = {}, {}
for name in BODIES:
    for rank in range(2 if name in TOGETHER else 1):
        children[fork(name, rank)] = name
    if "torch._dynamo" not in sys.modules:
        gc.disable()
        importlib.import_module("torch._dynamo")  # as optimizers do: once for all further jobs
        gc.freeze()
        gc.enable()
    while len(children) > 3 or (children and name == list(BODIES)[-1]):  # some at a time: they mostly wait
        child, status = os.wait()
        codes.setdefault(children.pop(child), []).append(os.waitstatus_to_exitcode(status))
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs, recorded: their folder, and the exit codes of each."""
    folder = tmp_path_factory.mktemp("jobs")
    for name in ALONE | TOGETHER:
        (folder / name / RAW / "job").mkdir(parents=True)
        (folder / name / MARKERS).mkdir()
        step = "jobs:iteration" if name == "function" else ""
        options = RecordOptions(window_steps=WINDOW_STEPS, every=EVERY, skip=SKIP, step=step)
        (folder / name / RAW / "job" / "config.json").write_text(json.dumps(asdict(options)))
        ended = process_identity(os.getpid()) | {"pid": 0, "start_ticks": 0}
        facts = {"host": socket.gethostname(), "command": [name], **ended}
        (folder / name / MARKERS / "job.json").write_text(json.dumps(facts))
    bodies = {name: textwrap.dedent(body) for name, body in (ALONE | TOGETHER).items()}
    head = f"PACKAGES, BODIES, TOGETHER = {str(ROOT / 'collectors')!r}, {bodies!r}, {list(TOGETHER)!r}\n"
    (folder / "jobs.py").write_text(imports() + head + JOBS)
    done = subprocess.run(
        [sys.executable, "jobs.py"], cwd=folder, env=environment(), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return (
        folder,
        json.loads(done.stdout),
        done.stderr.decode(),
    )


def recorded(jobs, name: str) -> Run:
    folder, codes, stderr = jobs
    assert set(codes[name]) == {-signal.SIGKILL if name == "killed" else 0}, stderr
    ensure_finished(folder / name)
    run = open_run(folder / name)
    assert run.manifest.warnings == []
    return run


@pytest.mark.parametrize("name", [name for name in ALONE if name != "inference"])
def test_every_step_is_counted_once_whatever_ends_it(jobs, name):
    run = recorded(jobs, name)
    assert run.table(STEPS)["step"].to_list() == list(range(1, 12))
    assert set(run.table(STEPS)["source"]) == {"named" if name in NAMED else "optimizer"}


def test_nothing_of_ours_is_compiled_nor_anything_said(jobs):
    _, _, stderr = jobs
    assert [line for line in stderr.splitlines() if "Profiler record function" not in line] == []


def test_range_or_function_names_the_steps(jobs):
    for name, updates in (("range", 2), ("range_beside", 2), ("function", 1)):
        assert values(recorded(jobs, name), "step_backward_calls") == {updates}


def test_backward_calls_of_a_step_are_its_micro_batches(jobs):
    assert values(recorded(jobs, "accumulation"), "step_backward_calls") == {4}
    assert values(recorded(jobs, "gan"), "step_backward_calls") == {4}
    assert values(recorded(jobs, "optimizer_in_backward"), "step_backward_calls") == {1}


def test_windows_are_whole_steps_whatever_ends_them(jobs):
    expected = [SKIP + j for j in range(WINDOW_STEPS)] + [SKIP + EVERY + j for j in range(WINDOW_STEPS)]
    guessed_otherwise_at_first = {"gan", "evaluation_that_is_followed_by_training"}
    for name in sorted(ALONE.keys() - {"inference"}):
        run = recorded(jobs, name)
        deep = run.table(STEPS).filter(pl.col("window") >= 0)
        if name in guessed_otherwise_at_first:
            assert deep["step"].to_list()[-2:] == expected[-2:], name
            continue
        assert deep["step"].to_list() == expected, name
        assert set(run.table(SPANS)["window"]) == set(deep["window"]), name


def test_each_call_of_the_outermost_model_is_a_step_where_nothing_trains(jobs):
    run = recorded(jobs, "inference")
    steps = run.table(STEPS)
    assert steps.height >= 12
    assert set(steps["source"]) == {"model call"}
    assert (
        run.table(SPANS).filter(name="aten::linear").height == 2 * steps.filter(pl.col("window") >= 0).height
    )


def test_ranks_that_count_differently_are_a_warning(jobs):
    folder, _, _ = jobs
    ensure_finished(folder / "large_extra_optimizer")
    [warning] = open_run(folder / "large_extra_optimizer").manifest.warnings
    assert "rank 1 completed" in warning
    assert "steps while rank 0 completed" in warning
    assert "name the step" in warning


@pytest.mark.parametrize("name", sorted(TOGETHER.keys() - {"large_extra_optimizer"}))
def test_ranks_agree_on_steps_windows_and_collectives(jobs, name):
    run = recorded(jobs, name)
    check_that_ranks_agree(run)
    calls = run.table(COLLECTIVES)
    deep = calls.filter(pl.col("window") >= 0)
    assert set(deep["window"]) == {0, 1}
    if name == "pipeline":  # messages, of which there are four in each direction and step
        sent, received = (
            deep.filter(op=op).select("window", "rank", "peer", "sequence", "group_ranks")
            for op in ("send", "recv")
        )
        assert sent.height == 4 * 2 * deep["window"].n_unique() * WINDOW_STEPS
        there = received.rename({"rank": "peer", "peer": "rank"}).select(sent.columns)
        keys = ["window", "rank", "sequence"]
        assert sent.sort(keys).equals(there.sort(keys))
        assert deep["sequence"].min() > 0
        return
    assert set(calls["group"].unique()) == {"0 default_pg"}
    first, second = (deep.filter(rank=rank).select("group", "sequence", "op") for rank in (0, 1))
    assert first.sort("sequence").equals(second.sort("sequence"))


def test_mesh_coordinates_come_from_the_names_of_its_axes(jobs):
    known = {
        "fsdp": [(0, -1, -1), (1, -1, -1)],
        "pipeline": [(-1, -1, 0), (-1, -1, 1)],
        "tensor_parallel": [(0, 0, -1), (0, 1, -1)],
        "fsdp_and_tensor_parallel": [(0, 0, -1), (0, 1, -1)],
        "ddp": [(-1, -1, -1)] * 2,
    }
    for name, coordinates in known.items():
        workers = recorded(jobs, name).table(WORKERS)
        assert workers.select("dp", "tp", "pp").rows() == coordinates, name


def test_buckets_say_which_parameters_are_in_them(jobs):
    ddp = recorded(jobs, "ddp").table(BUCKETS).filter(rank=1)
    assert ddp["names"].to_list() == [["2.bias"], ["2.weight"], ["0.bias"], ["0.weight"]]
    assert ddp["parameters"].to_list() == [[3], [2], [1], [0]]
    assert ddp["bytes"].to_list() == [16, 1024, 256, 1024]
    assert ddp["parameter_bytes"].to_list() == [[16], [1024], [256], [1024]]
    assert ddp["shapes"].to_list() == [[[4]], [[4, 64]], [[64]], [[64, 4]]]
    fsdp = recorded(jobs, "fsdp").table(BUCKETS).filter(rank=1)
    assert fsdp["names"].to_list() == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert fsdp["parameters"].to_list() == [[0, 1], [2, 3]]
    assert fsdp["bytes"].to_list() == [1280, 1040]
    assert fsdp["parameter_bytes"].to_list() == [[1024, 256], [1024, 16]]
    assert fsdp["shapes"].to_list() == [[[64, 4], [64]], [[4, 64], [4]]]
    both = recorded(jobs, "fsdp_and_tensor_parallel").table(BUCKETS).filter(rank=1)
    assert both["names"].to_list() == [
        ["1.weight", "1.bias"],
        ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"],
    ]
    assert both["parameters"].to_list() == [[4, 5], [0, 1, 2, 3]]
    assert both["shapes"].to_list() == [[[4, 4], [4]], [[32, 4], [32], [4, 32], [4]]]  # what a rank of tp has


def test_micro_batches_of_distributed_jobs_are_counted(jobs):
    for name, backward in (("ddp", 2), ("fsdp", 1), ("pipeline", 4), ("tensor_parallel", 1)):
        assert values(recorded(jobs, name), "step_backward_calls") == {backward}, name


# Frameworks of others: CONTRIBUTING.md says how to install them.
