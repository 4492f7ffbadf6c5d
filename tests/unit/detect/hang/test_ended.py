"""Who is named when a job hung and was then ended, or failed: small cases worked out by hand."""

from __future__ import annotations

import pytest

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.hang.case import lost_peer
from dpro.detect.hang.evidence import verdict_in_words
from dpro.detect.hang.stacks import calls_in_words
from dpro.units import NS_PER_S
from tests.unit.detect.hanging import DONE, OPEN, Job

WORLD = range(4)
INTERRUPTED = "KeyboardInterrupt\njob.py:7 main"
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:9616\njob.py:9 step"
BUG = "ValueError: x is negative\n/venv/lib/python3.11/site-packages/lib.py:3 f\njob.py:31 step"
LOADING = "/lib/python3.11/multiprocessing/connection.py:395 _recv\n/torch/utils/data/dataloader.py:725 next"


@pytest.fixture
def job() -> Job:
    job = Job(4)
    job.call(WORLD, WORLD)
    return job


def named(job: Job) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.class_, finding.ranks) for finding in job.findings()]


def evidence_of(finding: Finding) -> str:
    return "\n".join(finding.evidence)


def saved(job: Job, at_s: float, *ranks: int) -> None:
    for rank in ranks:
        job.dump(rank, saved_s=at_s)


def test_a_call_that_failed_when_the_job_was_interrupted_is_unfinished_if_one_never_made_it(job):
    job.call([0, 1, 3], WORLD, DONE)  # so PyTorch calls what failed
    saved(job, 60, *WORLD)
    for rank in WORLD:
        job.ended(rank, 61, number=2, error=INTERRUPTED, final=True)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.host", (2,))
    assert "ranks 0-1, 3 entered and are stuck; rank 2 never entered" in evidence_of(finding)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (["job.py:7 load", "job.py:30 main"], "job.py:7 load < job.py:30 main"),
        (["/lib/python3/a.py:0 f", "job.py:7 load"], "/lib/python3/a.py:0 f < job.py:7 load"),
        (
            [*(f"/lib/python3/a.py:{line} f" for line in range(6)), "job.py:7 load", "job.py:30 main"],
            "/lib/python3/a.py:0 f < /lib/python3/a.py:1 f < /lib/python3/a.py:2 f < … < job.py:7 load",
        ),
        (
            ["/lib/python3/a.py:0 f"] * 4,
            "/lib/python3/a.py:0 f < /lib/python3/a.py:0 f < /lib/python3/a.py:0 f",
        ),
    ],
)
def test_the_call_of_the_users_own_code_is_quoted_of_any_stack(calls, words):
    assert calls_in_words(calls) == words


def test_a_deadlock_in_first_calls_stays_one_though_those_of_ranks_that_were_ended_last_failed(job):
    for rank, pair in ((0, [0, 1]), (1, [1, 3]), (2, [0, 2]), (3, [2, 3])):
        job.call([rank], pair, OPEN)
        failed = {"group": "-".join(map(str, pair)), "group_ranks": f"{pair[0]},{pair[1]}", "enqueued": 1}
        job.dump(rank, saved_s=60 + rank, **failed, completed=1 if rank >= 2 else -1)
        job.ended(rank, 60 + rank, number=9, final=rank >= 2)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.cause) == ("hang.mismatch", (0, 1, 2, 3), "deadlock")
    assert "a deadlock, each waits for the next" in verdict_in_words(finding)
    assert all(
        f'all_reduce #1 of group "{pair}"' in evidence_of(finding) for pair in ("0-1", "1-3", "0-2", "2-3")
    )


def test_a_call_that_all_made_and_finished_stays_finished_however_the_job_ended(job):
    job.call(WORLD, WORLD, DONE)
    saved(job, 60, *WORLD)
    for rank in WORLD:
        job.ended(rank, 61, number=2, error=INTERRUPTED, final=True)
    assert job.findings() == []


def test_a_call_that_a_rank_may_have_made_after_its_last_dump_is_believed(job):
    # All were killed while they moved; the dump of rank 2 is just older than the calls of the others.
    job.dump(2, saved_s=0.001)
    job.call([0, 1, 3], WORLD, DONE)
    saved(job, 60, 0, 1, 3)
    for rank in WORLD:
        job.ended(rank, 61, number=9)
    assert job.findings() == []


@pytest.mark.parametrize("how", [{"code": 0}, {"number": 15}])
def test_a_rank_that_left_early_is_the_cause_and_not_those_that_failed_without_it(job, how):
    # Its launcher may send SIGTERM while it is slow to exit: it had left before that.
    job.call([0, 1, 3], WORLD, DONE)
    saved(job, 0.1, *WORLD)
    job.ended(2, 0.1, final=True, **how)
    for rank in (0, 1, 3):
        job.ended(rank, 0.2, code=1, error=LOST, final=True)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (2,))
    assert "it exited early without an error" in verdict_in_words(finding)
    assert "ranks 0-1, 3 failed only because it was gone" in evidence_of(finding)


@pytest.mark.parametrize(("last_step", "said"), [(8, "had fewer steps"), (9, "skipped calls in a step")])
def test_a_rank_that_left_after_more_steps_than_its_peers_ended_left_calls_out(job, last_step, said):
    job.call([0, 1, 3], WORLD, DONE)
    saved(job, 0.1, *WORLD)
    for rank, step in ((0, 8), (1, 8), (2, last_step), (3, 8)):
        job.steps.append({"rank": rank, "step": step, "start_ns": 1, "duration_ns": 10})
    job.ended(2, 0.1, code=0, final=True)
    for rank in (0, 1, 3):
        job.ended(rank, 0.2, code=1, error=LOST, final=True)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (2,))
    assert said in verdict_in_words(finding)


def test_a_rank_that_left_early_while_its_peers_hang_is_the_cause(job):
    job.call([0, 1, 3], WORLD, OPEN)
    saved(job, 60, 0, 1, 3)
    saved(job, 0.1, 2)
    job.ended(2, 0.1, code=0, final=True)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (2,))


def test_a_rank_that_left_without_a_word_is_the_cause_where_all_others_lost_a_peer(job):
    job.ended(2, 5, code=0)
    for rank in (0, 1, 3):
        job.ended(rank, 5.5, code=1, error=LOST)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.mismatch", (2,), 0.75)


def test_a_rank_that_was_stuck_and_left_well_when_it_was_interrupted_was_stuck(job):
    job.call([0, 1, 3], WORLD, OPEN)
    saved(job, 60, *WORLD)
    for rank in (0, 1, 3):
        job.ended(rank, 61, number=2, error=INTERRUPTED, final=True)
    job.ended(2, 61, code=0, final=True)
    assert named(job) == [("hang.host", (2,))]


def test_who_fails_of_its_own_is_the_cause_and_who_lost_a_peer_is_not(job):
    job.ended(0, 4.9, code=1, error=LOST)
    job.ended(2, 5, code=1, error=BUG)
    for rank in (1, 3):
        job.ended(rank, 6, number=15)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("dead.rank", (2,))
    assert "ValueError: x is negative (job.py:31 step)" in evidence_of(finding)
    assert verdict_in_words(finding) == "rank 2: its script raised an exception"


def test_where_its_peers_lost_a_rank_that_a_library_ended_is_said(job):
    job.call([0, 1, 3], WORLD, DONE)
    saved(job, 0.1, 0, 1, 3)
    job.ended(2, 0.1, number=6)
    for rank in (0, 1, 3):
        job.ended(rank, 0.2, code=1, error=LOST, final=True)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("dead.rank", (2,))
    assert "ranks 0-1, 3 lost a peer in job.py:9 step; last call: all_reduce of" in evidence_of(finding)


def test_who_only_lost_a_peer_is_no_sure_cause(job):
    for rank in WORLD:
        job.ended(rank, 5 + rank, code=1, error=LOST)
    (finding,) = job.findings()
    assert (finding.ranks, finding.confidence) == ((0,), 0.5)
    assert "which end of the connection failed is not known" in evidence_of(finding)


@pytest.mark.parametrize(("number", "cause"), [(9, (1,)), (-1, (0,))])
def test_an_exit_code_is_a_cause_only_where_no_rank_beside_it_has_a_reason_of_its_own(job, number, cause):
    job.ended(0, 4.9, code=1)
    job.ended(1, 5, number=number, code=0 if number < 0 else -1)
    for rank in (2, 3):
        job.ended(rank, 6, number=15)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("dead.rank", cause)


def test_two_ranks_that_are_killed_at_once_stay_two(job):
    for rank in (1, 3):
        job.ended(rank, 5, number=9)
    for rank in (0, 2):
        job.ended(rank, 5.1, code=1, error=LOST)
    assert named(job) == [("dead.rank", (1,)), ("dead.rank", (3,))]


def test_what_fails_on_most_ranks_at_once_is_the_fault_of_none(job):
    for rank in WORLD:
        job.ended(rank, 5 + rank / 100, code=1, error=BUG)
    assert job.findings() == []


def test_ranks_that_are_killed_one_by_one_are_killed_together(job):
    for rank in WORLD:
        job.ended(rank, 5 + rank, number=9)
    assert job.findings() == []


def test_two_ranks_that_stand_still_stay_two_also_without_their_dumps(job):
    job.call([0, 3], WORLD, OPEN)
    saved(job, 60, 0, 3)
    for rank in (0, 3):
        job.beat(rank, 60)
    job.lose(1, 2)
    for rank in (1, 2):
        job.beat(rank, 1)
    findings = job.findings()
    assert [(each.class_, each.ranks, each.confidence) for each in findings] == [
        ("hang.host", (1,), 0.9),
        ("hang.host", (2,), 0.9),
    ]


def test_a_second_rank_that_stands_still_is_named_beside_one_that_never_came(job):
    job.call([0], [0, 1], OPEN)
    job.call([3], [2, 3], OPEN)
    saved(job, 60, 0, 1, 3)
    for rank in (0, 1, 3):
        job.beat(rank, 60)
    job.lose(2)
    job.beat(2, 1)
    assert sorted(named(job)) == [("hang.host", (1,)), ("hang.host", (2,))]


def test_a_missing_dump_of_a_rank_that_others_wait_for_alone_may_be_a_second_cause(job):
    job.call([0], [0, 1], OPEN)
    job.call([3], [2, 3], OPEN)
    job.lose(2)
    (sure, open_) = job.findings()
    assert (sure.class_, sure.ranks, sure.confidence) == ("hang.host", (1,), 0.9)
    assert (open_.class_, open_.ranks, open_.confidence) == ("hang.rank", (2,), 0.25)
    assert "it may be stuck as well, or wait for the rank that is" in evidence_of(open_)


def test_a_dump_that_is_older_says_what_the_rank_had_open_and_not_what_of_it_is_stuck(job):
    job.call([2], WORLD, OPEN)
    for state in (DONE, DONE, OPEN):
        job.call([0, 1, 3], WORLD, state)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.rank", (2,))
    assert "when its dump was saved, rank 2 had 1 unfinished, the last all_reduce #2" in evidence_of(finding)
    assert "do not show whether its host or its GPU hangs" in verdict_in_words(finding)


def test_who_a_barrier_names_as_not_come_is_stuck_and_not_who_says_so(job):
    said = "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 8000 ms\njob.py:9 step"
    job.ended(0, 5, code=1, error=said)
    for rank in (1, 2, 3):
        job.ended(rank, 6, number=15)
    assert named(job) == [("hang.host", (1,)), ("hang.host", (3,))]
    assert all("failed to pass monitoredBarrier" in evidence_of(finding) for finding in job.findings())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LOST, True),
        ("DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("DistNetworkError: The client socket has timed out after 60000ms", True),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", True),
        ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 8000 ms", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer\njob.py:9 upload", True),
        (f"ConnectionResetError: [Errno 104] Connection reset by peer\n{LOADING}", False),
        (BUG, False),
        ("OutOfMemoryError: CUDA out of memory.", False),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        ("", False),
    ],
)
def test_losing_a_peer_is_distinguished_from_failing_of_its_own(error, expected):
    assert lost_peer(error) is expected


def test_a_rank_that_is_killed_because_it_did_not_go_when_all_were_asked_to_did_not_die_of_itself(job):
    job.ended(2, 35, number=9)
    for rank in (0, 1, 3):
        job.ended(rank, 5, number=15)
    assert job.findings() == []


def test_who_lost_a_peer_that_was_interrupted_is_no_cause(job):
    job.ended(1, 5, number=2, error=INTERRUPTED)
    for rank in (0, 2, 3):
        job.ended(rank, 5.1, code=1, error=LOST)
    assert job.findings() == []


ROUND = (400, 40, 80)


def rounds(job: Job, ranks, number: int = 4) -> None:
    """Some rounds of three calls of different sizes."""
    for _ in range(number):
        for size in ROUND:
            job.call(ranks, WORLD, bytes_in=size, bytes_out=size)


@pytest.fixture
def aborted() -> Job:
    """Rank 2 was ended by a library in the fifth round; its calls of that round are lost."""
    job = Job(4)
    rounds(job, WORLD)
    job.ended(2, 5, number=6)
    for rank in (0, 1, 3):
        job.ended(rank, 6, number=15, final=True)
    return job


def test_the_rank_that_leaves_a_call_out_is_at_fault_and_not_the_one_that_a_library_ends(aborted):
    aborted.call([0, 3], WORLD, bytes_in=400, bytes_out=400)
    aborted.call([1], WORLD, bytes_in=40, bytes_out=40)
    (finding,) = aborted.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (1,))


@pytest.mark.parametrize(
    ("error", "means"),
    [
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "disk is"),
        (f"ConnectionResetError: [Errno 104] Connection reset by peer\n{LOADING}", "worker process of its"),
    ],
)
def test_an_exception_that_does_not_name_its_cause_is_explained(job, error, means):
    job.ended(2, 5, code=1, error=error)
    for rank in (0, 1, 3):
        job.ended(rank, 5.1, code=1, error=LOST)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence) == ("dead.rank", (2,), 0.9)
    assert means in evidence_of(finding)


def test_where_a_stuck_rank_is_ends_with_the_innermost_call_of_its_script():
    library = [f"/usr/lib/python3.11/subprocess.py:{line} wait" for line in range(4)]
    shown = " < ".join(library[:3])
    assert calls_in_words([*library, "job.py:9 step"]) == f"{shown} < … < job.py:9 step"
    assert calls_in_words([*library[:3], "job.py:9 step", "job.py:20 main"]) == f"{shown} < job.py:9 step"
    assert calls_in_words(["job.py:9 step", "job.py:20 main"]) == "job.py:9 step < job.py:20 main"
    assert calls_in_words(library) == shown


@pytest.mark.parametrize("warm_up", [(), (12, 36, 400, 36, 4)])
def test_of_two_ranks_the_one_whose_call_departs_from_its_rounds_is_at_fault(warm_up):
    job = Job(2)
    for size in warm_up:
        job.call(range(2), range(2), bytes_in=size, bytes_out=size)
    for _ in range(4):
        for size in ROUND:
            job.call(range(2), range(2), bytes_in=size, bytes_out=size)
    for size in (400, 80):
        job.call([1], range(2), bytes_in=size, bytes_out=size)
    job.ended(0, 5, number=6)
    job.ended(1, 6, number=15, final=True)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.mismatch", (1,), 0.9)
    assert "all ranks called all_reduce of 40 bytes of float32 there" in evidence_of(finding)
    assert "rank 1 skipped 1 call" in evidence_of(finding)
    assert "rank 0 received more than it expected" in evidence_of(finding)


@pytest.mark.parametrize(("within", "class_"), [(True, "hang.mismatch"), (False, "dead.rank")])
def test_a_rank_that_a_library_ends_within_a_call_while_its_peers_call_as_before_called_otherwise(
    aborted, within, class_
):
    calls = ["/venv/site-packages/torch/distributed/distributed_c10d.py:3 all_reduce"] * within
    aborted.workers[2]["stack"] = "\n".join([*calls, "job.py:9 main"])
    aborted.call([0, 1, 3], WORLD, bytes_in=400, bytes_out=400)
    (finding,) = aborted.findings()
    assert (finding.class_, finding.ranks) == (class_, (2,))


def test_calls_that_never_repeated_or_that_all_change_together_accuse_no_rank(aborted):
    aborted.call([0, 1, 3], WORLD, bytes_in=7, bytes_out=7)
    (finding,) = aborted.findings()
    assert (finding.class_, finding.ranks) == ("dead.rank", (2,))


def test_how_a_rank_ended_that_stood_still_comes_before_that_it_was_stuck(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in (0, 1, 3):
        job.dump(rank, saved_s=60)
        job.ended(rank, 61, code=1, error=LOST)
    job.dump(2, saved_s=55)
    job.ended(2, 60, number=9)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("dead.rank", (2,))
    assert "SIGKILL" in evidence_of(finding)
    assert "its peers had waited for rank 2 for 60" in evidence_of(finding)
    observed = {one.kind: one.values for one in finding.observations}
    assert observed["death"]["exit_signal"] == 9
    assert observed["waited-for"]["waited_ns"] == 60 * NS_PER_S - 6_000_000  # since the last call, #6


def test_where_a_single_stuck_rank_stands_is_its_place(job):
    job.call([0, 1, 3], WORLD, OPEN)
    saved(job, 60, *WORLD)
    job.ended(2, 61, number=15)
    job.workers[2]["stack"] = "/venv/site-packages/lib.py:3 f\njob.py:31 step"
    (finding,) = job.findings()
    assert (finding.class_, finding.place) == ("hang.host", CodeLocation("step", "job.py", 31))


@pytest.mark.parametrize(("other_s", "class_"), [(60.02, "hang.host"), (63, "dead.rank")])
def test_ranks_that_are_killed_at_once_are_not_gone_by_themselves_though_one_missed_the_other(
    other_s, class_
):
    job = Job(2)
    for _ in range(3):
        job.call(range(2), range(2))
    job.call([0], range(2), OPEN)
    for rank in range(2):
        job.dump(rank, saved_s=59)
    job.ended(0, other_s, number=9, error=LOST)
    job.ended(1, 60, number=9)
    assert named(job) == [(class_, (1,))]


def test_two_ranks_that_both_died_after_standing_still_are_both_named(job):
    job.call([0, 3], WORLD, OPEN)
    saved(job, 60, 0, 3)
    for rank in (0, 3):
        job.ended(rank, 61, code=1, error=LOST)
    job.lose(1, 2)
    for rank in (1, 2):
        job.ended(rank, 40 + 3 * rank, number=9)
    assert named(job) == [("dead.rank", (1,)), ("dead.rank", (2,))]
    assert all(finding.confidence > 0.9 for finding in job.findings())


def test_a_rank_that_is_killed_because_it_did_not_go_after_its_peers_had_failed_was_stuck(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in (0, 1, 3):
        job.dump(rank, saved_s=60)
        job.ended(rank, 61, code=1, error=LOST)
    job.dump(2, saved_s=62)
    job.ended(2, 91, number=9)
    assert named(job) == [("hang.host", (2,))]
