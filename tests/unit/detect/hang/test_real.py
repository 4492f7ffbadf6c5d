"""A real hang of 16 ranks, two of which hold the interpreter's lock, also without some of its dumps."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.reference.hang_cases import diagnose, records_of

STUCK = (9, 14)
RANKS = range(16)


@pytest.fixture
def dumps(traces: Path, tmp_path: Path) -> Path:
    """The dumps alone: what was done to the job stays out of sight."""
    source = traces / "flight_recorder" / "lock_gil_1st"
    folder = tmp_path / "dumps"
    folder.mkdir()
    for path in source.glob("_dump_*"):
        shutil.copy(path, folder)
    assert len(list(folder.iterdir())) == len(RANKS)
    return folder


def test_both_stuck_ranks_are_named_and_no_other(dumps):
    findings = diagnose(dumps, 16)
    assert [(finding.class_, finding.ranks) for finding in findings] == [
        ("hang.host", (9,)),
        ("hang.host", (14,)),
    ]
    evidence = findings[0].evidence
    assert "never entered" in "\n".join(evidence)
    assert "blocked by this: ranks 0-8, 10-13, 15" in evidence


@pytest.mark.parametrize("missing", RANKS)
def test_any_one_dump_may_be_missing(dumps, missing):
    (dumps / f"_dump_{missing}").unlink()
    findings = diagnose(dumps, 16)
    left = tuple(rank for rank in STUCK if rank != missing)
    sure = [finding for finding in findings if finding.confidence > 0.5]
    assert tuple(rank for finding in sure for rank in finding.ranks) == left
    assert {finding.class_ for finding in sure} == {"hang.host"}
    # Others wait for the rank whose dump is missing: that it is stuck, too, is said to be possible.
    assert [(each.class_, each.ranks) for each in findings if each not in sure] == [("hang.rank", (missing,))]
    if missing in STUCK:  # whether it is stuck, too, only its dump would show
        assert f"a dump of rank {missing} would show" in "\n".join(findings[0].evidence)


@pytest.mark.parametrize("seed", range(30))
def test_with_several_dumps_missing_no_rank_is_accused_that_is_known_to_wait(dumps, seed):
    rng = random.Random(seed)
    missing = rng.sample(RANKS, rng.randint(2, 10))
    for rank in missing:
        (dumps / f"_dump_{rank}").unlink()
    findings = diagnose(dumps, 16)
    accused = {rank for finding in findings for rank in finding.ranks}
    assert {finding.class_ for finding in findings if finding.confidence > 0.5} <= {"hang.host"}
    assert accused <= {*STUCK, *missing}
    assert accused & set(STUCK) or all(finding.confidence <= 0.5 for finding in findings)
    for finding in findings:
        assert finding.confidence <= 0.5 or set(finding.ranks) <= set(STUCK)


@pytest.mark.parametrize("seed", range(10))
def test_damaged_dumps_are_one_line_each_and_the_rest_is_analysed(dumps, seed):
    rng = random.Random(seed)
    damaged = rng.sample([rank for rank in RANKS if rank not in STUCK], 3)
    for rank in damaged:
        path = dumps / f"_dump_{rank}"
        path.write_bytes(path.read_bytes()[: rng.randrange(10, 1000)])
    _, left_out = records_of(dumps, 16)
    assert len(left_out) == 3
    assert all("\n" not in line for line in left_out)
    findings = diagnose(dumps, 16)
    assert [finding.ranks for finding in findings if finding.confidence > 0.5] == [(9,), (14,)]
