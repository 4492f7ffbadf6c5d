"""Signals that are heard first still end the process, whatever saving does meanwhile."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

COLLECTORS = Path(__file__).parents[5] / "collectors"

# A process that is asked to end while its main thread hangs inside C, holding no interpreter lock.
JOB = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from inside.process import preemption

class Stub:
    records = None
    def guarded(self, action, *arguments): action(*arguments)
    def call(self, action, *arguments): action(*arguments)
    def on_end(self): {saving}

preemption.FLUSH_S = preemption.MAIN_THREAD_S = 0.2
heard = preemption.Preemption(Stub())
heard.on_open()
{then}
mutex = ctypes.create_string_buffer(64)
locked = ctypes.CDLL(None).pthread_mutex_lock
locked(mutex)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
locked(mutex)  # never returns, and no signal interrupts it
"""


@pytest.mark.parametrize(
    ("saving", "then"),
    [
        ("time.sleep(1000)", ""),  # saving waits for something that never comes
        ("raise ValueError", ""),
        ("pass", "heard._leave = lambda number: 1 / 0"),  # our own thread dies of an error
    ],
)
def test_process_ends_by_the_signal_though_saving_hangs_or_fails(saving, then):
    command = [sys.executable, "-c", JOB.format(saving=saving, then=then), str(COLLECTORS)]
    if then:  # the first signal is lost with the thread; later ones have their default action
        command[2] = command[2].replace("threading.Timer(0.2", "threading.Timer(2, os.kill, (os.getpid(), "
                                        "signal.SIGTERM)).start(); threading.Timer(0.2")  # fmt: skip
    done = subprocess.run(command, timeout=60, capture_output=True)
    assert done.returncode == -signal.SIGTERM
