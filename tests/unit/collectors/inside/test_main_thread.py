"""Functions that are called in the main thread, and exceptions of signal handlers within them."""

import functools
import os
import signal
import sys
import threading
import time

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.main_thread import MainThreadCall, is_from_signal_handler
from tests.jobs import wait_until


class Preempted(Exception):
    """What a job raises when it is asked to go."""

    def __init__(self, reason, seconds):
        super().__init__(reason, seconds)
        self.seconds = seconds


@pytest.fixture
def handler():
    """A handler of the job's for SIGUSR1 that raises; `set_to` exchanges it."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda function: signal.signal(signal.SIGUSR1, function)
    signal.signal(signal.SIGUSR1, before)


def preempt(number, frame):
    raise Preempted("spot", 30)


class Handler:
    def method(self, number, frame):
        preempt(number, frame)

    def __call__(self, number, frame):
        preempt(number, frame)


def busy_until(condition):
    wait_until(condition, "the main thread was never asked", 60)


def test_function_is_called_in_the_main_thread_and_sees_what_it_interrupted():
    seen = []
    call = MainThreadCall(lambda: seen.append((threading.get_ident(), stack_here())))
    asking = threading.Thread(target=call.ask)
    asking.start()
    busy_until(lambda: seen)
    asking.join()
    ident, functions = seen[0]
    assert ident == threading.main_thread().ident
    assert any(name.startswith("test_function_is_called_in") for name in functions)


def stack_here():
    frame, functions = sys._getframe(), []
    while frame is not None:
        functions.append(frame.f_code.co_name)
        frame = frame.f_back
    return functions


def test_function_that_is_asked_for_often_waits_for_its_turn_once():
    calls = []
    call = MainThreadCall(lambda: calls.append(1))
    call._is_asked = True  # as if it had been asked for, and the main thread were in C
    call.ask()
    busy_until(lambda: time.sleep(0.05) or True)
    assert not calls
    call._is_asked = False
    call.ask()
    busy_until(lambda: calls)
    call.ask()
    busy_until(lambda: len(calls) == 2)


def test_forked_child_does_not_call_what_its_parent_was_asked_for():
    calls = []
    call = MainThreadCall(lambda: calls.append(1))
    call._process = -1
    call.ask()
    busy_until(lambda: not call._is_asked)
    assert not calls


@pytest.mark.parametrize("function", [preempt, Handler().method, Handler(), functools.partial(preempt)])
def test_exception_of_a_handler_within_the_function_reaches_the_job(handler, function):
    handler(function)

    def interrupted():
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(1000):
            pass

    call = MainThreadCall(interrupted)
    with pytest.raises(Preempted) as raised:
        busy_until(call.ask)
    assert type(raised.value) is Preempted
    assert raised.value.seconds == 30


def test_ctrl_c_within_the_function_reaches_the_job():
    call = MainThreadCall(lambda: os.kill(os.getpid(), signal.SIGINT) or list(range(1000)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            busy_until(call.ask)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("function", [preempt, Handler().method, Handler(), functools.partial(preempt)])
def test_exceptions_of_handlers_are_known_by_their_traceback(handler, function):
    handler(function)
    with pytest.raises(Preempted) as raised:
        busy_until(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert is_from_signal_handler(raised.value)
    with pytest.raises(ZeroDivisionError) as other:
        1 / 0  # noqa: B018
    assert not is_from_signal_handler(other.value)
