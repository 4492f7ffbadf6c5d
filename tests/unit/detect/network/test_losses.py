"""What loses packets, by made-up counts of TCP connections between the hosts of a fabric."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import polars as pl
import pytest

from dpro.detect.findings import Finding
from dpro.detect.network.degradation import CAUSE, pairs_of_hosts, with_losses
from dpro.detect.observations import observe
from dpro.schema import COUNTERS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from tests.unit.detect.network.test_wires import put_fabric, spine_of

RANKS = range(6)
SENT = 2000


def counters(again: dict[tuple[int, int], int]) -> pl.DataFrame:
    """Two samples of each connection; by pair how many segments were sent again by the second."""
    rows = []
    for one, other in permutations(RANKS, 2):
        device = f"10.0.0.{one}>10.0.0.{other}"
        for time_ns, share in ((1, 0.0), (2, 1.0)):
            for counter, value in (
                ("tcp_sent_segments", SENT * share),
                ("tcp_retransmitted_segments", again.get((one, other), 0) * share),
            ):
                rows.append((one, f"h{one}", device, counter, time_ns, value))
    names = ["rank", "host", "device", "counter", "time_ns", "value"]
    return pl.DataFrame(rows, schema={name: COUNTERS.dtypes[name] for name in names}, orient="row")


def workers() -> pl.DataFrame:
    return pl.DataFrame(
        {"rank": RANKS, "host": [f"h{rank}" for rank in RANKS], "local_rank": [0] * len(RANKS)},
        schema_overrides={"rank": WORKERS.dtypes["rank"], "local_rank": WORKERS.dtypes["local_rank"]},
    )


def run_of(tmp_path: Path, *, known: bool | None) -> Run:
    """A run of these ranks; with a topology unless that is None."""
    for rank in RANKS:
        own = workers().filter(rank=rank)
        write_part(tmp_path, WORKERS, f"rank-{rank}", own)
    write_manifest(tmp_path, Manifest(world_size=len(RANKS), ranks=list(RANKS)))
    if known is not None:
        put_fabric(tmp_path, known=known)
    return open_run(tmp_path)


def found(tmp_path: Path, again: dict[tuple[int, int], int], *, known: bool | None) -> list[Finding]:
    return with_losses([], counters(again), workers(), run_of(tmp_path, known=known))


def test_a_link_that_loses_one_way_is_named(tmp_path: Path) -> None:
    lossy = {
        (one, other): 25
        for one, other in permutations(RANKS, 2)
        if one // 2 == 1 and other // 2 != 1 and spine_of(*sorted((one, other))) == 1
    }
    (finding,) = found(tmp_path, lossy, known=True)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.link", "link", "l1 > s1")
    assert finding.cause == CAUSE
    assert finding.cost_ns == 0
    assert any("1.25%" in line for line in finding.evidence)
    observed = {one.kind: one.values for one in finding.observations}
    assert observed["segments-sent-again"]["again_share"] == 25 / SENT


@pytest.mark.parametrize("known", [True, False, None])
def test_a_port_that_loses_is_named_whatever_is_known_of_paths(tmp_path: Path, known: bool | None) -> None:
    lossy = {pair: 30 for pair in permutations(RANKS, 2) if 4 in pair}
    (finding,) = found(tmp_path, lossy, known=known)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.nic", "port", "h4:nic0")


@pytest.mark.parametrize("again", [0, 3, 30])
def test_what_all_pairs_send_again_equally_blames_nothing(tmp_path: Path, again: int) -> None:
    assert found(tmp_path, dict.fromkeys(permutations(RANKS, 2), again), known=True) == []


@pytest.mark.parametrize(
    ("kind", "name", "ranks"), [("port", "h4:nic0", (0, 1, 2, 3, 4, 5)), ("link", "1 - 4", (1, 4))]
)
def test_what_is_slow_because_of_losses_is_one_finding_with_them(
    tmp_path: Path, kind: str, name: str, ranks: tuple[int, ...]
) -> None:
    observed = (observe("test", "slow"),)
    slow = Finding("slow.link", kind, name, ranks, 0.1, 0.9, 5.0, observed)
    other = Finding("slow.link", "link", "0 - 1", (0, 1), 0.1, 0.9, 5.0, observed)
    lossy = {pair: 30 for pair in permutations(RANKS, 2) if 4 in pair}
    kept, finding = with_losses([slow, other], counters(lossy), workers(), run_of(tmp_path, known=True))
    assert kept == other
    assert (finding.cause, finding.component_id) == (CAUSE, "h4:nic0")
    assert (finding.cost_ns, finding.evidence[0]) == (5.0, "slow")
    assert not any("not known" in line for line in finding.evidence)


def test_counts_of_connections_that_end_are_kept() -> None:
    values = [100.0, 400.0, 50.0, 90.0]  # one of two connections ends after the second sample
    rows = pl.DataFrame(
        {
            "rank": 0, "host": "a", "device": "10.0.0.1>10.0.0.2", "time_ns": [1, 2, 3, 4],
            "counter": "tcp_sent_segments", "value": values,
        }
    )  # fmt: skip
    other = rows.with_columns(host=pl.lit("b"), device=pl.lit("10.0.0.2>10.0.0.1"))
    pairs = pairs_of_hosts(pl.concat([rows, other]))
    assert pairs.select("source", "target", "sent").rows() == [("a", "b", 440), ("b", "a", 440)]


def test_runs_without_tcp_counters_say_nothing(tmp_path: Path) -> None:
    none = counters({}).filter(pl.col("counter") == "load_1m")
    assert with_losses([], none, workers(), run_of(tmp_path, known=True)) == []
