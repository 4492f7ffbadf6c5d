"""Hangs of simulated jobs, whose model knows nothing of how they are found: the right rank and class."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reference.hang_cases import diagnose, make_case, verdict
from tests.reference.hanging_dumps import choose_dumping, write_dumps
from tests.reference.hanging_jobs import run_job
from tests.reference.hanging_model import FAULTS, LAYOUTS, NEVER, TWO_HOSTS


def verdicts(
    folder: Path, seeds: range, kinds: tuple[str | None, ...], sizes: tuple[int, ...]
) -> Counter[str]:
    """Verdicts on drawn cases; those whose dumps do not show what happened are counted as open."""
    found: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(f"case {seed}")
        layout, kind, size = rng.choice(LAYOUTS), rng.choice(kinds), rng.choice(sizes)
        if layout == "dp" and kind == "deadlock" and size == 4:
            size = 16
        gloo = rng.random() < 0.15 and layout != "tp_pp" and kind != "deadlock"
        place = folder / str(seed)
        place.mkdir()
        case = make_case(seed, layout, size, kind, place, gloo=gloo, lose=rng.random() < 0.5)
        prefix = "" if case.decided else "open case: "
        found[prefix + verdict(case, diagnose(place, size))] += 1
    return found


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 84), marks=pytest.mark.slow)])
def test_the_right_rank_and_class_are_named(tmp_path, seeds):
    found = verdicts(tmp_path, seeds, FAULTS, (4, 16))
    assert found["right"] >= len(seeds) / 2
    assert found["wrong"] + found["silent"] + found["open"] <= 0.01 * found.total()
    assert found["open case: wrong"] <= 0.1 * found.total()


@pytest.mark.parametrize(
    "seeds", [range(1000, 1015), pytest.param(range(1015, 1055), marks=pytest.mark.slow)]
)
def test_healthy_jobs_raise_nothing(tmp_path, seeds):
    found = verdicts(tmp_path, seeds, (None,), (4, 16))
    assert set(found) == {"right"}


@pytest.mark.parametrize(
    ("seeds", "sizes"),
    [(range(9), (4, 16)), pytest.param(range(100, 220), (4, 16, 64), marks=pytest.mark.slow)],
)
def test_two_ranks_that_are_stuck_at_once_stay_two_whichever_dump_is_missing(tmp_path, seeds, sizes):
    hidden = 0
    for seed in seeds:
        rng = random.Random(seed)
        layout, size = rng.choice(LAYOUTS), rng.choice(sizes)
        job = run_job(rng, layout, size, TWO_HOSTS)
        guilty = set(job.fault.ranks if job.fault else ())
        others = sorted(set(range(size)) - guilty)
        missing = [(), (rng.choice(sorted(guilty)),), (rng.choice(others),)][seed % 3]
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_dumps(rng, job, replace(choose_dumping(rng, job), early={}), folder, missing=missing)
        found = diagnose(folder, size)
        sure = {rank for each in found if each.confidence > 0.5 for rank in each.ranks}
        assert sure <= guilty - set(missing), seed
        # A rank that is stuck with a message open to the one whose dump is missing may as well wait for it.
        chains = [line for each in found for line in each.evidence if line.startswith("the chain")]
        behind = guilty - set(missing) - sure
        assert all(any(f"rank {rank} waits in message" in chain for chain in chains) for rank in behind), seed
        hidden += len(behind)
        assert guilty - behind <= {rank for each in found for rank in each.ranks}, seed
        assert {each.class_ for each in found if each.confidence <= 0.5} <= {"hang.rank"}
    assert hidden <= len(seeds) / 100


@pytest.mark.parametrize("seed", range(6))
def test_a_device_whose_dump_is_older_than_those_of_its_peers_is_not_called_a_host(tmp_path, seed):
    rng = random.Random(seed)
    job = run_job(rng, rng.choice(LAYOUTS), 16, "device")
    (guilty,) = job.fault.ranks if job.fault else ()
    stopped = max(work.enqueued for work in job.works[guilty] if work.completed < NEVER)
    dumping = replace(choose_dumping(rng, job), early={guilty: stopped})
    write_dumps(rng, job, dumping, tmp_path, missing=())
    found = diagnose(tmp_path, 16)
    assert guilty in {rank for each in found for rank in each.ranks}
    for each in found:
        assert each.confidence <= 0.5 or each.class_ == "hang.device", each
        assert each.class_ in ("hang.rank", "hang.device"), each


@pytest.mark.slow
def test_the_right_rank_and_class_are_named_in_99_of_100_cases(tmp_path):
    found = verdicts(tmp_path, range(2000, 2600), FAULTS, (4, 16, 64))
    judged = sum(count for what, count in found.items() if not what.startswith("open case: "))
    assert judged >= 300
    assert found["right"] >= 0.99 * judged
