"""What a report of NCCL's RAS beside the dumps settles, confirms and leaves open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dpro.detect.findings import Finding
from dpro.detect.hang.find import find_hangs
from dpro.detect.hang.records import read_ras, read_records, records_of
from dpro.ingest.dumps import read_dumps
from dpro.ingest.importer import import_sources
from dpro.schema import COUNTERS
from dpro.store import open_run
from tests.unit.ingest.test_dumps import BEGIN, S, dump, write

WELL = {"init_state": 0, "async_error": 0, "abort_flag": False}


def report(calls: dict[int, int], missing: dict[int, str] | None = None) -> bytes:
    """What RAS says: how often ranks called all_reduce, and what is wrong with those that do not answer."""
    members = [
        {"rank": rank, "host": "a", "pid": 10 + rank, "nvml_dev": rank, "status": WELL}
        | {"collective_counts": {"AllReduce": count}}
        for rank, count in calls.items()
    ]
    gone = [
        {"rank": rank, "host": "a", "pid": 10 + rank, "nvml_dev": rank}
        | {"status": {"unresponsive": True, "considered_dead": what == "dead"}}
        for rank, what in (missing or {}).items()
    ]
    size = len(members) + len(gone)
    world: dict[str, Any] = {"hash": "0xab", "size": size, "ranks": members, "missing_ranks": gone}
    return json.dumps({"nccl_version": "2.28.3", "communicators_count": 1, "communicators": [world]}).encode()


def found(folder: Path) -> list[Finding]:
    """From the dumps themselves; the run made of them must give the same."""
    dumps = read_dumps(folder)
    assert dumps is not None
    findings = find_hangs(records_of(dumps.frames, dumps.manifest.world_size))
    run = folder.with_name("run")
    import_sources([folder], run)
    assert find_hangs(read_records(open_run(run))) == findings
    return findings


def waiting(folder: Path, ras: bytes) -> Path:
    """Rank 0 waits in its third call; of rank 1 there is no dump, but a report."""
    write(folder, rank_0=dump(3, 0, state="scheduled"), ras=ras)
    os.utime(folder / "rank_0", ns=(BEGIN + 60 * S, BEGIN + 60 * S))
    return folder


def test_rank_without_a_dump_that_is_considered_dead_is_dead(tmp_path):
    (finding,) = found(waiting(tmp_path / "dumps", report({0: 3}, {1: "dead"})))
    assert (finding.class_, finding.ranks, finding.confidence) == ("dead.rank", (1,), 0.9)
    assert "NCCL's RAS considers rank 1 dead" in finding.evidence


def test_rank_without_a_dump_that_does_not_answer_is_surer_but_not_dead(tmp_path):
    (finding,) = found(waiting(tmp_path / "dumps", report({0: 3}, {1: "silent"})))
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.host", (1,), 0.75)
    assert any("does not answer NCCL's RAS" in line for line in finding.evidence)


def test_counts_of_calls_show_that_a_rank_without_a_dump_is_behind(tmp_path):
    (finding,) = found(waiting(tmp_path / "dumps", report({0: 3, 1: 2})))
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.host", (1,), 0.75)
    assert "rank 1 answers NCCL's RAS: its process is alive" in finding.evidence
    assert (
        "by NCCL's RAS it has called AllReduce 2 times in communicator 0xab, others 3 times"
        in finding.evidence
    )
    observed = {one.kind: one.values for one in finding.observations}
    assert (observed["ras-behind"]["calls"], observed["ras-behind"]["others"]) == (2, 3)


def test_report_that_knows_nothing_against_a_rank_leaves_it_open(tmp_path):
    (finding,) = found(waiting(tmp_path / "dumps", report({0: 3, 1: 3})))
    assert (finding.class_, finding.ranks, finding.confidence) == ("hang.host", (1,), 0.5)


def test_report_confirms_what_dumps_show(tmp_path):
    folder = write(tmp_path / "dumps", rank_0=dump(3, 0, state="scheduled"), rank_1=dump(2, 1))
    write(folder, ras=report({0: 3, 1: 2}))
    (finding,) = found(folder)
    assert (finding.class_, finding.ranks) == ("hang.host", (1,))
    assert "rank 1 answers NCCL's RAS: its process is alive" in finding.evidence


def test_healthy_job_stays_healthy_with_a_report(tmp_path):
    folder = write(tmp_path / "dumps", rank_0=dump(3, 0), rank_1=dump(3, 1), ras=report({0: 3, 1: 3}))
    assert found(folder) == []


@pytest.mark.parametrize("ranks", [(1, 2), (2,)])
def test_suspects_are_narrowed_to_those_the_report_is_against(ranks, tmp_path):
    write(tmp_path, rank_0=dump(3, 0), ras=report({0: 3, 1: 3}, {2: "silent"}))
    dumps = read_dumps(tmp_path)
    assert dumps is not None
    assert read_ras(dumps.frames[COUNTERS.name]).suspects(ranks) == [2]
