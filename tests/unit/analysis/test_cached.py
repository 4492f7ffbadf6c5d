"""Properties that are computed once."""

from __future__ import annotations

import threading

import pytest

from dpro.analysis.cached import Cached, cached
from dpro.errors import Unanswerable


def test_what_several_threads_ask_for_is_computed_once():
    began, go_on, calls = threading.Event(), threading.Event(), []

    class Slow(Cached):
        @cached
        def answer(self) -> int:
            calls.append(1)
            began.set()
            go_on.wait(10)
            return 42

        @cached
        def failure(self) -> int:
            calls.append(2)
            raise Unanswerable("no spans")

    slow = Slow()
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(slow.answer)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert (found, calls) == ([42] * 4, [1])
    for _ in range(2):
        with pytest.raises(Unanswerable, match="no spans"):
            _ = slow.failure
    assert calls == [1, 2]


def test_a_function_of_an_object_is_computed_once_for_each_without_the_object_knowing_it():
    calls = []

    @cached
    def length(one: Cached) -> int:
        calls.append(one)
        return len(calls)

    first, second = Cached(), Cached()
    assert [length(first), length(second), length(first)] == [1, 2, 1]
    assert (calls, length.__name__) == ([first, second], "length")


def test_of_results_that_follow_from_more_only_the_latest_is_kept():
    calls, holder = [], Cached()

    def ask(edit: str) -> str:
        return holder.once("changed", lambda: calls.append(edit) or edit, inputs=(edit,))

    assert [ask(edit) for edit in "aabba"] == list("aabba")
    assert calls == ["a", "b", "a"]
