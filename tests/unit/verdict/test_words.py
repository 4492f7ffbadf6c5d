"""A verdict on a screen."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dpro.verdict.advice import Advice
from dpro.verdict.verdict import Explanation, Limit
from dpro.verdict.words import _wrapped, limit_in_words, lines_of, times


def verdict(**more) -> Explanation:
    known = {
        "run": "run",
        "job": "run   8 x H100",
        "fault": "no slow rank or component found.",
        "faulty_ranks": [],
    }
    return Explanation(**known | more)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.1, 1.25, "x1.10 to 1.25"),
        (1.2, 1.2, "x1.20"),
        (2.0, 12.3, "x2.0 to 12.3"),
        (5.0, 655.5, "x5.0 or more"),
        (30.0, 655.5, "x20.0 or more"),
    ],
)
def test_a_gain_is_a_range_of_few_digits_and_never_boundless(low, high, words):
    assert times(low, high) == words


def test_a_limit_says_what_the_step_would_take_without_it():
    (line,) = [
        line
        for line in lines_of(
            verdict(step_ms=40.0, limit=Limit("host", 2.0, 0.5, gain_low=1.8, gain_high=2.2))
        )
        if "LIMIT" in line
    ]
    text = " ".join(
        lines_of(verdict(step_ms=40.0, limit=Limit("host", 2.0, 0.5, gain_low=1.8, gain_high=2.2)))
    )
    assert line.startswith("LIMIT  the host")
    assert "40 ms -> 20 ms (x1.80 to 2.2)" in " ".join(text.split())
    most = " ".join(
        lines_of(verdict(step_ms=40.0, limit=Limit("host", 4000.0, 0.5, gain_low=30.0, gain_high=4000.0)))
    )
    assert "40 ms -> 10 us (x20.0 or more)" in " ".join(most.split())


def test_uneven_ranks_say_whose_healing_ends_them():
    of_one = Limit("imbalance", 2.0, 0.5, gain_low=2.0, gain_high=2.0, ranks=[1])
    assert limit_in_words(of_one, 60.0).endswith("With rank 1 as fast as its peers 60 ms -> 30 ms (x2.0).")
    both = limit_in_words(replace(of_one, ranks=[1, 3]), 60.0)
    assert "With ranks 1, 3 as fast as their peers" in both


def test_a_limit_has_no_gain_where_the_replay_does_not_fit():
    said = limit_in_words(Limit("imbalance", 6.0, 0.8, fits=False), 53.8)
    assert said.endswith("slowest. The gain without that is not known, since the replay does not fit.")
    assert "(x6.0)" in limit_in_words(Limit("imbalance", 6.0, 0.8, gain_low=6.0, gain_high=6.0), 53.8)


def test_a_host_that_others_wait_for_is_said_to_be_under_waiting():
    limit = Limit("host", 1.16, 0.14)

    def said(host: float) -> str:
        shares = {"host": host, "waiting": 0.12}
        return " ".join(" ".join(lines_of(verdict(limit=limit, step_ms=38.5, shares=shares))).split())

    assert "Most of it is under waiting" in said(0.02)
    assert "Most of it is under waiting" not in said(0.14)


def test_lines_wrap_at_words_within_the_screen():
    advice = Advice("launch", "launch less " + "again and again " * 12, 1.1, 1.3, "a line of code")
    lines = lines_of(
        verdict(limit=Limit("host", 1.3, 0.2), step_ms=10.0, advice=[advice], unsure=["one step"])
    )
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if line[:1].isalpha()][1:] == [
        "LIMIT",
        "FAULT",
        "TRY",
        "UNSURE",
    ]


def test_no_line_begins_with_a_unit():
    for count in range(60, 80):
        lines = _wrapped(f"{'x' * count} takes 71.4 ms, moves 5 GB, and ends", "", "  ")
        assert not [line for line in lines if line.split()[0].strip(",") in ("ms", "GB")]
        assert not any("\N{NO-BREAK SPACE}" in line for line in lines)


def test_a_long_first_line_wraps_at_words_too():
    job = "h200_slow_host   2 x NVIDIA H200   usual step 72.2 ms (159 steps, 18 in depth; median)"
    first, second, *_ = lines_of(verdict(job=job))
    assert f"{first} {second.strip()}" == job
    assert len(first) <= 80


def test_what_comes_after_the_first_is_marked_as_that():
    first = Advice("launch", "launch less", 2.0, 3.0, "a line of code")
    fuse = Advice("fuse", "torch.compile", 1.02, 1.04, "a line of code")
    then = Advice("fuse", "torch.compile", 1.2, 1.4, "a line of code")
    separate = lines_of(verdict(advice=[first], then=then))
    assert separate[2:] == [
        "TRY    1 launch less: x2.0 to 3.0, a line of code",
        "THEN   once the limit is gone, torch.compile: x1.20 to 1.40, a line of code",
    ]
    both = lines_of(verdict(advice=[first, fuse], then=then))
    assert " ".join(" ".join(both[3:]).split()) == (
        "2 torch.compile: x1.02 to 1.04, a line of code (once 1 is done x1.20 to 1.40)"
    )


def test_what_comes_after_the_limit_says_of_which_step_it_gains():
    then = Advice("heal", "heal rank 1", 1.3, 1.4, "new code")
    after = verdict(step_ms=72.0, limit=Limit("communication", 3.0, 0.9), then=then)
    assert "THEN   once the limit is gone (a step of 24 ms), heal rank 1: x1.30" in "\n".join(lines_of(after))


def test_of_a_run_without_a_graph_nothing_limits_and_no_gain_is_said():
    advice = Advice("unblock", "see what rank 9 does", None, None, "a setting")
    lines = lines_of(verdict(fault="rank 9: its host code is stuck", advice=[advice]))
    assert lines == [
        "run   8 x H100",
        "FAULT  rank 9: its host code is stuck",
        "TRY    1 see what rank 9 does",
    ]


def test_many_parts_of_the_step_take_two_lines_within_the_screen():
    parts = ("compute", "copies", "transfer", "waiting", "communication", "host", "idle")
    lines = lines_of(verdict(shares=dict.fromkeys(parts, 1 / 7)))
    assert lines[1:3] == [
        "14% compute | 14% copies | 14% transfer | 14% waiting",
        "14% communication | 14% host | 14% idle",
    ]
    assert lines_of(verdict(shares={"compute": 0.6, "idle": 0.4}))[1] == "60% compute | 40% idle"
