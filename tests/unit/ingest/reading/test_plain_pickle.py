"""Pickles of plain values: read as pickle does, or refused."""

from __future__ import annotations

import pickle
import pickletools
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.ingest.reading import plain_pickle
from dpro.ingest.reading.opcodes import are_harmless
from dpro.ingest.reading.plain_pickle import is_harmless, is_harmless_by_expression, loads

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=9), inner),
)


@given(plain, st.integers(0, 5))
def test_plain_values_come_back(value: Any, protocol: int):
    assert loads(pickle.dumps(value, protocol)) == value


@given(st.lists(plain, max_size=4))
def test_what_dumps_of_pytorch_are_made_of_is_seen_at_a_glance(value: Any):
    opcodes = [opcode.name for opcode, _, _ in pickletools.genops(pickle.dumps(value, 2))]
    assert is_harmless(pickle.dumps(value, 2)) or any(name.startswith(("LONG", "TUPLE")) for name in opcodes)


@given(plain, st.binary(min_size=1, max_size=9), st.integers(0, 200))
def test_what_is_called_harmless_remembers_nothing_far_away_and_no_tuple(value: Any, put: bytes, at: int):
    mangled = pickle.dumps(value, 2)
    mangled = mangled[:at] + put + mangled[at:]
    if not is_harmless(mangled):
        return
    before = ""
    try:
        for opcode, place, _ in pickletools.genops(mangled):
            assert "PUT" not in opcode.name or place < 1 << 20
            assert not (opcode.name == "MEMOIZE" or "PUT" in opcode.name) or before not in SMALL_TUPLES
            assert opcode.name not in ("DUP", "POP", "POP_MARK", "BUILD", "FROZENSET", "TUPLE")
            before = opcode.name
    except ValueError:
        pass  # what follows is damaged, and the unpickler will say so


@given(plain, st.binary(max_size=9), st.integers(0, 200), st.sampled_from([2, 4, 5]))
def test_the_compiled_loop_finds_what_the_expression_finds(value: Any, put: bytes, at: int, protocol: int):
    whole = pickle.dumps(value, protocol)
    assert are_harmless(whole) == is_harmless_by_expression(whole)
    mangled = whole[:at] + put + whole[at:]
    assert are_harmless(mangled) <= is_harmless_by_expression(mangled)  # less where a length is cut off


PIECES = [b"h\x01", b"\x85", b"\x86", b"\x87", b"q\x01", b"r\x01\x00\x00\x00", b"\x94", b"N", b"K\x05"]
PIECES += [b"r\x00\x00\x10\x00", b"X\x01\x00\x00\x00a", b"\x8d" + b"\xff" * 8, b"\x8a\x09", b"\x8a\x01a"]


@given(st.lists(st.sampled_from(PIECES), max_size=150).map(b"".join))
def test_the_compiled_loop_counts_tuples_as_the_expression_does(opcodes: bytes):
    assert are_harmless(opcodes) == is_harmless_by_expression(opcodes)


def test_a_process_that_has_read_much_loads_the_compiled_loop(monkeypatch):
    monkeypatch.setattr(plain_pickle, "_checked_bytes", 0)
    monkeypatch.setattr(plain_pickle, "_LOOP_WORTH_BYTES", 100)
    asked = []
    monkeypatch.setattr(plain_pickle, "_loop", lambda: asked.append(True))
    pickled = pickle.dumps(list(range(20)), 2)
    for _ in range(4):
        assert is_harmless(pickled)
    assert len(asked) == 4 - 100 // len(pickled)


SMALL_TUPLES = ("TUPLE1", "TUPLE2", "TUPLE3")


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"r\x00\x00\x10\x00", b"p2147483647\n"])
def test_a_place_far_away_takes_no_room(put):
    tracemalloc.start()
    assert loads(b"\x80\x02}" + put + b".") == {}
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def _tuples_of_one(depth: int, *, remembered: bool) -> bytes:
    """A tuple of a tuple of … as a key; each holds the one before twice, if they are remembered."""
    step = b"q\x00h\x00\x86" if remembered else b"N\x86"
    return b"\x80\x02}" + b"N" + step * depth + b"Ns."


@pytest.mark.parametrize(
    "pickled", [_tuples_of_one(200, remembered=True), _tuples_of_one(10**6, remembered=False)]
)
def test_a_key_that_takes_for_ever_to_look_up_is_refused(pickled):
    with pytest.raises(pickle.UnpicklingError, match="a key of a dictionary is a tuple"):
        loads(pickled)


@pytest.mark.parametrize("taken", [lambda inner: [inner, inner], lambda inner: {"a": inner, "b": inner}])
def test_values_that_hold_the_same_over_and_over_are_refused(taken):
    value: Any = []
    for _ in range(60):
        value = taken(value)
    with pytest.raises(pickle.UnpicklingError, match="repeats values excessively"):
        loads(pickle.dumps(value, 2))


def test_what_is_shared_as_in_a_dump_with_stacks_is_read():
    frames = [{"name": f"frame{number}", "filename": "train.py", "line": number} for number in range(100)]
    value = {"entries": [{"frames": list(frames)} for _ in range(2000)]}
    assert loads(pickle.dumps(value, 2)) == value


@pytest.mark.parametrize(
    "pickled", [b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".", b"\x80\x02]q\x00h\x00a."]
)
def test_values_that_lie_too_deep_or_in_themselves_are_refused(pickled):
    with pytest.raises(Exception, match=r"recursion|cyclic|over and over"):
        loads(pickled)
