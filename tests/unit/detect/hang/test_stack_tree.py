"""Stacks of several ranks as one tree."""

from hypothesis import given
from hypothesis import strategies as st

from dpro.detect.hang.stack_tree import Branch, StackedThread, lines_of, merge_stacks

MAIN, TRAIN, LOAD, REDUCE = "job.py:9 <module>", "job.py:7 train", "data.py:3 load", "dist.py:5 all_reduce"


def lines(threads: list[StackedThread]) -> list[str]:
    return [line for kind, tree in merge_stacks(threads).items() for line in lines_of(kind, tree)]


def test_ranks_part_where_their_calls_do_and_the_rarest_come_first():
    waits = [StackedThread(rank, "MainThread", (REDUCE, TRAIN, MAIN)) for rank in (0, 2, 3)]
    assert lines([*waits, StackedThread(1, "MainThread", (LOAD, TRAIN, MAIN))]) == [
        "MainThread, ranks 0-3",
        "  job.py:9 <module>",
        "  job.py:7 train",
        "    rank 1",
        "      data.py:3 load",
        "    ranks 0, 2-3",
        "      dist.py:5 all_reduce",
    ]


def test_a_thread_that_is_in_no_further_call_ends_where_the_others_go_on():
    (tree,) = merge_stacks(
        [StackedThread(0, "MainThread", (MAIN,)), StackedThread(1, "MainThread", (TRAIN, MAIN))]
    ).values()
    assert tree == Branch((MAIN,), (0, 1), 2, (Branch((TRAIN,), (1,), 1, ()),))


def test_threads_whose_names_differ_in_numbers_are_one_kind_behind_the_main_ones():
    threads = [StackedThread(rank, f"worker_{number}", (LOAD,)) for rank in (0, 1) for number in (0, 1)]
    assert lines([*threads, StackedThread(0, "MainThread", (MAIN,))]) == [
        "MainThread, rank 0",
        "  job.py:9 <module>",
        "worker_N, ranks 0-1 (4 threads)",
        "  data.py:3 load",
    ]


def test_files_of_installed_packages_are_named_from_the_package_on():
    call = "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py:12 forward"
    python = "/usr/lib/python3.11/threading.py:982 run"
    said = lines([StackedThread(0, "MainThread", (call, python, "/home/me/lib/job.py:1 main"))])
    assert said[1:] == [
        "  /home/me/lib/job.py:1 main",
        "  threading.py:982 run",
        "  torch/nn/module.py:12 forward",
    ]


def test_calls_of_c_are_named_by_library_and_shortened():
    said = lines(
        [StackedThread(0, "MainThread", ("/usr/lib/libc.so.6:0 poll", f"/opt/x/torch.so:0 {'f' * 500}"))]
    )
    assert said[2] == "  libc.so.6 poll"
    assert said[1].startswith("  torch.so fff")
    assert len(said[1]) < 130


def test_nothing_is_merged_of_no_threads_and_a_thread_without_calls_is_shown():
    assert merge_stacks([]) == {}
    assert lines([StackedThread(4, "MainThread", ())]) == ["MainThread, rank 4"]


calls = st.lists(st.sampled_from("abc"), max_size=5)


@given(st.lists(st.tuples(st.integers(0, 5), calls), min_size=1, max_size=12))
def test_each_thread_is_on_one_way_through_the_tree(stacks):
    (tree,) = merge_stacks([StackedThread(rank, "main", way[::-1]) for rank, way in stacks]).values()

    def ends(branch: Branch, before: tuple[str, ...]) -> list[tuple[str, ...]]:
        way = before + branch.calls
        here = branch.num_threads - sum(part.num_threads for part in branch.branches)
        assert {rank for part in branch.branches for rank in part.ranks} <= {*branch.ranks}
        return [way] * here + [end for part in branch.branches for end in ends(part, way)]

    assert sorted(ends(tree, ())) == sorted(tuple(way) for _, way in stacks)
    assert list(tree.ranks) == sorted({rank for rank, _ in stacks})
