"""What main threads do while a job stands still, by stacks of real jobs, and both sides in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.hang.evidence import advice_in_words, verdict_in_words, verdicts_in_words
from dpro.detect.hang.stacks import (
    doing_of,
    main_threads,
    own_call,
    ran_share,
    sides_in_words,
    source_line,
    stand_of,
    with_cpu_time,
    works,
)
from dpro.schema import COUNTERS, RECORDER, WORKERS, conform
from dpro.units import NS_PER_S
from tests.unit.detect.hanging import DONE, OPEN, START_NS, Job

WORLD = range(3)
TORCH = "/venv/lib/python3.11/site-packages/torch"
PYTHON = "/usr/lib/python3.11"
MAKING = (
    f"{TORCH}/distributed/distributed_c10d.py:2169 _new_process_group_helper",
    f"{TORCH}/distributed/distributed_c10d.py:6056 _new_group_with_tag",
    f"{TORCH}/distributed/distributed_c10d.py:5863 new_group",
    f"{TORCH}/distributed/c10d_logger.py:97 wrapper",
    "/home/me/job.py:10 build_mesh",
)
BARRIER = (
    f"{TORCH}/distributed/distributed_c10d.py:5356 barrier",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    "/home/me/job.py:20 <module>",
)
BUFFERS = (
    f"{TORCH}/nn/parallel/distributed.py:2363 _distributed_broadcast_coalesced",
    f"{TORCH}/nn/parallel/distributed.py:2425 _sync_buffers",
    f"{TORCH}/nn/parallel/distributed.py:1886 forward",
    f"{TORCH}/nn/modules/module.py:1789 _call_impl",
    "/home/me/job.py:15 <genexpr>",
    "/home/me/job.py:15 validate",
    "/home/me/job.py:19 <module>",
)
BACKWARD = (
    f"{TORCH}/autograd/graph.py:979 _engine_run_backward",
    f"{TORCH}/autograd/__init__.py:395 backward",
    f"{TORCH}/_tensor.py:623 backward",
    "/home/me/job.py:15 train",
)
LOADER = (
    f"{PYTHON}/selectors.py:415 select",
    f"{PYTHON}/multiprocessing/queues.py:113 get",
    f"{TORCH}/utils/data/dataloader.py:1291 _try_get_data",
    f"{TORCH}/utils/data/dataloader.py:1464 _get_data",
    f"{TORCH}/utils/data/dataloader.py:725 __next__",
    "/home/me/job.py:14 train",
)
COMPILING = (
    "/home/me/backends.py:7 slow_backend",
    f"{TORCH}/_dynamo/output_graph.py:3119 _call_user_compiler",
    f"{TORCH}/_dynamo/convert_frame.py:935 run_tracer",
    f"{TORCH}/_dynamo/eval_frame.py:700 compile_wrapper",
    "/home/me/job.py:12 fit",
)
LOADING = (
    f"{TORCH}/serialization.py:776 __init__",
    f"{TORCH}/serialization.py:1561 load",
    "job.py:12 restore",
)
WAITING = (f"{PYTHON}/subprocess.py:2046 _wait", f"{PYTHON}/subprocess.py:550 run", "job.py:10 unpack")
BUSY = ("/home/me/job.py:6 <listcomp>", "/home/me/job.py:6 tokenize", "/home/me/job.py:11 <module>")
RUNS_COMPILED = (
    "/tmp/torchinductor_me/ab/cab.py:33 call",
    f"{TORCH}/_inductor/output_code.py:550 __call__",
    f"{TORCH}/_dynamo/eval_frame.py:700 compile_wrapper",
    "/home/me/job.py:12 fit",
)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (MAKING, "rank 1 waits in new_group for other ranks, in build_mesh (job.py:10)"),
        (BARRIER, "rank 1 waits in barrier, at job.py:20"),
        (BUFFERS, "rank 1 waits in DDP's broadcast of buffers, in validate (job.py:15)"),
        (BACKWARD, "rank 1 waits in backward, in train (job.py:15)"),
        (LOADER, "rank 1 waits for DataLoader workers in train (job.py:14)"),
        (COMPILING, "rank 1 compiles in fit (job.py:12)"),
        (LOADING, "rank 1 loads a checkpoint in restore (job.py:12)"),
        (WAITING, "rank 1 waits for a process that it started in unpack (job.py:10)"),
        (BUSY, "rank 1 is in tokenize (job.py:6)"),
        (RUNS_COMPILED, "rank 1 is in fit (job.py:12)"),
    ],
)
def test_what_a_library_does_is_known_by_its_calls_and_the_place_is_the_users(calls, words):
    assert sides_in_words(finding_of(main_threads([1], calls, "is"))) == ([words], [])


def finding_of(*observations: Any, ranks: tuple[int, ...] = (1,), class_: str = "hang.host") -> Finding:
    text = "-".join(map(str, ranks))
    return Finding(class_, "rank", text, ranks, 1.0, 0.98, 0.0, observations, waited_ns=20 * NS_PER_S)


def test_several_ranks_at_one_place_are_said_together():
    peers = main_threads([0, 2], BARRIER, "is")
    assert sides_in_words(finding_of(peers)) == ([], ["ranks 0, 2 wait in barrier, at job.py:20"])
    assert sides_in_words(finding_of(main_threads([0], BUSY, "is"))) == (
        [], ["rank 0 waits, in tokenize (job.py:6)"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "called"),
    [
        (["<frozen runpy>:88 _run_code", *MAKING[:1]], MAKING[0]),
        ([f"{TORCH}/x.py:1 f", "/v/lib/python3.11/site-packages/lightning/loop.py:3 run"], "loop.py:3 run"),
        ([f"{PYTHON}/json/decoder.py:3 decode", "/opt/me/job.py:9 <module>"], "/opt/me/job.py:9 <module>"),
        (["<eval_with_key>.0:5 forward", "job.py:9 <lambda>", "job.py:30 main"], "job.py:9 <lambda>"),
        (["job.py:9 <genexpr>"], "job.py:9 <genexpr>"),
    ],
)  # fmt: skip
def test_the_call_of_the_user_is_in_no_library_and_in_code_that_is_written(calls, called):
    assert own_call(calls).endswith(called)


@given(st.lists(st.sampled_from([*MAKING, *BUFFERS, *LOADER, *COMPILING, *BUSY]), min_size=1))
def test_whatever_a_stack_holds_the_place_is_one_of_its_calls(calls):
    assert stand_of(calls)["own_call"] in calls


def samples(*values: tuple[str, int, float, float]) -> pl.DataFrame:
    """Rows of `counters` of one host: counter, rank, seconds, value."""
    rows = [
        (rank, "a", "", name, START_NS + round(at_s * NS_PER_S), value) for name, rank, at_s, value in values
    ]
    names = ("rank", "host", "device", "counter", "time_ns", "value")
    schema = {name: COUNTERS.dtypes[name] for name in names}
    return conform(COUNTERS, pl.DataFrame(rows, schema=schema, orient="row"))


SAMPLED = [("telemetry_cpu_s", -1, float(second), 0.1) for second in range(21)]
CPU, QUEUE = "main_thread_cpu_s", "main_thread_runqueue_s"


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ([(CPU, 1, 0.0, 2.0), (CPU, 1, 20.0, 12.0)], 0.5),
        ([(CPU, 1, 0.0, 2.0), (CPU, 1, 20.0, 2.0), (QUEUE, 1, 1.0, 3.0), (QUEUE, 1, 20.0, 18.0)], 0.75),
        ([(CPU, 1, 0.0, 2.0)], 0.0),  # equal samples are written once
        ([(CPU, 1, -5.0, 1.0), (CPU, 1, 0.0, 2.0), (CPU, 2, 20.0, 50.0)], 0.0),
        ([], None),
        ([(CPU, 2, 0.0, 2.0)], None),
    ],
)
def test_how_long_a_thread_ran_while_its_peers_waited(values, share):
    assert ran_share(samples(*SAMPLED, *values), 1, "a", START_NS) == share


def test_work_before_the_wait_and_while_the_process_ends_is_not_of_the_wait():
    rows = samples(*SAMPLED, (CPU, 1, 0.0, 2.0), (CPU, 1, 1.0, 2.9), (CPU, 1, 20.0, 9.0))
    began_ns = START_NS + NS_PER_S // 2
    assert ran_share(rows, 1, "a", began_ns, START_NS + 12 * NS_PER_S) == 0.0


@pytest.mark.parametrize("end", ["left_ns", "failed_ns", "ended_ns"])
def test_a_sleeping_rank_that_takes_long_to_end_is_stuck_and_does_not_compute(end):
    finding = finding_of(main_threads([1], BUSY, "is"), main_threads([0, 2], BARRIER, "is"))
    ended = {"rank": 1, "host": "a", "exit_signal": 2, end: START_NS + 10 * NS_PER_S}
    workers = conform(WORKERS, pl.DataFrame([ended]))
    rows = samples(*SAMPLED, (CPU, 1, 0.0, 1.0), (QUEUE, 1, 0.0, 1.0), (QUEUE, 1, 20.0, 9.0))
    (explained,) = with_cpu_time([finding], rows, workers, START_NS + 20 * NS_PER_S)
    assert verdict_in_words(explained).startswith("rank 1 is stuck in tokenize (job.py:6)")
    assert "it ran for 0% of the time that its peers waited" in explained.evidence[0]


def test_how_long_a_thread_ran_is_not_known_of_a_host_that_was_not_sampled_for_long():
    rows = samples((CPU, 1, 0.0, 2.0), *SAMPLED[:4])
    assert ran_share(rows, 1, "a", START_NS) is None
    assert ran_share(samples((CPU, 1, 0.0, 2.0), *SAMPLED), 1, "b", START_NS) is None


@pytest.mark.parametrize(
    ("ran_s", "words", "goes_on"),
    [
        (19.0, "rank 1 computes in tokenize (job.py:6)", True),
        (0.5, "rank 1 is stuck in tokenize (job.py:6)", False),
        (1.8, "rank 1 is stuck in tokenize (job.py:6)", False),  # it was interrupted, and ended
    ],
)
def test_a_thread_is_stuck_only_where_it_does_not_run(ran_s, words, goes_on):
    finding = finding_of(main_threads([1], BUSY, "is"), main_threads([0, 2], BARRIER, "is"))
    workers = conform(WORKERS, pl.DataFrame([{"rank": 1, "host": "a"}]))
    rows = samples(*SAMPLED, (CPU, 1, 0.0, 1.0), (CPU, 1, 20.0, 1.0 + ran_s))
    (explained,) = with_cpu_time([finding], rows, workers, START_NS + 20 * NS_PER_S)
    assert verdict_in_words(explained) == f"{words}; ranks 0, 2 wait in barrier, at job.py:20"
    assert works(explained) == goes_on
    assert f"it ran for {ran_s / 20:.0%} of the time that its peers waited" in explained.evidence[0]


@pytest.mark.parametrize(
    ("calls", "goes_on"), [(COMPILING, True), (LOADING, True), (LOADER, False), (BUSY, False)]
)
def test_who_compiles_or_loads_a_checkpoint_goes_on(calls, goes_on):
    assert works(finding_of(main_threads([1], calls, "is"))) == goes_on


def test_a_rank_that_stands_somewhere_and_may_run_is_not_called_stuck():
    said = verdict_in_words(finding_of(main_threads([1], BUSY, "is")))
    meaning = "its host code has not reached the call that its peers wait in"
    assert said == f"rank 1: {meaning}; rank 1 is in tokenize (job.py:6)"


def test_what_peers_do_is_said_once_of_several_findings():
    peers = main_threads([0], BARRIER, "is")
    findings = [
        finding_of(main_threads([1], LOADER, "is"), peers),
        finding_of(main_threads([2], LOADER, "is"), peers, ranks=(2,)),
    ]
    assert verdicts_in_words(findings) == (
        "rank 1 waits for DataLoader workers in train (job.py:14); rank 2 waits for DataLoader workers in "
        "train (job.py:14); rank 0 waits in barrier, at job.py:20"
    )


def worker(**facts: Any) -> pl.DataFrame:
    alive = {"exit_code": -1, "exit_signal": -1, "failed_ns": -1, "left_ns": -1}
    return conform(WORKERS, pl.DataFrame([{"rank": 1, "host": "a", "pid": 77, **alive, **facts}]))


@pytest.mark.parametrize("end", [{"exit_signal": 15}, {"exit_code": 1}, {"failed_ns": 5}, {"left_ns": 5}])
def test_py_spy_and_the_pid_are_advised_of_a_living_process_alone(end):
    finding = finding_of(main_threads([1], BUSY, "is"))
    assert "py-spy dump" in advice_in_words(finding, worker())
    assert "py-spy" not in advice_in_words(finding, worker(**end))
    assert advice_in_words(finding, worker()).endswith("(rank 1: pid 77)")
    several = pl.concat([worker(), worker(rank=0, host="b")])
    assert advice_in_words(finding, several).endswith("(rank 1: pid 77 on a)")
    assert not advice_in_words(finding, worker(**end)).endswith(")")
    several = pl.concat([worker(**end), worker(rank=0, host="b")])
    assert advice_in_words(finding, several).endswith("(rank 1: on a)")
    placed = replace(finding, place=CodeLocation("tokenize", "job.py", 6))
    assert advice_in_words(placed, worker(**end)).startswith("see what rank 1 does in tokenize (job.py:6)")


def test_stacks_of_a_job_that_dpro_records_are_taken_by_dpro():
    finding = finding_of(main_threads([1], BUSY, "is"))
    assert ": `dpro attach --pid 77 --stacks` for stacks" in advice_in_words(finding, worker(source=RECORDER))


def test_the_line_at_which_a_rank_is_stuck_is_quoted_from_the_file_that_the_job_ran(tmp_path):
    script = tmp_path / "job.py"
    script.write_text("import time\n    time.sleep(3600)\n")
    began_ns = script.stat().st_mtime_ns
    finding = replace(finding_of(), place=CodeLocation("<module>", str(script), 2))
    said = advice_in_words(finding, worker(started_ns=began_ns))
    assert said.startswith("see what rank 1 does in job.py:2 (`time.sleep(3600)`): ")
    assert "time.sleep" not in advice_in_words(finding, worker(started_ns=began_ns - 1))  # changed since
    for path, line in ((script, 3), (script, 0), (tmp_path / "none.py", 1), (tmp_path, 1), ("job.py", 2)):
        assert source_line(CodeLocation("f", str(path), line), began_ns) == ""


@pytest.mark.parametrize(
    ("calls", "advised"),
    [(LOADER, "DataLoader(timeout="), (COMPILING, "TORCHINDUCTOR_CACHE_DIR"), (WAITING, "timeout")],
)
def test_what_a_rank_does_decides_what_to_do(calls, advised):
    finding = finding_of(main_threads([1], calls, "is"))
    assert advised in advice_in_words(finding, worker())
    assert "py-spy" not in advice_in_words(finding, worker())


def test_advice_on_a_rank_that_computes_holds_in_any_step_and_says_where_to_look():
    seen = main_threads([1], BUSY, "is").then("; it ran {ran_share}", ran_share=0.9)
    computes = replace(finding_of(seen), place=CodeLocation("tokenize", "job.py", 6))
    assert advice_in_words(computes, worker()) == (
        "see what rank 1 does in tokenize (job.py:6); if it needs that long, do it once and keep its result "
        "on disk, share it among all ranks, or give `init_process_group` a longer `timeout`"
    )


@pytest.mark.parametrize(
    ("number", "advised", "not_advised"),
    [(6, "PYTHONFAULTHANDLER=1", "dmesg"), (9, "dmesg", "PYTHONFAULTHANDLER"), (-1, "log", "dmesg")],
)
def test_only_who_was_killed_may_have_lacked_memory(number, advised, not_advised):
    job = Job(3)
    for _ in range(3):
        job.call(WORLD, WORLD)
    job.ended(1, 5, number=number, code=-1 if number > 0 else 3)
    (finding,) = job.findings()
    assert advised in advice_in_words(finding, worker())
    assert not_advised not in advice_in_words(finding, worker())


# Whole jobs.


def standing(job: Job, at_s: float = 60, **stacks: tuple[str, ...]) -> None:
    """Stacks of ranks `r0`, `r1`, …, that were recorded while the job stood still, until SIGTERM ended it."""
    for name, calls in stacks.items():
        rank = int(name[1:])
        job.dump(rank, at_s)
        job.ended(rank, at_s + 1, number=15)
        job.workers[rank]["stack"] = "\n".join(calls)


@pytest.fixture
def job() -> Job:
    job = Job(3)
    for _ in range(4):
        job.call(WORLD, WORLD)
    return job


def test_both_sides_of_a_mismatch_are_said_with_their_places(job):
    job.call([0], WORLD, OPEN, "broadcast")
    job.call([1, 2], WORLD, OPEN, "barrier", bytes_in=-1, bytes_out=-1, dtype="")
    standing(job, r0=BUFFERS, r1=BARRIER, r2=BARRIER)
    (finding,) = job.findings()
    assert verdict_in_words(finding) == (
        "rank 0: its calls differ from those of the others: a bug in the program, not a hardware fault; rank "
        "0 waits in DDP's broadcast of buffers, in validate (job.py:15); ranks 1-2 wait in barrier, at "
        "job.py:20"
    )
    assert finding.place == CodeLocation("validate", "/home/me/job.py", 15)
    assert "model.module" in advice_in_words(finding, WORKERS.empty())


def test_buffers_that_most_ranks_broadcast_are_no_evaluation_of_one(job):
    job.call([1, 2], WORLD, OPEN, "broadcast")
    job.call([0], WORLD, OPEN, "barrier", bytes_in=-1, bytes_out=-1, dtype="")
    standing(job, r0=BARRIER, r1=BUFFERS, r2=BUFFERS)
    (finding,) = job.findings()
    assert finding.ranks == (0,)
    assert advice_in_words(finding, WORKERS.empty()).startswith(
        "make these calls on all ranks, in the same order"
    )


def test_ranks_that_make_groups_while_others_wait_elsewhere_are_the_program_s_fault(job):
    job.call([0], WORLD, OPEN)
    standing(job, r0=BACKWARD, r1=MAKING, r2=MAKING)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (1, 2))
    said = verdict_in_words(finding)
    assert said.endswith(
        "ranks 1-2 wait in new_group for other ranks, in build_mesh (job.py:10); rank 0 waits in backward, "
        "in train (job.py:15)"
    )
    assert advice_in_words(finding, WORKERS.empty()).startswith(
        "call `new_group` on all ranks and in one order"
    )


def test_who_makes_a_group_may_wait_for_a_rank_that_does_something_else(job):
    job.call([0], WORLD, OPEN)
    standing(job, r0=BACKWARD, r1=MAKING, r2=LOADER)
    named = [(finding.class_, finding.ranks, finding.confidence) for finding in job.findings()]
    assert named == [("hang.host", (2,), 0.98), ("hang.host", (1,), 0.5)]


MONITORED = (f"{TORCH}/distributed/distributed_c10d.py:5435 monitored_barrier", "/home/me/job.py:14 <module>")


def test_stacks_show_who_is_waited_for_in_calls_that_are_not_recorded(job):
    standing(job, r0=WAITING, r1=MONITORED, r2=MONITORED)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.host", (0,), 0.75)
    assert verdict_in_words(finding).endswith("ranks 1-2 wait in monitored_barrier, at job.py:14")


@pytest.mark.parametrize(
    ("at_s", "stacks"),
    [
        (5, {"r0": WAITING, "r1": MONITORED, "r2": MONITORED}),  # not for long
        (60, {"r0": WAITING, "r1": MONITORED}),  # one is not known
        (60, {"r0": BUSY, "r1": BUSY, "r2": LOADER}),  # none waits for another
        (60, {"r0": MONITORED, "r1": MONITORED, "r2": MONITORED}),  # none is missing
    ],
)
def test_stacks_that_show_no_wait_for_a_rank_name_none(job, at_s, stacks):
    standing(job, at_s, **stacks)
    assert job.findings() == []


def test_a_job_that_ended_well_after_it_stood_still_waited_for_no_rank(job):
    standing(job, r0=WAITING, r1=MONITORED, r2=MONITORED)
    for rank in WORLD:
        job.workers[rank] |= {"exit_signal": -1, "exit_code": 0}
    assert job.findings() == []


def epochs(job: Job, *lengths: int, ranks: range = WORLD) -> None:
    """Epochs of steps with two calls each, with a barrier at the end of each."""
    for length in lengths:
        for _ in range(length):
            job.call(ranks, ranks)
            job.call(ranks, ranks, bytes_in=40, bytes_out=40)
        job.call(ranks, ranks, op="barrier", bytes_in=-1, bytes_out=-1, dtype="")


@pytest.mark.parametrize("size", [2, 3])
def test_a_loop_that_ended_earlier_than_the_time_before_is_said_with_by_how_much(size):
    job, ranks = Job(size), range(size)
    epochs(job, 6, 6, ranks=ranks)
    for _ in range(4):
        job.call(ranks, ranks)
        job.call(ranks, ranks, bytes_in=40, bytes_out=40)
    job.call([1], ranks, OPEN, "barrier", bytes_in=-1, bytes_out=-1, dtype="")
    job.call([rank for rank in ranks if rank != 1], ranks, OPEN)
    for rank in ranks:
        job.dump(rank, 60)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (1,))
    assert (
        verdict_in_words(finding)
        == "rank 1: its loop ended 2 rounds short: a bug in the program, not a hardware fault"
    )
    assert (
        "rank 1 called barrier after 4 rounds of other calls, the time before after 6: the loop ended 2 short"
        in finding.evidence
    )
    assert "DistributedSampler" in advice_in_words(finding, WORKERS.empty())


def test_of_two_ranks_the_one_whose_call_none_had_made_before_departs():
    job, ranks = Job(2), range(2)
    for _ in range(5):
        job.call(ranks, ranks)
    job.call([0], ranks, OPEN)
    job.call([1], ranks, OPEN, "barrier", bytes_in=-1, bytes_out=-1, dtype="")
    for rank in ranks:
        job.dump(rank, 60)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.mismatch", (1,), 0.75)
    assert "no rank had called barrier in this group before" in finding.evidence


def test_a_rank_with_fewer_updates_is_said_to_have_ended_its_loop_early(job):
    job.call([1], WORLD, OPEN, "barrier", bytes_in=-1, bytes_out=-1, dtype="")
    job.call([0, 2], WORLD, OPEN)
    for rank, step in ((0, 79), (1, 77), (2, 79)):
        job.dump(rank, 60)
        job.steps.append({"rank": rank, "step": step, "start_ns": START_NS, "duration_ns": 10})
    (finding,) = job.findings()
    assert verdict_in_words(finding).startswith("rank 1: its loop ended 2 updates short")
    assert "rank 1 had made 78 updates, the others 80: the loop ended 2 short" in finding.evidence


def test_messages_that_differ_are_not_compared_with_collectives_of_the_same_number():
    job, ranks = Job(2), range(2)
    for _ in range(4):
        job.call(ranks, ranks)
    for size in (400, 400, 400):
        job.send(0, 1, DONE, bytes_in=size, bytes_out=size)
        job.recv(1, 0, DONE, bytes_in=size, bytes_out=size)
    job.send(0, 1, bytes_in=8, bytes_out=8)
    job.recv(1, 0, bytes_in=16, bytes_out=16)
    for rank in ranks:
        job.dump(rank, 60)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (0, 1))
    assert not {"never-before", "came-early"} & {one.kind for one in finding.observations}


def test_doing_of_ranks_that_do_different_things_is_not_known():
    observations = main_threads([1], LOADER, "is"), main_threads([2], LOADING, "is")
    assert doing_of(finding_of(*observations, ranks=(1, 2))) == ""
