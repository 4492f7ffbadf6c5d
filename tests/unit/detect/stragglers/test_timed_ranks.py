"""Ranks whose GPU is late, found in the times of collectives that were measured without deep windows."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.stragglers.from_calls import (
    HOSTS_ONLY,
    LAST_ON_GPU,
    cannot_show,
    find_late_gpus,
    is_timed,
    own_time_when_timed,
)
from dpro.ingest.flight_recorder import read_dump
from dpro.schema import COLLECTIVES, COUNTERS, STEPS, WORKERS, conform
from dpro.store import open_run
from tests.reference.training_jobs import Job, run_job
from tests.reference.training_records import Recording, write_run

MS, STEPS_RUN, EACH, RANKS = 1_000_000, 24, 3, 4
STEP_MS, TRANSFER_MS = 50, 2
BEGUN_NS = 1_760_000_000 * 10**9


def dumped(folder, waits_ms, ranks=range(RANKS), measured=True):
    """Collectives of a job by NCCL's flight recorder.

    All hosts run equally far ahead of their GPUs: call `n` is enqueued 1 ms after the one before.

    Args:
        folder: for the dumps.
        waits_ms: [R, T, C] how long each rank's GPU waits in each call.
        ranks: whose dumps there are.
        measured: whether timing was on.
    """
    tables = []
    for rank in ranks:
        entries = []
        for number in range(STEPS_RUN * EACH):
            step, place = divmod(number, EACH)
            made_ns = BEGUN_NS + (step * STEP_MS + place) * MS
            entry = {
                "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "is_p2p": False,
                "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1,
                "profiling_name": "nccl:all_reduce", "time_created_ns": made_ns, "input_sizes": [[1000]],
                "input_dtypes": ["Float"], "output_sizes": [[1000]], "output_dtypes": ["Float"],
                "state": "completed", "retired": True, "timeout_ms": 600000,
                "time_discovered_started_ns": made_ns + 9 * MS if measured else None,
                "time_discovered_completed_ns": made_ns + 99 * MS,
            }  # fmt: skip
            if measured:
                entry["duration_ms"] = float(np.float32(TRANSFER_MS + waits_ms[rank, step, place]))
            entries.append(entry)
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}}
        path = folder / f"rank{rank}.pickle"
        path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries}, 2))
        tables.append(read_dump(path, rank=rank).frames[COLLECTIVES.name])
    return conform(COLLECTIVES, pl.concat(tables))


def steps_table():
    rows = [
        {"rank": rank, "step": step, "window": -1, "start_ns": BEGUN_NS + (step * STEP_MS - 1) * MS}
        for rank in range(RANKS)
        for step in range(STEPS_RUN)
    ]
    # The hosts are done with a step in 5 ms, but for each tenth, which waits for what the GPUs still do.
    took = [5 if row["step"] % 10 else 455 for row in rows]
    frame = pl.DataFrame(rows).with_columns(duration_ns=pl.Series(took) * MS)
    return conform(STEPS, frame)


def found(collectives):
    workers = conform(WORKERS, pl.DataFrame({"rank": range(RANKS), "gpu_uuid": "GPU"}))
    return find_late_gpus(collectives, steps_table(), COUNTERS.empty(), workers, doubtful=False)


def waits(seed, late=-1, ms=0.0):
    """[R, T, C] ms: noise of 1% of a step, and a rank that comes last by so much."""
    generator = np.random.default_rng(seed)
    arrives = generator.normal(10, STEP_MS / 100 / EACH, (RANKS, STEPS_RUN, EACH))
    if late >= 0:
        arrives[late] += ms / EACH
    return arrives.max(axis=0) - arrives


def test_gpu_that_is_slow_is_named_though_all_hosts_run_equally_far_ahead(tmp_path):
    (finding,) = found(dumped(tmp_path, waits(1, late=2, ms=12)))
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.compute", "rank", "2")
    assert finding.cost_ns == pytest.approx(12 * MS, rel=0.1)
    assert LAST_ON_GPU in finding.observations
    assert finding.confidence == pytest.approx(0.6, abs=0.03)


def test_nothing_is_said_of_gpus_that_are_equally_fast_or_were_not_timed(tmp_path):
    assert [found(dumped(tmp_path, waits(seed))) for seed in range(5)] == [[]] * 5
    untimed = dumped(tmp_path, waits(1, late=2, ms=12), measured=False)
    assert found(untimed) == []
    assert not is_timed(untimed)
    assert own_time_when_timed(untimed, steps_table()).is_empty()


def test_a_rank_that_left_no_dump_does_not_keep_the_others_from_being_compared(tmp_path):
    (finding,) = found(dumped(tmp_path, waits(1, late=2, ms=12), ranks=[0, 1, 2]))
    assert finding.ranks == (2,)


def test_calls_of_which_a_member_is_missing_are_not_taken_for_short_waits(tmp_path):
    rows = dumped(tmp_path, waits(1, late=2, ms=12))
    partly = rows.filter((pl.col("rank") != 3) | (pl.col("sequence") <= EACH * 15))
    own = own_time_when_timed(partly, steps_table())
    assert own["step"].unique().to_list() == list(range(15))


JOB = Job("dp", 4, 30, gpu=True, seed=3, fault="compute", victim=2, severity=1.3)


@pytest.mark.parametrize(("timed", "ranks"), [(True, [(2,)]), (False, [])])
def test_diagnosis_without_windows_uses_it_and_says_what_is_missing_else(tmp_path, timed, ranks):
    run = open_run(write_run(tmp_path, JOB, run_job(JOB), Recording(timed=timed)))
    findings, unknown = Analysis(run).verdict_by_calls
    assert [finding.ranks for finding in findings] == ranks
    assert (HOSTS_ONLY in unknown) == (not timed)
    assert HOSTS_ONLY in cannot_show(run.table(COLLECTIVES), run.table(WORKERS))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp", "moe", "tp_pp"])
@pytest.mark.parametrize("noise", ["5%", "10%", "heavy", "periodic"])
def test_healthy_jobs_are_left_alone(tmp_path, layout, noise):
    job = replace(JOB, layout=layout, num_ranks=16, noise=noise, fault="", victim=-1, severity=1.0)
    run = open_run(write_run(tmp_path, job, run_job(job), Recording(timed=True)))
    findings, _ = Analysis(run).verdict_by_calls
    assert [finding for finding in findings if finding.component_kind == "rank"] == []
