"""Cost of recording a job on a GPU: in one process, and by whole jobs in turns, plain, again and recorded.

In one process the recorder is alternately off and on, which excludes differences between processes.

The script times itself by its own events on the GPU and by the host's clock. Each round runs all ways once,
in a new order; a ratio is that of a way to the mean of the round's two plain jobs. The difference between
these two is the noise, beside which a bar of half a per cent has to be read.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from gpu_stages.check import Bench, Check, supports

NEVER = 10**9
ONCE = ("profiler by hand", "a window every 50 steps")  # ways without a bar, for which one round is enough
BARS = {"always-on": 1.005, "default windows": 1.01}
# Student's t for 95%, by the number of rounds.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
KEYS = {"event": "event_mean_ms", "wall": "wall_mean_ms"}


def ways_of(dry: bool) -> dict[str, list[Any] | None]:
    """Return options of `dpro record` by way; None is a job that is not recorded."""
    never = ["--no-windows"] if supports("--no-windows") else ["--every", NEVER, "--skip", NEVER]
    ways: dict[str, list[Any] | None] = {
        "plain": None,
        "plain again": None,
        "always-on": never,
        "default windows": [],
        "profiler by hand": None,
        "a window every 50 steps": ["--every", 50],
    }
    if dry:
        del ways["a window every 50 steps"]
    return ways


def arguments_of(bench: Bench, job: str, steps: int) -> list[object]:
    """Return the arguments of a job."""
    return [job, "--steps", steps, *(["--tiny"] if bench.dry else ["--bf16", "--fused"] * (job == "gpt"))]


def in_turns(bench: Bench, job: str, steps: int, rounds: int) -> None:
    """Run a job in all ways, round after round, as long as time allows."""
    arguments = arguments_of(bench, job, bench.few(steps, 12))
    ways = ways_of(bench.dry)
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    round_s = 0.0
    for number in range(bench.few(rounds, 1)):
        if number and bench.left_s < 1.1 * round_s:
            break
        before_s = bench.left_s
        of_round = [way for way in ways if way not in ONCE]
        _measure(bench, random.Random(number).sample(of_round, len(of_round)), ways, arguments, measured)
        round_s = before_s - bench.left_s
    if bench.dry or bench.left_s > round_s:
        _measure(bench, [way for way in ways if way in ONCE], ways, arguments, measured)


def _measure(
    bench: Bench,
    order: list[str],
    ways: dict[str, list[Any] | None],
    arguments: list[object],
    measured: dict[str, list[dict[str, float]]],
) -> None:
    """Run a job once in some ways, and report the results so far."""
    for way in order:
        try:
            measured[way].append(one_job(bench, way, ways[way], arguments))
        except RuntimeError as error:  # the other ways are measured all the same
            if ways[way] is None:
                raise
            bench.say(f"{way} failed", holds=False, error=str(error))
            del ways[way], measured[way]
    report(bench, measured)


def one_job(bench: Bench, way: str, options: list[Any] | None, arguments: list[object]) -> dict[str, float]:
    """Run a job in one way, and return its own figures."""
    command = bench.job("train.py", *arguments, *(["--by-hand"] if way == "profiler by hand" else []))
    if options is None:
        return bench.run(command).ensure().last_json()
    run, done = bench.record("run", command, options)
    figures = done.ensure().last_json()
    facts = bench.ask("info", run)
    windows = facts.get("windows") or {}
    return figures | {"windows": windows.get("count", 0), "recorded_steps": facts.get("steps", 0)}


def switched(bench: Bench, job: str, steps: int, turn: int) -> None:
    """Turn the recorder of one process off and on; report what its work in the thread adds to a step."""
    turn = bench.few(turn, 6)
    arguments = [*arguments_of(bench, job, bench.few(steps, 60)), "--switch-every", turn]
    run, done = bench.record("run", bench.job("train.py", *arguments), ["--no-windows"])
    figures = done.ensure().last_json()
    ratio, error = figures["ratio"], figures["ratio_error"]
    bench.say(
        "on to off", n=figures["turns"], ratio=ratio, low=ratio - 2 * error, high=ratio + 2 * error,
        added_us=figures["added_us"], off_ms=figures["off_ms"],
        steps=bench.ask("info", run).get("steps"), settled=abs(ratio - 1.005) >= 2 * error,
        bar="≤ 1.005", holds=ratio <= 1.005,
    )  # fmt: skip


def by_action(bench: Bench, job: str, steps: int) -> None:
    """Time each action of the recorder in the training thread."""
    arguments = [*arguments_of(bench, job, bench.few(steps, 60)), "--probes"]
    _, done = bench.record("run", bench.job("train.py", *arguments), ["--no-windows"])
    figures = done.ensure().last_json()
    actions = figures["probes_us"]
    added_us, step_us = actions.pop("all"), 1e3 * figures["event_median_ms"]
    bench.say(
        "us of a step", n=int(figures["steps"]), added_us=added_us, step_us=step_us, share=added_us / step_us,
        actions=dict(list(actions.items())[:16]), bar="≤ 0.5% of a step", holds=added_us <= 0.005 * step_us,
    )  # fmt: skip


def report(bench: Bench, measured: dict[str, list[dict[str, float]]]) -> None:
    """Report a line per way and clock, over the rounds so far."""
    plain, again = measured["plain"], measured["plain again"]
    for clock, key in KEYS.items():
        noise = [two[key] / one[key] for one, two in zip(plain, again)]
        whole = [(one[key] + two[key]) / 2 for one, two in zip(plain, again)]
        worst = max(abs(ratio - 1) for ratio in noise)
        bench.say(
            f"{clock}: plain against plain", n=len(noise), ratio=statistics.median(noise), worst=worst,
            step_ms=statistics.median(whole),
        )  # fmt: skip
        for way, each in measured.items():
            if way.startswith("plain") or not each:
                continue
            ratios = [mine[key] / base for mine, base in zip(each, whole)]
            low, high = interval(ratios)
            bar, ratio = BARS.get(way), statistics.median(ratios)
            bench.say(
                f"{clock}: {way}", n=len(ratios), ratio=ratio, low=low, high=high, noise=worst,
                windows=statistics.median(figures.get("windows", 0) for figures in each),
                settled=bar is not None and (high <= bar or low > bar),
                bar=f"≤ {bar:g} of plain" if bar else "", holds=ratio <= bar if bar else None,
            )  # fmt: skip


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return Student's 95% interval of the ratios' geometric mean; without bounds for a single ratio."""
    if len(ratios) < 2:
        return 0.0, math.inf
    logs = [math.log(ratio) for ratio in ratios]
    width = STUDENT.get(len(logs), 2.3) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - width), math.exp(middle + width)


def _check(name: str, run: Callable[..., None], asks: str, limit_s: float, **sizes: object) -> Check:
    return Check("overhead", name, asks, functools.partial(run, **sizes), limit_s)


_BY_ACTION = "what does each action of the recorder take of a step?"
_SWITCHED = "what does the recorder add to a step of one process?"
_IN_TURNS = "what do always-on recording and windows cost a step?"

CHECKS = (
    _check("small-actions", by_action, _BY_ACTION, 60, job="small", steps=500),
    _check("gpt-actions", by_action, _BY_ACTION, 60, job="gpt", steps=200),
    _check("gpt-switched", switched, _SWITCHED, 90, job="gpt", steps=1000, turn=10),
    _check("small-launches", in_turns, _IN_TURNS, 150, job="small", steps=1000, rounds=6),
    _check("gpt", in_turns, _IN_TURNS, 330, job="gpt", steps=150, rounds=4),
)
