"""Stacks of threads, read from what `faulthandler` writes."""

import threading

from dpro.collectors.inside import tracebacks


def test_every_thread_has_its_calls_innermost_first():
    begun, done = threading.Event(), threading.Event()

    def waiting_here():
        begun.set()
        done.wait(60)

    thread = threading.Thread(target=waiting_here)
    thread.start()
    begun.wait(60)
    stacks = {stack.ident: stack for stack in tracebacks.stacks()}
    done.set()
    thread.join()
    functions = [frame["function"] for frame in stacks[thread.ident].frames]
    assert functions.index("waiting_here") > functions.index("wait")
    assert not stacks[thread.ident].is_current
    here = stacks[threading.get_ident()]
    assert here.is_current
    calling = next(frame for frame in here.frames if frame["file"] == __file__)
    assert calling["function"].startswith("test_every_thread")


def test_text_without_threads_and_names_that_are_no_frames_are_passed_over():
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "a b.py", line 3 in f\n  ...\n\n'
        'Current thread 0x00000a0f [main] (most recent call first):\n  File "c.py", line ??? in g\n'
    )
    assert tracebacks.parse("") == []
    assert tracebacks.parse(text) == [
        (0x7F01, False, [{"file": "a b.py", "line": 3, "function": "f"}]),
        (0xA0F, True, []),
    ]
