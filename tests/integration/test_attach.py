"""`dpro attach` on real jobs that are running."""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import polars as pl
import pytest

from dpro.cli.options import MAX_PID
from dpro.cli.runs import is_live
from dpro.collectors.attach import with_descendants
from dpro.dashboards.app import make_app
from dpro.dashboards.command import copies, offered_runs
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.store import open_run
from tests.jobs import (
    PATIENCE_S,
    RECORD,
    TORCHRUN,
    TWO_RANKS,
    complete,
    opened,
    script,
    start,
    wait_for,
    wait_until,
)
from tests.pressed import pressed

pytest.importorskip("torch")

DPRO = [sys.executable, "-m", "dpro"]

JOB = """
import os, pathlib, time
import torch.distributed as dist

def train_until_stopped():
    stop = torch.zeros(1)
    while not stop:
        for _ in range(5):
            train_step()
            time.sleep(0.003)
        stop[0] = pathlib.Path("stop").exists()
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        pathlib.Path(f"running{dist.get_rank()}").touch()

dist.init_process_group("gloo")
train_until_stopped()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of two ranks that runs for as long as the tests need it."""
    folder = tmp_path_factory.mktemp("attach")
    process = start([*RECORD, "-o", "run", "--", *TWO_RANKS, script(folder, JOB)[1]], folder)
    wait_for(folder / "running0")
    yield folder
    (folder / "stop").touch()
    assert process.wait(60) == 0


def attach(folder, *arguments):
    done = complete([*DPRO, "attach", *map(str, arguments), "--json"], folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_window_on_request_is_the_same_steps_on_all_ranks_and_can_be_read_while_the_job_runs(job):
    answer = attach(job, "run", "--steps", 3, "-o", "copy")
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert [rank["why_not"] for rank in answer["ranks"]] == ["", ""]
    begin, end = answer["ranks"][0]["steps"]
    assert answer["ranks"][1]["steps"] == [begin, end] == [begin, begin + 3]
    copy = open_run(job / "copy")
    steps = copy.table(STEPS).filter(window=answer["window"])
    assert steps.sort("rank", "step").select("rank", "step").rows() == [
        (rank, step) for rank in (0, 1) for step in range(begin, end)
    ]
    assert copy.table(SPANS).filter(window=answer["window"]).height > 20
    seen = copy.table(COLLECTIVES)
    assert seen.select("rank", "group", "sequence").is_unique().all()
    assert not (job / "copy" / ".raw").exists()
    assert not (job / "run" / "manifest.json").exists()


@pytest.mark.slow
def test_a_dashboard_gets_copies_of_a_run_that_is_being_recorded_and_they_grow(job):
    assert is_live(job / "run")
    states = copies(job / "run", least_s=0.1)
    steps = []
    for state in (next(states), next(states)):
        assert state.label == str(job / "run")
        steps.append(state.table(STEPS).height)
    states.close()
    assert 0 < steps[0] < steps[1]


@pytest.mark.slow
def test_the_button_of_a_dashboard_has_the_job_record_a_window(job):
    app = make_app(offered_runs([str(job / "run")]), "token")
    assert pressed(app, "shown") == (False, False, "", True)
    assert pressed(app)[1:3] == (True, "waiting for 3 steps …")
    wait_until(lambda: not pressed(app, "asking")[1], "no window was recorded")
    said = pressed(app, "asking")[2]
    assert "were recorded in depth, as window" in said
    assert "not on rank" not in said


def test_reading_a_run_that_is_being_recorded_says_how(job):
    done = complete([*DPRO, "replay", "run"], job)
    assert done.returncode == 1
    assert b"dpro attach run -o COPY" in done.stderr


def test_stacks_of_all_ranks_are_reported_without_the_recorders_threads(job):
    answer = attach(job, "run", "--stacks")
    assert answer["silent_ranks"] == []
    for rank in answer["ranks"]:
        main = rank["threads"][0]
        assert main["name"] == "MainThread"
        assert any(frame["file"].endswith("job.py") for frame in main["frames"])
        assert not any(thread["name"].startswith("dpro-") for thread in rank["threads"])


def test_job_is_found_by_the_pid_of_any_of_its_processes(job):
    [facts, _] = job.glob("run/.raw/*/*/facts.json")
    answer = attach(job, "--pid", json.loads(facts.read_text())["pid"], "--stacks")
    assert answer["run"] == str((job / "run").resolve())


@pytest.mark.slow
def test_windows_are_switched_off_and_on_and_can_be_asked_for_meanwhile(job):
    off = attach(job, "run", "--off")["from_step"]
    during = attach(job, "run", "--steps", 1)
    on = attach(job, "run", "--on")["from_step"]
    assert off < during["ranks"][0]["steps"][0] < on


def test_copy_does_not_replace_what_is_there(job):
    (job / "thesis").mkdir()
    (job / "thesis" / "thesis.tex").touch()
    done = complete([*DPRO, "attach", "run", "-o", "thesis"], job)
    assert done.returncode == 2
    assert list((job / "thesis").iterdir()) == [job / "thesis" / "thesis.tex"]


HANGS = """
import ctypes, pathlib
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(5): train_step()

def hold_the_interpreter():
    pathlib.Path("held").touch()
    ctypes.PyDLL(None).sleep(600)

if dist.get_rank() == 1:
    hold_the_interpreter()
dist.barrier()
"""


@pytest.mark.slow
def test_rank_whose_interpreter_is_held_by_a_call_in_c_is_asked_by_a_signal(tmp_path):
    process = start([*RECORD, "-o", "run", "--", *TORCHRUN, script(tmp_path, HANGS)[1]], tmp_path)
    wait_for(tmp_path / "held")
    wait_until(lambda: len(list(tmp_path.glob("run/.raw/*/*/stacks.json"))) == 2, "a rank has no stacks")
    answer = attach(tmp_path, "run", "--stacks")
    waiting, held = answer["ranks"]
    assert "by_signal" not in waiting
    assert held["by_signal"]
    frames = [frame["function"] for thread in held["threads"] for frame in thread["frames"]]
    assert "hold_the_interpreter" in frames
    assert process.poll() is None
    for facts in tmp_path.glob("run/.raw/*/*/facts.json"):
        os.kill(json.loads(facts.read_text())["pid"], signal.SIGKILL)
    process.wait(60)
    assert opened(tmp_path / "run").manifest.ranks == [0, 1]


LOADS = """
import pathlib, time
import torch
import torch.distributed as dist

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        read_a_file_that_never_comes()

def read_a_file_that_never_comes():
    time.sleep(600)

def main():
    dist.init_process_group("gloo")
    for _ in range(5): train_step()
    if dist.get_rank() == 1:
        pathlib.Path("stuck").touch()
        next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=2, multiprocessing_context="fork")))
    dist.barrier()

main()
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_stacks_of_dataloader_workers_and_calls_of_c_come_from_py_spy(tmp_path):
    process = start([*RECORD, "-o", "run", "--", *TORCHRUN, script(tmp_path, LOADS)[1]], tmp_path)
    try:
        wait_for(tmp_path / "stuck")
        wait_until(lambda: len(list(tmp_path.glob("run/.raw/*/*/stacks.json"))) == 2, "a rank has no stacks")
        answer = attach(tmp_path, "run", "--stacks", "--native")
        assert [rank["native"] for rank in answer["ranks"]] == [True, True]
        workers = [one for one in answer["ranks"][1]["threads"] if one["name"] == "child process, MainThread"]
        assert len(workers) == 2
        for thread in workers:
            functions = [frame["function"] for frame in thread["frames"]]
            assert functions.index("clock_nanosleep") < functions.index("read_a_file_that_never_comes")
        text = complete([*DPRO, "attach", "run", "--stacks", "--native"], tmp_path).stdout.decode()
        assert "child process, MainThread, rank 1 (2 threads)" in text
        assert not any("_run_beside_job" in line for line in text.splitlines())
    finally:
        for facts in tmp_path.glob("run/.raw/*/*/facts.json"):
            for pid in with_descendants(json.loads(facts.read_text())["pid"]):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["run", "--steps", "1"], 1, b"run: no such run"),
        ([str(Path(__file__).parent), "--steps", "1"], 1, b"is not being recorded"),
        (["--pid", str(os.getpid()), "--stacks"], 1, b"not started by `dpro record`"),
        ([str(os.getpid()), "--stacks"], 1, b"not started by `dpro record`"),
        (["--pid", str(MAX_PID), "--stacks"], 1, b"none on this host"),
        (["--pid", str(MAX_PID + 1), "--stacks"], 2, b"is not in the range"),
        (["run"], 2, b"give one of --steps"),
        (["--stacks"], 2, b"name the job"),
        (["run", "--stacks", "--off"], 2, b"give one of --steps"),
        (["run", "--native", "--off"], 2, b"--native requires --stacks"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, arguments, code, what):
    done = complete([*DPRO, "attach", *arguments], tmp_path)
    assert done.returncode == code
    assert what in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_options_of_windows_reach_the_tables(tmp_path):
    from dpro.schema import DEPENDENCIES
    from tests.jobs import record

    body = """
    inner = torch.nn.Sequential(model, torch.nn.ReLU())
    for _ in range(12):
        optimizer.zero_grad()
        inner(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print("trained")
    """
    options = ["--shapes", "--stacks", "--modules", "--memory", "--execution-trace"]
    run, done = record(tmp_path, script(tmp_path, body), *options)
    assert (done.returncode, done.stdout) == (0, b"trained\n")
    assert run.manifest.warnings == []
    spans = run.table(SPANS)
    assert (spans["shapes"] != "").any()
    assert (spans["kind"] == "python").any()
    names = spans.filter(pl.col("kind") == "annotation")["name"].to_list()
    assert names.count("nn.Module: 0") == 2
    needs = run.table(DEPENDENCIES)
    assert {"data", "control"} <= set(needs["kind"])
    assert needs["source_span_id"].is_in(spans["span_id"].implode()).all()
    memory = run.table(COUNTERS).filter(counter="memory_allocated_bytes", device="")
    assert set(memory["rank"]) == {0}
    assert memory["value"].max() >= 2 * 4 * 4  # the input, 2 x 4 floats
    window = run.table(STEPS).filter(pl.col("window") >= 0)
    assert memory["time_ns"].min() >= window["start_ns"].min()


UNRECORDED = """
import os, pathlib, time
import torch.distributed as dist
dist.init_process_group("gloo")
deadline = time.monotonic() + 200
while not pathlib.Path("stop").exists() and time.monotonic() < deadline:
    train_step()
    time.sleep(0.005)
    pathlib.Path(f"pid{dist.get_rank()}").write_text(str(os.getpid()))
"""


@pytest.mark.slow
def test_job_that_is_not_recorded_is_profiled_by_what_it_asks_a_daemon(tmp_path):
    sockets = Path(tempfile.mkdtemp())  # addresses of sockets have to be short
    kineto = {"KINETO_USE_DAEMON": 1, "KINETO_IPC_SOCKET_DIR": sockets, "KINETO_LOG_LEVEL": 99}
    job = start([*TORCHRUN, script(tmp_path, UNRECORDED)[1]], tmp_path, **kineto)
    wait_for(tmp_path / "pid1")
    answer = attach(tmp_path, "--pid", job.pid, "--steps", 3, "-o", "run")
    (tmp_path / "stop").touch()
    job.communicate(timeout=PATIENCE_S)
    assert answer["ranks"] == [0, 1]
    spans = open_run(tmp_path / "run").table(SPANS)
    for rank in (0, 1):
        assert spans.filter(pl.col("name") == "aten::addmm", rank=rank).height >= 2
    assert not (sockets / "dynolog").exists()
    shutil.rmtree(sockets)
