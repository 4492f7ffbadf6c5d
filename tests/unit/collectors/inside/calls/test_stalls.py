"""The stack of the main thread that is saved while a process stands still."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.calls.stalls import _main_stack


def call_deeply(depth: int) -> list[str]:
    return call_deeply(depth - 1) if depth else _main_stack()


def test_the_users_code_is_found_below_the_many_calls_of_a_compiler():
    functions = [call.rpartition(" ")[2] for call in call_deeply(60)]
    test = "test_the_users_code_is_found_below_the_many_calls_of_a_compiler"
    assert functions[:62] == ["call_deeply"] * 61 + [test]
