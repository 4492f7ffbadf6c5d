"""The recorder's cost in the training thread, measured from within a recorded job.

Whole jobs differ by more than this cost. Here the recorder of one process is alternately off and on, or each
of its actions is timed.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean, median, stdev
from typing import Any

ENTRIES = ("guarded", "on_update", "on_backward")  # methods of the recorder that hooks call
SETTLING = 2  # steps at the beginning of a turn that are still affected by the one before


def _recorder_module() -> Any:
    """Return the recorder's module in this process.

    Raises:
        StopIteration: the job is not recorded.
    """
    return next(module for name, module in sys.modules.items() if name.endswith(".recorder"))


def recorder_switch() -> Callable[[bool], None]:
    """Return a function that turns the recorder's work in this thread off and on; its own threads go on."""
    recorder_class, thread, is_on = _recorder_module().Recorder, threading.get_ident(), True

    def if_on(method: Callable[..., None]) -> Callable[..., None]:
        def switched(recorder: object, *arguments: Any) -> None:
            if is_on or threading.get_ident() != thread:
                method(recorder, *arguments)

        return switched

    def switch(on: bool) -> None:
        nonlocal is_on
        is_on = on

    for name in ENTRIES:
        setattr(recorder_class, name, if_on(getattr(recorder_class, name)))
    return switch


def step_times_by_turn(steps_ms: list[float], turn: int) -> dict[str, float]:
    """Compare steps with the recorder with those of the turns around them without.

    Args:
        steps_ms: from the end of each step to that of the next: one less than steps.
        turn: steps of each turn; the first is without.

    Returns:
        `on_ms` and `off_ms`, the median of the turns' medians, and `added_us` between a turn and those around
        it; the mean of `ratio` over `turns` turns, and its standard error.
    """
    last = len(steps_ms) + 1 - turn
    # The first turn warms up, so that they begin with one that is on.
    medians = [
        median(steps_ms[begin + SETTLING - 1 : begin + turn - 1]) for begin in range(turn, last + 1, turn)
    ]
    pairs = [(medians[at], (medians[at - 1] + medians[at + 1]) / 2) for at in range(2, len(medians) - 1, 2)]
    ratios = [on / off for on, off in pairs]
    return {
        "on_ms": median(on for on, _ in pairs),
        "off_ms": median(off for _, off in pairs),
        "added_us": 1e3 * median(on - off for on, off in pairs),
        "ratio": fmean(ratios),
        "ratio_error": stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0,
        "turns": len(ratios),
    }


def _have_timed(recorder_class: Any, timed_call: Callable[[Any, Callable[[], object]], object]) -> None:
    """Have each action of the recorder timed, whatever calls it.

    Args:
        timed_call: gets an action, and a function that calls it.
    """

    def calling(method: Callable[..., object]) -> Callable[..., object]:
        return lambda recorder, action, *rest: timed_call(action, lambda: method(recorder, action, *rest))

    def timing(action: Any) -> Callable[..., object]:
        @functools.wraps(action)
        def timed_action(*arguments: object) -> object:
            return timed_call(action, lambda: action(*arguments))

        return timed_action

    for name in ("call", "run"):
        setattr(recorder_class, name, calling(getattr(recorder_class, name)))
    for name in ENTRIES[1:]:
        setattr(recorder_class, name, timing(getattr(recorder_class, name)))
    for recorder in [held for held in gc.get_objects() if type(held) is recorder_class]:
        for occasion, listeners in recorder._listeners.items():
            recorder._listeners[occasion] = [timing(action) for action in listeners]


def timed_actions() -> Callable[[int], dict[str, float]]:
    """Time each action of the recorder in this thread from now on.

    Returns:
        A function that returns, for a number of steps, the us of a step that each action takes: its median
        call times its calls per step, so that other work on the machine does not show. The time of an action
        includes that of actions it calls; `all` is the sum over actions that no other one calls.
    """
    core = _recorder_module()
    took_ns: dict[Callable[..., object], array[int]] = defaultdict(lambda: array("q"))
    outermost: set[Callable[..., object]] = set()
    here, depth = threading.get_ident(), 0

    def timed_call(action: Any, call: Callable[[], object]) -> object:
        nonlocal depth
        if threading.get_ident() != here:
            return call()
        function = getattr(action, "__func__", action)
        if not depth:
            outermost.add(function)
        depth += 1
        begun_ns = time.perf_counter_ns()
        try:
            return call()
        finally:
            took_ns[function].append(time.perf_counter_ns() - begun_ns)
            depth -= 1

    _have_timed(core.Recorder, timed_call)

    def us_per_step(steps: int) -> dict[str, float]:
        us: dict[str, float] = defaultdict(float)
        for action, times_ns in took_ns.items():
            spent_us = 1e-3 * median(times_ns) * len(times_ns) / steps
            us[f"{action.__module__.partition('.')[2]}.{action.__name__}"] += spent_us
            us["all"] += spent_us if action in outermost else 0.0
        return {
            name: spent_us
            for name, spent_us in sorted(us.items(), key=lambda part: -part[1])
            if spent_us > 0.05
        }

    return us_per_step
