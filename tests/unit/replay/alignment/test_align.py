"""Clocks of hosts against each other, from what a run holds: collectives, comparisons, causality."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from dpro.replay.alignment.align import Alignment, ClockLine, align, one_clock
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.timeline import replay
from dpro.schema import CLOCK_SAMPLES, WORKERS, conform
from tests.builders import TinyRun

US, MS, S = 1_000, 1_000_000, 1_000_000_000
TODAY = 1_700_000_000 * S


class Job:
    """Collectives of several ranks as their hosts' clocks showed them."""

    def __init__(self, ahead: dict[int, tuple[int, float]]) -> None:
        """How far each rank's clock is ahead: ns, and ppm from `TODAY` on."""
        self._ahead = {
            rank: ClockLine(TODAY, offset, round(ppm * 1000)) for rank, (offset, ppm) in ahead.items()
        }
        self.rows: list[dict[str, Any]] = []
        self.workers: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._instances = 0
        self._noise = np.random.default_rng(5)

    def shows(self, rank: int, time: int) -> int:
        """What a rank's clock shows at a true time, both in ns."""
        return time + int(self._ahead[rank].offset_at(np.array([time]))[0])

    def meet(self, op: str, members: dict[int, tuple[int, int]], window: int = 0) -> None:
        """A collective: when each rank came and left, in true time."""
        for rank, (came, left) in members.items():
            start, end = self.shows(rank, came), self.shows(rank, left)
            row = {"rank": rank, "window": window, "instance": self._instances, "members": len(members)}
            self.rows.append(row | {"op": op, "start_ns": start, "duration_ns": end - start})
        self._instances += 1

    def all_reduces(self, ranks: list[int], count: int, period: int = 10 * MS, window: int = 0, at: int = 0):
        """A series in which ranks come apart by up to 2 ms and leave together to some 20 us."""
        for number in range(count):
            begin = TODAY + at + number * period
            came = {rank: begin + int(self._noise.integers(0, 2 * MS)) for rank in ranks}
            left = {rank: begin + 3 * MS + int(self._noise.normal(0, 15 * US)) for rank in ranks}
            self.meet("all_reduce", {rank: (came[rank], left[rank]) for rank in ranks}, window)
        return self

    def host(self, rank: int, host: str = "", clock: str = "") -> None:
        self.workers.append({"rank": rank, "host": host, "clock": clock})

    def compare(self, rank: int, peer: int, at: int, round_trip: int = 40 * US) -> None:
        """Eight exchanges, each as lopsided as chance has it."""
        for number in range(8):
            asked = TODAY + at + number * MS
            out = int(self._noise.integers(0, round_trip))
            t1, t2 = self.shows(rank, asked), self.shows(peer, asked + out)
            t3, t4 = self.shows(peer, asked + out + US), self.shows(rank, asked + round_trip + US)
            self.samples.append(
                {
                    "rank": rank,
                    "time_ns": (t1 + t4) // 2,
                    "monotonic_ns": -1,
                    "peer_rank": peer,
                    "offset_ns": (t1 - t2 + t4 - t3) // 2,
                    "round_trip_ns": t4 - t1 - (t3 - t2),
                }
            )

    def align(self, begun: dict[tuple[int, int], int] | None = None) -> Alignment:
        matched = pl.DataFrame(self.rows)
        workers = pl.DataFrame(self.workers) if self.workers else WORKERS.empty()
        samples = pl.DataFrame(self.samples) if self.samples else CLOCK_SAMPLES.empty()
        places = {(row["rank"], row["window"]) for row in self.rows}
        defaults = {"local_rank": 0, "world_size": 1, "pid": 1, "started_ns": 0, "ended_ns": 0}
        for name in ("dp", "tp", "pp", "cp", "ep", "exit_code", "exit_signal"):
            defaults[name] = -1
        missing = [
            pl.lit(value).alias(name) for name, value in defaults.items() if name not in workers.columns
        ]
        whole = conform(WORKERS, workers.with_columns(missing))
        return align(matched, places, whole, conform(CLOCK_SAMPLES, samples), begun or {})

    def worst_error(self, alignment: Alignment) -> int:
        """Largest distance of an aligned end from the true one, against the reference's."""
        frame = pl.DataFrame(self.rows).with_columns(pl.col("rank", "window").cast(pl.Int32))
        aligned = alignment.aligned(frame)
        errors = []
        for (rank,), rows in frame.with_columns(a=aligned["start_ns"]).group_by("rank"):
            true = [
                t - int(self._ahead[rank].offset_at(np.array([t]))[0]) for t in rows["start_ns"].to_list()
            ]
            reference = np.array([self.shows(0, t) for t in true])
            errors.append(np.abs(rows["a"].to_numpy() - reference).max())
        return int(max(errors))


@pytest.mark.parametrize("offset", [200 * US, -5 * MS, 50 * MS, -50 * MS])
@pytest.mark.parametrize("ppm", [0, 50, -50])
def test_offset_and_drift_come_back_from_ends_alone_within_their_skew(offset, ppm):
    job = Job({0: (0, 0), 1: (offset, ppm), 2: (0, 0)}).all_reduces([0, 1, 2], 300)
    alignment = job.align()
    clock = alignment.of(1)
    assert clock.source == "collective ends"
    assert clock.line.drift_ppb == pytest.approx(ppm * 1000, abs=4_000)
    assert job.worst_error(alignment) < 20 * US < clock.line.uncertainty_ns + 20 * US
    assert alignment.of(2).source == "collective ends: clocks agree"
    assert alignment.of(2).line.offset_ns == 0
    assert alignment.conflicts == ()


def test_ranks_of_one_host_have_one_clock_and_the_reference_has_none_of_its_own():
    job = Job({rank: (7 * MS * (rank // 2), 0) for rank in range(4)}).all_reduces([0, 1, 2, 3], 40)
    for rank in range(4):
        job.host(rank, f"node{rank // 2}")
    alignment = job.align()
    assert [alignment.of(rank).name for rank in range(4)] == ["node0", "node0", "node1", "node1"]
    assert [alignment.of(rank).source for rank in range(2)] == ["reference", "same host"]
    assert alignment.of(2) == alignment.of(3)
    assert alignment.of(2).line.offset_ns == pytest.approx(7 * MS, abs=20 * US)


def test_ranks_that_nothing_connects_begin_their_first_step_at_once():
    # Ranks 0 and 1 meet, and so do 2 and 3, 5 ms further ahead; the two pairs never do.
    clocks = {0: (0, 0), 1: (0, 0), 2: (0, 0), 3: (5 * MS, 0)}
    job = Job(clocks).all_reduces([0, 1], 40).all_reduces([2, 3], 40)
    begun = {(0, 0): TODAY, (1, 0): TODAY + 9 * MS, (2, 0): TODAY + 700 * MS, (3, 0): TODAY + 800 * MS}
    alignment = job.align(begun)
    assert alignment.of(1).line.offset_ns == 0
    assert alignment.of(2).line.offset_ns == 700 * MS
    assert alignment.of(3).line.offset_ns == pytest.approx(705 * MS, abs=20 * US)
    assert [alignment.of(rank).line.uncertainty_ns for rank in (2, 3)] == [-1, -1]
    assert job.align().of(2).line.offset_ns == 0
    del begun[0, 0], begun[1, 0]  # nothing says when the others began: no clock is moved
    assert [job.align(begun).of(rank).line.offset_ns for rank in (0, 2)] == [0, 0]


def test_a_clock_is_that_of_a_boot_whatever_the_hosts_are_called():
    # Two containers of one machine, and another machine of the same name as one of them.
    job = Job({0: (0, 0), 1: (0, 0), 2: (9 * MS, 0)}).all_reduces([0, 1, 2], 30)
    job.host(0, "localhost", "boot-a")
    job.host(1, "pod-7", "boot-a")
    job.host(2, "localhost", "boot-b")
    alignment = job.align()
    assert alignment.of(0).name == alignment.of(1).name != alignment.of(2).name
    assert alignment.of(2).line.offset_ns == pytest.approx(9 * MS, abs=20 * US)


def test_ranks_of_one_host_name_that_causality_separates_have_clocks_of_their_own():
    job = Job({0: (0, 0), 1: (8 * MS, 0)}).all_reduces([0, 1], 30)
    for rank in (0, 1):
        job.host(rank, "localhost")
    alignment = job.align()
    assert [alignment.of(rank).name for rank in (0, 1)] == ["rank 0", "rank 1"]
    assert alignment.of(1).line.offset_ns == pytest.approx(8 * MS, abs=20 * US)


def _prompt(ahead_us: int) -> Job:
    """Two ranks that come and leave together, a microsecond later, on clocks that differ by so much."""
    job = Job({0: (0, 0), 1: (ahead_us * US, 0)})
    for number in range(30):
        at = TODAY + number * 10 * MS
        job.meet("all_reduce", dict.fromkeys((0, 1), (at, at + US)))
    return job


@pytest.mark.parametrize(("ahead_us", "clocks"), [(990, 1), (1010, 2)])
def test_ranks_of_one_host_name_may_contradict_it_by_a_millisecond(ahead_us, clocks):
    job = _prompt(ahead_us)
    for rank in (0, 1):
        job.host(rank, "localhost")
    assert len({job.align().of(rank).name for rank in (0, 1)}) == clocks


@pytest.mark.parametrize(("ahead_us", "found_us"), [(49, 0), (51, 51)])
def test_offsets_within_the_skew_of_ends_are_none(ahead_us, found_us):
    assert _prompt(ahead_us).align().of(1).line.offset_ns == found_us * US


def test_ranks_that_share_nothing_with_the_reference_are_compared_through_others():
    job = Job({0: (0, 0), 1: (5 * MS, 0), 2: (-3 * MS, 0)})
    alignment = job.all_reduces([0, 1], 40).all_reduces([1, 2], 40).align()
    assert alignment.of(2).line.offset_ns == pytest.approx(-3 * MS, abs=20 * US)
    assert alignment.of(2).line.uncertainty_ns > alignment.of(1).line.uncertainty_ns


def test_what_nothing_connects_to_the_reference_is_said_to_be_unknown():
    job = Job({0: (0, 0), 1: (0, 0), 2: (5 * MS, 0), 3: (6 * MS, 0)})
    alignment = job.all_reduces([0, 1], 40).all_reduces([2, 3], 40).align()
    assert (alignment.of(2).source, alignment.of(2).line.uncertainty_ns) == ("nothing", -1)
    assert alignment.of(3).line.offset_ns == pytest.approx(1 * MS, abs=20 * US)
    assert alignment.of(3).line.uncertainty_ns == -1


def test_comparisons_count_more_than_ends_and_show_drift_that_a_short_window_cannot():
    # The host of ranks 2 and 3 leaves every collective 300 us late: by the ends it would be its clock.
    job = Job({rank: ((20 * MS, 30) if rank > 1 else (0, 0)) for rank in range(4)})
    for rank in range(4):
        job.host(rank, f"node{rank // 2}")
    for number in range(20):
        begin = TODAY + 90 * S + number * 10 * MS
        ends = {rank: begin + 3 * MS + (300 * US if rank > 1 else 0) for rank in range(4)}
        job.meet("all_reduce", {rank: (begin, ends[rank]) for rank in range(4)})
    for minute in range(4):
        job.compare(2, 0, minute * 60 * S)
    alignment = job.align()
    clock = alignment.of(3)
    assert clock.source == "clock samples"
    assert clock.line.drift_ppb == pytest.approx(30_000, abs=600)
    assert job.worst_error(alignment) <= 20 * US
    assert clock.line.uncertainty_ns < 60 * US
    assert alignment.conflicts == ()


def test_comparisons_made_by_the_other_side_show_the_same():
    job = Job({0: (0, 0), 1: (-4 * MS, 0)}).all_reduces([0, 1], 5)
    for minute in range(3):
        job.compare(0, 1, minute * 60 * S)
    clock = job.align().of(1)
    assert clock.source == "clock samples"
    assert clock.line.offset_ns == pytest.approx(-4 * MS, abs=20 * US)


def test_each_window_has_the_clock_of_its_time():
    # A clock that is being slewed: far off in the first window, and less in the second an hour later.
    job = Job({0: (0, 0), 1: (30 * MS, -5)})
    job.all_reduces([0, 1], 30, window=0).all_reduces([0, 1], 30, window=1, at=3_600 * S)
    alignment = job.align()
    assert alignment.clocks[1, 0].line.offset_ns == pytest.approx(30 * MS, abs=20 * US)
    assert alignment.clocks[1, 1].line.offset_ns == pytest.approx(12 * MS, abs=20 * US)


def test_sends_that_end_early_in_both_directions_leave_what_causality_allows():
    # Buffered sends end at once. What rank 0 sends is received 4 to 20 ms later, what rank 1 sends in 1 ms.
    job = Job({0: (0, 0), 1: (40 * MS, 0)})
    for number in range(30):
        begin = TODAY + number * 50 * MS
        late = 4 * MS + number % 9 * 2 * MS
        job.meet("send", {0: (begin, begin + US), 1: (begin, begin + late)})
        job.rows[-1]["op"] = "recv"
        begin += 30 * MS
        job.meet("send", {1: (begin, begin + US), 0: (begin, begin + MS)})
        job.rows[-1]["op"] = "recv"
    alignment = job.align()
    clock = alignment.of(1)
    assert clock.source == "causality of sends"
    assert abs(clock.line.offset_ns - 40 * MS) <= clock.line.uncertainty_ns <= 2.6 * MS
    assert alignment.conflicts == ()


def test_sends_that_end_with_their_receives_give_the_offset_as_collectives_do():
    job = Job({0: (0, 0), 1: (40 * MS, 0)})
    for number in range(20):
        begin = TODAY + number * 50 * MS
        for sender in (0, 1):
            came = {sender: begin, 1 - sender: begin + 15 * MS}
            job.meet("recv", {rank: (at, begin + 20 * MS + rank * US) for rank, at in came.items()})
            job.rows[-2]["op"] = "send"
            begin += 25 * MS
    clock = job.align().of(1)
    assert clock.source == "collective ends"
    assert clock.line.offset_ns == pytest.approx(40 * MS, abs=2 * US)


def test_a_clock_that_was_set_within_the_window_cannot_be_reconciled():
    job = Job({0: (0, 0), 1: (0, 0)}).all_reduces([0, 1], 40)
    for row in job.rows:
        if row["rank"] == 1 and row["instance"] >= 20:
            row["start_ns"] += 30 * MS
    conflicts = job.align().conflicts
    assert conflicts
    assert "cannot be reconciled" in conflicts[0]


def test_comparisons_that_contradict_the_collectives_cannot_be_reconciled():
    job = Job({0: (0, 0), 1: (0, 0)}).all_reduces([0, 1], 40)
    job.host(0, "a", "boot-a")
    job.host(1, "b", "boot-b")
    for minute in range(3):
        job.compare(1, 0, minute * 60 * S)
    for row in job.samples:
        row["offset_ns"] += 30 * MS
    conflicts = job.align().conflicts
    assert any("the clock of b cannot be reconciled" in line for line in conflicts)


def test_a_clock_that_was_set_before_the_window_is_compared_after_that_only():
    job = Job({0: (0, 0), 1: (4 * MS, 0)}).all_reduces([0, 1], 20, at=150 * S)
    for second in (0, 60, 100, 160):
        job.compare(1, 0, second * S)
    own = []
    for second in range(170):  # at 70 s the clock of rank 1 is put back by two seconds
        back = 2 * S if second < 70 else 0
        time = TODAY + second * S + back
        own.append({"rank": 1, "time_ns": time, "monotonic_ns": second * S, "peer_rank": -1})
    for row in job.samples:
        early = row["time_ns"] < TODAY + 70 * S
        row["time_ns"] += 2 * S * early
        row["offset_ns"] += 2 * S * early
    job.samples += [row | {"offset_ns": 0, "round_trip_ns": 0} for row in own]
    alignment = job.align()
    assert alignment.of(1).source == "clock samples"
    assert alignment.of(1).line.offset_ns == pytest.approx(4 * MS, abs=20 * US)
    assert alignment.conflicts == ()


def test_a_clock_that_is_seen_to_be_set_within_the_window_cannot_be_aligned():
    job = Job({0: (0, 0), 1: (0, 0)}).all_reduces([0, 1], 40, period=S)
    for second in range(40):
        time = TODAY + second * S + (5 * MS if second >= 20 else 0)
        row = {"rank": 1, "time_ns": time, "monotonic_ns": second * S, "peer_rank": -1}
        job.samples.append(row | {"offset_ns": 0, "round_trip_ns": 0})
    conflicts = job.align().conflicts
    assert any("the clock of rank 1 was set during the window" in line for line in conflicts)


def test_comparisons_from_long_before_the_window_count_less_than_its_ends():
    job = Job({0: (0, 0), 1: (4 * MS, 20)}).all_reduces([0, 1], 40, at=1_000 * S)
    job.compare(1, 0, 0)
    alignment = job.align()
    assert alignment.of(1).source == "collective ends"
    assert alignment.of(1).line.offset_ns == pytest.approx(24 * MS, abs=20 * US)
    assert alignment.conflicts == ()


def test_rows_keep_their_times_to_the_nanosecond_where_clocks_agree():
    job = Job({0: (0, 0), 1: (10 * US, 0)}).all_reduces([0, 1], 40)
    frame = pl.DataFrame(job.rows)
    assert job.align().aligned(frame).equals(frame)


def test_aligned_rows_keep_unknown_durations_and_rows_of_no_window_go_with_the_first():
    clock = one_clock([(0, 3)], "one trace").clocks[0, 3]
    late = type(clock)("b", ClockLine(TODAY, 5 * MS, 1_000_000), "collective ends")
    alignment = Alignment({(0, 3): clock, (1, 3): late})
    frame = pl.DataFrame(
        {
            "rank": [0, 1, 1, 1, 7],
            "window": [3, 3, 3, -1, 3],
            "start_ns": [TODAY, TODAY, TODAY + S, TODAY, TODAY],
            "duration_ns": [5, S, -1, 0, 9],
        },
        schema_overrides={"rank": pl.Int32, "window": pl.Int32},
    )
    aligned = alignment.aligned(frame)
    assert (aligned["start_ns"] - TODAY).to_list() == [0, -5 * MS, S - 6 * MS, -5 * MS, 0]
    assert aligned["duration_ns"].to_list() == [5, S - MS, -1, 0, 9]
    assert aligned.schema == frame.schema


def test_clocks_that_cannot_be_reconciled_forbid_predictions(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        for number in range(20):
            begin = 1000 * number + (30_000 if rank and number >= 10 else 0)  # us: set in the middle
            run.step(number, begin, begin + 900, rank)
            run.call(begin, begin + 5, number, rank)
            run.nccl(begin + 10, begin + 600, number, rank, sequence=number, group="0", group_ranks="0,1")
    opened = run.write(tmp_path / "r")
    built = build_graph(opened)
    trust = assess(built, replay(built.graph), opened.manifest)
    assert not trust.answerable
    assert any("the clock of rank 1 cannot be reconciled" in reason for reason in trust.reasons)


def together(job: Job, ranks: list[int], count: int, window: int = 0, **late_us: int) -> Job:
    """Collectives of a microsecond, 10 ms apart; `r1=60` has rank 1 end that much later each time."""
    for _ in range(count):
        at = TODAY + job._instances * 10 * MS
        left = {rank: at + (1 + late_us.get(f"r{rank}", 0)) * US for rank in ranks}
        job.meet("all_reduce", {rank: (at, left[rank]) for rank in ranks}, window)
    return job


def test_two_collectives_are_too_few_for_an_offset_and_bound_it():
    clock = together(Job({0: (0, 0), 1: (5 * MS, 0)}), [0, 1], 2).align().of(1)
    assert clock.source == "too few collectives in common"
    assert (clock.line.offset_ns, clock.line.uncertainty_ns) == (0, 5 * MS)


@pytest.mark.parametrize(("count", "offset_ns"), [(7, 0), (8, 5 * MS)])
def test_eight_collectives_of_a_window_are_enough_for_its_own_clock(count, offset_ns):
    job = together(Job({0: (0, 0), 1: (0, 0)}), [0, 1], 200)
    job._ahead[1] = ClockLine(TODAY, 5 * MS, 0)
    clock = together(job, [0, 1], count, window=1).align().clocks[1, 1]
    assert clock.line.offset_ns == offset_ns


def test_of_two_ranks_of_a_clock_the_end_of_the_first_counts():
    job = together(Job({0: (0, 0), 1: (300 * US, 0), 2: (300 * US, 0)}), [0, 1, 2], 20, r2=60)
    for rank in range(3):
        job.host(rank, f"host {min(rank, 1)}", f"boot-{min(rank, 1)}")
    assert job.align().of(1).line.offset_ns == 300 * US


def test_collectives_left_30_us_early_on_both_sides_are_no_conflict():
    job = Job({0: (0, 0), 1: (0, 0)})
    for number in range(20):
        at = TODAY + number * 10 * MS
        early, late = (at, at + 100 * US), (at + 130 * US, at + 131 * US)
        job.meet("all_reduce", {number % 2: early, 1 - number % 2: late})
    alignment = job.align()
    assert alignment.of(1).line.offset_ns == 0
    assert alignment.conflicts == ()


def test_a_conflict_names_every_clock_and_how_early_a_collective_was_left():
    job = together(Job({0: (0, 0), 1: (0, 0), 2: (0, 0)}), [0, 1, 2], 20)
    at = TODAY + 100 * S
    job.meet("all_reduce", {0: (at, at + US), 1: (at, at + US), 2: (at + 401 * US, at + 402 * US)})
    conflicts = job.align().conflicts
    assert [line.partition(" cannot")[0] for line in conflicts] == [
        f"window 0: the clock of rank {rank}" for rank in range(3)
    ]
    assert all("left 400 us before all have arrived" in line for line in conflicts)


def _buffered(backwards_ms: int) -> Job:
    """Two sends that are received after 4 ms for each one back that is received after some time."""
    job = Job({0: (0, 0), 1: (40 * MS, 0)})
    for number in range(30):
        begin, sender = TODAY + number * 50 * MS, number % 3 // 2
        takes = backwards_ms * MS if sender else 4 * MS
        job.meet("send", {sender: (begin, begin), 1 - sender: (begin, begin + takes)})
        job.rows[-1]["op"] = "recv"
    return job


def test_the_middle_of_what_causality_allows_is_the_offset():
    # What rank 1 is ahead lies between 40 - 1 and 40 + 4 ms; two in three ends say 44.
    clock = _buffered(backwards_ms=1).align().of(1)
    assert clock.source == "causality of sends"
    assert (clock.line.offset_ns, clock.line.uncertainty_ns) == (41.5 * MS, 2.5 * MS)


def test_sends_that_contradict_each_other_bound_nothing():
    job = _buffered(backwards_ms=1)
    late = job.rows[1]  # one is received 20 ms before it is sent
    late["start_ns"], late["duration_ns"] = late["start_ns"] - 30 * MS, 10 * MS
    alignment = job.align()
    assert alignment.of(1).source == "collective ends"
    assert alignment.of(1).line.offset_ns == 44 * MS
    assert alignment.conflicts


@pytest.mark.parametrize(("off_us", "is_said"), [(1016, False), (1021, True)])
def test_comparisons_may_lie_a_millisecond_off_the_line_beside_their_round_trips(off_us, is_said):
    job = together(Job({0: (0, 0), 1: (0, 0)}), [0, 1], 20)
    for number in range(8):  # half of the comparisons say ahead, the others behind, each to 20 us
        for sign in (1, -1):
            time = {"rank": 1, "time_ns": TODAY + number * MS, "monotonic_ns": -1, "peer_rank": 0}
            job.samples.append(time | {"offset_ns": sign * off_us * US, "round_trip_ns": 40 * US})
    assert any("off any line" in line for line in job.align().conflicts) == is_said
