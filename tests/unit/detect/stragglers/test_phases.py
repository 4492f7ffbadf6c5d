"""The part of its step in which a late rank takes longer, from made-up backward passes."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.observations import observe
from dpro.detect.stragglers.phases import PHASES, phase_times, phases_with_collectives, with_phases
from dpro.schema import COLLECTIVES, PASSES, STEPS, conform

MS = 1_000_000
RANKS, STEPS_OF_JOB = 3, 12
USUAL = {"before": 20, "backward": 50, "after": 10}


def tables_of(longer, calls_in=("backward",), on_device=False):
    """A job whose rank 1 takes longer in a phase: what takes longer there, the others wait in `backward`.

    Args:
        longer: ms by phase.
        calls_in: phases with collectives.
        on_device: whether only the device shows that, since hosts enqueue each step in 30 ms.
    """
    passes, steps, calls = [], [], []
    step_ms = sum(USUAL.values()) + sum(longer.values())
    for rank in range(RANKS):
        took = dict(USUAL)
        for phase, ms in longer.items():
            took[phase if rank == 1 else "backward"] += ms
        for step in range(1, STEPS_OF_JOB + 1):
            start = 1_000 * MS + step * step_ms * MS
            on_host = dict.fromkeys(PHASES, 10) if on_device else took
            begun, whole = start + on_host["before"] * MS, sum(on_host.values()) * MS
            gpu = (took["before"] * MS, took["backward"] * MS) if on_device else (-1, -1)
            passes.append((rank, step, begun, on_host["backward"] * MS, *gpu))
            steps.append((rank, step, -1, start, whole, step_ms * MS if on_device else -1))
            within = {"before": start + MS, "backward": begun + MS, "after": start + whole - MS}
            calls += [(rank, within[phase]) for phase in calls_in]
    names = ["rank", "step", "window", "start_ns", "duration_ns", "gpu_step_ns"]
    return (
        conform(PASSES, pl.DataFrame(passes, [*PASSES.dtypes.items()][:-1], orient="row")),
        conform(STEPS, pl.DataFrame(steps, {name: STEPS.dtypes[name] for name in names}, orient="row")),
        conform(COLLECTIVES, pl.DataFrame(calls, {"rank": pl.Int32, "enqueued_ns": pl.Int64}, orient="row")),
    )


def late_rank(longer_ms, steps=10):
    values = {"longer_ns": longer_ms * MS, "steps": steps, "last_step": 12}
    lateness = observe("longer-work", "rank 1 takes {longer_ns} more", **values)
    return Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, longer_ms * MS, (lateness,))


def placed(longer, ahead=(), **job):
    finding = late_rank(sum(longer.values()))
    tables = tables_of(longer, **job)
    [answer] = with_phases([finding], *tables, on_gpus=job.get("on_device", False), ahead=ahead)
    return answer


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("on_device", [False, True])
def test_late_rank_is_late_in_the_phase_that_takes_longer_though_steps_are_equal(phase, on_device):
    finding = placed({phase: 30}, on_device=on_device)
    assert finding.place == CodeLocation(PHASES[phase])
    assert finding.evidence == (f"rank 1 takes 30 ms more; all of it in {PHASES[phase]}",)
    assert finding.observations[0].values["phase_ns"] == 30 * MS


def test_phase_that_takes_most_is_named_with_how_much_that_is():
    finding = placed({"before": 8, "backward": 32})
    assert finding.evidence == ("rank 1 takes 40 ms more; 32 ms of it in the backward pass",)


def test_steps_whose_passes_are_recorded_seldom_are_compared_as_far_back_as_needed():
    passes, steps, calls = tables_of({"backward": 30})
    seldom = passes.filter(pl.col("step") % 2 == 0)  # 2, 4, ..., 12: five of them, without the first
    finding = late_rank(30, steps=4)
    [answer] = with_phases([finding], seldom, steps, calls, on_gpus=False, ahead=())
    assert answer.place == CodeLocation(PHASES["backward"])


def test_lateness_that_is_spread_over_the_step_is_in_no_phase():
    assert placed({"before": 20, "backward": 20}).place is None


def test_where_two_phases_have_collectives_what_takes_longer_in_either_is_in_no_phase():
    of_fsdp = ("before", "backward")
    assert placed({"backward": 30}, calls_in=of_fsdp).place is None
    assert placed({"after": 30}, calls_in=of_fsdp).place == CodeLocation(PHASES["after"])


def test_host_that_is_ahead_of_its_device_is_compared_by_its_own_clock():
    assert placed({"backward": 30}, ahead=(1,), on_device=True).place == CodeLocation(PHASES["backward"])
    assert placed({"before": 30}, ahead=(1,), on_device=True).place == CodeLocation(PHASES["backward"])


def test_other_findings_and_runs_without_passes_stay_as_they_are():
    of_job = Finding("slow.host", "job", "the host", (0, 1, 2), 0.2, 0.9, MS, ())
    tables = tables_of({"before": 30})
    assert with_phases([of_job], *tables, on_gpus=False, ahead=()) == [of_job]
    late = late_rank(30)
    assert with_phases([late], PASSES.empty(), *tables[1:], on_gpus=False, ahead=()) == [late]
    few = tables[0].filter(pl.col("step") > STEPS_OF_JOB - 4)
    assert with_phases([late], few, *tables[1:], on_gpus=False, ahead=()) == [late]


def test_passes_that_only_hosts_timed_say_nothing_of_gpus():
    late = late_rank(30)
    assert with_phases([late], *tables_of({"before": 30}), on_gpus=True, ahead=()) == [late]


def test_steps_of_deep_windows_and_passes_that_no_device_timed_do_not_count():
    passes, steps, _ = tables_of({"before": 30}, on_device=True)
    covered = steps.with_columns(window=pl.when(pl.col("step") == 3).then(0).otherwise(-1).cast(pl.Int32))
    unknown = pl.when(pl.col("step") == 5).then(-1).otherwise("gpu_duration_ns")
    times = phase_times(passes.with_columns(gpu_duration_ns=unknown), covered, by_device=True)
    assert sorted(set(times["step"])) == [1, 2, 4, *range(6, STEPS_OF_JOB + 1)]


def test_what_lies_between_the_passes_of_one_step_is_forward():
    passes, steps, _ = tables_of({})
    half = passes.with_columns(duration_ns=pl.lit(20 * MS))
    second = half.with_columns(start_ns=pl.col("start_ns") + 30 * MS)
    times = phase_times(pl.concat([half, second]), steps, by_device=False)
    assert times.select(*PHASES).unique().rows() == [(30 * MS, 40 * MS, 10 * MS)]


def test_phase_in_which_few_steps_call_collectives_counts_as_one_without():
    passes, steps, calls = tables_of({}, calls_in=("before", "backward"))
    assert phases_with_collectives(passes, steps, calls) == {"before", "backward"}
    first = steps["start_ns"].min() + 40 * MS
    rare = calls.filter((pl.col("enqueued_ns") > first).not_() | (pl.int_range(pl.len()) % 2 == 1))
    assert phases_with_collectives(passes, steps, rare) == {"backward"}
