"""What a job sees of the recorder when it looks at its own process: nothing that it did not make itself."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from dpro.schema import SPANS, STEPS, WORKERS
from tests.jobs import (
    MODEL,
    PATIENCE_S,
    RECORD,
    complete,
    opened,
    record,
    script,
    start,
    wait_for,
    wait_until,
)

pytest.importorskip("torch")

# Windows open and close all the time, so that whatever is started for one is there to be seen.
OFTEN = ["--skip", "2", "--every", "3", "--window-steps", "1"]


def seen(folder: Path, body: str, *options: str, expected: int = 0) -> object:
    """What a job says of itself in its last line, as JSON."""
    _, done = record(folder, script(folder, body), *(options or OFTEN))
    assert (done.returncode, done.stderr) == (expected, b"")
    return json.loads(done.stdout.splitlines()[-1])


LOOKS = """
import json, os, pathlib, signal, threading, time
for _ in range(30): train_step()
time.sleep(1.2)  # our threads are at work
for _ in range(30): train_step()
"""


def test_threads_of_ours_are_not_listed_and_block_every_signal(tmp_path):
    body = (
        LOOKS
        + """
def masks():
    for task in pathlib.Path("/proc/self/task").iterdir():
        text = (task / "status").read_text()
        if int(task.name) != os.getpid():
            yield text.split("Name:")[1].split()[0], int(text.split("SigBlk:")[1].split()[0], 16)
listed = [thread.name for thread in threading.enumerate()]
for thread in threading.enumerate():  # as jobs do that wait for all their threads
    if thread is not threading.main_thread(): thread.join()
print(json.dumps([listed, threading.active_count(), list(masks())]))
"""
    )
    listed, count, masks = seen(tmp_path, body)
    assert (listed, count) == (["MainThread"], 1)
    ours = [mask for name, mask in masks if "python" in name]
    assert ours
    for mask in ours:
        open_to = [number for number in range(1, 64) if not mask >> (number - 1) & 1]
        # The kernel keeps two, libc two more; a handler in C is asked for stacks by the last one.
        assert set(open_to) <= {signal.SIGKILL, signal.SIGSTOP, 32, 33, signal.SIGRTMAX}


def test_no_signal_is_handled_that_the_job_does_not_handle_but_an_unused_one(tmp_path):
    body = (
        "import faulthandler, json, pathlib, signal\n"
        "def caught():\n"
        "    return pathlib.Path('/proc/self/status').read_text().split('SigCgt:')[1].split()[0]\n"
        + LOOKS
        + "print(json.dumps([caught(), faulthandler.is_enabled()]))\n"
    )
    caught, is_enabled = seen(tmp_path, body)
    handled = {number for number in range(1, 65) if int(caught, 16) >> (number - 1) & 1}
    assert handled - {signal.SIGINT, 32, 33} <= {signal.SIGRTMAX}
    assert not is_enabled


SIGNALS = {
    "a wait for it": """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
ready()
print(json.dumps(signal.sigwait({signal.SIGTERM}) == signal.SIGTERM))
""",
    "a descriptor for it": """
import ctypes, select
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
mask = ctypes.create_string_buffer(128)
libc.sigemptyset(mask); libc.sigaddset(mask, signal.SIGTERM)
descriptor = libc.signalfd(-1, mask, 0)
ready()
print(json.dumps(len(os.read(descriptor, 128)) == 128))
""",
    "a mask around a checkpoint": """
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(len(steps)))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
ready()
steps = []
while len(signal.sigpending()) == 0: time.sleep(0.01)
for _ in range(50): train_step(); steps.append(1)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
print(json.dumps(came == [50]))
""",
    "a handler": """
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
ready()
while not came: train_step()
print(json.dumps(came == [1]))
""",
    "a handler of faulthandler's by keyword, and a fork": """
import faulthandler
with open("stacks", "wb") as file:
    faulthandler.register(signum=signal.SIGTERM, file=file, chain=False)
    ready()
    while not os.path.getsize("stacks"): train_step()
    if os.fork() == 0: os._exit(0)
    os.wait()
    print(json.dumps(True))
""",
    "a wait in another thread": """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
came = []
thread = threading.Thread(target=lambda: came.append(signal.sigwait({signal.SIGTERM})))
thread.start()
ready()
while not came: train_step()
print(json.dumps(came == [signal.SIGTERM]))
""",
}


QUICK = ("a wait for it", "a mask around a checkpoint")


@pytest.mark.parametrize(
    "how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.slow) for how in SIGNALS]
)
def test_a_signal_comes_to_the_job_as_it_asked_for_it(tmp_path, how):
    head = LOOKS + "\ndef ready():\n    pathlib.Path('ready').touch()\n"
    job = start([*RECORD, "-o", "run", *OFTEN, "--", *script(tmp_path, head + SIGNALS[how])], tmp_path)
    wait_for(tmp_path / "ready")
    job.send_signal(signal.SIGTERM)
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout, stderr) == (0, b"true\n", b"")


FILES = """
import os, resource
mine = []
def keep():
    while True:
        mine.append(os.open(f"mine{len(mine)}", os.O_RDWR | os.O_CREAT, 0o600))
        if mine[-1] >= 40: return
for _ in range(20): train_step()
time.sleep(1.2)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("closed", ["os.closerange(3, 256)", "[os.dup2(0, each) for each in range(3, 41)]"])
def test_a_job_that_closes_all_descriptors_keeps_its_own_under_their_numbers(tmp_path, closed):
    """A fork keeps them, too, where what the recorder had open is forgotten."""
    body = f"""
import json, os, time
{FILES}
{closed}
if "dup2" in {closed!r}: os.closerange(3, 256)
keep()
for _ in range(20): train_step()
time.sleep(1.2)
if os.fork() == 0:
    kept = [each for each in mine if os.fstat(each).st_size == 0]  # an error for one that is closed
    train_step()
    os._exit(len(kept) != len(mine))
assert os.wait()[1] == 0
print(json.dumps([os.fstat(each).st_size for each in mine]))
"""
    sizes = seen(tmp_path, body)
    assert sizes == [0] * len(sizes)
    assert len(sizes) > 30


LATE = """
import atexit, sys
def late():
    for _ in range(40): train_step()
    print("trained on")
{register}
import torch
{model}
for _ in range(4): train_step()
{then}
"""


@pytest.mark.parametrize(
    ("register", "then"),
    [
        ("atexit.register(late)", ""),
        ("", "atexit._clear(); late()"),
        pytest.param("", "atexit._run_exitfuncs(); late()", marks=pytest.mark.slow),
        pytest.param("atexit.register(late)", "sys.exit(0)", marks=pytest.mark.slow),
    ],
    ids=["registered before torch", "cleared", "run early", "exit"],
)
def test_a_job_that_trains_on_after_our_exit_handler_ends_as_it_would(tmp_path, register, then):
    job = tmp_path / "job.py"
    job.write_text(LATE.format(register=register, model=MODEL, then=then))
    command = [sys.executable, str(job)]
    plain = complete(command, tmp_path)
    run, done = record(tmp_path, command, "--skip", "2", "--every", "2", "--window-steps", "1")
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (0, b"trained on\n")
    # Torch itself complains on stderr where its own handlers are cleared.
    assert re.sub(rb"0x\w+", b"", done.stderr) == re.sub(rb"0x\w+", b"", plain.stderr)
    assert run.table(STEPS).height >= 2
    assert run.table(SPANS).height > 0


def test_a_recording_whose_files_are_truncated_ends_as_it_would(tmp_path):
    body = LOOKS + "pathlib.Path('ready').touch()\nwhile not os.path.exists('go'): train_step()\nprint(1)"
    job = start([*RECORD, "-o", "run", *OFTEN, "--", *script(tmp_path, body)], tmp_path)
    wait_for(tmp_path / "ready")
    for path in (tmp_path / "run" / ".raw").rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    (tmp_path / "go").touch()
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout, stderr) == (0, b"1\n", b"")


def test_a_preempted_job_with_workers_ends_by_the_signal_and_no_fault_is_found(tmp_path):
    """Where SIGTERM ends ranks and workers together, nothing of ours runs, and nothing is blamed."""
    body = """
import pathlib
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Ones(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, at): return torch.ones(4)

if __name__ == "__main__":
    for number, batch in enumerate(DataLoader(Ones(), 2, num_workers=2)):
        train_step()
        if number == 40: pathlib.Path("ready").touch()
"""
    job = start([*RECORD, "-o", "run", "--", *script(tmp_path, body)], tmp_path)
    wait_for(tmp_path / "ready")
    wait_until(lambda: len(_processes(job.pid)) == 3, "no workers")
    for pid in reversed(_processes(job.pid)):  # workers first, as where a node is drained
        os.kill(pid, signal.SIGTERM)
    _, stderr = job.communicate(timeout=PATIENCE_S)
    assert b"collectors" not in stderr
    run = opened(tmp_path / "run")
    if (
        job.returncode == -signal.SIGTERM
    ):  # else PyTorch noticed its worker's end first, as it does unrecorded
        assert run.table(WORKERS)["exit_signal"].to_list() == [signal.SIGTERM]


def _processes(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [pid, *(int(word) for word in re.findall(r"\d+", text))]


PATCHED = """
import _thread, sys, time
used = []
def patched(name, original):
    def function(*args, **kwargs):
        if "/inside/" in sys._getframe(1).f_code.co_filename: used.append(name)
        return original(*args, **kwargs)
    return function
names = "start_new_thread", "allocate_lock", "get_ident"
for module, name in ((time, "sleep"), *((_thread, name) for name in names)):
    setattr(module, name, patched(name, getattr(module, name)))
"""


@pytest.mark.slow
def test_our_threads_and_locks_are_those_of_the_interpreter_where_the_job_has_patched_them(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(f"{PATCHED}\nimport torch\n{MODEL}\n{LOOKS}\nprint(json.dumps(sorted(set(used))))\n")
    run, done = record(tmp_path, [sys.executable, str(job)], *OFTEN)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[]\n", b"")
    assert run.table(STEPS).height > 50


GREENLETS = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}


@pytest.mark.slow
@pytest.mark.parametrize("library", GREENLETS)
def test_sigterm_and_greenlets_are_as_without_a_recorder(tmp_path, library):
    pytest.importorskip(library)
    job = tmp_path / "job.py"
    then = "print(threading.active_count(), flush=True)\npathlib.Path('ready').touch()\ntime.sleep(600)\n"
    job.write_text(f"{GREENLETS[library]}\nimport torch\n{MODEL}\n{LOOKS}\n{then}")
    process = start([*RECORD, "-o", "run", *OFTEN, "--", sys.executable, str(job)], tmp_path)
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (-signal.SIGTERM, b"1\n")
    assert opened(tmp_path / "run").table(STEPS).height > 50
