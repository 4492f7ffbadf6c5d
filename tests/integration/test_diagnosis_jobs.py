"""Faults put into real two-rank jobs: what `dpro diagnose`, `replay` and `whatif` make of the recordings."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.schema import SPANS, STEPS
from dpro.store import open_run
from tests.jobs import PATIENCE_S

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = ROOT / "sample_traces" / "train.py"
# Per sample, of which a batch has 8: the fault is several times what a healthy step takes here, so that the
# noise of a busy machine matters little.
SLOW_MS = 40
INPUT_MS = 12
WARM_UP = 4
PERIOD = 24  # steps from one deep window to the next; each begins with step 5 of it and has 4 steps
SLOW = range(4, 16)  # when, in each period, the disk of rank 1 is slow
UNDISTURBED = range(10, 16)  # of these, the steps that are not profiled, nor next to one that is
HEALED = (*range(18, 24), *range(3))  # when the disk is fast, and has been for a while

# A core that something else on the machine uses slows its rank, and is rightly reported; it costs less.
SUBSTANTIAL = 0.15  # of the step

# The sample job, except that a slow disk is slow only during part of each period.
AT_TIMES = f"""
import sys
sys.path.insert(0, {str(TRAIN.parent)!r})
import train

class Text(train.Text):
    served = 0

    def __getitem__(self, index):
        batch = self.served // train.BATCH
        self.served += 1
        return super().__getitem__(index) if batch % {PERIOD} in {SLOW!r} else self.tokens[index]

train.Text = Text
train.main()
"""


def dpro(*arguments: str | int | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dpro", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


@functools.cache
def document(*arguments: str | Path) -> dict[str, Any]:
    done = dpro(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def record(folder: Path, every: int, window_steps: int, job: Path, *options: str) -> Path:
    windows = ["--every", every, "--window-steps", window_steps]
    done = dpro("record", "-o", folder / "run", *windows, "--", *TORCHRUN, job, *options)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("healthy"), 100, 8, TRAIN, "--steps", "16")


@pytest.fixture(scope="session")
def slow_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 1 reads its samples from a disk that is slow at times, and whenever the job is profiled."""
    folder = tmp_path_factory.mktemp("slow_rank")
    (folder / "job.py").write_text(AT_TIMES)
    options = ("--steps", "66", "--slow-rank", "1", "--slow-ms", str(SLOW_MS))
    return record(folder, PERIOD, 4, folder / "job.py", *options)


@pytest.fixture(scope="session")
def slow_input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both ranks read their samples from a slow disk."""
    options = ("--steps", "16", "--slow-input-ms", str(INPUT_MS))
    return record(tmp_path_factory.mktemp("slow_input"), 100, 8, TRAIN, *options)


def usual_step_ms(run: Path, places: Iterable[int]) -> float:
    """Median of the steps that lie at the given places of their period and were timed but not profiled.

    Every rank waits for the others in each step, so any rank's steps are the job's; the mean over the ranks
    evens out where in the step each one's boundary lies.
    """
    here = (pl.col("step") > WARM_UP) & (pl.col("window") < 0) & (pl.col("step") % PERIOD).is_in(list(places))
    steps = open_run(run).table(STEPS).filter(here)
    assert steps["step"].n_unique() >= 12
    return float(steps.group_by("step").agg(pl.col("duration_ns").mean())["duration_ns"].median()) / 1e6


def of_job(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Findings but that the machine is crowded: what else runs there is nothing of the job's."""
    return [finding for finding in found["findings"] if finding["component"]["kind"] != "host"]


def substantial(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in of_job(found) if finding["severity"] >= SUBSTANTIAL]


@pytest.mark.slow  # so is the sample that ships, and the demo
def test_the_rank_with_slow_input_is_named_and_no_other(slow_rank):
    found = document("diagnose", slow_rank)
    (finding,) = of_job(found)
    assert finding["class"] == "slow.host"
    assert finding["component"] == {"kind": "rank", "id": "1"}
    assert finding["ranks"] == [1]
    assert finding["severity"] > SUBSTANTIAL
    assert "input pipeline" in finding["evidence"][0]
    assert not found["healthy"]


@pytest.mark.slow
def test_the_stated_cost_is_what_the_job_saves_when_the_fault_is_gone(slow_rank):
    # The truth is measured in the same job, on steps that the diagnosis does not see: it reads only profiled
    # steps, all of which are slow. Between them the disk is slow for a while and then healed for a while, and
    # the difference of these stretches, side by side in time, is what healing saves. Two runs of a job on a
    # busy machine differ among themselves by more than the tolerance.
    (finding,) = of_job(document("diagnose", slow_rank))
    saved_ms = usual_step_ms(slow_rank, UNDISTURBED) - usual_step_ms(slow_rank, HEALED)
    assert saved_ms > 0.8 * 8 * SLOW_MS  # the fault was there
    assert finding["cost_ms_per_step"] == pytest.approx(saved_ms, rel=0.10)


@pytest.mark.slow  # the sample that ships is healthy as well
def test_a_healthy_job_is_healthy(healthy):
    found = document("diagnose", healthy)
    assert found["answerable"] is True
    assert substantial(found) == []
    assert found["healthy"] is (not found["findings"])


@pytest.mark.slow
def test_input_slow_on_all_ranks_is_one_finding_of_the_job_and_blames_no_rank(slow_input):
    (finding,) = substantial(document("diagnose", slow_input))
    assert finding["class"] == "slow.host"
    assert finding["component"] == {"kind": "job", "id": "the input pipeline"}
    assert finding["ranks"] == [0, 1]
    # Each batch of 8 is read while the step waits: what it sleeps at least, what it was seen to take at most.
    spans = open_run(slow_input).table(SPANS).filter(pl.col("name").str.starts_with("enumerate(DataLoader)"))
    seen_ms = float(spans["duration_ns"].mean()) / 1e6
    assert 0.9 * 8 * INPUT_MS <= finding["cost_ms_per_step"] <= 1.1 * seen_ms


@pytest.mark.slow
@pytest.mark.parametrize("job", ["healthy", "slow_rank", "slow_input"])
def test_the_replay_explains_the_steps_of_real_jobs(job, request):
    fit = document("replay", request.getfixturevalue(job))
    assert fit["answerable"], fit["reasons"]
    assert fit["error_pct"] <= 3.0
    assert fit["coverage"]["collectives_matched"] == 1.0


@pytest.mark.slow
def test_what_helps_most_against_slow_input_of_one_rank_is_its_input(slow_rank):
    predictions = document("whatif", slow_rank)["predictions"]
    best = next(prediction for prediction in predictions if len(prediction["edits"]) == 1)
    assert best["edits"][0].partition(":")[0] in ("workers", "hide-input")
    measured = usual_step_ms(slow_rank, UNDISTURBED) / usual_step_ms(slow_rank, HEALED)
    assert best["speedup"] == pytest.approx(measured, rel=0.35)  # profiled steps are slower by a share


@pytest.mark.slow
def test_the_diagnosis_in_words_names_the_rank_and_its_cost(slow_rank):
    done = dpro("diagnose", slow_rank)
    assert done.returncode == 0
    assert re.search(r"slow host work: rank 1 (\(.*\) )?costs", done.stdout)
    assert "input pipeline" in done.stdout
