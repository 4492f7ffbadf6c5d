"""How recorded jobs end: the recorded exit codes and signals, and the parts of the recording that survive."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import info_document
from dpro.collectors.convert.process import UNFINISHED, UNPREPARED
from dpro.collectors.inside.records import FLUSH_NS, read_records
from dpro.collectors.launch.endings import UNKNOWN, Ending, ending
from dpro.collectors.launch.start import RecordOptions
from dpro.schema import SPANS, STEPS, TABLES, WORKERS
from dpro.store import Run
from tests.jobs import (
    ABORTED_AT_EXIT,
    COMPILER,
    PATIENCE_S,
    RECORD,
    ROOT,
    TORCHRUN,
    TWO_RANKS,
    children,
    complete,
    kill,
    opened,
    record,
    script,
    sidecar_of,
    start,
    wait_for,
    wait_until,
)

pytest.importorskip("torch")

# What a process itself records of its end: each in a process that trains, whose wait status is not read.

ENDS = {
    "pass": Ending(0, -1),
    "sys.exit(3)": Ending(3, -1),
    "sys.exit('a text')": Ending(1, -1),
    "raise SystemExit(300)": Ending(300 & 0xFF, -1),
    "1 / 0": Ending(1, -1),
    "sys.excepthook = lambda *_: None; 1 / 0": Ending(1, -1),
    "raise KeyboardInterrupt": Ending(-1, signal.SIGINT),
    "os._exit(5)": Ending(5, -1),
    "threading.Thread(target=os._exit, args=(6,)).start(); time.sleep(60)": Ending(6, -1),
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)": UNKNOWN,
    "os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)": UNKNOWN,
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); os.kill(os.getpid(), signal.SIGTERM)": Ending(
        9, -1
    ),
    "os.fork() or sys.exit(8); os.wait(); sys.exit(7)": Ending(7, -1),
    "os.kill(os.getpid(), signal.SIGKILL)": UNKNOWN,
    "os.abort()": UNKNOWN,
}

ENDED_FROM_WITHIN = """
import importlib, json, os, pathlib, signal, threading, time

sys.path.insert(0, PACKAGES)
hooks = importlib.import_module("inside.hooks")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup

def ended(number, how):
    launch = pathlib.Path(str(number)).resolve()
    launch.mkdir()
    (launch / "config.json").write_text(json.dumps(CONFIG))
    hooks.install(str(launch))
    train_step()
    train_step()
    exec(how, globals())

gc.freeze()  # children that leave it alone are quick
for number, how in enumerate(ENDS):
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        ended(number, how)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def ended_from_within(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    packages = str(ROOT / "collectors")
    config = asdict(RecordOptions(skip=50))
    body = f"PACKAGES, ENDS, CONFIG = {packages!r}, {list(ENDS)!r}, {config!r}\n{ENDED_FROM_WITHIN}"
    done = complete(script(folder, body), folder)
    assert done.returncode == 0, done.stderr
    return folder, [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(("number", "how"), list(enumerate(ENDS)), ids=list(ENDS))
def test_process_itself_leaves_how_it_ended(ended_from_within, number, how):
    folder, codes = ended_from_within
    [process] = (folder / str(number)).glob("*-*")
    seen = ending(process, read_records(process / "records.bin"), None)
    assert seen == ENDS[how]
    if seen.is_known:
        assert seen.status == codes[number]
    assert (folder / str(number) / "log.txt").read_text() == ""


# A kernel that reports the wait status to the parent alone, as before 6.15, and a lost race for the zombie.

OLD_KERNEL = """
import sys
from dpro.cli import main
from dpro.collectors.launch.processes import LaunchedProcess
LaunchedProcess._read_status = lambda self: None
sys.argv = ["dpro", *sys.argv[1:]]
main()
"""
RECORD_ON_OLD_KERNEL = [sys.executable, "-c", OLD_KERNEL, "record", "--quiet"]


@pytest.mark.slow
def test_the_end_of_a_rank_under_torchrun_is_known_even_without_its_wait_status(tmp_path):
    body = """
    import os, signal
    import torch.distributed as dist
    dist.init_process_group("gloo")
    train_step()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    """
    command = [*TORCHRUN, script(tmp_path, body)[1]]
    done = complete([*RECORD_ON_OLD_KERNEL, "-o", "run", "--", *command], tmp_path)
    run = opened(tmp_path / "run")
    assert done.returncode == run.manifest.exit_status == 1
    ends = run.table(WORKERS).select("rank", "exit_code", "exit_signal").rows()
    assert ends[1] == (1, -1, signal.SIGKILL)
    # Torchrun asks the other rank to go, which may have seen its peer vanish before.
    assert ends[0] in [(0, -1, signal.SIGTERM), (0, 1, -1), (0, -1, signal.SIGABRT)]


FOREVER = """
import pathlib, signal, time
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
for number in range(100_000):
    train_step()
    if number > 40:
        time.sleep(0.01)
    if number == 42:  # what ended 10 ms before a kill is recorded
        pathlib.Path("running").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_deadly_signal_kills_within_a_window_as_it_would_have_and_the_steps_are_kept(tmp_path, number):
    options = ["--window-steps", "100000", "--every", "100000", "--skip", "20"]
    job = start([*RECORD, "-o", "run", *options, "--", *script(tmp_path, FOREVER)], tmp_path)
    wait_for(tmp_path / "running")
    job.send_signal(number)
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout, stderr) == (-number, b"True\n", b"")
    run = opened(tmp_path / "run")
    assert run.table(STEPS).height >= 40
    assert run.table(WORKERS)["exit_signal"].to_list() == [number]
    assert run.manifest.skipped[UNFINISHED] == 1
    assert run.manifest.warnings == []


# Killed at any moment: whichever process is killed, the run opens and its tables are consistent.

TRAINS_UNTIL_KILLED = """
import os, pathlib, time
import torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
progress = os.open(f"progress{dist.get_rank()}", os.O_CREAT | os.O_WRONLY)
for step in range(1_000_000):
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    os.pwrite(progress, str(step).encode(), 0)
    time.sleep(0.002)
"""


# Steps of at least 2 ms, of which those may be lost that end within 10 ms of the last write.
MAX_LOST = FLUSH_NS // 2_000_000 - 1


def victims(random: Random, run: Path, launcher: int) -> list[int]:
    """Choose some processes among launcher, sidecar and ranks."""
    sidecar, ranks = sidecar_of(run), children(launcher)
    chosen = random.choice(["a rank", "the ranks", "the launcher", "the sidecar", "all", "any"])
    everybody = [launcher, sidecar, *ranks]
    return {
        "a rank": random.sample(ranks, min(1, len(ranks))),
        "the ranks": ranks,
        "the launcher": [launcher],
        "the sidecar": [sidecar],
        "all": everybody,
        "any": [pid for pid in everybody if random.random() < 0.5],
    }[chosen]


def _trainers(folder: Path) -> list[int]:
    """The ranks of a folder's job that live."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(folder / "job.py") in words and b"dpro" not in words:
                found.append(int(process.name))
    return found


def killed_at_random(folder: Path, seed: int) -> Run:
    """Return the run of a job of which some processes were killed at a random moment, and the rest later."""
    random = Random(seed)
    command = [*TWO_RANKS, script(folder, TRAINS_UNTIL_KILLED, COMPILER)[1]]
    job = start([*RECORD, "-o", "run", "--every", "20", "--", *command], folder)
    run = folder / "run"
    wait_until(lambda: list(run.glob(".recording/*.json")), "no recording")
    if random.random() < 0.8:
        wait_until(lambda: list(run.glob(".raw/*/*-*/facts.json")), "no rank records")
    time.sleep(random.uniform(0, 2))
    sidecar, ranks = sidecar_of(run), children(job.pid)
    kill(*victims(random, run, job.pid))
    time.sleep(random.uniform(0, 1))
    kill(job.pid, *ranks, *children(job.pid), number=random.choice([signal.SIGKILL, signal.SIGTERM]))
    job.wait(60)
    kill(*_trainers(folder))  # a launcher that is killed may have begun another meanwhile
    wait_until(lambda: not _trainers(folder), "ranks outlive all")
    if random.random() < 0.3:
        time.sleep(random.uniform(0, 1))
        kill(sidecar)  # in the midst of making the tables
    job.communicate()
    return opened(run)


def check_consistency(folder: Path, run: Run) -> None:
    manifest = run.manifest
    assert sorted([*manifest.ranks, *manifest.missing_ranks]) == list(range(manifest.world_size))
    assert manifest.ranks or manifest.warnings
    assert run.table(WORKERS)["rank"].to_list() == manifest.ranks
    assert [path.name for path in run.path.rglob("*") if path.name.startswith(".")] == []
    tables = {name: run.table(table) for name, table in TABLES.items()}
    for rank in manifest.ranks:
        steps = tables["steps"].filter(rank=rank)
        assert steps["step"].to_list() == list(range(1, steps.height + 1))
        ends = steps["start_ns"] + steps["duration_ns"]
        assert (steps["start_ns"][1:] >= ends[:-1]).all()
        progress = folder / f"progress{rank}"
        counted = int(progress.read_text() or 0) if progress.exists() else 0
        assert steps.height >= counted - MAX_LOST if progress.exists() else steps.is_empty()
        spans = tables["spans"].filter(rank=rank, name="dpro::backward")
        inside = steps.filter(pl.col("window") >= 0)
        assert set(inside["window"]) <= set(spans["window"])
        for window in inside["window"].unique():
            assert spans.filter(window=window).height >= inside.filter(window=window).height
    assert info_document(Analysis(run)).ranks == manifest.ranks


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))])
def test_run_is_whole_whatever_was_killed_whenever(tmp_path, seed):
    check_consistency(tmp_path, killed_at_random(tmp_path, seed))


# Where the recording goes fails: the job must not notice.

PROFILED = "for _ in range(400): train_step()\nprint('trained')"


def on_a_disk_of(
    size_kib: int, folder: Path, *commands: list[str]
) -> list[subprocess.CompletedProcess[bytes]]:
    """Run commands in a mount namespace in which `folder/disk` is a small file system."""
    (folder / "disk").mkdir()
    results = folder / "results"
    results.mkdir()
    lines = [f"mount -t tmpfs -o size={size_kib}k tmpfs disk || exit 77"]
    for number, command in enumerate(commands):
        streams = f">{results}/{number}.out 2>{results}/{number}.err"
        lines.append(f"{shlex.join(command)} {streams}; echo $? >{results}/{number}.rc")
    done = complete(["unshare", "-m", "sh", "-c", "\n".join(lines)], folder)
    if not (results / "0.rc").exists():
        pytest.skip(f"no small file system can be mounted here: {done.stderr.decode()}")
    return [
        subprocess.CompletedProcess(
            command,
            int((results / f"{number}.rc").read_text()),
            *((results / f"{number}.{stream}").read_bytes() for stream in ("out", "err")),
        )
        for number, command in enumerate(commands)
    ]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_full_disk_ends_the_recording_and_not_the_job_and_what_was_written_can_be_read_later(tmp_path):
    info = [sys.executable, "-m", "dpro", "info", "disk/run"]
    job, full, room, later = on_a_disk_of(
        1700,
        tmp_path,
        [*RECORD, "-o", "disk/run", "--every", "10", "--", *script(tmp_path, PROFILED)],
        info,
        ["mount", "-o", "remount,size=100m", "disk"],
        info,
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, b"trained\n", b"")
    assert full.returncode == 1
    assert b"its tables cannot be written" in full.stderr
    assert full.stderr.count(b"\n") == 1
    assert (room.returncode, later.returncode) == (0, 0)
    assert b"steps      399" in later.stdout
    assert b"rank 0: exit code 0" in later.stdout
    assert b"incomplete, since" in later.stdout


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_no_job_begins_where_its_run_has_no_room(tmp_path):
    _, full = on_a_disk_of(
        4,
        tmp_path,
        ["sh", "-c", "head -c 1M /dev/zero > disk/full"],
        [*RECORD, "-o", "disk/run", "--", "touch", str(tmp_path / "begun")],
    )
    assert full.returncode == 2
    assert full.stderr.decode().endswith("disk/run: cannot record there (No space left on device)\n")
    assert not (tmp_path / "begun").exists()


def test_no_job_begins_where_no_reader_would_take_the_path_of_its_run(tmp_path):
    done = complete([*RECORD, "-o", os.fsdecode(b"run\xff"), "--", "touch", "begun"], tmp_path)
    assert done.returncode == 1
    assert b"the path of a run must be UTF-8" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_disk_that_is_full_from_the_start_is_a_run_that_says_so(tmp_path):
    job, info = on_a_disk_of(
        600,
        tmp_path,
        [*RECORD, "-o", "disk/run", "--", *script(tmp_path, PROFILED)],
        [sys.executable, "-m", "dpro", "info", "disk/run"],
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, b"trained\n", b"")
    assert info.returncode == 0
    assert b"stopped recording in on_update: OSError: [Errno 28]" in info.stdout


@pytest.mark.slow
def test_run_that_is_deleted_while_the_job_runs_is_not_missed_by_it(tmp_path):
    body = """
    import os, pathlib, shutil
    for _ in range(20): train_step()
    shutil.rmtree("run")
    for _ in range(30): train_step()
    if os.fork() == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    sys.exit(3)
    """
    done = complete([*RECORD, "-o", "run", "--every", "10", "--", *script(tmp_path, body)], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"7\n", b"")
    assert not (tmp_path / "run").exists()


# The recorder never keeps a job from ending.


GIVES_UP_ITS_RIGHTS = """
import os, pathlib
for step in range(60):
    if step == 20:
        if os.geteuid() == 0:
            os.setgid(65534), os.setuid(65534)
        else:
            [raw] = pathlib.Path("run/.raw").iterdir()
            raw.chmod(0)
    train_step()
"""


def test_job_that_gives_up_its_rights_goes_on_and_the_run_says_what_failed(tmp_path):
    tmp_path.chmod(0o755)
    run, done = record(
        tmp_path, script(tmp_path, GIVES_UP_ITS_RIGHTS), "--skip", "2", "--every", "15", "--window-steps", "2"
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert run.table(STEPS)["step"].max() == 59
    assert any("continues without windows: PermissionError" in line for line in run.manifest.warnings)


CLOSES_ALL_DESCRIPTORS = """
import os

def closes_all():
    os.closerange(3, 256)
    numbers = [os.open(f"data{number}", os.O_RDWR | os.O_CREAT) for number in range(40)]
    for number in numbers:  # left open, as by a library
        os.write(number, b"0123456789")

if os.fork():  # as daemons begin
    os.wait()
    sys.exit(0)
closes_all()
"""
CLOSES_ALL_IN_ITS_LOOP = (
    CLOSES_ALL_DESCRIPTORS.partition("if os.fork")[0]
    + """
for step in range(3_000):
    if step == 100:
        closes_all()
    train_step()
"""
)


@pytest.mark.parametrize("body", [CLOSES_ALL_DESCRIPTORS, CLOSES_ALL_IN_ITS_LOOP], ids=["daemon", "loop"])
def test_files_of_a_job_that_closes_all_descriptors_are_not_written_to(tmp_path, body):
    run, done = record(tmp_path, script(tmp_path, body), "--no-windows")
    assert (done.returncode, done.stderr) == (0, b"")
    assert {path.read_bytes() for path in tmp_path.glob("data*")} == {b"0123456789"}
    assert run.table(STEPS).height == (2_999 if "train_step" in body else 0)


BESIDE_THE_MAIN_THREAD = """
import threading, time

def loop():
    for _ in range({steps}):
        train_step()
        time.sleep(0.005)

thread = threading.Thread(target=loop, daemon={daemon})
thread.start()
while thread.is_alive() and model.weight.sum() > {until}:
    time.sleep(0.005)
"""


@pytest.mark.parametrize(
    ("steps", "daemon", "until"),
    [(18, False, -1e9), (10**6, True, -110.0)],
    ids=["thread ends within a window", "process exits within a window"],
)
def test_loop_beside_the_main_thread_may_end_within_a_window(tmp_path, steps, daemon, until):
    """Only the thread that started Kineto can stop it, and a running one crashes the process at its exit."""
    body = BESIDE_THE_MAIN_THREAD.format(steps=steps, daemon=daemon, until=until)
    run, done = record(
        tmp_path, script(tmp_path, body), "--skip", "2", "--every", "15", "--window-steps", "12"
    )
    assert done.stderr in (b"", ABORTED_AT_EXIT)
    assert done.returncode in ((0,) if done.stderr == b"" else (-signal.SIGABRT,))
    assert run.table(SPANS).height > 0


def test_loop_beside_a_main_thread_that_never_runs_python_has_no_windows_and_says_so(tmp_path):
    body = "import threading\nthread = threading.Thread(target=lambda: [train_step() for _ in range(40)])"
    body += "\nthread.start()\nthread.join()\n"
    run, done = record(
        tmp_path, script(tmp_path, body), "--skip", "2", "--every", "15", "--window-steps", "2"
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert run.manifest.skipped[UNPREPARED] >= 1


@pytest.mark.parametrize("window", [pytest.param("--skip=1000", marks=pytest.mark.slow), "--skip=5"])
def test_interpreter_ends_at_once_with_our_threads_in_it(tmp_path, window):
    body = """
    import threading
    for _ in range(6): train_step()
    print(sorted(each.name for each in threading.enumerate()))
    """
    run, done = record(tmp_path, script(tmp_path, body), window)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"['MainThread']\n", b"")
    assert run.manifest.warnings == []


def test_ctrl_c_of_a_terminal_reaches_the_job_alone_and_the_run_is_whole(tmp_path):
    body = FOREVER.replace("for number", "try:\n  for number").replace("\n    ", "\n      ") + (
        "except KeyboardInterrupt:\n    print('interrupted')\n    raise\n"
    )
    job = start([*RECORD, "-o", "run", "--", *script(tmp_path, body)], tmp_path)
    wait_for(tmp_path / "running")
    for pid in (job.pid, *children(job.pid)):
        kill(pid, number=signal.SIGINT)
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == -signal.SIGINT
    assert stdout == b"True\ninterrupted\n"
    assert stderr.rstrip().endswith(b"KeyboardInterrupt")
    run = opened(tmp_path / "run")
    (worker,) = run.table(WORKERS).iter_rows(named=True)
    assert (worker["exit_signal"], worker["error"]) == (signal.SIGINT, "KeyboardInterrupt")
    assert worker["started_ns"] < worker["failed_ns"] < worker["left_ns"]
    assert run.table(STEPS).height >= 40
