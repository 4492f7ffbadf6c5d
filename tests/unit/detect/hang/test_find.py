"""Who is named when a job hangs: small cases worked out by hand."""

from __future__ import annotations

import pytest

from dpro.detect.findings import Finding
from dpro.detect.hang.evidence import verdict_in_words
from dpro.detect.hang.waits import sinks
from dpro.members import members_text
from dpro.units import NS_PER_S, time_in_words
from dpro.words import numbers_in_words, ranks_in_words
from tests.unit.detect.hanging import DONE, OPEN, RUNNING, START_NS, Job

WORLD = range(4)


def named(job: Job) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.class_, finding.ranks) for finding in job.findings()]


def evidence_of(finding: Finding) -> str:
    return "\n".join(finding.evidence)


@pytest.fixture
def job() -> Job:
    job = Job(4)
    job.call(WORLD, WORLD)
    return job


def test_a_job_that_has_finished_all_it_began_hangs_nowhere(job):
    assert job.findings() == []


def test_nothing_at_all_hangs_nowhere():
    assert Job(4).findings() == []


def test_a_rank_that_never_came_and_waits_for_nothing_is_stuck_on_its_host(job):
    job.call([0, 1, 3], WORLD, OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.component_kind, finding.component_id) == ("hang.host", "rank", "2")
    assert finding.confidence > 0.95
    assert "ranks 0-1, 3 entered and are stuck; rank 2 never entered" in evidence_of(finding)
    assert 'all_reduce #2 of group "0-1-2-3"' in evidence_of(finding)
    assert "its last call in that group is #1, which finished" in evidence_of(finding)
    observed = {one.kind: one.values for one in finding.observations}
    assert observed["nothing-unfinished"] == {"rank": 2, "last_sequence": 1}
    assert observed["operation-attendance"] == {
        "operation": "all_reduce", "sequence": 2, "group": "0-1-2-3", "ranks": [0, 1, 2, 3],
        "waiting_ranks": [0, 1, 3], "finished_ranks": [], "came_ranks": [], "absent_ranks": [2],
        "unknown_ranks": [], "since_at_ns": START_NS + 6_000_000,
    }  # fmt: skip


def test_two_ranks_may_be_stuck_at_the_same_time(job):
    job.call([0, 3], WORLD, OPEN)
    assert named(job) == [("hang.host", (1,)), ("hang.host", (2,))]


def test_the_first_cause_is_found_through_nested_groups(job):
    # 3 never comes to the pair (2, 3); 2 waits there and does not come to (0, 2); 0 does not come to (0, 1).
    job.call([2], [2, 3], OPEN)
    job.call([0], [0, 2], OPEN)
    job.call([1], [0, 1], OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.host", (3,))
    (chain,) = [one for one in finding.observations if one.kind == "chain-of-waiting"]
    assert chain.text == (
        'the chain: rank 1 waits in all_reduce #1 of group "0-1" (ranks 0-1) for rank 0; '
        'rank 0 waits in all_reduce #1 of group "0-2" (ranks 0, 2) for rank 2; '
        'rank 2 waits in all_reduce #1 of group "2-3" (ranks 2-3) for rank 3'
    )
    assert (chain.values["waiting_ranks"], chain.values["end_ranks"]) == ([1, 0, 2], [3])
    assert "blocked by this: ranks 0-2" in evidence_of(finding)


def test_what_waits_in_the_queue_behind_something_else_is_no_network_fault(job):
    # On GPUs calls return at once: ranks 0 and 1 have issued the next one, too, which waits in their queues.
    job.call([0], [0, 2], OPEN)
    job.call([0, 1], [0, 1], OPEN)
    assert named(job) == [("hang.host", (2,))]


def test_a_rank_that_does_not_finish_what_its_peers_finished_is_stuck_on_its_device(job):
    job.call([0, 1, 3], WORLD, DONE)
    job.call([2], WORLD, OPEN)
    job.call([0, 1, 2, 3], WORLD, OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.device", (2,))
    assert "rank 2 entered and is stuck; ranks 0-1, 3 finished it" in evidence_of(finding)


def test_a_rank_that_never_starts_what_runs_on_its_peers_is_stuck_on_its_device(job):
    job.call([0, 1, 3], WORLD, RUNNING)
    job.call([2], WORLD, OPEN)
    assert named(job) == [("hang.device", (2,))]
    (finding,) = job.findings()
    assert verdict_in_words(finding).startswith(
        "rank 2: a kernel on its GPU, launched before all_reduce #2, never ends"
    )
    evidence = evidence_of(finding)
    assert "rank 2 launched the call below, but its kernel never started" in evidence
    assert "its kernel is running on ranks 0-1, 3" in evidence


@pytest.mark.parametrize(
    ("held", "class_"), [([2], "hang.device"), ([2, 3], "hang.device"), ([1, 2, 3], "hang.comm")]
)
def test_the_devices_of_most_ranks_are_not_at_fault_at_once(job, held, class_):
    job.call([rank for rank in WORLD if rank not in held], WORLD, DONE)
    job.call(held, WORLD, OPEN)
    assert [finding.class_ for finding in job.findings()] == [class_]


@pytest.mark.parametrize(("later_s", "class_"), [(0.9, "hang.host"), (1.1, "hang.rank")])
def test_a_dump_is_older_than_a_call_only_by_more_than_clocks_of_hosts_differ(job, later_s, class_):
    job.call([0, 1, 3], WORLD, OPEN)
    job.dump(2, saved_s=100)
    for rank in (0, 1, 3):
        job.dump(rank, saved_s=200)
        job.rows[-1 - rank // 2]["enqueued_ns"] = round(START_NS + (100 + later_s) * NS_PER_S)
    assert [finding.class_ for finding in job.findings()] == [class_]


def test_what_all_began_and_no_rank_finishes_is_the_network_or_the_group(job):
    job.call(WORLD, WORLD, OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.component_kind) == ("hang.comm", "group")
    assert finding.component_id == "0-1-2-3 (0-3)"


def test_a_message_that_both_ranks_wait_for_is_between_these_two(job):
    job.send(0, 1)
    job.recv(1, 0)
    (finding,) = job.findings()
    assert (finding.class_, finding.component_kind) == ("hang.comm", "pair")
    assert finding.component_id == "0->1"


def test_messages_are_matched_in_order_so_that_the_one_not_sent_is_missed(job):
    for _ in range(2):
        job.send(0, 1, DONE)
        job.recv(1, 0, DONE)
    job.recv(1, 0, OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.host", (0,))
    assert "message #3 from rank 0 to rank 1" in evidence_of(finding)


def test_a_receive_whose_message_was_sent_is_the_receivers_device(job):
    job.send(0, 1, DONE)
    job.recv(1, 0, OPEN)
    job.call([0, 2, 3], WORLD, OPEN)
    assert named(job) == [("hang.device", (1,))]


def test_messages_that_still_wait_to_be_received_are_no_reason_to_be_late(job):
    # 0 has sent ahead, as pipelines do; 1 would receive if 0 came to the collective.
    job.send(0, 1)
    job.call([1, 2, 3], WORLD, OPEN)
    assert named(job) == [("hang.host", (0,))]


def test_two_ranks_that_receive_from_each_other_are_a_mistake_of_the_program(job):
    job.recv(0, 1)
    job.recv(1, 0)
    job.call([2, 3], WORLD, OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.component_kind) == ("hang.mismatch", (0, 1), "ranks")
    assert "wait for each other, which is a deadlock" in evidence_of(finding)


def test_the_rank_that_calls_groups_in_another_order_than_most_is_named(job):
    job.call([0, 1, 3], WORLD, OPEN)
    job.call([2], [0, 2], OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (2,))


@pytest.mark.parametrize(
    "different", [{"op": "broadcast"}, {"dtype": "float64"}, {"bytes_in": 8}, {"bytes_out": 8}]
)
def test_a_call_unlike_that_of_most_is_a_mistake_of_the_program(job, different):
    job.call([0, 1, 3], WORLD, OPEN)
    job.call([2], WORLD, OPEN, **different)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (2,))
    assert finding.evidence[0].startswith('call #2 of group "0-1-2-3": ranks 0-1, 3 called all_reduce of 400')


def test_a_rank_that_left_out_a_call_is_known_by_the_calls_after_it(job):
    sizes = (100, 200, 300, 400)
    for size in sizes:
        job.call([0, 1, 3], WORLD, OPEN, bytes_in=size)
    for size in sizes[1:]:
        job.call([2], WORLD, OPEN, bytes_in=size)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (2,))
    assert "rank 2 skipped 1 call there" in evidence_of(finding)


def test_sizes_of_an_all_to_all_may_differ(job):
    for rank in WORLD:
        job.call([rank], WORLD, DONE, op="all_to_all", bytes_out=100 + rank)
    job.call([0, 1, 3], WORLD, OPEN)
    assert named(job) == [("hang.host", (2,))]


def test_of_two_calls_that_differ_neither_is_said_to_be_right():
    job = Job(2)
    job.call([0], [0, 1], OPEN, bytes_in=8)
    job.call([1], [0, 1], OPEN)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.mismatch", (0, 1))
    assert finding.confidence <= 0.5
    assert "one of ranks 0-1 is wrong" in evidence_of(finding)


def test_a_missing_dump_of_the_rank_all_wait_for_is_said_and_nothing_is_made_up(job):
    job.call([0, 1, 3], WORLD, OPEN)
    job.lose(2)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.rank", (2,))
    assert finding.confidence <= 0.5
    assert "the dump of rank 2 is missing" in evidence_of(finding)
    causes = "its GPU does not answer, its process is gone, or it waits for something itself"
    assert causes in evidence_of(finding)


def test_of_several_missing_dumps_one_must_be_the_cause(job):
    job.call([0, 1], WORLD, OPEN)
    job.lose(2, 3)
    (finding,) = job.findings()
    assert (finding.ranks, finding.component_kind) == ((2, 3), "ranks")
    assert "one of ranks 2-3" in evidence_of(finding)


def test_the_missing_dump_that_explains_all_that_waits_is_the_one_named(job):
    job.call([0], [0, 2, 3], OPEN)
    job.call([1], [1, 2], OPEN)
    job.lose(2, 3)
    assert named(job) == [("hang.rank", (2,))]


def test_a_missing_dump_of_a_rank_that_may_be_a_victim_makes_it_no_more_than_a_possible_cause(job):
    job.call([0, 1], WORLD, OPEN)
    job.lose(1)
    *sure, possible = job.findings()
    assert [finding.ranks for finding in sure] == [(2,), (3,)]
    assert all("a dump of rank 1 would show" in evidence_of(finding) for finding in sure)
    assert (possible.class_, possible.ranks, possible.confidence) == ("hang.rank", (1,), 0.25)


def test_a_rank_known_to_have_gone_on_is_not_accused_with_its_old_dump(job):
    # The others finished #2 and #3, which rank 2 must have joined after its dump was saved.
    for state in (DONE, DONE, OPEN):
        job.call([0, 1, 3], WORLD, state)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.rank", (2,), 0.5)
    assert "the dump of rank 2 is older than what its peers wait for" in evidence_of(finding)


def test_what_was_begun_a_moment_before_the_dumps_is_only_under_way(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in WORLD:
        job.dump(rank, saved_s=2)
    assert job.findings() == []


def test_what_is_unfinished_for_long_when_the_dumps_are_saved_hangs(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in WORLD:
        job.dump(rank, saved_s=60)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("hang.host", (2,))
    assert (finding.waited_ns, finding.cost_ns) == (60 * NS_PER_S - 6_000_000, 0)  # the last call was #6


def test_a_stall_that_passed_hangs_nowhere(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in WORLD:
        job.dump(rank, saved_s=60)
        job.stepped(rank, 70)
    assert job.findings() == []


def test_what_a_rank_reported_of_a_group_shows_that_it_never_came(job):
    # Dumps of what is unfinished alone: rank 2's is empty but for the state of the group.
    job.rows.clear()
    job.call([0, 1, 3], WORLD, OPEN)
    job.dump(2, group="0-1-2-3", group_ranks=members_text(WORLD), enqueued=1, completed=1)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence > 0.95) == ("hang.host", (2,), True)


def test_a_rank_that_died_while_others_waited_is_dead(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in (0, 1, 3):
        job.dump(rank, saved_s=60)
        job.ended(rank, 70, number=15)
    job.lose(2)
    job.ended(2, 0, number=9)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("dead.rank", (2,))
    assert "SIGKILL" in evidence_of(finding)


@pytest.mark.parametrize(
    ("number", "means"),
    [
        (6, "a library or the program itself gave up"),
        (9, "memory ran out"),
        (7, "/dev/shm"),
        (4, "(SIGILL), seen"),
    ],
)
def test_what_usually_ends_a_process_by_such_a_signal_is_said(job, number, means):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in (0, 1, 3):
        job.dump(rank, saved_s=60)
    job.lose(2)
    job.ended(2, 0, number=number)
    (finding,) = job.findings()
    assert means in evidence_of(finding)


def test_a_rank_that_was_stuck_until_all_were_killed_did_not_die_of_itself(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in WORLD:
        job.dump(rank, saved_s=60)
        job.ended(rank, 70, number=9)
    assert named(job) == [("hang.host", (2,))]


def test_a_rank_that_ended_first_and_badly_is_dead_though_no_rank_was_left_waiting(job):
    job.ended(2, 5, code=3)
    for rank in (0, 1, 3):
        job.ended(rank, 8, number=15)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks) == ("dead.rank", (2,))
    assert "exit code 3" in evidence_of(finding)


def test_ranks_that_are_all_killed_at_once_are_nobodys_fault(job):
    for rank in WORLD:
        job.ended(rank, 5, number=9)
    assert job.findings() == []


def test_a_missing_dump_alone_is_no_death(job):
    job.lose(2)
    assert job.findings() == []


def test_a_process_of_which_no_thread_runs_is_distinguished_from_one_stuck_in_one_thread(job):
    job.call([0, 1, 3], WORLD, OPEN)
    for rank in (0, 1, 3):
        job.dump(rank, saved_s=60)
        job.beat(rank, 60)
    job.lose(2)
    job.beat(2, 1)
    (finding,) = job.findings()
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.host", (2,), 0.9)
    assert "no thread of rank 2 has run since 00:16:41.000 UTC, 59 s before" in evidence_of(finding)
    observed = {one.kind: one.values for one in finding.observations}
    assert observed["no-thread-runs"]["silent_ns"] == 59 * NS_PER_S


def test_sinks_are_the_components_nothing_leads_out_of():
    edges = {1: [2], 2: [3], 3: [2], 4: [1, 5], 5: []}
    found = sinks([("rank", n) for n in edges], lambda node: [("rank", n) for n in edges[node[1]]])
    assert found == [[("rank", 2), ("rank", 3)], [("rank", 5)]]


def test_a_chain_of_many_thousand_ranks_is_followed_without_recursion():
    last = 50_000
    found = sinks(
        [("rank", n) for n in range(last + 1)], lambda node: [("rank", node[1] + 1)] if node[1] < last else []
    )
    assert found == [[("rank", last)]]


def test_ranks_and_times_in_words():
    assert numbers_in_words([]) == ""
    assert numbers_in_words([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert (ranks_in_words([3]), ranks_in_words([4, 3])) == ("rank 3", "ranks 3-4")
    assert time_in_words(1_758_581_237_526_848_193) == "22:47:17.526 UTC"
    assert time_in_words(-1) == "an unknown time"
