"""The ledger: appended to by several at once, read in spite of damage; what it says of predictions."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dpro.errors import DproError
from dpro.extensions.trial.ledger import (
    LedgerEntry,
    Ratio,
    append,
    joint_kind,
    ledger_path,
    mostly_inside,
    read,
    usual_error,
    widened,
)

ENTRY = LedgerEntry(
    kind="bucket:mb",
    edits=["bucket:mb=1"],
    predicted=Ratio(0.8, 0.75, 0.85),
    measured=Ratio(0.82, 0.8, 0.84),
    noise=0.01,
    baseline_ms=10.0,
    pairs=3,
    steps=50,
    world_size=2,
    time="2025-01-01T00:00:00Z",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def off_by(*errors, kind="bucket:mb"):
    return [replace(ENTRY, kind=kind, measured=Ratio(0.8 * math.exp(error), 0, 9)) for error in errors]


def test_nothing_was_tried_before_the_first_try():
    assert read() == ([], 0)


def test_entries_come_back_in_the_order_they_were_made():
    entries = [replace(ENTRY, kind=f"{number}", predicted=None) for number in range(3)]
    assert {append(entry) for entry in entries} == {ledger_path()}
    assert read() == (entries, 0)


def test_the_ledger_is_in_the_home_folder_unless_said_otherwise(folder, monkeypatch):
    assert ledger_path() == folder / "dpro" / "ledger"
    for nowhere in ("", "relative/folder"):
        monkeypatch.setenv("XDG_DATA_HOME", nowhere)
        monkeypatch.setenv("HOME", "/home/user")
        assert str(ledger_path()) == "/home/user/.local/share/dpro/ledger"


@pytest.mark.parametrize(
    "damage",
    [b"{\n", b'{"kind": 3}\n', b"\xff\xfe\n", b"[]\n", b"null\n", b"no newline at the end"],
)
def test_a_damaged_line_is_counted_and_loses_no_other(damage):
    append(ENTRY)
    with ledger_path().open("ab") as file:
        file.write(damage)
    append(ENTRY)
    assert read() == ([ENTRY, ENTRY], 1)


def test_a_ratio_of_which_there_is_no_logarithm_is_damage():
    append(ENTRY)
    append(replace(ENTRY, measured=Ratio(0.0, 0.0, 1.0)))
    assert read() == ([ENTRY], 1)


def test_fields_of_later_versions_are_passed_over():
    append(ENTRY)
    text = ledger_path().read_text()
    ledger_path().write_text(text.replace('{"kind"', '{"later": [1, 2], "kind"', 1))
    assert read() == ([ENTRY], 0)


def test_several_processes_append_at_once_and_every_entry_is_whole():
    code = (
        "from dpro.extensions.trial.ledger import LedgerEntry, Ratio, append\n"
        "for number in range(100):\n"
        "    append(LedgerEntry('k' * 3000, [], None, Ratio(1, 1, 1), None, 1.0, 1, 1, 1, ''))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    entries, damaged = read()
    assert (len(entries), damaged) == (300, 0)


def test_a_ledger_that_cannot_be_written_is_one_line(folder):
    (folder / "dpro").write_text("a file where the folder should be")
    with pytest.raises(DproError, match="the ledger cannot be written"):
        append(ENTRY)


def test_fewer_than_three_tries_say_nothing_of_the_next_one():
    assert usual_error(off_by(0.1, 0.2), "bucket:mb") == (0.0, 2)


def test_the_usual_error_is_the_largest_until_there_are_enough_for_nine_in_ten():
    error, count = usual_error(off_by(0.1, -0.3, 0.2), "bucket:mb")
    assert (error, count) == (pytest.approx(0.3), 3)
    error, _ = usual_error(off_by(*[0.01 * number for number in range(1, 20)], 5.0), "bucket:mb")
    assert error == pytest.approx(0.19)


def test_tries_of_another_kind_and_those_nothing_predicted_do_not_count():
    others = [*off_by(0.5, 0.5, kind="compress:to=fp16"), replace(ENTRY, predicted=None)]
    assert usual_error([*off_by(0.1, 0.1, 0.1), *others], "bucket:mb") == (pytest.approx(0.1), 3)
    assert usual_error(others, "") == (0.0, 0)


@given(st.floats(0.1, 10), st.floats(0, 1), st.floats(0, 1), st.floats(0, 2))
def test_an_interval_never_becomes_narrower(predicted, below, above, error):
    low, high = predicted - below * predicted, predicted + above
    wider = widened(predicted, low, high, error)
    assert wider[0] <= low
    assert wider[1] >= high
    assert wider[0] <= predicted * math.exp(-error)
    assert wider[1] >= predicted * math.exp(error)


def test_changes_made_together_are_of_one_kind_in_any_order():
    assert joint_kind(["b", "a"]) == joint_kind(["a", "b"]) == "a + b"


def test_tries_of_a_kind_prove_it_where_most_took_as_long_as_was_predicted():
    good, bad = ENTRY, replace(ENTRY, measured=Ratio(1.1, 1.0, 1.2))
    assert mostly_inside([good], "bucket:mb")
    assert mostly_inside([good, good, bad], "bucket:mb")
    for entries in ([], [bad], [good, bad], [replace(ENTRY, predicted=None)]):
        assert not mostly_inside(entries, "bucket:mb")
    assert not mostly_inside([good], "compile")
