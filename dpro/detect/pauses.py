"""Detector of time lost in some steps only: checkpoints, validation, collections, compilation, loaders.

Takes steps and counters, which are always recorded, and own times of ranks where counters do not explain a
pause. Returns a finding for each kind of pause that takes enough of the wall time: its steps, the ranks that
work in them, its cost and remedy. `dpro.replay.steps` decides which steps are pauses: a job that is slower
for good has none, nor has one in which single steps are a little longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.detect.findings import PAUSES, START, Finding
from dpro.detect.observations import Observation, observe
from dpro.detect.stragglers.from_calls import KeptWaiting
from dpro.replay.steps import StepSeries, host_facts, step_series
from dpro.timed import all_hosts_ahead
from dpro.units import NS_PER_S
from dpro.words import first_few, ordinal, ranks_in_words

# How regularly something happens, and the words for it.

MIN_OCCURRENCES = 3  # two always have a single distance
REGULAR = 0.8  # least share of occurrences that are whole periods apart, and of due steps that have one
ABOUT = 0.15  # of the typical distance: by how much distances may differ for an approximate period
SHOWN = 4  # steps that are named


@dataclass(frozen=True)
class Recurrence:
    """The steps in which something happens, and how regularly.

    Attributes:
        steps: [N] step numbers.
        period: steps from one occurrence to the next; 0 if not regular.
        exact: whether the period is exact rather than approximate.
    """

    steps: Ints
    period: int
    exact: bool

    def in_words(self) -> str:
        """Return `in every 10th step`, `in about every 40th step`, or `now and then`."""
        if not self.period:
            return "in one step" if self.steps.size == 1 else "now and then"
        return f"in {'' if self.exact else 'about '}every {ordinal(self.period)} step"

    def named(self) -> str:
        """Return the first of the steps: `steps 10, 20, 30, 40 …`."""
        return f"step{'s' if self.steps.size > 1 else ''} {first_few(self.steps.tolist(), SHOWN)}"


def recurrence_of(steps: Ints, seen: Ints) -> Recurrence:
    """Return how regularly something happens.

    Args:
        steps: [N] int64, the steps in which it does, ascending.
        seen: [T] int64, all steps that would have shown it.
    """
    distances = np.diff(steps)
    if steps.size < MIN_OCCURRENCES:
        return Recurrence(steps, 0, False)
    # The most frequent distances come first, then their common divisor: some occurrences may be unseen.
    values, counts = np.unique(distances, return_counts=True)
    ordered = np.append(values[np.lexsort((values, -counts))], np.gcd.reduce(distances))
    for period in np.asarray(ordered[ordered > 1]):
        if _in_step(steps, seen, period):
            return Recurrence(steps, int(period), True)
    middle = float(np.median(distances))
    spread = float(np.quantile(np.abs(distances - middle), REGULAR))
    if middle >= 2 and steps.size > MIN_OCCURRENCES and spread <= ABOUT * middle:
        return Recurrence(steps, round(middle), False)
    return Recurrence(steps, 0, False)


def _in_step(steps: Ints, seen: Ints, period: int) -> bool:
    """Return whether nearly all occurrences are whole periods apart, and nearly all due steps have one."""
    phases, counts = np.unique(steps % period, return_counts=True)
    phase = phases[counts.argmax()]
    within = seen[(seen >= steps[0]) & (seen <= steps[-1])]
    due = within[within % period == phase]
    return bool(counts.max() >= REGULAR * steps.size and counts.max() >= REGULAR * due.size)


# The kind of each pause, and the ranks that work in it, from the host's counters.

EXPLAINED = 0.5  # share of a pause that its cause must explain on some rank
PART = 0.1  # of a pause: with this much work without gradients, waiting for data belongs to a validation
LOOK_BACK = 3  # steps: a host that runs ahead of its GPU waits for another rank's pause some steps later

CHECKPOINT, COMPILATION, COLLECTION = "checkpoint", "compilation", "garbage collection"
VALIDATION, RESTART, EPOCH, DATA = "validation", "loader restart", "epoch start", "waiting for data"
CONTENTION, BUSY, IDLE = "CPU contention", "other work", "unknown wait"
EMPTY_QUEUE = "empty queue"  # hosts waited for their GPUs, which then waited for the next step to be enqueued
# Causes of a pause, most specific first: validation may cause a collection, but not vice versa.
_ORDER = {
    "checkpoint_ns": CHECKPOINT,
    "compile_ns": COMPILATION,
    "gc_ns": COLLECTION,
    "no_grad_ns": VALIDATION,
    "data_wait_ns": DATA,
    "run_queue_ns": CONTENTION,
}
_CPU = "training_thread_cpu_ns"
_BEGINNING = "loader_start_ns"


@dataclass(frozen=True)
class Pause:
    """One pause.

    Attributes:
        longer_ns: by how much its step is longer than usual.
        lost_ns: how much time the job loses to it.
        kind: its cause.
        explained: share of it that the cause explains.
        ranks: ranks that work in it; empty where that is not known.
    """

    step: int
    longer_ns: float
    lost_ns: float
    kind: str
    explained: float
    ranks: tuple[int, ...]


def pauses_of(
    series: StepSeries,
    steps: pl.DataFrame,
    counters: pl.DataFrame,
    read_own: Callable[[], pl.DataFrame],
) -> list[Pause]:
    """Return each pause of a job with its cause, in order.

    Args:
        read_own: returns own times of ranks in all steps, `rank`, `step`, `own_ns`; called only if needed.
    """
    paused = np.flatnonzero(series.paused)
    times = {int(series.steps[row]): series.times[row] - series.usual[row] for row in paused}
    lost = {int(series.steps[row]): float(series.lost[row]) for row in paused}
    more = _counted(series, host_facts(steps, counters))
    explained = {step: _explained(more.get(step, {}), longer) for step, longer in times.items()}
    hosts = all_hosts_ahead(steps) if series.by_device else steps.clear()
    if hosts.height:
        explained |= {
            step: cause
            for step, (kind, *_) in explained.items()
            if not kind and (cause := _empty_queue(step, times[step], series, steps, hosts)) is not None
        }
    if not all(kind for kind, *_ in explained.values()):
        more_of_own = _more_of_own(series, read_own())
        explained |= {
            step: _unexplained(more.get(step, {}), more_of_own.get(step, {}), times[step])
            for step, (kind, *_) in explained.items()
            if not kind
        }
    # Whether a DataLoader that began again had to start its workers, by step.
    beginnings = counters.filter(pl.col("counter") == _BEGINNING).select("rank", "device", "time_ns")
    inside = beginnings.sort("time_ns").join_asof(
        steps.select("rank", "step", "start_ns", "duration_ns").sort("start_ns"),
        left_on="time_ns", right_on="start_ns", by="rank", check_sortedness=False,
    )  # fmt: skip
    inside = inside.filter(pl.col("time_ns") < pl.col("start_ns") + pl.col("duration_ns"))
    starts = ~pl.col("device").str.contains("persistent") & ~pl.col("device").str.starts_with("0 ")
    kinds = inside.group_by("step").agg(restart=starts.any()).iter_rows()
    begun = {step: RESTART if restart else EPOCH for step, restart in kinds}
    pauses = []
    for step, (kind, share, ranks) in explained.items():
        kind = begun.get(step, kind) if kind == DATA else kind
        pauses.append(Pause(step, float(times[step]), lost[step], kind, share, ranks))
    return pauses


def merged(pauses: list[Pause]) -> list[Pause]:
    """Merge pauses in two successive steps that may be one.

    What a rank does after its last call of a step makes that step longer for itself, and the next one for the
    ranks that wait for it: the job's step time, between these, contains a part of it each time.
    """
    merged_pauses: list[Pause] = []
    for pause in sorted(pauses, key=lambda pause: pause.step):
        last = merged_pauses[-1] if merged_pauses else None
        if last is None or pause.step != last.step + 1 or not _is_one(last, pause):
            merged_pauses.append(pause)
            continue
        main, other = (last, pause) if _is_explained(last) or not _is_explained(pause) else (pause, last)
        longer, lost = last.longer_ns + pause.longer_ns, last.lost_ns + pause.lost_ns
        ranks = main.ranks or other.ranks
        merged_pauses[-1] = Pause(last.step, longer, lost, main.kind, main.explained, ranks)
    return merged_pauses


def _is_explained(pause: Pause) -> bool:
    return pause.kind not in _UNEXPLAINED


def _is_one(first: Pause, second: Pause) -> bool:
    """Return whether two successive pauses may be one: kind and ranks agree, or one of them lacks these."""
    same = first.kind == second.kind or not (_is_explained(first) and _is_explained(second))
    return same and (first.ranks == second.ranks or not (first.ranks and second.ranks))


def _excess_of(series: StepSeries, rows: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """Return `pause`, `rank` and the excess of `columns` over the rank's ordinary steps."""
    # Each step belongs to the pause in it, or to one that soon follows.
    pairs, last = [], -1
    for paused in np.flatnonzero(series.paused).tolist():
        first = max(paused - LOOK_BACK, last + 1)
        pairs += [(int(series.steps[row]), int(series.steps[paused])) for row in range(first, paused + 1)]
        last = paused
    belongs = pl.DataFrame(pairs, schema={"step": pl.Int64, "pause": pl.Int64}, orient="row")
    ordinary = rows.filter(
        pl.col("step").is_in(series.steps[~series.paused].tolist())
        & ~pl.col("step").is_in(belongs["step"].implode())
    )
    usual = ordinary.group_by("rank").agg(pl.col(columns).median().name.suffix("_usual"))
    beyond = [(pl.col(name) - pl.col(f"{name}_usual").fill_null(0.0)).clip(0.0) for name in columns]
    within = rows.join(belongs, on="step").join(usual, on="rank", how="left")
    return within.group_by("pause", "rank").agg(growth.sum() for growth in beyond).sort("pause", "rank")


def _counted(series: StepSeries, facts: pl.DataFrame) -> dict[int, dict[int, dict[str, float]]]:
    """Return the excess of counters over ordinary steps, in ns: by pause, by rank, by counter."""
    columns = [*_ORDER, _CPU]
    more: dict[int, dict[int, dict[str, float]]] = {}
    for row in _excess_of(series, facts, columns).iter_rows(named=True):
        more.setdefault(row["pause"], {})[row["rank"]] = {name: row[name] or 0.0 for name in columns}
    return more


def done_in_windows(steps: pl.DataFrame, counters: pl.DataFrame) -> str:
    """Return what mostly makes steps of deep windows longer than others, as `compile code`; else empty."""
    in_windows = steps.select("rank", "step", is_deep=pl.col("window") >= 0)
    facts = host_facts(steps, counters).join(in_windows, on=["rank", "step"])
    of_deep, of_others = facts.filter("is_deep"), facts.filter(~pl.col("is_deep"))
    more = {
        name: float((of_deep[name].mean() or 0.0) - (of_others[name].median() or 0.0))  # type: ignore[arg-type, operator]
        for name in ("duration_ns", *_ORDER)
    }
    kinds = (kind for name, kind in _ORDER.items() if more[name] >= EXPLAINED * more["duration_ns"] > 0)
    return next((_DOES[kind][1] for kind in kinds if kind in _DOES), "")


def _more_of_own(series: StepSeries, own_times: pl.DataFrame) -> dict[int, dict[int, float]]:
    """Return the excess of own time over ordinary steps, in ns: by pause, by rank."""
    more: dict[int, dict[int, float]] = {}
    rows = own_times.select("rank", "step", pl.col("own_ns").cast(pl.Float64))
    for pause, rank, value in _excess_of(series, rows, ["own_ns"]).iter_rows():
        more.setdefault(pause, {})[rank] = value
    return more


def _explained(more: dict[int, dict[str, float]], longer: float) -> tuple[str, float, tuple[int, ...]]:
    """Return the kind of a pause, the share it explains, and its ranks; an empty kind if no counter does."""
    enough = EXPLAINED * longer
    for counter, kind in _ORDER.items():
        most = max((of_rank[counter] for of_rank in more.values()), default=0.0)
        if most >= enough:
            ranks = tuple(rank for rank, of_rank in more.items() if of_rank[counter] >= enough)
            return kind, min(most / longer, 1.0), ranks
    validating = {
        rank: of_rank["no_grad_ns"] + of_rank["data_wait_ns"]
        for rank, of_rank in more.items()
        if of_rank["no_grad_ns"] >= PART * longer
    }
    ranks = tuple(rank for rank, ns in validating.items() if ns >= enough)
    return (VALIDATION, min(max(validating.values()) / longer, 1.0), ranks) if ranks else ("", 0.0, ())


ENQUEUED = 1.5  # times a host's usual step: the longest wait of a GPU without work


def _empty_queue(
    step: int, longer: float, series: StepSeries, steps: pl.DataFrame, hosts: pl.DataFrame
) -> tuple[str, float, tuple[int, ...]] | None:
    """Return whether GPUs waited for a step to be enqueued, and the ranks that take longer to do so.

    Hosts that are far ahead of their GPUs, and wait for them now and then, begin the next step with nothing
    queued. None if it is another kind of pause.

    Args:
        hosts: as from `hosts_ahead`, of all ranks.
    """
    near = steps.filter(pl.col("step").is_between(step - 1, step) & (pl.col("window") < 0))
    waited = near.group_by("rank").agg(pl.col("duration_ns").max() >= series.typical_ns)["duration_ns"]
    pace_ns = hosts["pace_ns"].to_numpy()
    if waited.sum() < hosts.height or longer > ENQUEUED * pace_ns.max():
        return None
    slow = hosts.filter(pl.col("pace_ns") >= pace_ns.min() + EXPLAINED * longer)
    return EMPTY_QUEUE, min(float(pace_ns.max()) / longer, 1.0), tuple(slow["rank"].to_list())


def _unexplained(
    more: dict[int, dict[str, float]], more_of_own: dict[int, float], longer: float
) -> tuple[str, float, tuple[int, ...]]:
    """Return which ranks work in a pause that no counter explains, and whether they compute in it."""
    ranks = tuple(rank for rank, value in more_of_own.items() if value >= EXPLAINED * longer)
    computing = max((more.get(rank, {}).get(_CPU, 0.0) for rank in ranks), default=0.0)
    return BUSY if computing >= EXPLAINED * longer else IDLE, 0.0, ranks


MIN_WALL_SHARE = 0.03  # of the wall time: every job loses up to this much
MIN_TIMES = 3  # fewer pauses may never recur
HUGE = 0.1  # of the wall time, in fewer than `MIN_TIMES` pauses
MIN_UNEXPLAINED = 8  # unexplained irregular pauses of one rank: fewer are chance
HUGE_UNEXPLAINED = 0.3  # of the wall time, if neither regular nor of one rank: rare delays are normal
SAVING = 5  # steps after a deep window in which it may still be being saved
MIN_SHARE_OF_RANK = 0.8  # least share of the pauses, by time, in which a rank works
WARM_UP = 3  # first steps: what is long there occurs once per start of the job
MIN_WARM_UP, MIN_WARM_UP_NS = 0.3, NS_PER_S  # of the wall time, and in all: a shorter warm-up is no finding

_DOES = {  # of one rank, of several
    CHECKPOINT: ("saves a checkpoint", "save a checkpoint"),
    COLLECTION: ("collects garbage", "collect garbage"),
    COMPILATION: ("compiles code", "compile code"),
    VALIDATION: ("validates (works without gradients)", "validate (work without gradients)"),
    RESTART: ("waits for DataLoader workers to start", "wait for DataLoader workers to start"),
    EPOCH: ("waits for the first batch of an epoch", "wait for the first batch of an epoch"),
    DATA: ("waits for its data", "wait for their data"),
    BUSY: ("does work outside training steps", "do work outside training steps"),
    IDLE: ("is stalled, computing nothing", "are stalled, computing nothing"),
    EMPTY_QUEUE: ("keeps GPUs waiting for new work", "keep GPUs waiting for new work"),
}
DO = {
    CHECKPOINT: "save in the background (torch.distributed.checkpoint.async_save), shards on all ranks, or "
    "less often",
    COLLECTION: "gc.freeze() after the first steps; or gc.disable(), and gc.collect() at the same, few steps "
    "on all ranks",
    COMPILATION: "torch.compile(dynamic=True), mark_dynamic, or inputs of few sizes; TORCH_LOGS=recompiles "
    "says why",
    VALIDATION: "validate on fewer batches, or less often",
    RESTART: "persistent_workers=True in the DataLoader",
    EPOCH: "see what the dataset and its sampler do at the start of an epoch",
    DATA: "more workers, a larger prefetch_factor, or faster storage",
    BUSY: "see what the training loop does there: logging, metrics, validation with gradients",
    IDLE: "see what the training loop does there: files, locks, the network, time.sleep",
    EMPTY_QUEUE: "wait for the GPU less often (`.item()`, `.cpu()`, a loss that is printed): after each wait "
    "nothing is queued",
}
_ONE_VALIDATES = "validate on all ranks, a part of the data on each; or less often"
_UNEXPLAINED = (BUSY, IDLE)


@dataclass(frozen=True)
class LostTime:
    """Time that a job loses to pauses.

    Attributes:
        findings: costliest first.
        steps: the steps that they explain, so that other detectors need not.
        described: pauses that are not faults, a sentence each.
        kept_waiting: how long each rank that keeps GPUs waiting for new work does so.
    """

    findings: list[Finding]
    steps: list[int]
    described: list[str]
    kept_waiting: Mapping[int, KeptWaiting] = field(default_factory=dict)


@dataclass(frozen=True)
class PauseGroup:
    """The pauses of a kind, and the ranks that work in them.

    Attributes:
        ranks: ranks that work in nearly all of them.
        some: ranks that work in any of them.
    """

    kind: str
    pauses: list[Pause]
    recurrence: Recurrence
    ranks: tuple[int, ...]
    some: tuple[int, ...]

    @property
    def lost_ns(self) -> float:
        """Time that the job loses to them."""
        return sum(pause.lost_ns for pause in self.pauses)


def find_pauses(
    steps: pl.DataFrame, counters: pl.DataFrame, read_own: Callable[[], pl.DataFrame]
) -> LostTime:
    """Find the causes of lost time, if some steps take far longer than all others.

    The cost of a finding is what its pauses take beyond what their steps usually would, averaged over all
    steps; the severity is its share of the wall time.

    Args:
        steps, counters: the tables; times are on each rank's own clock.
        read_own: returns own times of ranks in all steps, `rank`, `step`, `own_ns`; called only if needed.
    """
    series = step_series(steps)
    if series is None or not series.paused.any():
        return LostTime([], [], [])
    # Unexplained pauses soon after a deep window do not count: it may still be being saved then.
    windows = set(steps.filter(pl.col("window") >= 0)["step"].to_list())
    pauses = merged(
        [
            pause
            for pause in pauses_of(series, steps, counters, read_own)
            if pause.kind not in _UNEXPLAINED or windows.isdisjoint(range(pause.step - SAVING, pause.step))
        ]
    )
    first = series.steps[:WARM_UP] if series.steps[0] <= WARM_UP else series.steps[:0]
    warm_up = [pause for pause in pauses if pause.step in first]
    groups = _groups([pause for pause in pauses if pause.step not in first], series)
    groups = sorted((group for group in groups if _matters(group, series)), key=lambda group: -group.lost_ns)
    num_ranks = steps["rank"].n_unique()
    of_steps = _lengths_of_steps(series, warm_up)
    findings = [
        _finding(group, series, num_ranks, [*_observe_checkpoint(group, counters), *of_steps])
        for group in groups
        if not _is_wanted(group, num_ranks)
    ]
    wanted = [group for group in groups if _is_wanted(group, num_ranks)]
    return LostTime(
        [*findings, *_long_warm_up(warm_up, series)],
        sorted(pause.step for pauses in (warm_up, *(group.pauses for group in groups)) for pause in pauses),
        [
            _pauses(group, num_ranks)
            .then(": {wall_share} of the wall time", wall_share=group.lost_ns / float(series.times.sum()))
            .text
            for group in wanted
        ],
        {
            rank: KeptWaiting(
                _middle_ns(group), group.recurrence.in_words(), group.lost_ns / series.times.size
            )
            for group in groups
            if group.kind == EMPTY_QUEUE and len(group.ranks) < num_ranks
            for rank in group.ranks
        },
    )


def mean_pause(series: StepSeries) -> tuple[float, float]:
    """Return by how much the mean step exceeds the typical one, and the standard error of that mean, in ns.

    First steps do not count; without pauses, nothing does.
    """
    is_later = series.steps > WARM_UP
    times = series.times[is_later]
    if times.size < 2 or not series.paused[is_later].any():
        return 0.0, 0.0
    added_ns = max(float(times.mean()) - series.typical_ns, 0.0)
    return added_ns, float(times.std(ddof=1) / math.sqrt(times.size))


def _is_wanted(group: PauseGroup, num_ranks: int) -> bool:
    """Return whether a job pauses on purpose: all ranks validate, or roll out a policy."""
    return group.kind == VALIDATION and len(group.ranks) == num_ranks


def _pauses(group: PauseGroup, num_ranks: int) -> Observation:
    """Return what ranks do, how long and how often: `rank 1 saves a checkpoint for 20 ms now and then`."""
    return observe(
        "pauses", f"{_who(group, num_ranks)} for {{pause_ns}} {group.recurrence.in_words()}",
        what=group.kind, ranks=group.ranks or group.some, pause_ns=_middle_ns(group),
        period_steps=group.recurrence.period,
    )  # fmt: skip


def _middle_ns(group: PauseGroup) -> float:
    return float(np.median([pause.longer_ns for pause in group.pauses]))


def _groups(pauses: list[Pause], series: StepSeries) -> list[PauseGroup]:
    """Group pauses by kind; large unexplained pauses are one group, and CPU contention is left out."""
    by_kind: dict[str, list[Pause]] = {}
    for pause in pauses:
        by_kind.setdefault("" if pause.kind in _UNEXPLAINED else pause.kind, []).append(pause)
    large = _large(by_kind.pop("", []))
    kinds = sorted(by_kind.items())
    if large:  # named by the kind that loses most of the time
        lost = {kind: sum(p.lost_ns for p in large if p.kind == kind) for kind in _UNEXPLAINED}
        kinds.append((max(lost, key=lost.__getitem__), large))
    return [_group(kind, held, series) for kind, held in kinds if kind != CONTENTION]


def _large(pauses: list[Pause]) -> list[Pause]:
    """Return pauses at least half as long as the one that splits the lost time in half, by length."""
    if not pauses:
        return []
    lengths = np.sort([pause.longer_ns for pause in pauses])
    middle = lengths[np.searchsorted(lengths.cumsum(), lengths.sum() / 2)]
    return [pause for pause in pauses if pause.longer_ns >= middle / 2]


def _group(kind: str, pauses: list[Pause], series: StepSeries) -> PauseGroup:
    recurrence = recurrence_of(np.array([pause.step for pause in pauses]), series.steps)
    some = sorted({rank for pause in pauses for rank in pause.ranks})
    lost = sum(pause.longer_ns for pause in pauses)
    working = {rank: sum(p.longer_ns for p in pauses if rank in p.ranks) for rank in some}
    ranks = tuple(rank for rank in some if working[rank] >= MIN_SHARE_OF_RANK * lost)
    return PauseGroup(kind, pauses, recurrence, ranks, tuple(some))


def _matters(group: PauseGroup, series: StepSeries) -> bool:
    """Return whether a group takes enough of the wall time, and occurs too often to be a hiccup."""
    share, times = group.lost_ns / float(series.times.sum()), len(group.pauses)
    if group.kind not in _UNEXPLAINED:
        return share >= (MIN_WALL_SHARE if times >= MIN_TIMES else HUGE)
    regular = group.recurrence.period > 0 and group.recurrence.exact and times > MIN_TIMES
    of_one = len(group.ranks) == 1 and times >= MIN_UNEXPLAINED
    return share >= (MIN_WALL_SHARE if regular or of_one else HUGE_UNEXPLAINED)


def _finding(group: PauseGroup, series: StepSeries, num_ranks: int, more: list[Observation]) -> Finding:
    of_one = len(group.ranks) == 1 and num_ranks > 1
    times, lost = len(group.pauses), group.lost_ns
    share = lost / float(series.times.sum())
    do = _ONE_VALIDATES if of_one and group.kind == VALIDATION else DO[group.kind]
    pauses = _pauses(group, num_ranks)
    observations = (
        pauses.then(", the others wait") if of_one else pauses,
        observe(
            "share-of-wall-time",
            f"{group.recurrence.named()}: {{pauses}} of {{steps}} steps, {{wall_share}} of the wall time; "
            "the cost is the mean over all steps",
            pauses=times, steps=series.times.size, wall_share=share,
        ),
        *more,
    )  # fmt: skip
    kind, component = ("rank", str(group.ranks[0])) if of_one else ("job", group.kind)
    sure = round(_sure(group) * times / (times + 1), 3)
    return Finding(
        PAUSES, kind, component, group.ranks or group.some, round(share, 4), sure,
        lost / series.times.size, observations, group.kind if of_one else "", remedy=do,
    )  # fmt: skip


def _sure(group: PauseGroup) -> float:
    if group.kind not in _UNEXPLAINED:
        return float(np.median([pause.explained for pause in group.pauses]))
    return 0.9 if group.recurrence.period and group.ranks else 0.6


def _who(group: PauseGroup, num_ranks: int) -> str:
    """Return which ranks do what, in words."""
    one, several = _DOES[group.kind]
    if num_ranks == 1 or not group.some:
        return f"the job {one}"
    if len(group.ranks) == 1:
        return f"rank {group.ranks[0]} {one}"
    if len(group.ranks) == num_ranks:
        return f"all ranks {several}"
    together = "" if group.ranks else ", not all in the same steps,"
    return f"{ranks_in_words(group.ranks or group.some)}{together} {several}"


def _observe_checkpoint(group: PauseGroup, counters: pl.DataFrame) -> list[Observation]:
    """Return the size of a checkpoint, and how fast it was saved."""
    if group.kind != CHECKPOINT:
        return []
    saves = counters.filter(pl.col("counter").is_in(["checkpoint_save_ns", "checkpoint_save_bytes"]))
    saved = saves.pivot("counter", index=["rank", "time_ns"], values="value", aggregate_function="first")
    if "checkpoint_save_bytes" not in saved.columns:
        return []
    files = saved.drop_nulls()
    size, took = (float(files[name].sum()) for name in ("checkpoint_save_bytes", "checkpoint_save_ns"))
    return [
        observe(
            "checkpoint-files", "files of {file_bytes}, saved at {saved_per_s_bytes}/s",
            file_bytes=size / files.height, saved_per_s_bytes=size / took * NS_PER_S,
        )
    ]  # fmt: skip


def _lengths_of_steps(series: StepSeries, warm_up: list[Pause]) -> list[Observation]:
    """Return the two lengths of a step, and what the first steps took in addition."""
    lengths = observe(
        "step-lengths", "typical step {typical_ns}, mean step with pauses {mean_ns}",
        typical_ns=series.typical_ns, mean_ns=series.mean_ns,
    )  # fmt: skip
    if not warm_up:
        return [lengths]
    sentence = "not counted: {more_ns} more in the first {steps} steps (warm-up)"
    more_ns = sum(pause.lost_ns for pause in warm_up)
    return [lengths, observe("warm-up", sentence, more_ns=more_ns, steps=WARM_UP)]


def _long_warm_up(pauses: list[Pause], series: StepSeries) -> list[Finding]:
    """Return the finding of the first steps, if they take much of the recorded time."""
    lost, wall = sum(pause.lost_ns for pause in pauses), float(series.times.sum())
    if lost < max(MIN_WARM_UP * wall, MIN_WARM_UP_NS):
        return []
    kinds = sorted({pause.kind for pause in pauses if pause.kind not in (*_UNEXPLAINED, CONTENTION)})
    observations = (
        observe(
            START, "the first {steps} steps take {more_ns} more than typical ones",
            steps=WARM_UP, more_ns=lost,
        ),
        observe(
            "share-of-wall-time",
            "{wall_share} of the wall time of {steps} steps; the cost is the mean over all steps",
            wall_share=lost / wall, steps=series.times.size,
        ),
        *_lengths_of_steps(series, []),
    )  # fmt: skip
    ranks = tuple(sorted({rank for pause in pauses for rank in pause.ranks}))
    cost = lost / series.times.size
    return [
        Finding(
            PAUSES, "job", START, ranks, round(lost / wall, 4), 0.5, cost, observations, ", ".join(kinds),
            remedy="record more steps, if the job has them: this occurs once per start",
        )
    ]  # fmt: skip
