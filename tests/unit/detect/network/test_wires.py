"""Cables, ports and switches that are blamed for slow groups, in made-up jobs on a fabric of three leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import polars as pl
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.network.degradation import find_slower_transfers
from dpro.detect.network.traffic import Traffic, max_savings, traffic_of
from dpro.detect.network.transfers import find_slow_network
from dpro.detect.network.wires import components_of, wires_of
from dpro.replay.cost.fabric.network import fabric_of
from dpro.topology.file import FILE, HostEntry, LinkEntry, SwitchEntry, TopologyFile, write
from dpro.topology.kept import PATHS as PATHS
from dpro.topology.kept import PathEntry, write_paths
from tests.unit.detect.jobs import MS, Work, equal_work, graph_of

HOSTS = 6
# All pairs of six ranks, in five rounds.
ROUNDS = [
    [(0, 5), (1, 4), (2, 3)],
    [(1, 5), (0, 2), (3, 4)],
    [(2, 5), (1, 3), (0, 4)],
    [(3, 5), (2, 4), (0, 1)],
    [(4, 5), (0, 3), (1, 2)],
]


FABRIC = TopologyFile(
    hosts=[HostEntry(f"h[0-{HOSTS - 1}]", gpus=1, nics=1)],
    switches=[SwitchEntry("l[0-2]"), SwitchEntry("s[0-1]", "spine")],
    links=[
        *(LinkEntry(f"h{host}:nic0", f"l{host // 2}") for host in range(HOSTS)),
        LinkEntry("l[0-2]", "s[0-1]"),
    ],
)


def spine_of(begin: int, end: int) -> int:
    """The spine that a flow takes in these tests."""
    return (3 * begin + end + begin * end) % 2


def put_fabric(folder: Path, *, known: bool) -> None:
    """Three leaves of two hosts each, two spines; perhaps with the paths of all pairs."""
    write(FABRIC, folder / FILE)
    if known:
        paths = [
            PathEntry(
                f"h{one}:nic0", f"h{other}:nic0", [f"l{one // 2} > {spine}", f"{spine} > l{other // 2}"]
            )
            for pair in combinations(range(HOSTS), 2)
            if pair[0] // 2 != pair[1] // 2
            for spine in [f"s{spine_of(*pair)}"]
            for one, other in (pair, pair[::-1])
        ]
        write_paths(paths, folder / PATHS)


def crossing(part: str) -> dict[tuple[int, ...], float]:
    """Pairs of ranks whose path crosses a part, twice as slow."""
    found = {}
    for one, other in combinations(range(HOSTS), 2):
        leaves, spine = (f"l{one // 2}", f"l{other // 2}"), f"s{spine_of(one, other)}"
        parts = {f"h{one}", f"h{other}", *leaves}
        if leaves[0] != leaves[1]:
            parts |= {spine, *(f"{leaf}-{spine}" for leaf in leaves)}
        if part in parts:
            found[one, other] = 2.0
    return found


def found(
    tmp_path: Path, part: str, *, known: bool = True, beside: Mapping[tuple[int, ...], float] | None = None
) -> list[Finding]:
    base = equal_work(HOSTS, 6, num_collectives=len(ROUNDS))
    work = Work(
        base.data, base.gap, base.compute, base.tail, transfer=10.0, transfer_sigma=0.03, groups=ROUNDS,
        links=crossing(part) | dict(beside or {}), hosts=[f"h{host}" for host in range(HOSTS)],
    )  # fmt: skip
    graph = graph_of(tmp_path, work)
    put_fabric(tmp_path, known=known)
    return find_slow_network(traffic_of(Baseline(graph)))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("h3", ("slow.nic", "port", "h3:nic0")),
        ("l1-s1", ("slow.link", "cable", "l1 - s1")),
        ("", None),
    ],
)
def test_the_part_that_slow_pairs_cross_is_named(tmp_path: Path, part: str, named: tuple[str, ...]) -> None:
    said = [(each.class_, each.component_kind, each.component_id) for each in found(tmp_path, part)]
    assert said == ([named] if named else [])


def test_a_pair_that_is_slightly_slow_does_not_vote_on_what_makes_others_far_slower(tmp_path: Path) -> None:
    # Pair 2, 3 shares its leaf with all that cross the cable, which are twice as slow.
    (finding,) = found(tmp_path, "l1-s1", beside={(2, 3): 1.18})
    assert (finding.component_kind, finding.component_id) == ("cable", "l1 - s1")


def test_the_finding_says_who_votes_who_is_next_and_what_it_costs(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "l1-s1")
    slow = len(crossing("l1-s1"))
    assert f"{slow} of {slow} groups whose paths cross cable l1 - s1 are slow, 0 others" in finding.evidence
    assert any(line.startswith("runner-up: ") for line in finding.evidence)
    observed = {one.kind: one.values for one in finding.observations}
    assert (observed["slow-on-paths"]["slow"], observed["slow-on-paths"]["others"]) == (slow, 0)
    assert finding.cost_ns > 0
    assert finding.confidence > 0.5


def test_cables_of_a_leaf_are_not_distinct_where_paths_are_not_known(tmp_path: Path) -> None:
    for finding in found(tmp_path, "l1-s1", known=False):
        assert finding.component_id != "l1 - s1"


def test_a_run_without_a_topology_has_no_wires(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, equal_work(2))
    assert wires_of(graph.run) is None
    assert wires_of(None) is None


def test_what_may_be_at_fault_are_ports_cables_their_ways_and_switches() -> None:
    kinds = [each.kind for each in components_of(fabric_of(FABRIC))]
    assert {kind: kinds.count(kind) for kind in kinds} == {"port": 6, "link": 24, "cable": 6, "switch": 5}


@pytest.mark.parametrize("known", [True, False])
def test_what_became_slow_while_the_job_ran_is_named_on_the_wires(tmp_path: Path, known: bool) -> None:
    slow = crossing("l1-s1")
    graph = graph_of(tmp_path, replace(equal_work(HOSTS), hosts=[f"h{host}" for host in range(HOSTS)]))
    put_fabric(tmp_path, known=known)
    rows = [
        {
            "op": "all_reduce", "bytes": 1 << 20, "members": f"{one},{other}", "num_ranks": 2, "num_hosts": 2,
            "step": step, "whole": True,
            "transfer_ns": round(MS * (10 + 0.01 * (one + step % 3)) * (times if step >= 30 else 1)),
        }
        for step in range(60)
        for one, other in combinations(range(HOSTS), 2)
        for times in [slow.get((one, other), 1.0)]
    ]  # fmt: skip
    transfers = pl.DataFrame(rows).with_row_index("instance").cast({"instance": pl.Int64})
    lasted = [200 * MS if step < 30 else 220 * MS for step in range(60)]
    steps = pl.DataFrame({"step": range(60), "duration_ns": lasted})
    hosts = {rank: f"h{rank}" for rank in range(HOSTS)}
    traffic = Traffic(transfers, hosts, partial(max_savings, transfers, steps), "no windows", run=graph.run)
    (finding,) = find_slower_transfers(traffic)
    assert finding.evidence[0].startswith("since step 30")
    if known:
        assert (finding.class_, finding.component_kind, finding.component_id) == (
            "slow.link",
            "cable",
            "l1 - s1",
        )
        assert any("became slower, 0 others" in line for line in finding.evidence)
    else:
        assert finding.component_id != "l1 - s1"
