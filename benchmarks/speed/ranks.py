"""Cost of matching, alignment and the late watch per rank, by the number of ranks.

python -m benchmarks.speed.ranks [--ranks 64 1024 10240] [--rounds 3] [--json]

A made-up job: hosts of eight ranks, each with its own clock; steps with collectives inside a host, between
ranks of one place on all hosts, and of all ranks. Each call lists the ranks of its group, as the recorder
writes them. Each part runs at each size in a new process; CPU time is the smallest of the rounds, memory the
growth of the process in the first one. A part is flat if its cost per rank at the most ranks is at most 1.25
times that at any other number. The same bar holds for the calls of a rank on disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.detect.stragglers.own_time import calls_of
from dpro.extensions.watch.late import LatestRecords, OwnTimes
from dpro.members import members_text
from dpro.replay.alignment.align import align
from dpro.replay.alignment.match import match_collectives
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, PASSES, SPANS, STEPS, WORKERS, conform
from dpro.store import write_part
from dpro.units import NS_PER_MS, NS_PER_S, NS_PER_US

RANKS_PER_HOST = 8
STEPS_OF_JOB = 6
STEP_NS = 100 * NS_PER_MS
IN_HOST, ACROSS, OF_ALL = 6, 2, 1  # collectives of each step
FLAT = 1.25


class Job(NamedTuple):
    """Tables of a made-up job.

    Attributes:
        collectives, spans, workers, steps, samples: rows of the tables.
    """

    collectives: pl.DataFrame
    spans: pl.DataFrame
    workers: pl.DataFrame
    steps: pl.DataFrame
    samples: pl.DataFrame


def job(num_ranks: int, *, numbered: bool, window: int) -> Job:
    """Make the tables of a job.

    Args:
        num_ranks: how many.
        numbered: whether collectives have sequence numbers.
        window: the deep window of all rows; -1 for calls that are always recorded.
    """
    ranks = np.arange(num_ranks, dtype=np.int32)
    host, place = ranks // RANKS_PER_HOST, ranks % RANKS_PER_HOST
    ahead = np.random.default_rng(0).integers(0, NS_PER_S, host[-1] + 1)[host]
    rows = _calls(ranks, ahead, numbered).with_columns(window=pl.lit(window, pl.Int32))
    begins = NS_PER_S - NS_PER_MS + np.arange(STEPS_OF_JOB) * STEP_NS
    steps = pl.DataFrame(
        {
            "rank": np.repeat(ranks, STEPS_OF_JOB),
            "step": np.tile(np.arange(STEPS_OF_JOB), num_ranks),
            "start_ns": (begins + ahead[:, None]).ravel(),
            "duration_ns": np.full(num_ranks * STEPS_OF_JOB, STEP_NS),
            "window": np.full(num_ranks * STEPS_OF_JOB, window),
        }
    )
    lanes = pl.DataFrame({"rank": rows["rank"], "span_id": rows["span_id"], "device": 0, "stream": 7})
    workers = pl.DataFrame(
        {"rank": ranks, "host": [f"node{each}" for each in host], "clock": [f"boot{each}" for each in host]}
    )
    first = ranks[place == 0][1:]
    samples = pl.DataFrame(
        {
            "rank": first, "time_ns": NS_PER_S + ahead[first], "monotonic_ns": np.full(first.size, -1),
            "peer_rank": first * 0, "offset_ns": ahead[first] - ahead[0],
            "round_trip_ns": np.full(first.size, 50_000),
        }
    )  # fmt: skip
    return Job(
        conform(COLLECTIVES, rows),
        conform(SPANS, lanes),
        conform(WORKERS, workers),
        conform(STEPS, steps),
        conform(CLOCK_SAMPLES, samples),
    )


def _calls(ranks: np.ndarray, ahead: np.ndarray, numbered: bool) -> pl.DataFrame:
    """Make the calls of each rank in each step, on its own clock, which is ahead by a constant."""
    random = np.random.default_rng(1)
    host, place = ranks // RANKS_PER_HOST, ranks % RANKS_PER_HOST
    kinds = [("host", host)] * IN_HOST + [("across", place)] * ACROSS + [("all", ranks * 0)] * OF_ALL
    parts = []
    for number in range(STEPS_OF_JOB * len(kinds)):
        name, group = kinds[number % len(kinds)]
        called = NS_PER_S + number * (STEP_NS // (len(kinds) + 1)) + random.integers(0, NS_PER_MS, ranks.size)
        last = np.zeros(group.max() + 1, np.int64)
        np.maximum.at(last, group, called)
        ended = last[group] + NS_PER_MS + random.integers(0, 10 * NS_PER_US, ranks.size)
        columns = {
            "collective_id": np.full(ranks.size, number), "span_id": np.full(ranks.size, number),
            "rank": ranks, "op": ["all_reduce"] * ranks.size, "bytes_in": np.full(ranks.size, 1 << 20),
            "group": [f"{name}{which}" for which in group.tolist()], "group_ranks": _members(group),
            "sequence": np.full(ranks.size, number if numbered else -1),
            "enqueued_ns": called + ahead, "start_ns": called + ahead, "duration_ns": ended - called,
        }  # fmt: skip
        parts.append(pl.DataFrame(columns))
    return pl.concat(parts)


def _members(group: np.ndarray) -> list[str]:
    """Return the ranks of each rank's group, as the recorder writes them."""
    texts = [members_text(np.flatnonzero(group == each).tolist()) for each in range(group.max() + 1)]
    return [texts[each] for each in group.tolist()]


def _match(numbered: bool, num_ranks: int) -> Callable[[], object]:
    tables = job(num_ranks, numbered=numbered, window=0)
    return lambda: match_collectives(tables.collectives, tables.spans)


def _align(known: str, num_ranks: int) -> Callable[[], object]:
    tables = job(num_ranks, numbered=True, window=0)
    matched = match_collectives(tables.collectives, tables.spans).rows
    places = [(rank, 0) for rank in range(num_ranks)]
    samples = tables.samples if known == "comparisons" else CLOCK_SAMPLES.empty()
    workers = tables.workers.clear() if known == "nothing" else tables.workers
    return lambda: align(matched, places, workers, samples)


def _late(num_ranks: int) -> Callable[[], object]:
    tables = job(num_ranks, numbered=True, window=-1)
    calls = calls_of(tables.collectives).rename({"time_ns": "enqueued_ns"})
    now = LatestRecords(
        calls,
        tables.steps,
        tables.workers,
        tables.samples,
        COUNTERS.empty(),
        False,
        lambda _: {table.name: table.empty() for table in (STEPS, PASSES, COUNTERS)},
    )
    return lambda: OwnTimes().look(now)


PARTS: dict[str, Callable[[int], Callable[[], object]]] = {
    "match_by_sequence_numbers": lambda ranks: _match(True, ranks),
    "match_by_order": lambda ranks: _match(False, ranks),
    "align_by_comparisons_of_clocks": lambda ranks: _align("comparisons", ranks),
    "align_by_ends_of_collectives": lambda ranks: _align("hosts", ranks),
    "align_a_clock_of_each_rank": lambda ranks: _align("nothing", ranks),
    "late_watch": _late,
}


def measured(part: str, num_ranks: int, rounds: int) -> tuple[float, float]:
    """Run a part in this process.

    Args:
        part: of `PARTS`.
        num_ranks: of the job.
        rounds: how often.

    Returns:
        CPU seconds, the least of the rounds, and MB by which the first let the process grow.
    """
    run = PARTS[part](num_ranks)
    PARTS[part](8)()  # loads libraries and compiles loops
    peak_mb()
    before, took, peaks = peak_mb(), [], []
    for _ in range(rounds):
        begun = time.process_time()
        run()
        took.append(time.process_time() - begun)
        peaks.append(peak_mb())
    return min(took), peaks[0] - before


def kb_on_disk(num_ranks: int) -> float:
    """Return the size of a rank's calls on disk, in kB.

    Args:
        num_ranks: of the job.
    """
    rows = job(num_ranks, numbered=True, window=-1).collectives.filter(rank=0)
    with tempfile.TemporaryDirectory() as folder:
        write_part(Path(folder), COLLECTIVES, "rank00000", rows)
        (part,) = Path(folder).glob("*/*.parquet")
        return part.stat().st_size / 1e3


def _check(figures: dict[str, dict[str, float]], name: str) -> dict[str, object]:
    """Check that the last of some figures per rank is at most `FLAT` times the best of the others."""
    costs = [each[name] for each in figures.values()]
    growth = costs[-1] / min(costs[:-1], default=costs[-1])
    return {"n": int([*figures][-1]), "figures": figures, "bar": FLAT, "growth": growth,
            "holds": growth <= FLAT}  # fmt: skip


def peak_mb() -> float:
    """Return the peak memory of the process since the last call, in MB."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 10240])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    checks = {}
    for part in options.parts:
        figures = {}
        for size in options.ranks:
            # The peak of memory never falls, so each size gets a new process.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                seconds, grown = pool.submit(measured, part, size, options.rounds).result()
            figures[str(size)] = {"ms_per_rank": 1e3 * seconds / size, "kb_per_rank": 1e3 * grown / size}
            if not options.json:
                print(f"{part}, {size} ranks: {seconds:.3f} s, {1e3 * seconds / size:.3f} ms per rank, "
                      f"{grown:.0f} MB, {1e3 * grown / size:.0f} kB per rank", flush=True)  # fmt: skip
        checks[part] = _check(figures, "ms_per_rank")
    on_disk = {str(size): {"kb_per_rank": kb_on_disk(size)} for size in options.ranks}
    checks["calls_on_disk"] = _check(on_disk, "kb_per_rank")
    if not options.json:
        print(
            "calls on disk:", ", ".join(f"{n} ranks: {kb['kb_per_rank']:.2f} kB" for n, kb in on_disk.items())
        )
    if options.json:
        print(json.dumps(checks))


if __name__ == "__main__":
    main()
