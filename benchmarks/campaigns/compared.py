"""dpro's account of a campaign and its prediction of another, beside the logs of the jobs.

In: campaigns. Out: errors. The truth of an account is the log that ranks wrote while they trained; that of a
prediction is the measured goodput of a campaign of the other design, simulated with its failure times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from benchmarks.campaigns.campaign import RANKS, Campaign
from benchmarks.campaigns.design import KEEP_ALIVE_S, KEEP_ALIVE_TIMES, LAST_CALL_S, CampaignDesign
from dpro.arrays import Bools, Floats, Ints
from dpro.extensions.goodput.account import CHECKPOINT, EVALUATION, FINISH, PRODUCTIVE, STRAGGLER, WARM_UP
from dpro.extensions.goodput.attempts import LAUNCH
from dpro.extensions.goodput.life import JobLife, life_of
from dpro.extensions.goodput.outlook import changed
from dpro.extensions.goodput.simulate import Failures, simulate
from dpro.extensions.goodput.stages import stages_of
from dpro.opening import ensure_finished
from dpro.store import open_run
from dpro.units import NS_PER_S, S_PER_H

JOBS = 200  # simulated jobs, since the moment of a failure within a step is random


@dataclass(frozen=True)
class Progress:
    """The progress of a job, by its own log.

    Attributes:
        productive_s: in steps that were done for the first time, and count at the end.
        whole_s: productive time weighted by the share of ranks: a step of half of them counts half.
        repeated_s: in steps that were done again, or were lost at the end.
        saving_s: in which it was stalled by saves.
        wall_s: duration of the campaign.
    """

    productive_s: float
    whole_s: float
    repeated_s: float
    saving_s: float
    wall_s: float


def logged_progress(campaign: Campaign) -> Progress:
    """Compute the progress of a campaign from the log of its first rank.

    Args:
        campaign: which.
    """
    lines = campaign.logged(0)
    at_end = next((line["done"] for line in reversed(lines) if "done" in line), 0)
    productive = whole = repeated = saving = 0.0
    reached, before_s, saved_s, size = 0, 0.0, 0.0, 1.0
    for line in lines:
        if "resumed" in line:
            before_s, saved_s, size = line["at_s"], 0.0, line.get("ranks", RANKS) / RANKS
        elif "save" in line:
            saving += line["took_s"]
            saved_s = line["took_s"]
        else:
            took_s = line["at_s"] - before_s - saved_s
            before_s, saved_s = line["at_s"], 0.0
            if reached < line["done"] <= at_end:
                productive += took_s
                whole += took_s * size
            else:
                repeated += took_s
            reached = max(reached, line["done"])
    return Progress(productive, whole, repeated, saving, campaign.ended_s - campaign.begun_s)


def life(campaign: Campaign) -> JobLife:
    """Return the life of a campaign's job, as dpro recorded it."""
    ensure_finished(campaign.run)
    return life_of([open_run(campaign.run)])


def account_errors(campaign: Campaign, found: JobLife) -> dict[str, float]:
    """Return the error of dpro's account by class, as a share of the wall time.

    Args:
        campaign: which.
        found: its life, as dpro recorded it.
    """
    seconds, truth = _seconds(found), logged_progress(campaign)
    trained = (PRODUCTIVE, STRAGGLER, EVALUATION, WARM_UP)  # the job's log does not separate these
    trained_s = sum(seconds.get(name, 0.0) for name in trained) - _warm_up_again_s(found)
    return {
        "productive": (trained_s - truth.productive_s) / truth.wall_s,
        "checkpoint": (seconds.get(CHECKPOINT, 0.0) - truth.saving_s) / truth.wall_s,
    }


def _warm_up_again_s(found: JobLife) -> float:
    """Sum the first rank's warm-up in steps of earlier attempts, repeated ones to the job's log, in s."""
    steps = found.pieces.filter((pl.col("rank") == found.pieces["rank"].min()) & (pl.col("step") >= 0))
    first = steps.group_by("step").agg(pl.col("attempt").min().alias("first"))
    again = steps.join(first, on="step").filter(
        pl.col("attempt") > pl.col("first"), pl.col("class") == WARM_UP
    )
    return float(again["duration_ns"].sum() / NS_PER_S)


def predicted(base: JobLife, design: CampaignDesign, campaign: Campaign, stall_s: float) -> Floats:
    """Predict [S] goodputs of a design, from a recorded job of another design, with failures that happened.

    Args:
        base: the job that the prediction starts from.
        design: to predict.
        campaign: of that design, for its failure times and its duration.
        stall_s: what a save in the background stalls.
    """
    recovery = stages_of(base)
    given = {
        "stall": stall_s,
        "detect": design.detect_s,
        "repair": design.repair_s / S_PER_H,
        # The keep-alive timeout of the failed host, then the last call for more hosts.
        "wait": KEEP_ALIVE_S * KEEP_ALIVE_TIMES + LAST_CALL_S,
    }
    for edit in design.edits:
        recovery = changed(recovery, edit.format(**given))
    # Launch and finish happen once, before the first start and after the last step; they are as in the base.
    seconds = _seconds(base)
    launch_s, finish_s = seconds.get(LAUNCH, 0.0), seconds.get(FINISH, 0.0)
    times = np.array([each.at_s - campaign.begun_s - launch_s for each in campaign.failures])
    hangs = np.array([each.hang for each in campaign.failures], bool)
    failures = logged(times, np.ones(len(times), bool), hangs)
    wall_s = campaign.ended_s - campaign.begun_s
    found = simulate(recovery, failures, wall_s - launch_s - finish_s, np.random.default_rng(0), JOBS)
    return np.asarray(found.seconds[:, 0] / wall_s)


def logged(times_s: Floats, of_host: Bools, hangs: Bools | None = None) -> Failures:
    """Make failures of recorded ones, for all jobs; they have no effect on a job that is not running.

    Args:
        times_s: [F] when, s from the first start of processes.
        of_host: [F] whether each took a host; the simulation takes their share.
        hangs: [F] whether each hung; None where that is not known.
    """
    order = np.argsort(times_s, kind="stable")
    ordered = np.append(times_s[order], np.inf)
    share = float(np.mean(of_host)) if len(of_host) else 0.0

    def after(now_s: Floats, _hosts: Ints) -> Floats:
        return np.asarray(ordered[np.searchsorted(ordered[:-1], now_s, side="right")])

    def hanging(at_s: Floats) -> Bools:
        last = np.searchsorted(ordered[:-1], at_s, side="right") - 1
        return np.asarray(np.append(hung, False)[last])

    hung = np.zeros(0, bool) if hangs is None else hangs[order]
    return Failures(after, lambda hosts: np.full(len(hosts), share), None if hangs is None else hanging)


def _seconds(found: JobLife) -> dict[str, float]:
    """Return the seconds of the first rank by class."""
    own = found.pieces.filter(rank=0).group_by("class").agg(pl.col("duration_ns").sum())
    return {name: ns / NS_PER_S for name, ns in own.iter_rows()}
