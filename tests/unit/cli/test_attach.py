"""What `dpro attach` answers, from replies of the ranks of a job that is not there."""

import json

import msgspec
import pytest

from dpro.collectors import attach as attaching
from dpro.collectors.attach import Answers, RankWindow, StacksDocument, SwitchDocument, WindowDocument
from dpro.documents import plain
from tests.commands import dpro

FRAME = {"file": "job.py", "line": 7, "function": "main"}
STACKS = {
    0: {"rank": 0, "threads": [{"name": "MainThread", "frames": [FRAME]}]},
    2: {"rank": 2, "by_signal": True, "threads": []},
}
WINDOWS = {
    0: {"rank": 0, "window": 4, "steps": [20, 23], "why_not": ""},
    1: {"rank": 1, "window": 4, "steps": [20, 23], "why_not": "the disk is full"},
}


@pytest.fixture
def replies(monkeypatch):
    """Have a job reply."""

    def give(answers):
        monkeypatch.setattr(attaching, "read_stacks", lambda run, timeout_s: answers)
        monkeypatch.setattr(attaching, "ask", lambda run, kind, timeout_s, done, **facts: answers)

    return give


def test_stacks_are_merged_over_ranks(replies, tmp_path):
    replies(Answers(STACKS, [1]))
    printed = json.loads(dpro("attach", tmp_path, "--stacks", "--json").stdout)
    assert printed == {
        "schema_version": 2, "run": str(tmp_path), "ranks": list(STACKS.values()), "silent_ranks": [1],
    }  # fmt: skip
    assert plain(msgspec.convert(printed, StacksDocument)) == printed
    assert dpro("attach", tmp_path, "--stacks").stdout.splitlines() == [
        "MainThread, rank 0",
        "  job.py:7 main",
        "rank 2: a call in C holds the interpreter lock",
        "rank 1: did not answer",
    ]


def test_a_window_is_listed_with_the_ranks_that_did_not_record_it(replies, tmp_path):
    replies(Answers(WINDOWS, []))
    printed = json.loads(dpro("attach", tmp_path, "--steps", 3, "--json").stdout)
    assert (printed["ranks"], printed["window"]) == (list(WINDOWS.values()), 4)
    document = msgspec.convert(printed, WindowDocument)
    assert document.ranks[0] == RankWindow(rank=0, window=4, steps=(20, 23), why_not="")
    assert dpro("attach", tmp_path, "--steps", 3).stdout.splitlines() == [
        "rank 0: steps 20 to 22 are window 4",
        "rank 1: not recorded: the disk is full",
        f"next: dpro attach {tmp_path} -o COPY, then dpro COPY",
    ]


def test_the_recorders_own_calls_are_no_part_of_the_jobs_stack(replies, tmp_path):
    hook = {"file": "collectors/inside/hooks.py", "line": 129, "function": "backward"}
    replies(Answers({0: {"rank": 0, "threads": [{"name": "MainThread", "frames": [hook, FRAME]}]}}, []))
    assert dpro("attach", tmp_path, "--stacks").stdout.splitlines() == [
        "MainThread, rank 0",
        "  job.py:7 main",
    ]


def test_a_switch_names_the_step_from_which_it_counts(replies, tmp_path):
    replies(Answers({0: {"rank": 0, "from_step": 31}}, []))
    printed = json.loads(dpro("attach", tmp_path, "--off", "--json").stdout)
    assert msgspec.convert(printed, SwitchDocument).from_step == 31
    assert dpro("attach", tmp_path, "--off").stdout == "takes effect at step 31\n"


def test_a_reply_of_another_shape_is_one_line(replies, tmp_path):
    replies(Answers({0: {"rank": 0, "threads": [{"name": 7}]}}, []))
    done = dpro("attach", tmp_path, "--stacks")
    assert done.returncode == 1
    assert "another version of dpro" in done.stderr
