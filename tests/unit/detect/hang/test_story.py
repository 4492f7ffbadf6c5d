"""What happened before a job stood still, on calls written by hand."""

from dpro.detect.hang.story import last_calls, story_info
from dpro.units import NS_PER_MS
from tests.unit.detect.hanging import DONE, OPEN, Job

ALL = (0, 1, 2)


def events(job: Job) -> list[tuple[list[int], str]]:
    return [(ranks, what) for _, ranks, what in story_info(job.case()).iter_rows()]


def test_the_last_call_of_a_rank_that_never_came_is_before_the_wait_for_it():
    job = Job(3)
    job.call(ALL, ALL)
    job.call((0, 1), ALL, OPEN)
    group = 'of group "0-1-2"'
    assert events(job) == [
        ([2], f"makes its last call: all_reduce #1 {group}, finished"),
        ([0, 1], f"call all_reduce #2 {group} (ranks 0-2), which never finishes"),
    ]
    times = story_info(job.case())["time_ns"]
    assert times[1] - times[0] == NS_PER_MS


def test_ranks_that_came_late_to_what_never_ends_are_said_to():
    job = Job(3)
    job.call(ALL, ALL)
    job.call((0,), ALL, OPEN)
    for _ in range(4):
        job.call((1, 2), (1, 2), DONE)
    job.call((1,), ALL, OPEN)
    (wait,) = [what for ranks, what in events(job) if ranks == [0, 1]]
    assert wait.endswith("which never finishes; the last of them 9 ms later")


def test_the_first_wait_is_listed_though_more_ranks_are_in_others():
    job = Job(7)
    for waiting in ((5,), (3, 4), (0, 1, 2)):
        job.call(waiting, (*waiting, 6), OPEN)
    waits = [ranks for ranks, what in events(job) if "never finishes" in what]
    assert waits == [[5], [3, 4], [0, 1, 2]]


def test_the_last_call_of_each_rank_is_said_with_whether_it_finished():
    job = Job(2)
    job.call((0, 1), (0, 1))
    job.call((1,), (0, 1), OPEN)
    assert last_calls(job.case())["call"].to_list() == [
        'all_reduce #1 of group "0-1", finished',
        'all_reduce #2 of group "0-1", not finished',
    ]


def test_a_job_that_made_no_call_has_no_story():
    assert story_info(Job(2).case()).is_empty()
