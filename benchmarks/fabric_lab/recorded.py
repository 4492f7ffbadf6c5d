"""Jobs recorded in a lab under one condition each, and one predicted from another.

In: a folder. Out: steps predicted by edits of one recording, beside the recorded ones of the other. The order
of ranks on hosts puts each neighbour behind another leaf, so that the ring crosses the spines; the spine of
the flows between two hosts is pinned in the leaves before the job begins, and kept with its run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fabric_lab.lab import Lab
from benchmarks.recording import HERE, record_window
from dpro.analysis.analysis import Analysis
from dpro.opening import ensure_finished
from dpro.replay.whatif.predict import Prediction, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from dpro.topology.file import write
from dpro.topology.kept import PATHS, PathEntry, write_paths

RANKS = Path(__file__).with_name("ranks.py")
SKIP, WINDOW_STEPS, AFTERWARDS = 3, 8, 2
CROSSING, IN_ORDER = (0, 2, 1, 3), (0, 1, 2, 3)  # by rank, its host
APART = {(0, 2): 0, (1, 3): 1, (1, 2): 0, (0, 3): 1}  # by two hosts, the spine between them
TOGETHER = dict.fromkeys(APART, 0)
WORK = {
    "one bucket": "ddp --layers 8 --width 384 --layer-ms 8 --first",
    "four buckets": "ddp --layers 8 --width 384 --layer-ms 16 --bucket-mb 1 --first",
}


@dataclass(frozen=True)
class Setting:
    """The conditions under which a job is recorded.

    Attributes:
        name: of the run.
        order: by rank, its host.
        spines: by two hosts, the spine of the flows between them.
        down: a cable that is down, as leaf and spine.
        slow: cables at half rate.
    """

    name: str
    order: Sequence[int] = CROSSING
    spines: Mapping[tuple[int, int], int] | None = None
    down: tuple[int, int] | None = None
    slow: Sequence[tuple[int, int]] = ()


PLANNED = Setting("planned", spines=APART)
COLLIDED = Setting("collided", spines=TOGETHER)
NEAR = Setting("near", order=IN_ORDER, spines=APART)
DOWN = Setting("down", spines=TOGETHER, down=(0, 1))
HALF = Setting("half", spines=APART, slow=((0, 0),))
NARROW = Setting("narrow", spines=APART, slow=((0, 0), (0, 1), (1, 0), (1, 1)))
SETTINGS = (PLANNED, COLLIDED, NEAR, DOWN, HALF, NARROW)
# Before, after, and the edit that predicts the step after; {after} is replaced by the folder of that run.
EDITS_BAR_PCT = 5.0
PAIRS = (
    (COLLIDED, PLANNED, "paths"),
    (PLANNED, COLLIDED, "ecmp"),
    (PLANNED, COLLIDED, "paths:file={after}/paths.json"),
    (PLANNED, DOWN, "fail:link=l0/s1"),
    (PLANNED, HALF, "fail:link=l0/s0,left=0.5"),
    (PLANNED, NARROW, "oversubscription:ratio=2"),
    (COLLIDED, NEAR, "place"),
    (NEAR, PLANNED, "place:hosts=h0/h2/h1/h3,then=plan"),
)


@dataclass(frozen=True)
class PairOfRuns:
    """A prediction and the runs that it compares.

    Attributes:
        work: what the job does.
        before, after: names of settings.
        edit: predicts the step after from the run before.
        before_ms, predicted_ms, after_ms: median steps.
        held: whether the interval contains the measured step.
    """

    work: str
    before: str
    after: str
    edit: str
    before_ms: float
    predicted_ms: float
    after_ms: float
    held: bool

    @property
    def error_pct(self) -> float:
        """Error of the prediction, with sign."""
        return 100 * (self.predicted_ms / self.after_ms - 1)


def judged(rows: Sequence[PairOfRuns]) -> dict[str, dict[str, Any]]:
    """Compute the check over all pairs; its largest error counts.

    Args:
        rows: as from `compared`.
    """
    errors = [abs(row.error_pct) for row in rows]
    figures = {"median_pct": round(median(errors), 2), "worst_pct": round(max(errors), 2)}
    figures["held_pct"] = round(100 * sum(row.held for row in rows) / len(rows), 1)
    bar = {"bar": f"worst <= {EDITS_BAR_PCT:g}%", "holds": max(errors) <= EDITS_BAR_PCT}
    return {"steps by edits": {"n": len(rows), **figures, **bar}}


def record(made: Lab, run: Path, setting: Setting, words: Sequence[str]) -> None:
    """Record a job of `cpu_job.py`, a rank on each host, unless it is recorded already.

    Args:
        made: the lab.
        run: the folder to make.
        setting: the conditions.
        words: arguments of the job.
    """
    if (run / "manifest.json").exists():
        return
    made.heal()
    if setting.down:
        made.fail(*setting.down)
    for cable in setting.slow:
        made.slow(*cable, made.spine_mbit // 2)
    made.pin(setting.spines or {})
    described = run.with_suffix(".toml")
    write(made.topology(), described)
    order = setting.order
    places = ",".join(f"{made.host(host)}/h{host}" for host in order)
    port = random.randrange(20000, 30000)
    steps = ["--steps", str(SKIP + WINDOW_STEPS + AFTERWARDS)]
    launch = [sys.executable, str(RANKS), places, made.address(order[0]), str(port), "--", sys.executable]
    command = [*launch, str(HERE / "cpu_job.py"), *words, *steps]
    record_window(run, command, SKIP, WINDOW_STEPS, ["--topology", str(described)])
    ensure_finished(run)
    write_paths(list(_entries(made, setting)), run / PATHS)


def _entries(made: Lab, setting: Setting) -> Iterator[PathEntry]:
    """Yield the pinned paths, as dpro writes them."""
    for pair, spine in (setting.spines or {}).items():
        for one, other in (pair, pair[::-1]):
            up, down = made.leaf_of(one), made.leaf_of(other)
            yield PathEntry(f"h{one}:nic0", f"h{other}:nic0", [f"l{up} > s{spine}", f"s{spine} > l{down}"])


def recordings(made: Lab, folder: Path, settings: Sequence[Setting] = SETTINGS) -> None:
    """Record what is missing.

    Args:
        made: the lab.
        folder: of the runs.
        settings: to record under.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for work, words in WORK.items():
        for setting in settings:
            record(made, place_of(folder, work, setting), setting, words.split())
    made.pin({})
    made.heal()


def complete(folder: Path) -> bool:
    """Return whether all recordings exist."""
    return all((place_of(folder, work, setting) / PATHS).exists() for work in WORK for setting in SETTINGS)


def place_of(folder: Path, work: str, setting: Setting) -> Path:
    """Return the folder of a recording.

    Args:
        folder: of the runs.
        work: key of `WORK`.
        setting: under which it is recorded.
    """
    return folder / f"{work.replace(' ', '-')}-{setting.name}"


def compared(folder: Path) -> list[PairOfRuns]:
    """Predict each edit from one recording, and compare it with the other recording."""
    found = []
    for work in WORK:
        for before, after, edit in PAIRS:
            one, other = place_of(folder, work, before), place_of(folder, work, after)
            text = edit.replace("{after}", str(other))
            predicted, measured = _predicted(one, text), _step_ms(other)
            held = predicted.low_ns <= measured * 1e6 <= predicted.high_ns
            row = PairOfRuns(
                work,
                before.name,
                after.name,
                edit,
                _step_ms(one),
                predicted.predicted_ns / 1e6,
                measured,
                held,
            )
            found.append(row)
    return found


def _predicted(run: Path, edit: str) -> Prediction:
    analysis = Analysis(open_run(run))
    return predict(analysis.built.graph, analysis.baseline, [parse_edit(edit)], analysis.trust)


def _step_ms(run: Path) -> float:
    """Return the median measured step of the window, in ms."""
    return float(Analysis(open_run(run)).trust.steps["measured_ns"].median()) / 1e6  # type: ignore[arg-type]
