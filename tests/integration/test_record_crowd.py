"""What the recorder does in the threads of a job, done ten thousand times as often as it does it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpro.schema import STEPS
from tests.jobs import ROOT, environment, record, script

pytest.importorskip("torch")

# Garbage collections at every few allocations, threads that run into each other at every bytecode.
STRESS = """
import gc, sys, threading, time
from dpro.collectors.inside.main_thread import MainThreadCall
from dpro.collectors.inside.tracebacks import stacks
from dpro.collectors.inside.steps.host import timed_collections
from dpro.collectors.inside.steps.model_calls import outermost_call

end_s = time.monotonic() + float(sys.argv[1])
gc.set_threshold(50, 5, 5)
sys.setswitchinterval(1e-5)
begun_ns, ended_ns = timed_collections()
looks = num_stacks = calls = 0

class Finalized:
    def __del__(self):
        time.sleep(0)  # lets other threads run within a collection

def look():
    global looks
    looks += outermost_call(sys._getframe(), (call.__code__,)) is not None

def asking():
    asked = MainThreadCall(look)
    while time.monotonic() < end_s:
        asked.ask()
        time.sleep(1e-4)

def dumping():
    global num_stacks
    while time.monotonic() < end_s:
        num_stacks += len(stacks()) > 1
        time.sleep(2e-4)

def coming_and_going():
    while time.monotonic() < end_s:
        threading.Thread(target=call, args=(5,)).start()
        time.sleep(1e-3)

def call(depth):
    if depth:
        return call(depth - 1)
    global calls
    calls += 1
    cycle = [Finalized() if calls % 50 == 0 else None]
    cycle.append(cycle)
    return [[number] for number in range(30)]

for target in (asking, dumping, coming_and_going):
    threading.Thread(target=target, daemon=True).start()
while time.monotonic() < end_s:
    call(40)
print(looks, num_stacks, len(ended_ns))
"""


@pytest.mark.slow
def test_looking_at_threads_and_timing_collections_crashes_no_job():
    """Walking the frames of another thread from Python crashed here within seconds, on Python 3.11."""
    command = [sys.executable, "-c", STRESS, "30"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    looks, num_stacks, collections = map(int, done.stdout.split())
    assert looks > 1000
    assert num_stacks > 1000
    assert collections > 1000


# Many of these begin at once; threads of their own make garbage.
CROWDED = """
import threading
gc.set_threshold(50, 5, 5)
is_over = threading.Event()

def churn():
    while not is_over.is_set():
        cycle = [[number] for number in range(50)]
        cycle.append(cycle)

churning = [threading.Thread(target=churn) for _ in range(2)]
for thread in churning:
    thread.start()
for _ in range(40):
    train_step()
is_over.set()
for thread in churning:
    thread.join()
"""
STARTS = int(os.environ.get("DPRO_STARTS", "20"))  # 200 take ten minutes
AT_ONCE = 4


@pytest.mark.slow
def test_no_start_of_a_job_crashes_on_a_crowded_machine(tmp_path):
    def begun(number: int) -> tuple[int, bytes, int, list[str]]:
        folder = tmp_path / str(number)
        folder.mkdir()
        options = ("--skip", "2", "--every", "10", "--window-steps", "2")
        run, done = record(folder, script(folder, CROWDED), *options)
        return done.returncode, done.stderr, run.table(STEPS).height, run.manifest.warnings

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for ended in pool.map(begun, range(STARTS)):
            assert ended == (0, b"", 39, [])  # a step is from one update to the next
