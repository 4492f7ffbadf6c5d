"""Hangs of simulated jobs, whose model knows nothing of how they are found: the right rank and class."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.reference.hang_cases import diagnose, make_case, verdict
from tests.reference.hanging_jobs import FAULTS, LAYOUTS


def verdicts(
    folder: Path, seeds: range, kinds: tuple[str | None, ...], sizes: tuple[int, ...]
) -> Counter[str]:
    """Verdicts on drawn cases; those whose dumps do not tell what happened are counted with `untold`."""
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
        told = "" if case.told else "untold "
        found[told + verdict(case, diagnose(place, size))] += 1
    return found


def test_the_right_rank_and_class_are_named(tmp_path):
    found = verdicts(tmp_path, range(60), FAULTS, (4, 16))
    assert found["right"] >= 30
    assert found["wrong"] + found["silent"] + found["open"] <= 0.01 * found.total()
    assert found["untold wrong"] <= 0.1 * found.total()


def test_healthy_jobs_raise_nothing(tmp_path):
    found = verdicts(tmp_path, range(1000, 1040), (None,), (4, 16))
    assert set(found) == {"right"}


@pytest.mark.slow
def test_the_right_rank_and_class_are_named_in_99_of_100_cases(tmp_path):
    found = verdicts(tmp_path, range(2000, 2600), FAULTS, (4, 16, 64))
    judged = sum(count for what, count in found.items() if not what.startswith("untold"))
    assert judged >= 300
    assert found["right"] >= 0.99 * judged
