"""Changes to how a job saves and recovers: `checkpoint:every=200`, `spares:hosts=2`, `detect:s=30`.

In: the text of a change, and the `Recovery` of a job. Out: the changed `Recovery`. What a change assumes is
said with it. What it needs and the job did not show is asked for as a key, never assumed silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

from dpro.errors import UsageError
from dpro.goodput.recovery.simulate import Recovery
from dpro.replay.whatif.grammar import (
    MAX_VALUE,
    KnownChange,
    Values,
    amount_key,
    apply_change,
    count_key,
)
from dpro.units import S_PER_H

SMALLER = "smaller"


def _checkpoint(recovery: Recovery, values: Values) -> Recovery:
    given = values["stall"] is not None
    if not (given or recovery.every or recovery.stall_s):
        raise UsageError(
            "checkpoint: the job saved none, so give how long training stands for one, as in "
            "checkpoint:every=200,stall=5"
        )
    stall_s = values["stall"] if given else recovery.stall_s
    return replace(recovery, every=values["every"], stall_s=stall_s)


def _asynchronous(recovery: Recovery, values: Values) -> Recovery:
    hidden_s = recovery.stall_s + recovery.background_s - values["stall"]
    return replace(recovery, stall_s=values["stall"], background_s=max(hidden_s, 0.0))


def _neighbour(recovery: Recovery, values: Values) -> Recovery:
    return replace(recovery, every=0, stall_s=0.0, background_s=0.0, kept_steps=values["steps"])


def _peers(recovery: Recovery, values: Values) -> Recovery:
    return replace(recovery, every=values["every"], stall_s=values["stall"], background_s=0.0)


def _spares(recovery: Recovery, values: Values) -> Recovery:
    return replace(recovery, spares=values["hosts"], repair_s=values["repair"] * S_PER_H)


def _smaller(recovery: Recovery, values: Values) -> Recovery:
    replicas = values["replicas"]
    if replicas > recovery.ranks > 0:
        raise UsageError(f"smaller: the job has {recovery.ranks} ranks, which are no {replicas} replicas")
    spares = max(recovery.spares, 0)
    repair_s = values["repair"] * S_PER_H
    return replace(
        recovery,
        replicas=replicas,
        spares=spares,
        repair_s=repair_s,
        wait_s=values["wait"],
        slower=values["slower"],
        unsure=values["unsure"],
        keeps_batch=values["batch"] > 0,
    )


def _caches(recovery: Recovery, values: Values) -> Recovery:
    saved_s = (1.0 - values["left"]) * recovery.warm_s
    return replace(recovery, start_s=recovery.start_s - saved_s, warm_s=recovery.warm_s - saved_s)


def _sharded(recovery: Recovery, values: Values) -> Recovery:
    ranks = values["ranks"]
    share = recovery.writers / ranks
    if ranks > recovery.ranks > 0:
        raise UsageError(f"sharded: the job has {recovery.ranks} ranks, so {ranks} cannot write a share each")
    stall_s, background_s = recovery.stall_s * share, recovery.background_s * share
    return replace(recovery, stall_s=stall_s, background_s=background_s, writers=ranks)


def _hosts(recovery: Recovery, values: Values) -> Recovery:
    hosts = values["count"]
    grown = hosts / recovery.hosts
    return replace(
        recovery, hosts=hosts, replicas=round(recovery.replicas * grown), ranks=round(recovery.ranks * grown)
    )


STALL = amount_key("stall", "for how long training stands, s")
REPAIR = amount_key("repair", "hours until a failed host is back", 24.0)
DESIGNS: Mapping[str, KnownChange[Recovery]] = {
    "checkpoint": KnownChange(
        _checkpoint,
        [count_key("every", "steps from one to the next"), replace(STALL, default=None)],
        "checkpoint:every=200",
        "Save a checkpoint after this number of steps; training stands `stall` s, as measured if not given.",
    ),
    "async": KnownChange(
        _asynchronous, [STALL], "async:stall=2",
        "Save in the background: training stands `stall` s (copying to memory), the rest is hidden; a "
        "checkpoint is whole once it is written.", "ByteCheckpoint (NSDI'25)",
    ),
    "peers": KnownChange(
        _peers, [count_key("every", "steps from one to the next", default=1), STALL],
        "peers:every=1,stall=0.2",
        "Save to the memory of other hosts each `every` steps; assumes that these do not fail with it.",
        "Gemini (SOSP'23)",
    ),
    "neighbour": KnownChange(
        _neighbour, [count_key("steps", "of training that a failure costs", 0, 1)], "neighbour:steps=1",
        "No checkpoints: a failed stage is made anew from its neighbours. What that costs in steps of "
        "training is not known here: give it as `steps`.", "CheckFree (arXiv 2506.15461)",
    ),
    "spares": KnownChange(
        _spares, [count_key("hosts", "that stand by", 0), REPAIR], "spares:hosts=2,repair=24",
        "Hosts that stand by; a failed one is back after `repair` hours. Without enough the job waits.",
    ),
    SMALLER: KnownChange(
        _smaller,
        [
            count_key("replicas", "data-parallel replicas of the job"), REPAIR,
            amount_key("wait", "s from the failure on, such as a launcher's last call", 0.0),
            amount_key("slower", "times as long a step"),
            amount_key("unsure", "standard deviation of that", 0.0),
            count_key("batch", "1: steps hold as many samples", 0, 0),
        ],
        "smaller:replicas=16,repair=24,wait=30,slower=1.05",
        "Go on with fewer data-parallel replicas while a host is away, `wait` s later (its launcher's last "
        "call), and start again from its last checkpoint when it is back. Steps hold fewer samples, which "
        "counts as smaller progress, or with batch=1 as many. They take `slower` times as long, give or take "
        "`unsure`: as a replay of the run with fewer replicas says where it is not given.",
        "ElasWave, NTP",
    ),
    "detect": KnownChange(
        lambda recovery, values: replace(recovery, detect_s=values["s"]),
        [amount_key("s", "s")], "detect:s=30", "Processes that hang are ended after so long.",
    ),
    "start": KnownChange(
        lambda recovery, values: replace(recovery, start_s=values["s"]),
        [amount_key("s", "s")], "start:s=60", "From the start of processes to the first step.",
    ),
    "caches": KnownChange(
        _caches, [amount_key("left", "share", 0.1, 1)], "caches:left=0.1",
        "Warm caches: of what the first steps of a start take longer, compilation say, this share is left.",
    ),
    "sharded": KnownChange(
        _sharded, [count_key("ranks", "that write")], "sharded:ranks=8",
        "Each of this many ranks writes its share of a checkpoint; assumes storage that is as fast for each.",
        "ByteCheckpoint (NSDI'25)",
    ),
    "hosts": KnownChange(
        _hosts, [count_key("count", "of hosts")], "hosts:count=256",
        "The same job on this number of hosts, each with as much work: failures of hosts come more often.",
    ),
}  # fmt: skip


def changed(recovery: Recovery, text: str) -> Recovery:
    """Apply a change.

    Raises:
        UsageError: there is no such change, or its values are none.
    """
    return apply_change(recovery, text, DESIGNS)


def young_daly(recovery: Recovery, failures_per_s: float) -> int:
    """Steps from one checkpoint to the next by Young's formula, sqrt(2 · stall · time between failures).

    Young, CACM 17 (1974); Daly, FGCS 22 (2006), whose higher terms matter where checkpoints take long.
    """
    best = round(sqrt(2 * recovery.stall_s / failures_per_s) / recovery.step_s)
    return min(max(best, 1), MAX_VALUE // 2)
