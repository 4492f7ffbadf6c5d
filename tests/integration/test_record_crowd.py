"""What the recorder does in the threads of a job, done ten thousand times as often as it does it."""

import subprocess
import sys

import pytest

from tests.jobs import ROOT, environment

pytest.importorskip("torch")

# Garbage collections at every few allocations, threads that run into each other at every bytecode.
STRESS = """
import gc, sys, threading, time
from dpro.collectors.inside.main_thread import MainThreadCall
from dpro.collectors.inside.process.tracebacks import stacks
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
