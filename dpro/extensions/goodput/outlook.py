"""Predicts what a job would get done, and what changes to its recovery would give.

Takes the life of a job, its failure rate, and changes such as `checkpoint:every=200`, `spares:hosts=2` or
`detect:s=30`; returns an `OutlookDocument`. Without changes, it tries those for which the recording suffices.
Each change states its assumptions. A value that it needs and the job did not show must be given as a key;
none is assumed silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import sqrt

import numpy as np

from dpro.account import Gain
from dpro.analysis.analysis import Analysis
from dpro.analysis.predictions import predict_edits
from dpro.arrays import Floats
from dpro.documents import DocumentPart
from dpro.errors import DproError, Unanswerable, UsageError
from dpro.extensions.goodput.life import JobLife
from dpro.extensions.goodput.simulate import CLASSES, Failures, Recovery, exponential, simulate
from dpro.extensions.goodput.stages import FailureRate, observed_failures, own_rate, stages_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.scaling import Batch
from dpro.replay.whatif.grammar import (
    MAX_VALUE,
    KnownChange,
    Values,
    amount_key,
    count_key,
    split_edit,
    values_of,
)
from dpro.replay.whatif.predict import NINETY, Prediction
from dpro.replay.whatif.registry import apply_change, parse_edit
from dpro.schema import SPANS
from dpro.units import S_PER_H

SMALLER = "smaller"


def _checkpoint(recovery: Recovery, values: Values) -> Recovery:
    given = values["stall"] is not None
    if not (given or recovery.every or recovery.stall_s):
        raise UsageError(
            "checkpoint: the job saved none, so give how long one stalls training, as in "
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
        raise UsageError(f"smaller: the job has {recovery.ranks} ranks, fewer than {replicas} replicas")
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
        kept_share=1.0 - 1.0 / values["tp"],
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
        "No checkpoints: a failed stage is rebuilt from its neighbours. What that costs in steps of "
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
            count_key("tp", "GPUs that share each layer, of which a failure takes one", default=1),
        ],
        "smaller:replicas=16,repair=24,wait=30,slower=1.05",
        "Go on with fewer data-parallel replicas while a host is away, `wait` s later (its launcher's last "
        "call), and start again from its last checkpoint when it is back. Steps hold fewer samples, which "
        "counts as smaller progress, or with batch=1 as many. They take `slower` times as long, give or take "
        "`unsure`: as a replay of the run with fewer replicas says where it is not given. With tp=8, a "
        "failure takes one GPU, and its replica continues with the other 7 and 7/8 of its samples, in the "
        "same step time.",
        "ElasWave (arXiv 2510.00606); tp: NTP (arXiv 2504.06095)",
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
        UsageError: there is no such change, or its values are invalid.
    """
    return apply_change(recovery, text, DESIGNS)


def young_daly(recovery: Recovery, failures_per_s: float) -> int:
    """Return the best number of steps between checkpoints by Young: sqrt(2 · stall · time between failures).

    Young, CACM 17 (1974); Daly, FGCS 22 (2006), whose higher terms matter only where checkpoints take long.
    """
    best = round(sqrt(2 * recovery.stall_s / failures_per_s) / recovery.step_s)
    return min(max(best, 1), MAX_VALUE // 2)


class GoodputPrediction(DocumentPart, frozen=True):
    """What the job would get done in the predicted time.

    Attributes:
        edits: the changes; none for the job as it is.
        goodput: share of the time in which steps are done for good, with stragglers and evaluation, as `ettr`
            of the job counts them: mean over simulated jobs.
        low, high: interval of `goodput` with nine of ten simulated jobs.
        gain_h: hours of training that the change gives, mean; null for the job as it is.
        gain_low_h, gain_high_h: interval of `gain_h`.
        throughput: training done in the time, relative to the job as it is; null for that one, and where it
            would get nothing done.
        failures: mean number in that time.
        shares: share of the time of each class.
    """

    edits: list[str]
    goodput: float
    low: float
    high: float
    gain_h: float | None
    gain_low_h: float | None
    gain_high_h: float | None
    throughput: Gain | None
    failures: float
    shares: dict[str, float]


class OutlookDocument(DocumentPart, frozen=True):
    """What the job would get done at a given failure rate, and what changes would give. Unproven.

    Attributes:
        hours: simulated time.
        rate: source of the failure rate.
        job_failures_per_h: failures of the job as a whole.
        host_failures_per_h: failures of each host.
        hosts: number of hosts of the job.
        stages: measured stages of the job, s and steps, from which the simulation starts.
        predictions: the job as it is, then changes, largest gain first.
    """

    hours: float
    rate: str
    job_failures_per_h: float
    host_failures_per_h: float
    hosts: int
    stages: dict[str, float]
    predictions: list[GoodputPrediction]


def outlook(life: JobLife, rate: FailureRate | None, edits: Sequence[str], hours: float) -> OutlookDocument:
    """Predict a job as it is, and with changes.

    Args:
        rate: its failure rate; None for the observed one.

    Raises:
        UsageError: there is no such change.
        Unanswerable: the job did no step, or its own failures are too few.
    """
    recovery = stages_of(life)
    rate = rate or own_rate(observed_failures(life))
    changes = [_replayed(life, recovery, edits)] if edits else candidates(recovery, rate)
    base, *predictions = predict_goodput(recovery, rate, changes, hours)
    ranked = sorted(predictions, key=lambda prediction: -(prediction.gain_h or 0.0))
    return OutlookDocument(
        hours=hours,
        rate=rate.source,
        job_failures_per_h=rate.job,
        host_failures_per_h=rate.host,
        hosts=recovery.hosts,
        stages={name: float(value) for name, value in asdict(recovery).items()},
        predictions=[base, *ranked],
    )


def _replayed(life: JobLife, recovery: Recovery, edits: Sequence[str]) -> list[str]:
    """Return the changes, with step times of smaller jobs filled in from a replay."""
    changes: list[str] = []
    for edit in edits:
        changes.append(with_replayed_step(life, recovery, edit))
        recovery = changed(recovery, changes[-1])
    return changes


# Predicted goodput of changes to the recovery of a job, with intervals.

JOBS = 200  # simulated for each prediction
LOW, HIGH = 5.0, 95.0  # percentiles of an interval
SEED = 20240501
MAX_FAILURES = 10_000  # simulated per job


def predict_goodput(
    recovery: Recovery, rate: FailureRate, changes: Sequence[Sequence[str]], hours: float
) -> list[GoodputPrediction]:
    """Predict the job as it is, and with each list of changes.

    Raises:
        UsageError: there is no such change, or its values are invalid.
        Unanswerable: there would be more failures than can be simulated.
    """
    base = _simulated(recovery, rate, hours)
    predictions = [_prediction([], base, base, hours)]
    for edits in changes:
        design = recovery
        for edit in edits:
            design = changed(design, edit)
        predictions.append(_prediction(edits, _simulated(design, rate, hours), base, hours))
    return predictions


def candidates(recovery: Recovery, rate: FailureRate) -> list[list[str]]:
    """Return the changes that a search tries: those for which the recording of the job suffices."""
    per_s = (rate.job + rate.host * recovery.hosts) / S_PER_H
    changes = []
    if recovery.stall_s > 0 and per_s > 0:
        best = young_daly(recovery, per_s)
        changes += [[f"checkpoint:every={every}"] for every in sorted({best, max(best // 2, 1), 2 * best})]
        changes.append(["async:stall=0"])
    if recovery.detect_s > 0:
        changes.append([f"detect:s={recovery.detect_s / 10:.3g}"])
    if recovery.start_s > 0:
        changes.append([f"start:s={recovery.start_s / 2:.3g}"])
    return changes


def _simulated(recovery: Recovery, rate: FailureRate, hours: float) -> tuple[Floats, Floats, float]:
    """Return [S] goodput, [classes] shares and the mean number of failures of simulated jobs."""
    failures_per_h = rate.job + rate.host * recovery.hosts
    if not failures_per_h * hours <= MAX_FAILURES:
        raise Unanswerable(
            f"{failures_per_h:,.3g} failures an hour for {hours:,.5g} h are "
            f"more than the {MAX_FAILURES:,} that are simulated: give fewer --hours, or a lower rate"
        )
    rng = np.random.default_rng(SEED)
    failures: Failures = exponential(*rate.per_s(JOBS, rng), rng)
    done = simulate(recovery, failures, hours * S_PER_H, rng, JOBS)
    shares = done.seconds.mean(axis=0) / done.seconds.sum(axis=1).mean()
    return done.goodput, shares, float(done.failures.mean())


def _prediction(
    edits: Sequence[str],
    simulated: tuple[Floats, Floats, float],
    base: tuple[Floats, Floats, float],
    hours: float,
) -> GoodputPrediction:
    goodput, shares, failures = simulated
    gain = goodput - base[0]
    low, high = np.percentile(goodput, [LOW, HIGH])
    gains = (gain.mean(), *np.percentile(gain, [LOW, HIGH]))
    gain_h, gain_low_h, gain_high_h = (hours * float(share) if edits else None for share in gains)
    is_compared = bool(edits) and bool(np.all(base[0] > 0))
    times = goodput / base[0] if is_compared else goodput
    ends = map(float, np.percentile(times, [LOW, HIGH]))
    throughput = Gain(next(ends), float(goodput.mean() / base[0].mean()), next(ends)) if is_compared else None
    return GoodputPrediction(
        edits=list(edits),
        goodput=float(goodput.mean()),
        low=float(low),
        high=float(high),
        gain_h=gain_h,
        gain_low_h=gain_low_h,
        gain_high_h=gain_high_h,
        throughput=throughput,
        failures=failures,
        shares=dict(zip(CLASSES, map(float, shares), strict=True)),
    )


# The step time while a host is missing, from a replay of the job's recording with fewer replicas.


def with_replayed_step(life: JobLife, recovery: Recovery, text: str) -> str:
    """Add `slower` and `unsure` to a change `smaller` that lacks them; return other changes as they are.

    Raises:
        UsageError: the run does not show how long such a step takes.
    """
    name, rest = split_edit(text)
    if name != SMALLER:
        return text
    change = DESIGNS[name]
    values = values_of(name, rest, [key.name for key in change.keys], change.example)
    if "slower" in values or "replicas" not in values:
        return text
    with suppress(ValueError):
        replicas = int(values["replicas"])
        fewer = max((recovery.hosts - 1) * replicas // recovery.hosts, 1)
        keeps_batch = float(values.get("batch", "0")) > 0
        if int(values.get("tp", "1")) > 1:
            if keeps_batch:
                raise UsageError(
                    "smaller: with tp=, batch=1 needs slower=: the replay has even replicas only"
                )
            return f"{text},slower=1"
        slower, unsure = _replayed_slowdown(life, replicas, fewer, keeps_batch)
        return f"{text},slower={slower:.4g},unsure={unsure:.2g}"
    return text  # invalid numbers are refused when the change is applied


def _replayed_slowdown(life: JobLife, replicas: int, fewer: int, keeps_batch: bool) -> tuple[float, float]:
    """Return the step time of `fewer` replicas over that of `replicas`, and its standard deviation."""
    most = max((attempt.workers.height for attempt in life.attempts), default=0)
    whole = [
        attempt for attempt in life.attempts if attempt.workers.height == most and attempt.run.num_rows(SPANS)
    ]
    if not whole:
        raise UsageError(
            "smaller: nothing was recorded in depth (no deep window), so how long a step takes with fewer "
            f"replicas is not known: give it, as in {DESIGNS[SMALLER].example}"
        )
    analysis = Analysis(whole[-1].run)
    try:
        before = _predicted(analysis, replicas)
        more = [Batch(replicas / fewer)] if keeps_batch and fewer < replicas else []
        after = _predicted(analysis, fewer, *more)
    except DproError as error:
        raise UsageError(
            f"smaller: how long a step takes with fewer replicas is not known ({error}): give it, as in "
            f"{DESIGNS[SMALLER].example}"
        ) from error
    (before_ns, before_doubt_ns), (after_ns, after_doubt_ns) = before, after
    # Both make the same assumptions on the network, so errors do not add up: the larger one counts.
    return after_ns / before_ns, max(before_doubt_ns, after_doubt_ns) / before_ns


def _predicted(analysis: Analysis, replicas: int, *more: Edit) -> tuple[float, float]:
    """Return the mean step of a job with this number of replicas, and its standard deviation, in ns."""
    resized = parse_edit(f"data-parallel:ranks={replicas}")
    is_changed = resized.samples(analysis.built.predictive) != 1
    edits = [*([resized] if is_changed else []), *more]
    trust = analysis.trust
    if not trust.answerable:
        raise Unanswerable("; ".join(trust.reasons))
    prediction = predict_edits(analysis, edits)
    return prediction.predicted_ns, _deviation_ns(prediction) if edits else 0.0


def _deviation_ns(prediction: Prediction) -> float:
    """Return the standard deviation of a predicted step, from the 90 % interval of its gain."""
    return (prediction.gain_high_ns - prediction.gain_low_ns) * prediction.samples / 2 / NINETY
