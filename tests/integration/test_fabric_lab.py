"""The fabric of network namespaces that `benchmarks/fabric.py` measures on: slow, and only for root."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fabric
from benchmarks.fabric import check_of, judged
from benchmarks.fabric_lab import blame, recorded, replan
from benchmarks.fabric_lab.blame import NONE, NamedFault
from benchmarks.fabric_lab.cases import Compared, of_flows, of_job, rates_beside_acknowledgements
from benchmarks.fabric_lab.job import StepWork
from benchmarks.fabric_lab.lab import Lab, lab
from benchmarks.fabric_lab.lifetime import lab_name, left_over
from benchmarks.fabric_lab.pairs_job import rounds_of
from benchmarks.fabric_lab.traffic import before_other_work
from dpro.replay.cost.fabric.flows import Load
from dpro.topology.file import check

NEAR_PCT = 20.0  # on a busy machine: a collision that is not predicted is off by 50 and more


def test_a_figure_is_held_to_the_bar_of_what_it_is() -> None:
    rows = [
        Compared("flows", "hash", 10.0, 10.2, False),
        Compared("flows", "link down", 10.0, 10.6, False),
        Compared("all-reduce", "hash", 1.05, 1.0, True),
    ]
    assert [check_of(row) for row in rows] == ["flows", "flows under a fault", "all-reduce, both ways full"]
    found = judged(rows)
    assert [found[check]["holds"] for check in found] == [True, False, None, True, None]
    assert found["flows"]["worst_pct"] == pytest.approx(1.96, abs=0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_is_printed_where_a_benchmark_is_cut_off(number, monkeypatch, capsys) -> None:
    def cases(_seed: int, _cases: int, rows: list[NamedFault]) -> None:
        rows.append(NamedFault("slow cable", "l0-s0", (frozenset({"l0-s0"}),), frozenset({"l0-s0"})))
        signal.raise_signal(number)

    monkeypatch.setattr(fabric, "blamed", cases)
    monkeypatch.setattr(sys, "argv", ["fabric.py", "--only", "blame", "--json"])
    with pytest.raises(SystemExit) as ended:
        fabric.main()
    assert ended.value.code == 128 + number
    out = capsys.readouterr()
    assert json.loads(out.out)["blame"]["n"] == 1
    assert "cut off" in out.err


def test_the_lab_describes_itself_without_what_failed() -> None:
    made = Lab("x", 4, 2, 2, 100, 50)
    check(made.topology())
    made.failed.add((0, 1))
    made.rates[1, 0] = 25
    links = {(link.begin, link.end): link.gbit for link in made.topology().links}
    assert ("l0", "s1") not in links
    assert links["l1", "s0"] == pytest.approx(0.025)
    assert [made.address(host) for host in (0, 3)] == ["10.1.1.2", "10.2.4.2"]


def test_acknowledgements_take_their_part_of_a_cable_that_is_full_both_ways_and_of_no_other() -> None:
    """Two flows one way over cable 0, one the other way, and one alone over cable 1."""
    capacity = np.full(4, 100.0)  # links 2 and 3 are the other ways of 0 and 1
    alone = Load(np.arange(4), np.array([0, 0, 1]), np.ones(3))
    assert rates_beside_acknowledgements(alone, capacity, 4) == pytest.approx([50, 50, 100])
    both = Load(np.arange(5), np.array([0, 0, 2, 1]), np.ones(4))
    part = 66 / (4 * 1514)
    found = rates_beside_acknowledgements(both, capacity, 4)
    assert 2 * found[0] + part * found[2] == pytest.approx(100)
    assert found[2] + 2 * part * found[0] == pytest.approx(100)
    assert found[3] == pytest.approx(100)


def test_only_namespaces_of_labs_whose_process_is_gone_are_left_over() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    own, gone = lab_name(), f"dpro{ended.pid}t1"
    reused = f"dpro{os.getpid()}t1"  # this process, but not when the lab was made
    names = [f"{own}h0", f"{gone}h0", f"{gone}l12", f"{reused}s1", f"dpro{ended.pid}h0", f"{gone}x0", "cni-1"]
    assert left_over(names) == [f"{gone}h0", f"{gone}l12", f"{reused}s1"]


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc")
def test_a_lab_whose_process_is_ended_or_killed_is_removed_and_nothing_else() -> None:
    program = (
        "import time\nfrom benchmarks.fabric_lab.lab import lab\n"
        "with lab(2, 1, 1, 100, 100):\n    print('up', flush=True)\n    time.sleep(60)\n"
    )
    other = f"dpro{os.getpid()}-kept"
    subprocess.run(["ip", "netns", "add", other], check=True)
    try:
        for how in (signal.SIGTERM, signal.SIGKILL):
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            mine = {name for name in namespaces() if name.startswith(f"dpro{process.pid}t")}
            assert len(mine) == 4
            process.send_signal(how)
            assert process.wait(30) == (143 if how == signal.SIGTERM else -9)
            assert bool(mine & namespaces()) == (how == signal.SIGKILL)
        with lab(2, 1, 1, 100, 100):
            assert not mine & namespaces()
        assert other in namespaces()
    finally:
        subprocess.run(["ip", "netns", "del", other], check=True)


def test_what_is_named_is_right_only_if_it_is_all_that_is_named() -> None:
    fault, both = "cable l0 - s1", frozenset({"cable l0 - s1", "switch s1"})

    def right(*named: frozenset[str], indistinct: frozenset[str] = frozenset({fault})) -> bool:
        return NamedFault("slow cable", fault, named, indistinct).right

    assert right(frozenset({fault}))
    assert not right()
    assert not right(both)
    assert right(both, indistinct=both)
    assert not right(frozenset({fault}), frozenset({"switch s0"}))
    healthy = [NamedFault(NONE, "", (), frozenset()), NamedFault(NONE, "", (both,), frozenset())]
    found = blame.judged([NamedFault("slow cable", fault, (frozenset({fault}),), frozenset()), *healthy])
    assert found["blame, healthy"]["by_kind"] == {NONE: [1, 2]}
    assert (found["blame"]["right_pct"], found["blame"]["holds"]) == (0.0, False)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc")
def test_faults_of_each_kind_are_named_and_a_healthy_fabric_is_not() -> None:
    with lab(6, 3, 2, 100, 100) as made, before_other_work():
        rows = list(blame.of_cases(made, random.Random(5), 5))
    assert [row.kind for row in rows] == [*blame.FAULTS, NONE]
    assert sum(row.right for row in rows) >= 5  # on a busy machine one may be missed


def test_predictions_by_edits_are_held_to_the_worst() -> None:
    rows = [
        recorded.PairOfRuns("w", "a", "b", "paths", 20.0, 10.2, 10.0, True),
        recorded.PairOfRuns("w", "b", "a", "ecmp", 10.0, 18.8, 20.0, False),
    ]
    (found,) = recorded.judged(rows).values()
    assert (found["worst_pct"], found["held_pct"], found["holds"]) == (6.0, 50.0, False)
    assert found["median_pct"] == pytest.approx(4.0)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc")
def test_a_recorded_collision_is_predicted_away_by_a_plan(tmp_path: Path, monkeypatch) -> None:
    work = "one bucket"
    monkeypatch.setattr(recorded, "WORK", {work: recorded.WORK[work]})
    monkeypatch.setattr(recorded, "PAIRS", recorded.PAIRS[:2])
    with lab(4, 2, 2, 100, 50) as made:
        recorded.recordings(made, tmp_path, (recorded.PLANNED, recorded.COLLIDED))
    rows = recorded.compared(tmp_path)
    assert max(abs(row.error_pct) for row in rows) < NEAR_PCT
    assert min(row.before_ms / row.after_ms for row in rows[:1]) > 1.5


def test_a_new_plan_has_to_win_back_what_the_named_cable_cost() -> None:
    """100 ms, 300 with the cable, and afterwards 130 (85% won back) or 150 (75%)."""

    def row(named: tuple[str, ...], after_ms: float, applied_s: float | None = 60.0) -> replan.Replanned:
        return replan.Replanned("l0 - s1", 0.2, named, 40.0, applied_s, 1, 100.0, 300.0, after_ms)

    healthy = replan.Replanned("", 1.0, (), None, None, 0, 100.0, 100.0, float("nan"))
    touched = replan.Replanned("", 1.0, ("l1 - s0",), None, 50.0, 1, 100.0, 100.0, 100.0)
    good, weak, wrong = row(("l0 - s1",), 130.0), row(("l0 - s1",), 150.0), row(("l0 - s0",), 100.0)
    missed = row((), float("nan"), None)
    assert [each.right for each in (good, weak, wrong, missed)] == [True, False, False, False]
    checks = replan.judged([good] * 9 + [weak, healthy])
    assert [check["holds"] for check in checks.values()] == [True, True]
    assert checks["replan"]["figures"]["won_back_pct"] == [75.0] + [85.0] * 9
    checks = replan.judged([good] * 8 + [weak, missed, touched])
    assert [check["holds"] for check in checks.values()] == [False, False]
    assert checks["replan"]["figures"]["named"] == 9


def test_each_pair_of_ranks_reduces_once_and_each_rank_once_in_a_round() -> None:
    rounds = rounds_of(6)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(6), 2))
    assert all(sorted(rank for pair in pairs for rank in pair) == [*range(6)] for pairs in rounds)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc")
def test_a_slow_cable_of_a_watched_job_is_named_and_planned_around(tmp_path: Path) -> None:
    with lab(*fabric.REPLANNED_SHAPE) as made:
        (row,) = replan.draws(made, tmp_path, 1, 1, fabric.PAIRS)
    assert row.named == (row.fault,)
    assert row.won_back > 0.5  # on a busy machine


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc")
def test_flows_and_a_job_take_the_share_that_is_predicted_and_nothing_is_left_behind() -> None:
    draw = random.Random(1)
    with lab(4, 2, 2, 100, 50) as made, before_other_work():
        of_flows(made, "hash", draw)
        rows = [row for condition in ("hash", "link down") for row in of_flows(made, condition, draw)]
        rows.append(of_job(made, "hash", draw, StepWork(100, 2 << 20, 1), 2))
    assert max(row.error_pct for row in rows) < NEAR_PCT
    assert made.name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
