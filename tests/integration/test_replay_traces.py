"""Replay and what-if on real traces of 2 to 8 GPUs: goldens, matching, clocks, ablations, a twin run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.opening import open_path
from dpro.replay.alignment.align import ClockLine, align
from dpro.replay.alignment.match import Matching, match_collectives
from dpro.replay.condense import cut_by_rank
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.timeline import (
    critical_nodes,
    measured_step_times,
    replay,
    step_times,
)
from dpro.replay.whatif.edits.heal import Heal, RanksAt
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import explore
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, SPANS, STEPS, SYNCS, WORKERS
from dpro.store import Run, open_run, write_manifest, write_part
from tests.reference.condensed import assert_replays_as, condense, with_transfers_of
from tests.reference.event_driven import simulate
from tests.reference.pairing import pair_by_end
from tests.replayed_jobs import Job, Jobs

NANOGPT = "nanogpt_h100_8r_rs_ag"
SLEEP_1S = "torchrec_v100_4r_sleep1s_rank2"
SLEEP_20MS = "torchrec_v100_4r_a2a_ar"
OPT4 = "torchrec_v100_4r_opt4"
SMALLEST = "torchrec_v100_2r_kjt"
PARAM = "param_dlrm_v100_8r"
DECODE = "lightllm_h200_8r_deepep_cudagraph"
TWO_OF_128 = "hta_a100_sampled_0_1_of_128"
WHOLE = [NANOGPT, SLEEP_1S, SLEEP_20MS, SMALLEST, PARAM, DECODE]
MS, US = 1_000_000, 1_000
SPARSE_ARCH = "# running sparse arch"  # where rank 2 sleeps in the forward pass


@pytest.fixture(scope="session")
def jobs(traces) -> Jobs:
    return Jobs(traces)


def _steps_ms(graph: Graph) -> np.ndarray:
    timeline = replay(graph)
    return step_times(graph, timeline.start, timeline.end)["duration_ns"].to_numpy() / MS


def _measured_ms(graph: Graph) -> np.ndarray:
    return measured_step_times(graph)["duration_ns"].to_numpy() / MS


# --- how well the unchanged run replays ---------------------------------------------------------------------

# Measured when this was written: mean |step error| %, start error p50 / p95 us, unexplained, anchored (with
# the starts that wait for room on the device behind kernels that were seen too seldom).
#   nanogpt    0.036    18.6     75   0.49%  0.08%
#   sleep 1s   0.029    68     1044   0.05%  1.19%
#   sleep 20ms 0.042    39      170   0.21%  1.16%
#   four       0.019   119      184   0.30%  0.95%
#   smallest   0.000     2.0     32   0.09%  0
#   param      0.030     1.0      5   0.28%  0.09%
#   decode     0.054    57.0    113   0.34%  0.17%
BARS = {
    NANOGPT: (0.06, 25, 100, 0.007, 0.004),
    # Before the last wave of kernels left room: step errors 0.17% and 0.57%, p95 5,748 and 3,694 us.
    SLEEP_1S: (0.08, 100, 1_500, 0.002, 0.02),
    SLEEP_20MS: (0.1, 80, 300, 0.004, 0.02),
    OPT4: (0.05, 160, 300, 0.005, 0.02),
    SMALLEST: (0.01, 4, 50, 0.002, 0.001),
    PARAM: (0.1, 3, 9, 0.004, 0.002),
    # 0.12 ms: as much as 0.1% of the 121 ms that the step lasted with the wait that stops a profiler.
    DECODE: (0.115, 80, 150, 0.005, 0.003),
}


@pytest.mark.parametrize("name", [*WHOLE, OPT4])
def test_a_real_job_replays_as_well_as_it_did(jobs, name):
    trust = jobs[name].trust
    step_pct, p50_us, p95_us, unexplained, anchored = BARS[name]
    assert trust.error_pct <= step_pct
    assert trust.start_error_ns[0] <= p50_us * US
    assert trust.start_error_ns[1] <= p95_us * US
    assert trust.coverage.time_unexplained <= unexplained
    assert trust.coverage.starts_anchored <= anchored
    assert trust.answerable
    without_steps = name == DECODE  # one forward pass, marked by nothing
    assert [reason for reason in trust.reasons if "no steps are recorded" in reason] == list(trust.reasons)
    assert bool(trust.reasons) == without_steps


def test_staged_copies_do_not_make_all_of_a_decode_run_late(jobs):
    assert jobs[DECODE].trust.start_error_ns[0] <= 200 * US


def test_what_two_of_128_ranks_cannot_show_is_said_and_nothing_is_predicted_from_them(jobs):
    trust = jobs[TWO_OF_128].trust
    assert not trust.answerable
    assert any("126 of 128 ranks are missing" in reason for reason in trust.reasons)
    assert any("cannot be matched" in reason for reason in trust.reasons)
    assert set(jobs[TWO_OF_128].matching.rows["members"]) == {1}


@pytest.mark.parametrize("name", [SMALLEST, SLEEP_1S, SLEEP_20MS])
def test_the_engine_equals_the_event_driven_simulation_on_a_real_graph(jobs, name):
    graph, timeline = jobs[name].graph, jobs[name].timeline
    edges = zip(graph.edges.source.tolist(), graph.edges.target.tolist(), graph.edges.lag.tolist())
    starts = simulate(graph.nodes.duration.tolist(), graph.nodes.earliest.tolist(), list(edges))
    assert timeline.start.tolist() == starts


@pytest.mark.parametrize("name", [*WHOLE, TWO_OF_128])
def test_the_critical_path_of_a_real_job_is_as_long_as_its_makespan(jobs, name):
    graph, timeline = jobs[name].graph, jobs[name].timeline
    path = critical_nodes(timeline, 0)
    lags = int(graph.edges.lag[timeline.binding[path[1:]]].sum())
    length = int(graph.nodes.earliest[path[0]]) + int(graph.nodes.duration[path].sum()) + lags
    assert length == int(timeline.end.max())


@pytest.mark.parametrize("name", [*WHOLE, TWO_OF_128])
def test_every_piece_of_gpu_work_and_every_collective_is_in_the_graph_once(jobs, name):
    graph = jobs[name].graph
    spans = jobs[name].run.table(SPANS).filter(pl.col("kind").is_in(["kernel", "memcpy", "memset"]))
    work = np.isin(graph.nodes.kind, (*GPU_KINDS, NodeKind.TRANSFER))
    found = set(zip(graph.nodes.rank[work].tolist(), graph.nodes.span[work].tolist()))
    assert len(found) == work.sum() == spans.height
    assert found == set(spans.select("rank", "span_id").iter_rows())


# --- starts are derived, not copied -------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_slower_gpus_move_the_starts_of_work_on_them(jobs, name):
    graph, timeline = jobs[name].graph, jobs[name].timeline
    duration = graph.nodes.duration.copy()
    duration[np.isin(graph.nodes.kind, GPU_KINDS)] *= 2
    slower = replay(graph.with_durations(duration))
    work = np.isin(graph.nodes.kind, (*GPU_KINDS, NodeKind.ARRIVE))
    moved = (slower.start > timeline.start)[work].mean()
    assert moved > (0.4 if name == SMALLEST else 0.9)  # the smallest one hardly queues work on its GPUs
    assert (slower.start >= timeline.start).all()


@pytest.mark.parametrize("name", WHOLE)
def test_faster_cpus_move_everything_forward(jobs, name):
    graph, timeline = jobs[name].graph, jobs[name].timeline
    duration = graph.nodes.duration.copy()
    duration[np.isin(graph.nodes.kind, CPU_KINDS)] //= 2
    faster = replay(graph.with_durations(duration))
    assert (faster.start <= timeline.start).all()
    assert faster.end.max() < timeline.end.max()


# --- matching and clocks ------------------------------------------------------------------------------------


def _partners_by_end(job: Job) -> dict[tuple[int, int], int]:
    """(rank, collective) -> the fullest rank's collective it is paired with, by ends on the one host."""
    rows = job.matching.rows.with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
    ranks = sorted(rows["rank"].unique())
    of_rank = {rank: rows.filter(pl.col("rank") == rank).sort("start_ns", "collective_id") for rank in ranks}
    fullest = max(ranks, key=lambda rank: (of_rank[rank].height, -rank))
    pairs: dict[tuple[int, int], int] = {}
    for rank in ranks:
        if rank == fullest:
            continue
        mine, theirs = (list(of_rank[r].select("op", "end").iter_rows()) for r in (fullest, rank))
        for i, j in pair_by_end(mine, theirs, within=MS):
            key = of_rank[rank]["collective_id"][j]
            pairs[rank, key] = of_rank[fullest]["collective_id"][i]
    return pairs


@pytest.mark.parametrize("name", WHOLE)
def test_matching_without_clocks_agrees_with_pairing_by_the_clocks_of_the_one_host(jobs, name):
    rows = jobs[name].matching.rows
    fullest = rows.group_by("rank").len().sort(["len", "rank"], descending=[True, False])["rank"][0]
    instance_of = {
        (rank, number): i for rank, number, i in rows.select("rank", "collective_id", "instance").iter_rows()
    }
    on_fullest = {instance: number for (rank, number), instance in instance_of.items() if rank == fullest}
    matched = {
        key: on_fullest[instance]
        for key, instance in instance_of.items()
        if key[0] != fullest and instance in on_fullest
    }
    assert matched == _partners_by_end(jobs[name])


# Collectives on all ranks, and of how many that any rank holds; windows are clipped at their front.
ON_ALL_RANKS = {
    NANOGPT: (76, 84),
    SLEEP_1S: (31, 33),
    SLEEP_20MS: (31, 32),
    SMALLEST: (12, 12),
    PARAM: (8, 8),
    DECODE: (116, 116),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_collective_that_all_windows_hold_is_found_on_all_ranks(jobs, name):
    rows = jobs[name].matching.rows
    members = rows.group_by("instance").agg(pl.col("members").first())["members"]
    assert ((members == rows["rank"].n_unique()).sum(), members.len()) == ON_ALL_RANKS[name]
    assert jobs[name].matching.refused == ()


# How far the last rank's clock is off, us, and how fast it drifts, ppm; then the noise on its ends, us.
CLOCKS_OFF = [
    *[(200, 0, 0), (-200, 0, 0), (5_000, 0, 0), (-5_000, 50, 0), (50_000, 0, 0), (50_000, 50, 0)],
    *[(50_000, -50, 0), (-50_000, 50, 0), (-50_000, -50, 0), (-50_000, 50, 20), (200, -50, 20)],
]


def _shown(table: pl.DataFrame, rank: int, line: ClockLine, noise_us: float = 0) -> pl.DataFrame:
    """A table as it would be if a rank's clock were ahead by a line, and its ends were less even."""
    start = table["start_ns"].to_numpy()
    lasts = table["duration_ns"].clip(lower_bound=0).to_numpy() if "duration_ns" in table.columns else 0
    late = table["rank"].to_numpy() == rank
    scatter = np.random.default_rng(3).normal(0, noise_us * US, start.size).astype(np.int64)
    begin = np.where(late, start + line.offset_at(start), start)
    end = np.where(late, start + lasts + line.offset_at(start + lasts) + scatter, start + lasts)
    end = np.maximum(begin, end)
    shown = table.with_columns(start_ns=pl.Series(begin))
    if "duration_ns" not in table.columns:
        return shown
    known = pl.col("duration_ns") >= 0
    return shown.with_columns(
        duration_ns=pl.when(known).then(pl.Series(end - begin)).otherwise("duration_ns")
    )


def _end_skew(matching: Matching) -> float:
    """95th percentile over collectives of how far their members' ends are apart, ns, on the one clock."""
    end = pl.col("start_ns") + pl.col("duration_ns")
    several = matching.rows.filter(pl.col("members") > 1)
    return float(several.group_by("instance").agg(skew=end.max() - end.min())["skew"].quantile(0.95))


@pytest.mark.parametrize(("shift_us", "drift_ppm", "noise_us"), CLOCKS_OFF)
@pytest.mark.parametrize("name", WHOLE)
def test_a_rank_whose_clock_is_off_is_matched_the_same_and_aligned_within_the_skew_of_the_ends(
    jobs, name, shift_us, drift_ppm, noise_us
):
    # Seen at worst without noise, us, where the skew is this: decode 4 of 549, nanogpt 7 of 95, param 1 of 7,
    # smallest 34 of 40, sleep 20 ms 51 of 220, sleep 1 s 73 of 132 (with noise 143).
    job = jobs[name]
    ranks = job.run.manifest.ranks
    collectives = job.run.table(COLLECTIVES)
    line = ClockLine(int(collectives["start_ns"].min()), shift_us * US, drift_ppm * 1000)
    shown = _shown(collectives, ranks[-1], line, noise_us)
    matching = match_collectives(shown, job.run.table(SPANS))
    key = ["rank", "collective_id", "instance"]
    expected = job.matching.rows.select(key).sort("rank", "collective_id")
    paired = matching.rows.select(key).sort("rank", "collective_id")
    assert _same_pairs(paired, expected)
    places = [(rank, 0) for rank in ranks]
    alignment = align(matching.rows, places, WORKERS.empty(), CLOCK_SAMPLES.empty())
    assert alignment.conflicts == ()
    times = collectives.filter(pl.col("rank") == ranks[-1])["start_ns"].to_numpy()
    error = alignment.of(ranks[-1]).line.aligned(times + line.offset_at(times)) - times
    assert np.abs(error).max() <= _end_skew(job.matching) + noise_us * US
    for rank in ranks[:-1]:
        assert abs(alignment.of(rank).line.offset_ns) <= 100 * US
        assert alignment.of(rank).line.drift_ppb == 0


def _same_pairs(a: pl.DataFrame, b: pl.DataFrame) -> bool:
    """Whether two matchings put the same rows together, however they number them."""
    numbers = a.join(b, on=["rank", "collective_id"]).select("instance", "instance_right").unique()
    return numbers.height == a["instance"].n_unique() == b["instance"].n_unique()


def _with_clock(run: Run, folder: Path, rank: int, line: ClockLine) -> Run:
    """A copy of a run in which every rank is on a host of its own and one host's clock is off."""
    for table in (SPANS, COLLECTIVES, SYNCS, STEPS):
        write_part(folder, table, "all", _shown(run.table(table), rank, line))
    workers = run.table(WORKERS).with_columns(host=pl.format("host{}", "rank"))
    write_part(folder, WORKERS, "all", workers)
    write_manifest(folder, run.manifest)
    return open_run(folder)


@pytest.mark.parametrize("drift_ppm", [0, 50])
@pytest.mark.parametrize("name", [NANOGPT, SLEEP_20MS])
def test_a_clock_that_is_off_by_50_ms_changes_neither_the_steps_nor_how_well_they_replay(
    jobs, name, drift_ppm, tmp_path
):
    job = jobs[name]
    line = ClockLine(int(job.run.table(SPANS)["start_ns"].min()), 50 * MS, drift_ppm * 1000)
    built = build_graph(_with_clock(job.run, tmp_path / "run", job.run.manifest.ranks[1], line))
    trust = assess(built, replay(built.graph), job.run.manifest)
    plain, moved = (t.steps.select("measured_ns", "replayed_ns").to_numpy() for t in (job.trust, trust))
    assert np.abs(moved - plain).max() < 0.3 * MS
    assert trust.start_error_ns[0] < job.trust.start_error_ns[0] + 60 * US
    assert trust.answerable


# --- ablations: what each sort of edge is worth -------------------------------------------------------------

# Start errors p50 / p95 in us without that sort of edge, where with all of them they are
# nanogpt 27 / 83, param 5 / 11, sleep 20ms 94 / 3,678, decode 1,250 / 1,309. Steps hardly show it.
#   rendezvous  nanogpt  1,258 / 31,199   param       1,063 / 6,551
#   stream      nanogpt 29,305 / 49,496   sleep 20ms 60,112 / 139,705
#   handover    nanogpt  3,293 /  9,367   param         673 / 2,124
#   event       nanogpt  3,070 / 36,068   decode     21,980 / 51,798
#   sync        sleep 20ms 37,249 / 68,459  param       210 / 2,535
#   contention  sleep 20ms  8,038 / 13,961
WORTH = [
    (NANOGPT, EdgeKind.RENDEZVOUS, 100),
    (PARAM, EdgeKind.RENDEZVOUS, 100),
    (NANOGPT, EdgeKind.STREAM, 100),
    (SLEEP_20MS, EdgeKind.STREAM, 10),
    (NANOGPT, EdgeKind.HANDOVER, 50),
    (PARAM, EdgeKind.HANDOVER, 50),
    (NANOGPT, EdgeKind.EVENT, 100),
    (DECODE, EdgeKind.EVENT, 10),
    (SLEEP_20MS, EdgeKind.SYNC, 5),
    (PARAM, EdgeKind.SYNC, 50),
    (SLEEP_20MS, EdgeKind.CONTENTION, 2),
]


def _without(graph: Graph, kind: EdgeKind) -> Graph:
    own_transfer = graph.nodes.kind[graph.edges.target] == NodeKind.TRANSFER
    return graph.without_edges((graph.edges.kind == kind) & ((kind != EdgeKind.STREAM) | ~own_transfer))


@pytest.mark.parametrize(("name", "kind", "times_worse"), WORTH)
def test_without_a_sort_of_edge_starts_are_far_off_even_where_steps_are_not(jobs, name, kind, times_worse):
    job = jobs[name]
    timeline = replay(_without(job.graph, kind))
    ablated = assess(dataclasses.replace(job.built, graph=timeline.graph), timeline, job.run.manifest)
    assert ablated.start_error_ns[1] > times_worse * job.trust.start_error_ns[1]


# --- a twin: two recorded runs of one job, one change apart -------------------------------------------------


def _sleeping(graph: Graph, seconds: float, instead: float) -> Graph:
    """Rank 2's sleeps in the forward pass, of this many seconds, last this many instead."""
    nodes = graph.nodes
    near = np.abs(nodes.duration - seconds * 1e9) < 2 * MS
    asleep = near & (nodes.rank == 2) & (nodes.name == graph.names.index(SPARSE_ARCH))
    assert asleep.sum() == 3  # one per step
    return graph.with_durations(np.where(asleep, round(instead * 1e9), nodes.duration))


def test_shortening_the_sleep_predicts_the_run_that_was_recorded_with_the_short_one(jobs):
    # Predicted 337, 154, 153 ms from a run of 1318, 1135, 1135; recorded 359, 153, 157: -3.6% with the first
    # step, in which memory is still being allocated, and -0.8% without it. (The short run also sleeps 20 ms
    # in each backward pass, beside work of the GPU that hides most of it.)
    predicted = _steps_ms(_sleeping(jobs[SLEEP_1S].graph, 1.0012, 0.0202))
    recorded = _measured_ms(jobs[SLEEP_20MS].graph)
    assert predicted.mean() / recorded.mean() == pytest.approx(1, abs=0.05)
    assert predicted[1:].mean() / recorded[1:].mean() == pytest.approx(1, abs=0.02)


def test_lengthening_the_sleep_predicts_the_run_that_was_recorded_with_the_long_one(jobs):
    # Predicted 1340, 1134, 1138 ms; recorded 1318, 1135, 1135: +0.6%, and +0.07% without the first step.
    predicted = _steps_ms(_sleeping(jobs[SLEEP_20MS].graph, 0.0202, 1.0012))
    recorded = _measured_ms(jobs[SLEEP_1S].graph)
    assert predicted.mean() / recorded.mean() == pytest.approx(1, abs=0.02)
    assert predicted[1:].mean() / recorded[1:].mean() == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize(
    ("kind", "at_least"),
    # Seen without the first step, where all edges give -2.3%: -62%, -56%, -19%, -10%.
    [(EdgeKind.STREAM, 0.2), (EdgeKind.LAUNCH, 0.2), (EdgeKind.SYNC, 0.08), (EdgeKind.EVENT, 0.04)],
)
def test_the_twin_is_missed_without_a_sort_of_edge(jobs, kind, at_least):
    graph = _without(_sleeping(jobs[SLEEP_1S].graph, 1.0012, 0.0202), kind)
    predicted, recorded = _steps_ms(graph), _measured_ms(jobs[SLEEP_20MS].graph)
    assert abs(predicted[1:].mean() / recorded[1:].mean() - 1) > at_least


# --- edits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_healing_any_rank_of_a_real_job_lets_nothing_end_later(jobs, name):
    graph, timeline = jobs[name].graph, jobs[name].timeline
    # A single step may last longer, where the one before it ends sooner by more than it does itself.
    for rank in jobs[name].run.manifest.ranks:
        healed = replay(Heal(RanksAt(rank)).apply(graph))
        assert (healed.end <= timeline.end).all()
        steps = step_times(graph, healed.start, healed.end)["duration_ns"]
        assert steps.sum() <= step_times(graph, timeline.start, timeline.end)["duration_ns"].sum()


def test_healing_the_rank_that_sleeps_is_worth_most_of_its_sleep_and_healing_others_nothing(jobs):
    graph = jobs[SLEEP_1S].graph
    before = _steps_ms(graph).mean()
    gains = [before - _steps_ms(Heal(RanksAt(rank)).apply(graph)).mean() for rank in range(4)]
    assert gains[2] > 900
    assert max(gains[0], gains[1], gains[3]) < 5


def test_healing_the_rank_that_sleeps_is_as_good_as_taking_the_sleep_out(jobs):
    # Seen: 207 and 203 ms for the later steps, where without the sleep they last 151 and 143.
    graph = jobs[SLEEP_1S].graph
    awake = _steps_ms(_sleeping(graph, 1.0012, 0.0))
    assert _steps_ms(Heal(RanksAt(2)).apply(graph)).mean() == pytest.approx(awake.mean(), rel=0.1)


@pytest.mark.parametrize("name", WHOLE)
def test_an_edit_that_changes_nothing_changes_no_nanosecond(jobs, name):
    timeline = jobs[name].timeline
    for text in ("scale:factor=1", "network:bandwidth=1", "scale:kind=kernel,factor=1"):
        same = replay(parse_edit(text).apply(jobs[name].graph))
        assert (same.start == timeline.start).all()
        assert (same.end == timeline.end).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_search_on_a_real_job_is_repeatable_and_its_edits_can_be_typed(jobs, name):
    graph, trust = jobs[name].graph, jobs[name].trust
    found, again = explore(graph, trust), explore(graph, trust)
    assert (found.predictions, found.refused) == (again.predictions, again.refused)
    for prediction in found.predictions:
        assert prediction.low_ns <= prediction.predicted_ns <= prediction.high_ns
        assert all(parse_edit(str(edit)) == edit for edit in prediction.edits)
    if name == SLEEP_1S:  # what a slow rank costs is a bound: it is listed, and is no advice
        gains = {str(prediction.edits[0]): prediction.speedup for prediction in found.predictions}
        assert gains["heal:rank=2"] > 3


def test_without_communication_what_one_rank_does_is_nothing_to_the_others(jobs):
    alone = parse_edit("no-comm").apply(jobs[NANOGPT].graph)
    slower = alone.nodes.duration.copy()
    slower[alone.nodes.rank == 3] *= 3
    others = (alone.nodes.rank != 3) & (alone.nodes.rank >= 0)
    assert (replay(alone.with_durations(slower)).end == replay(alone).end)[others].all()


def test_a_slower_rank_slows_all_others_through_the_rendezvous(jobs):
    # Rank 3's CPU takes three times as long; without rendezvous its peers would not notice.
    graph = jobs[NANOGPT].graph
    slow = (graph.nodes.rank == 3) & np.isin(graph.nodes.kind, CPU_KINDS)
    slower = graph.with_durations(np.where(slow, 3 * graph.nodes.duration, graph.nodes.duration))
    last = np.array([(graph.nodes.rank == rank) & (graph.nodes.step >= 0) for rank in range(8)])
    before = [jobs[NANOGPT].timeline.end[mine].max() for mine in last]
    after = [replay(slower).end[mine].max() for mine in last]
    alone = [replay(_without(slower, EdgeKind.RENDEZVOUS)).end[mine].max() for mine in last]
    for rank in range(8):
        assert after[rank] > before[rank] + 100 * MS
        if rank != 3:
            assert alone[rank] < before[rank] + 10 * MS


# --- calls that were blocked without a record of it ---------------------------------------------------------


def test_operators_that_wait_for_a_transfer_while_memory_is_freed_are_no_work(jobs):
    # In the first step cudaMalloc fails inside `aten::cat`; the allocator waits for the all-to-all before it
    # frees what that used. Rank 2 comes last: it waits for 3.4 ms, too little to be distinguished from work.
    graph = jobs[OPT4].graph
    source, target = graph.edges.source, graph.edges.target
    waits = (graph.edges.kind == EdgeKind.SYNC) & (graph.nodes.kind[source] == NodeKind.TRANSFER)
    waits &= graph.nodes.name[target] == graph.names.index("aten::cat")
    assert graph.edges.inferred[waits].all()
    before = (graph.edges.kind == EdgeKind.THREAD) & np.isin(target, target[waits])
    idle = graph.nodes.measured_start[target[before]] - graph.nodes.measured_end[source[before]]
    idle_ms = dict(zip(graph.nodes.rank[target[before]].tolist(), (idle / MS).tolist()))
    assert idle_ms == pytest.approx({0: 13.0, 1: 12.3, 3: 14.8}, abs=0.1)


def test_healing_gains_as_much_in_each_usual_step_of_a_job_that_does_the_same_in_each(jobs):
    # Rank 3's clocks hide that it waits in the last: with that as work healing gained 10.8 and 1.6 ms.
    graph = jobs[OPT4].graph
    gains = _steps_ms(graph) - _steps_ms(Heal(RanksAt(2)).apply(graph))
    assert gains[1:].tolist() == pytest.approx([10.8, 9.8], abs=0.3)


# --- traces that do not record what depends on what -------------------------------------------------------


def test_a_replay_whose_starts_were_mostly_taken_from_the_trace_is_not_believed(traces, tmp_path):
    shutil.copytree(open_path(traces / "pp_timeline" / "primus_pp8").path, tmp_path / "run")
    for part in (tmp_path / "run" / SPANS.name).glob("*.parquet"):  # kernels that do not say what they are
        pl.read_parquet(part).with_columns(name=pl.lit("kernel")).write_parquet(part)
    run = open_run(tmp_path / "run")
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    assert trust.error_pct < 0.1
    assert trust.steps.height == 20
    assert not trust.answerable
    assert any("taken from the trace" in reason for reason in trust.reasons)


def test_one_stage_of_a_pipeline_alone_is_not_believed(traces):
    run = open_path(traces / "pp_timeline" / "primus_pp8" / "pp_rank_5.json.gz")
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    assert not trust.answerable
    assert any("are missing" in reason for reason in trust.reasons)


# --- the graph with only the nodes that ranks wait for each other at ----------------------------------------

CONDENSED = [*WHOLE, OPT4, TWO_OF_128]


def _edited(graph: Graph, which: str, free: np.ndarray) -> Graph:
    chosen = {"network": free, "one rank": graph.nodes.rank == 1, "all ranks": graph.nodes.rank >= 0}[which]
    drawn = np.random.default_rng(3).uniform(0, 10, graph.num_nodes)
    return graph.with_durations((graph.nodes.duration * np.where(chosen, drawn, 1.0)).astype(np.int64))


@pytest.mark.parametrize("name", CONDENSED)
def test_condensed_graphs_of_real_jobs_replay_as_the_whole_does_under_any_edit(jobs, name):
    graph = jobs[name].graph
    small, node = condense(graph)
    assert small.edges.source.size <= 2.2 * small.num_nodes
    assert_replays_as(graph, small, node)
    changed = _edited(graph, "network", cut_by_rank(graph).free)
    assert_replays_as(changed, with_transfers_of(small, node, changed), node)
    for which in ("one rank", "all ranks"):
        changed = _edited(graph, which, cut_by_rank(graph).free)
        assert_replays_as(changed, *condense(changed))
