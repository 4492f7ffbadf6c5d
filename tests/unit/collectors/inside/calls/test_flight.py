"""What is shown of a ring of calls to who watches."""

from __future__ import annotations

import json
import pickle

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.calls.flight import last_record, shorten_dump


def dump(first: int, last: int, unfinished: int = -1) -> bytes:
    """As PyTorch writes it: sorted keys, no spaces."""
    entries = [
        {"collective_seq_id": n, "frames": [{"name": "f"}], "record_id": n, "retired": n != unfinished}
        for n in range(first, last + 1)
    ]
    document = {"comm_lib_version": "", "entries": entries, "pg_config": {"0": {"name": "0"}}}
    return json.dumps(document, separators=(",", ":")).encode()


def shown(content: bytes, last: int) -> list[int]:
    document = json.loads(shorten_dump(content, last))
    assert document["pg_config"] == {"0": {"name": "0"}}
    return [entry["record_id"] for entry in document["entries"]]


def test_only_calls_after_a_number_are_shown_and_always_the_last_one():
    content = dump(10, 30)
    assert shown(content, 20) == list(range(21, 31))
    assert shown(content, 9) == shown(content, 2) == shown(content, -300) == list(range(10, 31))
    assert shown(content, 30) == shown(content, 400) == [30]


def test_what_is_unfinished_is_shown_however_old_with_all_that_follows():
    assert shown(dump(10, 30, unfinished=15), 25) == list(range(15, 31))
    assert shown(dump(10, 30, unfinished=30), 25) == list(range(26, 31))
    assert shown(dump(10, 30, unfinished=30), 2) == list(range(10, 31))


def test_a_dump_that_is_not_as_usual_is_shown_as_it_is():
    for content in (b"{}", dump(3, 2)):
        assert shorten_dump(content, 5) == content


def pickled(content: bytes) -> bytes:
    return pickle.dumps(json.loads(content), protocol=2)


def test_a_pickled_dump_is_shown_as_json_and_as_short():
    content = pickled(dump(10, 30))
    assert last_record(content) == 30
    assert shown(content, 20) == list(range(21, 31))
    assert shown(content, 30) == [30]
    assert shown(content, 2) == list(range(10, 31))
    assert shown(pickled(dump(10, 30, unfinished=15)), 25) == list(range(15, 31))
    assert last_record(pickled(dump(3, 2))) == last_record(dump(3, 2)) == -1
