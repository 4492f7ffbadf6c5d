"""Where the deep windows of real jobs lie: at the same steps on all ranks, spaced by their cost."""

import sys
from itertools import pairwise

import polars as pl
import pytest

from dpro.analysis.unanswered import why_no_window
from dpro.collectors.convert.process import MISSED
from dpro.collectors.inject._dpro_autoload import ALIAS
from dpro.schema import SPANS, STEPS
from tests.jobs import PATIENCE_S, RECORD, complete, free_port, opened, record, script, start, wait_until

pytest.importorskip("torch")

# Trains until this many windows of ranks are saved.
UNTIL = """
import pathlib, time
import torch.distributed as dist
dist.init_process_group("gloo")
enough = torch.zeros(1)
started = time.monotonic()
while not enough:
    for _ in range(10):
        train_step()
        dist.all_reduce(torch.ones(8))
        time.sleep(0.002)
    if dist.get_rank() == 0:
        saved = len(list(pathlib.Path("run/.raw").glob("*/*/window*.json")))
        enough[0] = saved >= FILES or time.monotonic() - started > 200
    dist.all_reduce(enough, op=dist.ReduceOp.MAX)
for _ in range(TAIL):
    train_step()
    time.sleep(0.002)
dist.destroy_process_group()
"""


def until(files: int, tail: int = 20) -> str:
    return UNTIL.replace("FILES", str(files)).replace("TAIL", str(tail))


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]


def windows_of(run) -> dict[int, dict[int, list[int]]]:
    """Steps by window and rank."""
    steps = run.table(STEPS).filter(pl.col("window") >= 0).sort("rank", "step")
    found: dict[int, dict[int, list[int]]] = {}
    for window, rank, step in steps.select("window", "rank", "step").iter_rows():
        found.setdefault(window, {}).setdefault(rank, []).append(step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_windows_follow_from_their_cost_and_are_the_same_steps_on_all_ranks(tmp_path, ranks):
    command = [*torchrun(ranks), script(tmp_path, until(4 * ranks))[1]]
    run, done = record(tmp_path, command, "--budget", "20%")
    assert done.returncode == 0, done.stderr
    windows = windows_of(run)
    assert len(windows) >= 4
    for by_rank in windows.values():
        assert len(by_rank) == ranks
        assert len({tuple(steps) for steps in by_rank.values()}) == 1
    begins = [steps[0][0] for _, steps in sorted(windows.items())]
    assert begins[0] == 5
    assert min(end - begin for begin, end in pairwise(begins)) >= 200
    assert run.manifest.skipped.get(MISSED, 0) == 0
    assert run.manifest.windows["share"] < 0.2
    print(f"{ranks} ranks: windows at {begins}: {run.manifest.windows}")


# Ending a window takes rank 1 as long as sixty steps.
EXPENSIVE = """
import torch.autograd.profiler
exit = torch.autograd.profiler.profile.__exit__
def slow_exit(*arguments):
    exit(*arguments)
    if dist.get_rank() == 1:
        time.sleep(60 * (time.monotonic() - started) / max(steps, 1))
torch.autograd.profiler.profile.__exit__ = slow_exit
steps = 0
plain_step = train_step
def train_step():
    global steps
    steps += 1
    plain_step()
"""


@pytest.mark.slow
def test_windows_that_are_expensive_on_any_rank_are_further_apart(tmp_path):
    body = until(4).replace("enough =", EXPENSIVE + "\nenough =", 1)
    run, done = record(tmp_path, [*torchrun(2), script(tmp_path, body)[1]], "--budget", "10%")
    assert done.returncode == 0, done.stderr
    windows = windows_of(run)
    assert windows[1][0][0] - windows[0][0][0] > 400


LATE = f"""
from {ALIAS}.windows import Agreement
receive = Agreement.receive
kept, passed_on = [], []
def receive_late(self):
    kept.extend(filter(None, [receive(self)]))
    if kept and done > kept[0]["step"]:
        passed_on.append(kept.pop(0))
        return passed_on[-1]
Agreement.receive = receive_late
done = 0
plain_step = train_step
def train_step():
    global done
    done += 1
    plain_step()
"""


# Rank 1 trains without the others until it receives a window that is already over, and a little longer.
UNTIL_PASSED_ON = """
while dist.get_rank() == 1 and not passed_on and time.monotonic() - started < 200:
    train_step()
    time.sleep(0.002)
for _ in range(300):  # the thread that received it has to pass it on
    train_step()
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_rank_that_learns_of_a_window_too_late_skips_it_and_it_is_counted(tmp_path):
    late = "\n".join(f"    {line}" for line in LATE.splitlines())
    body = until(3).replace("enough =", f"if dist.get_rank() == 1:{late}\nenough =", 1)
    body = body.replace("for _ in range(20)", f"{UNTIL_PASSED_ON}\nfor _ in range(20)", 1)
    run, done = record(tmp_path, [*torchrun(2), script(tmp_path, body)[1]], "--budget", "50%")
    assert done.returncode == 0, done.stderr
    windows = windows_of(run)
    assert set(windows[0]) == {0, 1}
    assert set(windows[1]) == {0}
    assert run.manifest.skipped[MISSED] >= 1


@pytest.mark.slow
def test_single_process_decides_for_itself(tmp_path):
    body = """
    import pathlib, time
    deadline = time.monotonic() + 200
    while len(list(pathlib.Path("run/.raw").glob("*/*/window*.json"))) < 3 and time.monotonic() < deadline:
        train_step()
    """
    run, done = record(tmp_path, script(tmp_path, body), "--budget", "30%")
    assert done.returncode == 0, done.stderr
    begins = [steps[0][0] for _, steps in sorted(windows_of(run).items())]
    assert len(begins) >= 2
    assert begins[0] == 5
    assert begins[1] >= 205


@pytest.mark.parametrize("share", ["0%", "150%", "much"])
def test_budget_that_is_no_share_is_refused(tmp_path, share):
    done = complete([*RECORD, "--budget", share, "--", "true"], tmp_path)
    assert done.returncode == 2
    assert b"is not a share" in done.stderr


def test_first_window_before_it_is_known_what_a_step_is_is_refused(tmp_path):
    done = complete([*RECORD, "--skip", "1", "--", "true"], tmp_path)
    assert done.returncode == 2
    assert b"--skip" in done.stderr


def test_job_without_deep_windows_has_steps_only_and_says_so(tmp_path):
    run, done = record(tmp_path, script(tmp_path, "for _ in range(12): train_step()"), "--no-windows")
    assert (done.returncode, done.stderr) == (0, b"")
    assert run.table(STEPS)["step"].to_list() == list(range(1, 12))
    assert run.rows()["spans"] == 0
    assert run.manifest.warnings == []
    assert "--no-windows" in why_no_window(run)


@pytest.mark.parametrize("option", [["--every", "9"], ["--skip", "5"], ["--stacks"], ["--no-memory"]])
def test_options_of_windows_are_refused_where_there_are_none(tmp_path, option):
    done = complete([*RECORD, "--no-windows", *option, "--", "true"], tmp_path)
    assert done.returncode == 2
    assert option[0].replace("--no-", "--").encode() in done.stderr
    assert b"--no-windows" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (["--every", "9"], b"--every applies to automatic deep windows, which --on-request turns off"),
        (["--skip", "5"], b"--skip applies to automatic deep windows, which --on-request turns off"),
        (["--no-windows"], b"--on-request applies to deep windows, which --no-windows turns off"),
    ],
)
def test_options_that_contradict_windows_on_request_are_refused(tmp_path, option, why):
    done = complete([*RECORD, "--on-request", *option, "--", "true"], tmp_path)
    assert (done.returncode, done.stderr) == (2, b"dpro: " + why + b"\n")


@pytest.mark.slow
def test_job_on_request_has_the_windows_that_were_asked_for_and_no_other(tmp_path):
    command = [*torchrun(2), script(tmp_path, until(2))[1]]
    job = start([*RECORD, "-o", "run", "--on-request", "--", *command], tmp_path)
    wait_until(lambda: asked(tmp_path).returncode == 0, "no window was recorded")
    _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, stderr
    run = opened(tmp_path / "run")
    [(number, steps)] = windows_of(run).items()
    assert number == 0
    assert steps[0] == steps[1]
    assert len(steps[0]) == 3
    assert run.manifest.options["on_request"]
    assert why_no_window(run) == ""


def asked(folder):
    """What `dpro attach` says: that nothing trains yet, until it has its window."""
    return complete([sys.executable, "-m", "dpro", "attach", "run", "--steps", "3"], folder)


# Trains until rank 0 has this many windows, wherever its launcher writes them.
APART = UNTIL.replace('"run/.raw"', '"../0/run/.raw"')


@pytest.mark.slow
def test_hosts_that_share_no_folder_agree_on_windows_through_the_store_of_the_job(tmp_path):
    """Two launchers with a folder each, as on two hosts with local disks."""
    body = APART.replace("FILES", "2").replace("TAIL", "20")
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = free_port()
    jobs = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        command = [*RECORD, "-o", "run", "--budget", "20%", "--", *script(folder, body)]
        jobs.append(start(command, folder, RANK=rank, **place))
    for job in jobs:
        _, stderr = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, stderr
    first, second = (windows_of(opened(tmp_path / str(rank) / "run")) for rank in range(2))
    assert len(first) >= 2
    assert {window: steps[0] for window, steps in first.items()} == {
        window: steps[1] for window, steps in second.items()
    }


SLOW_FOR_SOME_STEPS = """
import time
for step in range(30):
    time.sleep(0.3 if 10 <= step < 14 else 0.01)
    train_step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "slow"), [(["--keep", "slow"], True), ([], False)])
def test_one_window_stays_that_of_the_slowest_steps_or_the_latest(tmp_path, keep, slow):
    command = script(tmp_path, SLOW_FOR_SOME_STEPS)
    options = ["--skip", "3", "--every", "4", "--window-steps", "1", "--keep-windows", "1", *keep]
    run, done = record(tmp_path, command, *options)
    assert done.returncode == 0, done.stderr.decode()
    [kept] = run.table(STEPS).filter(pl.col("window") >= 0)["step"].to_list()
    assert (10 <= kept <= 15) == slow
    assert run.table(SPANS)["window"].n_unique() == 1
    assert run.table(STEPS).filter(pl.col("beside") >= 0).height >= 4


def test_which_windows_stay_is_asked_with_how_many(tmp_path):
    done = complete([*RECORD, "--keep", "slow", "--", "true"], tmp_path)
    assert done.returncode == 2
    assert b"--keep-windows N" in done.stderr
