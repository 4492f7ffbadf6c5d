"""Pickles of plain values: read as pickle does, or refused."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.ingest.plain_pickle import _is_harmless, loads

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=9), inner),
)


@given(plain, st.integers(0, 5))
def test_plain_values_come_back(value: Any, protocol: int):
    assert loads(pickle.dumps(value, protocol)) == value


@given(st.lists(plain, max_size=4))
def test_what_pickles_of_plain_values_are_made_of_is_seen_at_a_glance(value: Any):
    assert _is_harmless(pickle.dumps(value, 2)) or any(
        opcode.name in ("LONG1", "LONG4") for opcode, _, _ in pickletools.genops(pickle.dumps(value, 2))
    )


@given(plain, st.binary(min_size=1, max_size=9), st.integers(0, 200))
def test_what_is_called_harmless_remembers_nothing_far_away(value: Any, put: bytes, at: int):
    mangled = pickle.dumps(value, 2)
    mangled = mangled[:at] + put + mangled[at:]
    if not _is_harmless(mangled):
        return
    try:
        for opcode, place, _ in pickletools.genops(mangled):
            assert "PUT" not in opcode.name or place < 1 << 20
    except ValueError:
        pass  # what follows is damaged, and the unpickler will say so


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"r\x00\x00\x10\x00", b"p2147483647\n"])
def test_a_place_far_away_is_refused(put):
    with pytest.raises(pickle.UnpicklingError, match="it wants to remember"):
        loads(b"\x80\x02}" + put + b".")
