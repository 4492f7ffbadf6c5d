"""The ledger: predictions and measurements of every change tried on this machine.

Takes entries; appends them to `$XDG_DATA_HOME/dpro/ledger` (`~/.local/share/dpro/ledger`), a file with one
JSON object per line, and returns how far predictions of a kind of change have been off. Several processes may
append at once; unreadable lines are counted and skipped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpro.errors import DproError
from dpro.folders import lock

SCHEMA_VERSION = 1
VAGUE = 4.0  # ratio of the ends of an interval, above which it says nothing
TOO_WIDE = "too few or too uneven steps for an interval"
MIN_ENTRIES = 3  # of a kind, before they widen intervals
COVERAGE = 0.9  # share of later errors that the widened interval covers


@dataclass(frozen=True)
class Ratio:
    """Step time changed / unchanged, with an interval.

    Attributes:
        ratio: of the step times.
        low, high: its interval.
    """

    ratio: float
    low: float
    high: float

    @property
    def is_vague(self) -> bool:
        """Whether the interval says nothing, since too few steps were measured or they vary too much."""
        return self.high > VAGUE * self.low


class LedgerEntry(msgspec.Struct, frozen=True):
    """One trial; times are shares of the unchanged step.

    Attributes:
        kind: of change.
        edits: the changes, as the user wrote them.
        predicted: by the replay alone; null where nothing predicts it.
        measured: in pairs of recordings.
        noise: typical difference of two recordings of the unchanged job, as a share; null with one pair.
        baseline_ms: mean step of the unchanged job.
        pairs: number of pairs of recordings.
        steps: measured steps of the shortest recording.
        world_size: ranks of the job.
        time: UTC, ISO 8601.
        run: the folder of the recordings.
        gpus: models of the job's GPUs.
        versions: of dpro and torch.
        command: words of the job's command, as its manifest has them; empty in older entries.
        schema_version: of the ledger.
    """

    kind: str
    edits: list[str]
    predicted: Ratio | None
    measured: Ratio
    noise: float | None
    baseline_ms: float
    pairs: int
    steps: int
    world_size: int
    time: str
    run: str = ""
    gpus: list[str] = []
    versions: dict[str, str] = {}
    command: list[str] = []
    schema_version: int = SCHEMA_VERSION

    @property
    def error(self) -> float | None:
        """Logarithm of measured / predicted; None without a prediction."""
        return math.log(self.measured.ratio / self.predicted.ratio) if self.predicted else None

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured time is in the predicted interval; None without a prediction."""
        if self.predicted is None:
            return None
        return self.predicted.low <= self.measured.ratio <= self.predicted.high


def ledger_path() -> Path:
    """Return the path of this user's ledger."""
    chosen = os.environ.get("XDG_DATA_HOME", "")
    base = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".local" / "share"
    return base / "dpro" / "ledger"


def append(entry: LedgerEntry) -> Path:
    """Add an entry; return the path of the ledger.

    Raises:
        DproError: it cannot be written.
    """
    path = ledger_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            lock(descriptor)
            size = os.fstat(descriptor).st_size
            is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" * is_cut + msgspec.json.encode(entry) + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DproError(f"{path}: the ledger cannot be written ({error.strerror})") from error
    return path


def read() -> tuple[list[LedgerEntry], int]:
    """Return all entries in order, and the number of unreadable lines.

    Raises:
        DproError: there is a ledger, and it cannot be read.
    """
    path = ledger_path()
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise DproError(f"{path}: the ledger cannot be read ({error.strerror})") from error
    entries, damaged = [], 0
    for line in filter(bytes.strip, lines):
        try:
            entry = msgspec.json.decode(line, type=LedgerEntry)
            sound = entry.measured.ratio > 0 and (entry.predicted is None or entry.predicted.ratio > 0)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            sound = False
        if sound:
            entries.append(entry)
        else:
            damaged += 1
    return entries, damaged


def joint_kind(kinds: Iterable[str]) -> str:
    """Return the joint kind of changes that were made together."""
    return " + ".join(sorted(kinds))


def usual_error(entries: Sequence[LedgerEntry], kind: str) -> tuple[float, int]:
    """Return how far predictions of a kind are off.

    At least 9 of 10 later errors stay below it if they are like those so far: it is the ceil(0.9 (n + 1))-th
    smallest of n errors, or the largest if n is too small for that (split conformal prediction: Lei et al.,
    JASA 113, 2018).

    Returns:
        Absolute value of the logarithm of measured / predicted, 0 if there are too few entries, and the
        number of entries.
    """
    same = [entry for entry in entries if kind and entry.kind == kind]
    errors = sorted(abs(entry.error) for entry in same if entry.error is not None)
    if len(errors) < MIN_ENTRIES:
        return 0.0, len(errors)
    return errors[min(math.ceil(COVERAGE * (len(errors) + 1)), len(errors)) - 1], len(errors)


def mostly_inside(entries: Sequence[LedgerEntry], kind: str) -> bool:
    """Return whether most trials of a kind were measured within the predicted interval; False without any."""
    inside = [entry.is_inside for entry in entries if kind and entry.kind == kind]
    judged = [is_inside for is_inside in inside if is_inside is not None]
    return bool(judged) and 2 * sum(judged) > len(judged)


def widened(predicted: float, low: float, high: float, error: float) -> tuple[float, float]:
    """Widen an interval to cover the usual error around the prediction.

    Args:
        predicted, low, high: the prediction and its interval, ns.
        error: absolute value of a logarithm, as from `usual_error`.

    Returns:
        The ends of the interval, which is never narrower.
    """
    return min(low, predicted * math.exp(-error)), max(high, predicted * math.exp(error))
