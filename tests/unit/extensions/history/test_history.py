"""The history of findings: which host a finding is about, what is remembered, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from dpro.detect.findings import Finding
from dpro.detect.observations import observe
from dpro.documents import plain
from dpro.extensions.history.database import (
    DAY_NS,
    Culprit,
    HistoryDocument,
    Remembered,
    allow_command,
    culprit_of,
    forget,
    history_path,
    recurrence,
    remember,
    remembered,
    run_name,
    with_history,
)
from tests.commands import dpro

HOSTS = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
NOW = time.time_ns()


def finding(
    class_: str = "slow.nic", kind: str = "rank", name: str = "2", *ranks: int, part: tuple[int, ...] = ()
) -> Finding:
    slow = (observe("slow", "it is slow"),)
    return Finding(class_, kind, name, ranks or (2,), 0.5, 0.9, 1e6, slow, part_ranks=part)


@pytest.fixture(autouse=True)
def own_history(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("DPRO_HISTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(("kind", "name", "ranks", "part", "host"), [
    ("rank", "2", (2,), (), "n1"),
    ("nic", "rank 2", (0, 2), (2,), "n1"),
    ("sender", "rank 0", (0, 2), (0,), "n0"),
    ("ranks", "2-3", (2, 3), (), "n1"),
    ("host", "n0", (0, 1), (), "n0"),
    ("link", "2 - 3", (2, 3), (2, 3), "n1"),
    ("link", "0 -> 1", (0, 1), (0, 1), "n0"),
])  # fmt: skip
def test_a_finding_about_one_host_names_it(kind, name, ranks, part, host) -> None:
    assert culprit_of(finding("slow.nic", kind, name, *ranks, part=part), HOSTS) == Culprit(host)


@pytest.mark.parametrize(("class_", "kind", "name", "ranks", "why"), [
    ("slow.nic", "one of", "rank 2, link 0 - 2", (0, 2), "ambiguous: one of"),
    ("slow.link", "link", "0 - 2", (0, 2), "ambiguous: link 0 - 2 is on 2 hosts"),
    ("slow.compute", "ranks", "0, 2", (0, 2), "ambiguous"),
    ("slow.fabric", "hosts", "n0 - n1", (0, 2), "not about one host"),
    ("slow.host", "job", "input pipeline", (0, 1, 2, 3), "not about one host"),
    ("hang.comm", "group", "dp (0-3)", (0, 1, 2, 3), "not about one host"),
    ("hang.mismatch", "rank", "2", (2,), "no part of a host is at fault"),
    ("imbalance.data", "rank", "2", (2,), "no part of a host is at fault"),
    ("slow.nic", "rank", "9", (9,), "ambiguous"),
])  # fmt: skip
def test_a_finding_that_leaves_it_open_or_blames_no_host_names_none(class_, kind, name, ranks, why) -> None:
    part = ranks if kind == "link" else ()
    host, why_not = culprit_of(finding(class_, kind, name, *ranks, part=part), HOSTS)
    assert host == ""
    assert why in why_not


def test_a_job_on_one_host_has_none_to_take_out() -> None:
    assert culprit_of(finding(), {0: "n0", 2: "n0"}).why_not == "the job runs on one host"


def row(run: str = "b", class_: str = "slow.nic", days_ago: float = 0) -> Remembered:
    return Remembered("n1", class_, 0.9, NOW - int(days_ago * DAY_NS), run)


def test_a_host_that_comes_back_is_said_to_with_the_classes_before() -> None:
    now = row("now")
    assert recurrence(now, []) is None
    assert recurrence(now, [row("now", days_ago=1), row("later", days_ago=-1)]) is None
    again = recurrence(now, [row(days_ago=8.5), row("c", days_ago=3)])
    assert again.text == "host n1: third finding of slow network card in 9 days"
    assert (again.values["host"], again.values["times"]) == ("n1", 3)
    assert recurrence(now, [row(class_="slow.compute", days_ago=0.2)]).text == (
        "host n1: first finding of slow network card in a day, after 1 of slow compute"
    )
    assert "11th finding" in recurrence(now, [row(str(number), days_ago=1) for number in range(10)]).text


def test_findings_are_remembered_once_per_run_and_quoted_in_the_next(tmp_path) -> None:
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        run.mkdir()
    for _ in range(2):
        (same,) = with_history([finding()], HOSTS, runs[0], NOW - DAY_NS)
        assert same.evidence == ("it is slow",)
    found = with_history([finding(), finding("slow.nic", "one of", "a, b")], HOSTS, runs[1], NOW)
    assert [each.evidence for each in found] == [
        ("it is slow", "host n1: second finding of slow network card in a day"), ("it is slow",)
    ]  # fmt: skip
    assert [(each.host, each.class_) for each in remembered()] == [("n1", "slow.nic")] * 2
    (unsure,) = with_history([replace(finding(), confidence=0.4)], {2: "n2", 0: "n0"}, runs[0], NOW)
    assert remembered("n2") == []
    assert unsure.evidence == ("it is slow",)


def test_another_recording_in_the_same_place_is_another_run(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    before = run_name(run)
    run.rename(tmp_path / "moved")
    run.mkdir()
    assert run_name(run) != before


@pytest.mark.parametrize("where", ["off", "", "/proc/nowhere/history.sqlite", "/dev/null/x"])
def test_nothing_fails_where_there_is_no_history(where, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPRO_HISTORY", where)
    assert with_history([finding()], HOSTS, tmp_path, NOW) == [finding()]
    assert remembered() == []
    assert not (tmp_path / "state").exists()


def test_a_damaged_history_is_left_alone(tmp_path, monkeypatch) -> None:
    damaged = tmp_path / "history.sqlite"
    damaged.write_bytes(b"no database at all, and longer than a header of one" * 40)
    monkeypatch.setenv("DPRO_HISTORY", str(damaged))
    assert with_history([finding()], HOSTS, tmp_path, NOW) == [finding()]
    assert damaged.read_bytes().startswith(b"no database")


WRITER = """
import sys
from dpro.extensions.history import database as history
history.BUSY_S = 100.0  # on a busy machine three writers take longer than a command may wait
for number in range(20):
    history.remember([history.Remembered("n1", "slow.nic", 0.9, %d, f"{sys.argv[1]}-{number}")])
"""


def test_several_processes_write_at_once() -> None:
    command = [sys.executable, "-c", WRITER % NOW]
    root = Path(__file__).parents[4]
    writers = [subprocess.Popen([*command, str(each)], cwd=root) for each in range(3)]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0]
    assert len(remembered()) == 60


def test_what_is_older_than_a_year_is_dropped_and_a_repaired_host_is_forgotten() -> None:
    remember([row("old", days_ago=400), row("new")])
    remember([structs.replace(row("newer"), host="n2")])
    assert [each.run for each in remembered()] == ["new", "newer"]
    assert forget("n1") == 1
    assert [each.host for each in remembered()] == ["n2"]


def test_a_command_is_allowed_so_often_in_a_time_by_all_watchers_together() -> None:
    asked = [allow_command("x", "run", "n1", 2, NOW) for _ in range(3)]
    assert asked == [True, True, False]
    assert allow_command("another", "run", "n1", 2, NOW)
    assert allow_command("x", "run", "n1", 2, time.time_ns() + 1)


def test_the_history_is_listed_and_cleared() -> None:
    assert "No finding" in dpro("history").stdout
    remember([row("/runs/a#12"), structs.replace(row("/runs/b#13"), host="n2")])
    listed = [line.split("  ")[1:3] for line in dpro("history").stdout.splitlines()]
    assert listed == [["n1", "slow network card"], ["n2", "slow network card"]]
    printed = json.loads(dpro("history", "--host", "n2", "--json").stdout)
    document = msgspec.convert(printed, HistoryDocument)
    assert plain(document) == printed
    assert [(each.host, each.run) for each in document.findings] == [("n2", "/runs/b")]
    assert document.path == str(history_path())
    assert "1 findings removed" in dpro("history", "--host", "n1", "--clear").stdout
    assert [each.host for each in remembered()] == ["n2"]


def test_the_history_can_be_turned_off(monkeypatch) -> None:
    monkeypatch.setenv("DPRO_HISTORY", "off")
    assert "turned off" in dpro("history").stdout
    assert os.environ["DPRO_HISTORY"] == "off"
