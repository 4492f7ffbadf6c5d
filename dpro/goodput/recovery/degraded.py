"""How long a step takes while a host is missing: by a replay of the job's own recording with fewer replicas.

In: the life of a job, and `smaller:` without `slower=`. Out: the same change with what the replay says, and
how sure that is. Where nothing was recorded in depth, the user is asked.
"""

from __future__ import annotations

from contextlib import suppress

from dpro.analysis.analysis import Analysis
from dpro.errors import DproError, Unanswerable, UsageError
from dpro.goodput.life import JobLife
from dpro.goodput.recovery.designs import DESIGNS, SMALLER
from dpro.goodput.recovery.simulate import Recovery
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.replicas import DataParallelSize, replicas_of
from dpro.replay.whatif.edits.scaling import Batch
from dpro.replay.whatif.grammar import split_edit, values_of
from dpro.replay.whatif.predict import NINETY, Prediction, predict
from dpro.schema import SPANS


def with_replayed_step(life: JobLife, recovery: Recovery, text: str) -> str:
    """A change with `slower` and `unsure`, where it is `smaller` and does not give them.

    Raises:
        UsageError: the run does not say how long such a step takes.
    """
    name, rest = split_edit(text)
    if name != SMALLER:
        return text
    change = DESIGNS[name]
    values = values_of(name, rest, list(change.keys), change.example)
    if "slower" in values or "replicas" not in values:
        return text
    with suppress(ValueError):
        replicas = int(values["replicas"])
        fewer = max((recovery.hosts - 1) * replicas // recovery.hosts, 1)
        keeps_batch = float(values.get("batch", "0")) > 0
        slower, unsure = _replayed(life, replicas, fewer, keeps_batch)
        return f"{text},slower={slower:.4g},unsure={unsure:.2g}"
    return text  # whose numbers are none: it is refused when it is applied


def _replayed(life: JobLife, replicas: int, fewer: int, keeps_batch: bool) -> tuple[float, float]:
    """Steps of `fewer` replicas over those of all, and the standard deviation of that."""
    most = max((each.workers.height for each in life.attempts), default=0)
    whole = [each for each in life.attempts if each.workers.height == most and each.run.num_rows(SPANS)]
    if not whole:
        raise UsageError(
            "smaller: nothing was recorded in depth (no deep window), so how long a step takes with fewer "
            f"replicas is not known: give it, as in {DESIGNS[SMALLER].example}"
        )
    analysis = Analysis(whole[-1].run)
    try:
        recorded = replicas_of(analysis.built.predictive)
        before = _predicted(analysis, recorded, replicas)
        more = [Batch(replicas / fewer)] if keeps_batch and fewer < replicas else []
        after = _predicted(analysis, recorded, fewer, *more)
    except DproError as error:
        raise UsageError(
            f"smaller: how long a step takes with fewer replicas is not known ({error}): give it, as in "
            f"{DESIGNS[SMALLER].example}"
        ) from error
    (before_ns, before_doubt_ns), (after_ns, after_doubt_ns) = before, after
    # What both assume of the network is the same, so doubts do not add up: the larger one counts.
    return after_ns / before_ns, max(before_doubt_ns, after_doubt_ns) / before_ns


def _predicted(analysis: Analysis, recorded: int, replicas: int, *more: Edit) -> tuple[float, float]:
    """The mean step of a job with this number of replicas, and its standard deviation."""
    edits = [*([DataParallelSize(replicas)] if replicas != recorded else []), *more]
    trust = analysis.trust
    if not trust.answerable:
        raise Unanswerable("; ".join(trust.reasons))
    found = predict(analysis.built.predictive, analysis.baseline, edits, trust)
    return found.predicted_ns, _deviation_ns(found) if edits else 0.0


def _deviation_ns(found: Prediction) -> float:
    """The standard deviation of a predicted step, of its gain's interval of nine in ten."""
    return (found.gain_high_ns - found.gain_low_ns) * found.samples / 2 / NINETY
