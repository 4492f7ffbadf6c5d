"""`dpro record` on real jobs: gloo, one or two ranks, through the real command."""

import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import mean_step_of
from dpro.opening import ensure_finished
from dpro.replay.cost.work import inputs_of_calls, operations_of_calls
from dpro.schema import BUCKETS, CLOCK_SAMPLES, COLLECTIVES, COUNTERS, MODEL_CALLS, SPANS, STEPS, WORKERS
from dpro.store import Run
from tests.commands import dpro, on_terminal
from tests.jobs import (
    PATIENCE_S,
    RECORD,
    TORCHRUN,
    TRAIN,
    TWO_RANKS,
    complete,
    environment,
    head_start,
    opened,
    record,
    script,
    start,
)

pytest.importorskip("torch")

STEPS_RUN, EVERY, SKIP = 20, 7, 5


# A data-parallel job, recorded and not: many tests look at this one pair.


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    options = ["--every", str(EVERY), "--skip", str(SKIP)]
    folder = tmp_path_factory.mktemp("ddp")
    command = [*TORCHRUN, head_start(folder, TRAIN), "--steps", str(STEPS_RUN)]
    return record(folder, command, *options)


@pytest.fixture(scope="module")
def run(ddp) -> Run:
    return ddp[0]


def test_output_of_the_job_is_the_same_byte_for_byte(ddp, tmp_path):
    _, recorded = ddp
    plain = complete([*TWO_RANKS, head_start(tmp_path, TRAIN), "--steps", str(STEPS_RUN)], tmp_path)
    assert plain.returncode == 0
    assert b"loss" in plain.stdout
    assert (recorded.returncode, recorded.stdout, recorded.stderr) == (0, plain.stdout, plain.stderr)


def test_manifest_says_what_ran_where(run):
    manifest = run.manifest
    assert (manifest.world_size, manifest.ranks, manifest.missing_ranks) == (2, [0, 1], [])
    assert manifest.command[-2:] == ["--steps", str(STEPS_RUN)]
    assert manifest.hosts == [socket.gethostname()]
    assert manifest.warnings == []
    assert set(manifest.versions) >= {"python", "torch", "dpro"}
    assert manifest.exit_status in (0, None)


def test_raw_files_are_gone_once_converted(run):
    assert {path.name for path in run.path.iterdir() if path.name.startswith(".")} == set()


def test_every_step_but_the_first_is_a_row_on_every_rank(run):
    steps = run.table(STEPS)
    for rank in (0, 1):
        mine = steps.filter(rank=rank)
        assert mine["step"].to_list() == list(range(1, STEPS_RUN))
        ends = mine["start_ns"] + mine["duration_ns"]
        assert (mine["start_ns"][1:] >= ends[:-1]).all()
        assert mine["duration_ns"].min() > 1_000_000


def test_windows_cover_the_same_steps_on_all_ranks(run):
    expected = {
        (SKIP + k * EVERY + j, k) for k in (0, 1, 2) for j in (0, 1) if SKIP + k * EVERY + j < STEPS_RUN
    }
    steps = run.table(STEPS).filter(pl.col("window") >= 0)
    for rank in (0, 1):
        assert set(steps.filter(rank=rank).select("step", "window").iter_rows()) == expected


def test_spans_of_a_window_lie_around_its_steps_and_have_ids_of_their_own(run):
    spans = run.table(SPANS)
    assert set(spans["window"].unique()) == set(run.table(STEPS)["window"].unique()) - {-1}
    for rank in (0, 1):
        assert spans.filter(rank=rank)["span_id"].is_unique().all()
    inside = spans.join(run.table(STEPS).filter(pl.col("window") >= 0), on=["rank", "window"], suffix="_step")
    begun = inside.group_by("rank", "window").agg(pl.col("start_ns").min(), pl.col("start_ns_step").min())
    assert (begun["start_ns"] >= begun["start_ns_step"] - 10_000_000).all()
    assert (spans["name"] == "aten::addmm").any()


def test_each_backward_call_within_a_window_is_a_range(run):
    backward = run.table(SPANS).filter(name="dpro::backward")
    steps = run.table(STEPS).filter(pl.col("window") >= 0)
    assert backward.height == steps.height
    assert set(backward["kind"]) == {"annotation"}


def test_each_collective_is_one_row_and_the_ranks_agree_on_it(run):
    collectives = run.table(COLLECTIVES)
    key = ["group", "sequence"]
    known = ["op", "bytes_in", "bytes_out", "dtype", "group_ranks", "window"]
    first, second = (collectives.filter(rank=rank).select(*key, *known).sort(key) for rank in (0, 1))
    assert first.select(key).is_unique().all()
    assert first.equals(second)
    assert first["sequence"].to_list() == list(range(1, first.height + 1))
    assert set(first["group_ranks"]) == {"0,1"}
    assert first["bytes_in"].min() > 0


def test_collectives_in_a_window_have_times_and_the_others_the_time_of_the_call(run):
    collectives = run.table(COLLECTIVES)
    seen, called = collectives.filter(pl.col("window") >= 0), collectives.filter(window=-1)
    assert seen["duration_ns"].min() > 0
    assert set(called["duration_ns"]) == {-1}
    assert (called["enqueued_ns"] > 0).all()
    calls = seen.join(run.table(SPANS), left_on=["rank", "launch_span_id"], right_on=["rank", "span_id"])
    assert calls.height == seen.height
    assert calls["name"].str.starts_with("c10d::").all()


def test_buckets_are_those_that_were_reduced(run):
    buckets = run.table(BUCKETS).filter(rank=0)["bytes"].to_list()
    reduced = run.table(COLLECTIVES).filter(rank=0, window=0, op="all_reduce")["bytes_in"].to_list()
    assert len(buckets) > 1
    assert reduced == buckets * 2


def test_windows_are_on_the_clock_of_the_steps(run):
    # A step ends inside the optimizer's range, which Kineto timed; both say when, each by its own clock.
    ends = run.table(STEPS).filter(pl.col("window") >= 0)
    ends = ends.select("rank", "window", end=pl.col("start_ns") + pl.col("duration_ns"))
    ranges = run.table(SPANS).filter(pl.col("name").str.starts_with("Optimizer.step"))
    pairs = ends.join(ranges, on=["rank", "window"])
    inside = pairs.filter(pl.col("end").is_between("start_ns", pl.col("start_ns") + pl.col("duration_ns")))
    assert inside.height == ends.height > 0


def test_workers_and_clocks_are_recorded(run):
    workers = run.table(WORKERS)
    assert workers["local_rank"].to_list() == [0, 1]
    assert (workers["ended_ns"] > workers["started_ns"]).all()
    assert set(workers["exit_code"]) <= {0, -1}
    clocks = run.table(CLOCK_SAMPLES).filter(rank=0)
    drift = (clocks["time_ns"] - clocks["monotonic_ns"]).diff().drop_nulls()
    assert clocks.height >= 2
    assert drift.abs().max() < 1_000_000


# How jobs end.


# What the recorder does not touch.


def test_users_modules_and_loader_workers_are_left_alone(tmp_path):
    for name in ("replay", "collectors", "dashboards", "dpro_user"):
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    body = """
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    import replay, collectors, dashboards, dpro_user
    if __name__ == "__main__":
        assert replay.mine and collectors.mine and dashboards.mine and dpro_user.mine
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        for context in ("fork", "spawn"):
            for batch in DataLoader(list(range(8)), num_workers=2, multiprocessing_context=context):
                train_step()
        print(sorted({"dpro", "polars", "pyarrow"} & set(sys.modules)))
    """
    run, done = record(tmp_path, script(tmp_path, body))
    assert done.stdout == b"[]\n", done.stderr
    assert run.manifest.ranks == [0]
    assert run.table(WORKERS).height == 1
    assert run.table(STEPS).height == 15
    assert run.manifest.warnings == []


@pytest.mark.slow
def test_children_forked_after_or_within_a_window_gather_nothing_and_exit(tmp_path):
    body = """
    import atexit, os, resource

    def forked():
        if os.fork() == 0:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(50_000): torch.add(1, 1)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)

    atexit.register(print, "end", flush=True)
    for _ in range(6): train_step()
    forked()                              # within the first window, after step 5
    for _ in range(11): train_step()
    for _ in range(5): forked()           # within and after the second, after step 15
    for _ in range(6): train_step()
    forked()
    """
    run, done = record(tmp_path, script(tmp_path, body), "--every", "10")
    assert (done.returncode, done.stdout) == (0, b"True\nend\n7\n" * 7 + b"end\n"), done.stderr
    assert run.table(STEPS).height == 22
    assert run.manifest.warnings == []


def test_users_own_profiler_wins(tmp_path):
    body = """
    from torch.profiler import profile, ProfilerActivity

    def profiled(steps):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                train_step()
        print(sum(event.name == "aten::addmm" for event in profiler.events()))

    for _ in range(3): train_step()
    profiled(4)                       # over the start of the first window, after step 5
    for _ in range(9): train_step()
    profiled(1)                       # within the second window, which starts after step 15
    for _ in range(11): train_step()  # the third window, after step 25, is ours
    """
    run, done = record(tmp_path, script(tmp_path, body), "--every", "10")
    assert done.stdout == b"4\n1\n", done.stderr
    assert run.manifest.warnings == []
    assert set(run.table(SPANS)["window"]) == {2}
    assert run.table(STEPS).filter(window=2)["step"].to_list() == [25, 26]


@pytest.mark.slow
def test_users_own_profiler_may_warm_up_at_any_distance_from_our_windows(tmp_path):
    body = """
    from torch.profiler import profile, schedule, ProfilerActivity

    seen = []

    def ready(profiler):
        seen.append(sum(event.name == "aten::addmm" for event in profiler.events()))

    for shift in range(5):
        for warmup in (1, 2, 3):
            cycle = schedule(wait=1, warmup=warmup, active=2)
            with profile(activities=[ProfilerActivity.CPU], schedule=cycle, on_trace_ready=ready) as profiler:
                for _ in range(2 * (3 + warmup)):
                    train_step()
                    profiler.step()
        train_step()
    cycle = schedule(wait=1, warmup=3, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=cycle) as profiler:
        train_step()
        profiler.step()
    for _ in range(12): train_step()  # it stopped while it warmed up: windows are ours again
    print(seen)
    """
    run, done = record(tmp_path, script(tmp_path, body), "--every", "5", "--window-steps", "2", "--skip", "3")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == str([2] * 30)
    windows = run.table(SPANS).filter(name="aten::addmm").group_by("window").len()
    assert set(windows["len"]) == {2}
    assert windows["window"].max() >= run.table(STEPS)["step"].max() // 5 - 1


def test_job_without_torch_is_a_run_that_says_so(tmp_path):
    run, done = record(tmp_path, [sys.executable, "-c", "print('hello')"])
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hello\n", b"")
    assert (run.manifest.world_size, run.manifest.ranks) == (0, [])
    assert "no process of the job was seen to import torch" in run.manifest.warnings[0]
    for ask in ([], ["explain", "--json"], ["diagnose"]):
        said = dpro(*ask, run.path)
        assert (said.returncode, said.stdout) == (1, "")
        assert "no process of the job was seen to import torch" in said.stderr


WHERE = b"dpro: recording into run; once the job has ended: dpro run\n"


@pytest.mark.parametrize("to", ["a file", "a pipe"])
def test_stderr_says_where_the_run_is_and_why_nothing_was_recorded(tmp_path, to):
    job = ["record", "-o", "run", "--", sys.executable, "-c", "print(1); raise SystemExit(3)"]
    with (tmp_path / "log").open("w+b") as log:
        output = subprocess.PIPE if to == "a pipe" else log
        command = [sys.executable, "-m", "dpro", *job]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=output)
        ensure_finished(tmp_path / "run")
        log.seek(0)
        said = (done.stderr or b"") + log.read()
    assert (done.returncode, done.stdout) == (3, b"1\n")
    assert said == WHERE + (
        b"dpro: the job failed (exit code 3) before any of its processes was seen to import torch: "
        b"nothing was recorded\n"
    )


def test_stderr_says_nothing_more_of_a_job_that_was_recorded(tmp_path):
    options = ["-o", "run", "--no-windows", "--telemetry-period", "0"]
    job = script(tmp_path, "for _ in range(3):\n    train_step()\nprint('trained')")
    done = complete([sys.executable, "-m", "dpro", "record", *options, "--", *job], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"trained\n", WHERE)


def test_on_a_terminal_the_run_is_named_before_the_job_begins(tmp_path):
    text = on_terminal("record", "-o", "run", "--", sys.executable, "-c", "print(1)", cwd=tmp_path)
    assert text.split(b"\r\n") == [b"dpro: recording into run; once the job has ended: dpro run", b"1", b""]


def said_in_a_shell(command: str, folder: Path, until: bytes) -> list[bytes]:
    """Return the lines on the terminal of a shell, which stays until a word and the exit code have come."""
    child, end = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve("/bin/sh", ["/bin/sh", "-c", f"{command}; echo exit $?; read key"], environment())
    text = b""
    while not (until in text and re.search(rb"(^|\n)exit \d+\r\n", text)):
        text += os.read(end, 1 << 16)
    os.write(end, b"\n")
    assert os.waitpid(child, 0)[1] == 0
    os.close(end)
    return text.split(b"\r\n")


def test_the_end_of_a_job_of_which_nothing_was_recorded_says_why_on_its_terminal(tmp_path):
    job = f"{sys.executable} -m dpro record -o run -- {sys.executable} -c 'raise SystemExit(3)'"
    first, *others = said_in_a_shell(job, tmp_path, b"torch")
    assert first == b"dpro: recording into run; once the job has ended: dpro run"
    said, exited = sorted(others[:2])  # the shell goes on at once
    assert exited == b"exit 3"
    assert said.startswith(b"dpro: the job failed (exit code 3) before any of its processes was")


def test_the_end_of_a_recorded_job_says_on_its_terminal_where_the_run_is_and_what_is_next(tmp_path):
    job = script(tmp_path, "for _ in range(3):\n    train_step()")
    options = "-o run --no-windows --telemetry-period 0"
    command = f"{sys.executable} -m dpro record {options} -- {shlex.join(map(str, job))}"
    lines = said_in_a_shell(command, tmp_path, b"next: dpro run\r\n")
    assert sorted(lines[1:3]) == [b"dpro: recorded into run; next: dpro run", b"exit 0"]
    assert (tmp_path / "run" / "manifest.json").is_file()


def test_updates_of_several_optimizers_are_one_step(tmp_path):
    body = """
    head = torch.nn.Linear(4, 1)
    other = torch.optim.Adam(head.parameters())
    for _ in range(12):
        for each in (optimizer, other):
            each.zero_grad()
        head(model(torch.ones(2, 4))).sum().backward()
        for each in (optimizer, other):
            each.step()
    """
    run, done = record(tmp_path, script(tmp_path, body))
    assert done.returncode == 0
    assert run.table(STEPS)["step"].to_list() == list(range(1, 12))
    assert run.table(SPANS).filter(name="dpro::backward").height == 2
    assert (run.manifest.world_size, run.manifest.ranks) == (1, [0])


@pytest.mark.slow  # conversion has idle priority: on a busy machine it waits
def test_windows_converted_while_the_job_runs_join_those_converted_afterwards(tmp_path):
    body = """
    import pathlib, time
    for _ in range(350): train_step()
    deadline = time.monotonic() + 120
    while not list(pathlib.Path("run").glob("spans/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(60): train_step()
    """
    run, done = record(tmp_path, script(tmp_path, body), "--every", "10")
    assert done.returncode == 0
    windows = (
        run.table(SPANS).group_by("window").agg(pl.len(), pl.col("name").is_in(["dpro::backward"]).sum())
    )
    assert windows["window"].sort().to_list() == list(range(41))
    assert set(windows["name"]) == {2}
    assert run.table(SPANS)["span_id"].is_unique().all()
    assert len(list((run.path / "spans").iterdir())) >= 2


@pytest.mark.slow
def test_several_launchers_record_into_one_run(tmp_path):
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(10):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dpro", "record", "-o", "run", "--", *script(tmp_path, body)]
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = [start(command, tmp_path, RANK=rank, **shared) for rank in (0, 1)]
    said = [job.communicate(timeout=PATIENCE_S)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert sorted(line.count(b"recording into run") for line in said) == [0, 1]
    run = opened(tmp_path / "run")
    assert (run.manifest.world_size, run.manifest.ranks) == (2, [0, 1])
    assert run.table(STEPS).group_by("rank").len().sort("rank")["len"].to_list() == [9, 9]
    assert run.table(WORKERS)["rank"].to_list() == [0, 1]


def test_ranks_and_their_node_are_sampled_beside_the_job(run):
    counters = run.table(COUNTERS)
    assert counters.select("rank", "host").unique().sort("rank").rows() == [
        (rank, socket.gethostname()) for rank in (-1, 0, 1)
    ]
    of_ranks = {"cpu_user_s", "main_thread_cpu_s", "memory_bytes", "threads"}
    for rank in (0, 1):
        assert of_ranks <= set(counters.filter(rank=rank)["counter"])
    assert {"cpu_idle_s", "load_1m", "telemetry_cpu_s"} <= set(counters.filter(rank=-1, device="")["counter"])


@pytest.mark.slow
def test_telemetry_can_be_left_out(tmp_path):
    run, done = record(tmp_path, script(tmp_path, "train_step()"), "--telemetry-period", "0")
    assert done.returncode == 0
    assert not {"telemetry_cpu_s", "memory_bytes"} & set(run.table(COUNTERS)["counter"])


# What is wrong with the command.


def test_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    done = complete([*RECORD, "-o", "run", "--", sys.executable, "-c", "print('ran')"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert b"exists and is not empty" in done.stderr


def test_command_that_does_not_exist_exits_like_a_shell(tmp_path):
    done = complete([*RECORD, "-o", "run", "--", "no-such-command"], tmp_path)
    assert (done.returncode, done.stderr) == (127, b"dpro: no-such-command: command not found\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", ["train_step", "train:", ":step", "a:b:c", "train:step()"])
def test_name_of_a_step_that_is_no_function_of_a_module_is_refused(tmp_path, step):
    done = complete([*RECORD, "--step", step, "--", "true"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"MODULE:FUNCTION" in done.stderr


def test_window_that_does_not_fit_is_refused(tmp_path):
    done = complete([*RECORD, "--window-steps", "5", "--every", "3", "--", "true"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


# Jobs without steps, and with few.


@pytest.mark.slow
def test_model_calls_of_a_process_that_is_mostly_idle_are_recorded(tmp_path):
    body = """
    import time
    model.eval()
    until = time.monotonic() + 40
    with torch.inference_mode():
        while time.monotonic() < until:
            time.sleep(0.2)
            slow(torch.ones(2, 4))
    """
    slow = """
    class Slow(torch.nn.Module):
        def forward(self, data):
            import time
            time.sleep(0.01)
            return model(data)
    slow = Slow().eval()
    """
    run, done = record(tmp_path, script(tmp_path, textwrap.dedent(slow) + textwrap.dedent(body)))
    assert done.returncode == 0, done.stderr
    steps = run.table(STEPS)
    assert steps.height >= 10
    assert set(steps["source"]) == {"model call"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("train_step()", "the job ran a single step: "),
        (
            "import does_not_exist",
            "exit code 1: ModuleNotFoundError: No module named 'does_not_exist' (job.py:",
        ),
        ("", "the job imported torch, but no process created a process group"),
    ],
)
def test_job_without_a_step_is_said_to_be_one_by_every_command(tmp_path, body, words):
    run, _ = record(tmp_path, script(tmp_path, body))
    assert words in run.manifest.unrecorded
    assert run.manifest.warnings == [run.manifest.unrecorded]
    for ask in (["info"], ["diagnose"], ["report"], ["report", "--markdown", "-"], ["whatif"]):
        done = dpro(*ask, run.path)
        said = (done.stdout + done.stderr).replace("\\_", "_")  # as Markdown has it
        assert words in " ".join(said.split()), ask


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["net", "torch.compile(net, backend='eager')"])
def test_what_model_is_trained_and_on_how_many_tokens_is_seen_from_outside(tmp_path, wrapped):
    body = f"""
    import time
    from torch import nn
    net = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 256), nn.Linear(256, 50))
    model, update = {wrapped}, torch.optim.SGD(net.parameters(), lr=0.1)
    until = time.process_time() + 6
    while time.process_time() < until:
        for _ in range(2):  # micro-batches
            tokens = torch.randint(50, (4, 512))
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        update.step()
    """
    run, done = record(tmp_path, script(tmp_path, body))
    assert done.returncode == 0, done.stderr
    calls = run.table(MODEL_CALLS).filter(pl.col("parameters") > 0)
    weights = 64 * 256 + 256 * 50
    assert set(calls["matrices"]) == set(calls["trained_matrices"]) == {weights}
    assert set(calls["parameters"]) == {50 * 64 + 64 * 256 + 256 + 256 * 50 + 50}
    assert inputs_of_calls(calls, run.table(COUNTERS)).rows() == [(0, 8.0, 4096.0)]
    assert operations_of_calls(calls, run.table(COUNTERS)) == 6 * weights * 4096
    mean = mean_step_of(Analysis(run))
    assert (mean.mfu, mean.mfu_unknown) == (None, "no GPU work")  # no peak is known of a CPU
    assert mean.tokens_per_s == pytest.approx(512 * mean.samples_per_s)
