"""Clocks held down and errors of GPUs as evidence: eight GPUs on a node, four of them the job's."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.findings import Finding
from dpro.detect.machine.gpu_state import (
    AFTER,
    HARDWARE,
    HOLDS,
    PROGRAM,
    REMEDIES,
    XIDS,
    error_of,
    remedy_of,
    remedy_of_hold,
    with_errors,
    with_gpus,
)
from dpro.detect.machine.telemetry import RULES
from dpro.detect.observations import observe
from dpro.detect.stragglers.from_calls import HOST_OR_GPU
from dpro.schema import COLLECTIVES, COUNTERS, PROCESS_GROUPS, STEPS, WORKERS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.units import NS_PER_S
from tests.unit.detect.calling import data_parallel, noisy, slower, tables
from tests.unit.detect.hanging import OPEN, START_NS
from tests.unit.detect.hanging import Job as Hanging

BEGIN = 1_700_000_000 * 10**9
STEPS_EACH = 40  # of 1 s
MINE = ["g5", "g1", "g2", "g6"]
END = STEPS_EACH + 1


def job() -> tuple[pl.DataFrame, pl.DataFrame]:
    steps = [
        {"rank": rank, "step": step, "start_ns": BEGIN + step * NS_PER_S, "duration_ns": NS_PER_S}
        for rank in range(4)
        for step in range(STEPS_EACH)
    ]
    columns = {
        "rank": range(4),
        "host": "n1",
        "gpu_uuid": [f"GPU-{each}" for each in MINE],
        "gpu_name": "H100",
    }
    return conform(STEPS, pl.DataFrame(steps)), conform(WORKERS, pl.DataFrame(columns))


def sampled(*rows: tuple[str, str, list[tuple[float, float]]]) -> pl.DataFrame:
    """Rows of `(device, counter, [(time in s, value)])`, beside heartbeats and clocks of eight GPUs."""
    rows = ([(f"g{n}", "sampling_us", [(0, 80.0)]) for n in range(8)]) + list(rows)
    known = {(device, counter) for device, counter, _ in rows}
    rows += [
        (f"g{n}", "sm_clock_mhz", [(0, 1980.0)]) for n in range(8) if (f"g{n}", "sm_clock_mhz") not in known
    ]
    flat = [
        (device, counter, BEGIN + round(time * NS_PER_S), value)
        for device, counter, values in rows
        for time, value in values
    ]
    frame = pl.DataFrame(flat, ["device", "counter", "time_ns", "value"], orient="row")
    return conform(COUNTERS, frame.with_columns(host=pl.lit("n1")))


def slow(class_: str = "slow.compute", rank: int = 1, cause: str = "", **more) -> Finding:
    observations = (observe("test", "rank 1 is slower"), HOST_OR_GPU)
    return Finding(class_, "rank", str(rank), (rank,), 0.2, 0.4, 1e6, observations, cause, **more)


def explained(finding: Finding, *rows) -> Finding:
    steps, workers = job()
    (found,) = with_gpus([finding], steps, sampled(*rows), workers)
    return found


HEAT = [
    ("g1", "throttled_thermal_s", [(0, 0.0), (20, 16.0), (40, 32.0)]),
    ("g1", "clocks_hw_thermal_slowdown", [(0, 1.0)]),
    ("g1", "sm_clock_mhz", [(0, 1410.0)]),
    *[(each, "temperature_c", [(0, 91.0 if each == "g1" else 64.0)]) for each in MINE],
]


def test_a_gpu_whose_clocks_are_held_down_by_heat_is_the_cause_and_its_remedy_is_said():
    found = explained(slow(), *HEAT)
    assert found.cause == "GPU clocks held down by heat"
    assert found.evidence == (
        "rank 1 is slower",
        "the clocks of its GPU (g1 on n1, rank 1) were held down by heat 100% of the time, those of its "
        "peers 0%; SM clock 1410 MHz, theirs 1980; 91 °C, theirs 64",
    )
    assert found.remedy == (
        "check its cooling: fans, air flow, the liquid loop, the temperature of the inlet"
    )
    held = found.observations[-1]
    assert (held.kind, held.values["held_by"], held.values["held_share"]) == ("clock-held", "heat", 1.0)
    assert (held.values["clock_mhz"], held.values["peers_clock_mhz"]) == (1410.0, 1980.0)
    assert found.confidence == 0.8  # which of host and GPU it is was what made it unsure


def test_seconds_that_grow_show_it_without_a_flag():
    found = explained(slow(), HEAT[0], HEAT[2])
    assert "held down by heat 80% of the time" in found.evidence[-1]


def test_a_power_cap_is_reported_with_the_limits():
    limits = [(each, "power_limit_w", [(0, 500.0 if each == "g1" else 700.0)]) for each in MINE]
    held = [("g1", "clocks_sw_power_cap", [(0, 1.0)]), ("g1", "sm_clock_mhz", [(0, 1500.0)])]
    found = explained(slow(cause="kernels"), *limits, *held)
    assert found.cause == "GPU clocks held down by the power cap"
    assert "its power limit is 500 W, theirs 700 W" in found.evidence[-1]
    assert "nvidia-smi -pl" in found.remedy


def test_what_a_host_is_slow_at_stays_the_cause_beside_the_clocks_of_its_gpu():
    found = explained(slow("slow.host", cause="garbage collection"), *HEAT)
    assert found.cause == "garbage collection"
    assert HOST_OR_GPU in found.observations
    assert "held down by heat" in found.evidence[-1]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        # All of the job's are held down as much.
        [(each, "clocks_sw_power_cap", [(0, 1.0)]) for each in MINE]
        + [(each, "sm_clock_mhz", [(0, 1500.0)]) for each in MINE],
        # Flagged, and to no effect.
        [("g1", "clocks_sw_power_cap", [(0, 1.0)])],
        # Those of another job.
        [("g0", counter, values) for _, counter, values in HEAT],
        # For lack of work.
        [("g1", "clocks_gpu_idle", [(0, 1.0)]), ("g1", "sm_clock_mhz", [(0, 345.0)])],
        # Of a peer, which is not slow.
        [("g2", counter, values) for _, counter, values in HEAT[:3]],
    ],
    ids=["nothing", "all", "no effect", "another job", "idle", "a peer"],
)
def test_what_makes_no_difference_is_no_evidence(rows):
    assert explained(slow(), *rows) == slow()


def test_lower_clocks_without_a_reason_are_reported_as_such():
    found = explained(slow(), ("g1", "sm_clock_mhz", [(0, 1410.0)]))
    assert (found.cause, found.confidence) == ("", 0.4)
    assert "ran at lower clocks: SM clock 1410 MHz, theirs 1980; no reason was reported" in found.evidence[-1]


def test_what_began_while_the_job_ran_is_seen_in_the_latest_steps():
    late = [
        ("g1", "clocks_hw_power_brake", [(0, 0.0), (39.2, 1.0)]),
        ("g1", "sm_clock_mhz", [(0, 1980.0), (31, 700.0)]),
    ]
    found = explained(slow(), ("g1", "clocks_hw_power_brake", [(0, 0.0), (32, 1.0)]), late[1])
    assert "held down by the power brake 20% of the time" in found.evidence[-1]  # of all steps
    found = explained(slow(), *late)
    assert "in the latest 10 steps the clocks" in found.evidence[-1]
    assert "held down by the power brake 8% of the time" in found.evidence[-1]


def test_gpus_of_another_model_are_no_peers():
    steps, workers = job()
    models = workers.with_columns(
        gpu_name=pl.when(pl.col("rank") == 1).then(pl.lit("A100")).otherwise("gpu_name")
    )
    assert with_gpus([slow()], steps, sampled(*HEAT), models) == [slow()]


def test_an_error_of_the_gpu_is_quoted_with_its_number_meaning_and_time():
    found = explained(slow(), ("g1", "xid", [(5.0, 63.0), (9.0, 63.0)]), ("g0", "xid", [(5.0, 79.0)]))
    assert found.evidence[-1] == (
        "the GPU of rank 1 (g1 on n1): XID 63 2 times, first at 22:13:25.000 UTC: a row of memory was set "
        "aside after errors, to be remapped at the next reset"
    )
    assert found.remedy == ("reset the GPU between jobs; several of them on one GPU are reason to replace it")
    assert not any("79" in line for line in found.evidence)


def test_findings_about_no_rank_cost_no_reading():
    job_wide = Finding("slow.host", "job", "the host", (0, 1), 0.2, 1.0, 1.0, ())
    assert with_gpus([job_wide], STEPS.empty(), None, None) == [job_wide]  # type: ignore[arg-type]


# Jobs that stand still, or are over.


def hang(class_: str = "hang.device", rank: int = 1) -> Finding:
    return Finding(class_, "rank", str(rank), (rank,), 1.0, 0.9, 1e9, (observe("test", "it hangs"),))


def with_its_errors(finding: Finding, *rows) -> Finding:
    steps, workers = job()
    (found,) = with_errors([finding], steps, sampled(*rows), workers)
    return found


def errors(finding: Finding, *rows) -> list[str]:
    found = with_its_errors(finding, *rows)
    assert found.evidence[0] == "it hangs"
    return list(found.evidence[1:])


@pytest.mark.parametrize("class_", ["hang.host", "hang.device", "hang.rank", "hang.comm", "dead.rank"])
def test_an_error_since_the_last_steps_is_evidence_of_a_hang(class_):
    (line,) = errors(hang(class_), ("g1", "xid", [(END, 79.0)]), ("g7", "xid", [(END, 95.0)]))
    assert line.startswith("the GPU of rank 1 (g1 on n1): XID 79 at ")
    assert "the GPU has fallen off the bus" in line


def test_a_gpu_that_was_lost_is_evidence_of_a_hang():
    (line,) = errors(hang(), ("g1", "lost", [(END, 1.0)]))
    assert "lost at" in line


def test_an_error_of_a_partitioned_gpu_may_be_that_of_another_instance():
    (line,) = errors(hang(), ("g1", "xid", [(END, 31.0)]), ("g1/p1", "sampling_us", [(0, 9.0)]))
    assert "(the GPU is partitioned: it may be of another instance)" in line


def test_an_error_long_before_the_last_steps_is_none():
    steps, workers = job()
    later = steps.with_columns(start_ns=pl.col("start_ns") + 3600 * NS_PER_S)
    assert with_errors([hang()], later, sampled(("g1", "xid", [(3.0, 31.0)])), workers) == [hang()]


def test_a_hardware_error_of_a_rank_that_is_not_named_is_marked_as_such():
    (line,) = errors(hang(), ("g6", "xid", [(END, 74.0)]), ("g2", "xid", [(END, 31.0)]))
    assert line.startswith(
        "possibly the cause, though not named as such: the GPU of rank 3 (g6 on n1): XID 74"
    )
    assert line.endswith(f"; do: {REMEDIES[HARDWARE]}")


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        ([("g1", "xid", [(END, 79.0)])], REMEDIES[HARDWARE]),
        ([("g1", "xid", [(END, 45.0), (END + 1, 31.0)])], REMEDIES[PROGRAM]),
        ([("g1", "xid", [(END, 45.0)])], ""),
        ([("g6", "xid", [(END, 79.0)])], ""),
    ],
    ids=["its own", "the first that follows from no other", "follows from another", "of another rank"],
)
def test_what_to_do_about_a_hang_is_what_to_do_about_an_error_of_its_own_gpu(rows, remedy):
    assert with_its_errors(hang(), *rows).remedy == remedy
    assert with_its_errors(replace(hang(), remedy="look at its stack"), *rows).remedy == "look at its stack"


def test_calls_that_do_not_fit_are_no_fault_of_a_gpu():
    assert errors(hang("hang.mismatch"), ("g1", "xid", [(END, 79.0)])) == []


def test_every_error_has_a_meaning_and_a_remedy():
    for number in (13, 31, 43, 45, 48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 121, 140):
        assert number in XIDS
        assert error_of("xid", number).means
        assert remedy_of("xid", number)
    assert error_of("xid", 45).of == AFTER
    assert "catalog" in error_of("xid", 9999).means
    assert len({error.means for error in XIDS.values()}) > 35


def test_whatever_may_hold_clocks_down_over_time_has_a_remedy():
    held = {rule.what for name, rule in RULES.items() if name in {each for h in HOLDS for each in h.counters}}
    assert held
    assert all(remedy_of_hold(what) for what in held)


# From a run on disk to the verdict.


def written(path, *rows: pl.DataFrame, frames) -> Analysis:
    for table, frame in zip((COLLECTIVES, STEPS, COUNTERS, WORKERS), frames):
        write_part(path, table, "all", pl.concat([frame, *rows]) if table is COUNTERS else frame)
    groups = [{"rank": rank, "group": "0,1,2,3", "group_ranks": "0-3"} for rank in range(4)]
    write_part(path, PROCESS_GROUPS, "all", conform(PROCESS_GROUPS, pl.DataFrame(groups)))
    write_manifest(path, Manifest(world_size=4, ranks=[0, 1, 2, 3], created_by="dpro record test"))
    return Analysis(open_run(path))


def test_diagnose_names_the_clocks_of_a_slow_rank_in_a_run_without_windows(tmp_path):
    late = slower(noisy(data_parallel(4, 60), 7, 0.01), 1, 1.4)
    counters = sampled(*HEAT, ("g0", "clocks_hw_slowdown", [(0, 1.0)]))
    analysis = written(tmp_path / "run", counters, frames=tables(late, job()[1]))
    (finding,) = analysis.verdict[0]
    assert (finding.class_, finding.ranks, finding.cause) == (
        "slow.compute",
        (1,),
        "GPU clocks held down by heat",
    )
    assert any("held down by heat" in line for line in finding.evidence)
    assert not any("g0" in line for line in finding.evidence)


def test_diagnose_quotes_the_error_of_the_gpu_beside_the_rank_that_all_wait_for(tmp_path):
    made = Hanging(4)
    made.call(range(4), range(4))
    made.call([0, 2, 3], range(4), OPEN)
    for rank in range(4):
        made.dump(rank, saved_s=60)
    hung_ns = START_NS + 2 * NS_PER_S
    xid = pl.DataFrame({"device": ["g1"], "counter": ["xid"], "time_ns": [hung_ns], "value": [79.0]})
    for table, frame in (
        (COLLECTIVES, pl.DataFrame(made.rows)),
        (PROCESS_GROUPS, pl.DataFrame(made.groups)),
        (COUNTERS, xid.with_columns(host=pl.lit("n1"))),
        (WORKERS, job()[1]),
    ):
        write_part(tmp_path / "run", table, "all", conform(table, frame))
    write_manifest(
        tmp_path / "run", Manifest(world_size=4, ranks=[0, 1, 2, 3], created_by="dpro record test")
    )
    (finding,) = Analysis(open_run(tmp_path / "run")).verdict[0]
    assert (finding.class_, finding.ranks) == ("hang.host", (1,))
    assert "XID 79 at 00:16:42.000 UTC: the GPU has fallen off the bus" in finding.evidence[-1]
