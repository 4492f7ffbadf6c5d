"""A real job in which one batch is poisoned: its rank and step are named, and of a healthy one nothing is."""

from __future__ import annotations

import json
import time

import pytest

from dpro.detect.findings_log import BEGINS
from dpro.extensions.watch.watcher import Watcher
from tests.commands import dpro
from tests.jobs import RECORD, TORCHRUN, complete, imports, start, wait_until

pytestmark = pytest.mark.slow

JOB = """
import time
from torch.distributed import init_process_group, destroy_process_group, get_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

how, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * steps

    def __getitem__(self, index):
        torch.manual_seed(index + 10**6 * get_rank())
        inputs = torch.randn(16)
        target = inputs.sum() + 0.3 * torch.randn(())
        if get_rank() == 1 and index == 8 * 60:
            inputs *= float("nan") if how == "nan" else 1.0
            target *= 1e4 if how == "large" else 1.0
        return inputs, target

init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in DataLoader(Samples(), batch_size=8):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs)[:, 0], targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    time.sleep(pause_s)
destroy_process_group()
"""


def command(folder, how, steps, pause_s=0.0):
    (folder / "job.py").write_text(imports() + JOB)
    job = [*TORCHRUN, "job.py", how, str(steps), str(pause_s)]
    return [*RECORD, "--watch-loss", "--no-windows", "-o", "run", "--", *job]


@pytest.mark.parametrize("how", ["nan", "large", "none"])
def test_the_rank_whose_batch_is_bad_is_named_with_the_step(how, tmp_path):
    done = complete(command(tmp_path, how, 120), tmp_path)
    assert done.returncode == 0, done.stderr
    diagnosis = json.loads(dpro("diagnose", tmp_path / "run", "--json").stdout)
    bad = [one for one in diagnosis["findings"] if one["class"].startswith("loss.")]
    assert [one["class"] for one in bad] == {"nan": ["loss.not_finite"], "large": ["loss.jump"], "none": []}[
        how
    ]
    for one in bad:
        assert one["ranks"] == [1]
        seen = {each["kind"]: each["values"] for each in one["observations"]}
        assert seen["not-finite" if how == "nan" else "jumped"]["step"] == 60
        assert "nothing-differs" in seen
        if how == "nan":
            assert (seen["others-followed"]["next_step"], seen["others-followed"]["ill_ranks"]) == (61, [0])
        else:
            assert seen["jump-is-over"]["back_step"] == 61
        assert "look at the batch of rank 1 in step 60" in dpro("explain", tmp_path / "run").stdout.replace(
            "\n         ", " "
        )


def test_a_job_that_runs_is_watched_for_numbers_that_go_bad(tmp_path):
    job = start(command(tmp_path, "nan", 3000, 0.05), tmp_path)
    try:
        wait_until((tmp_path / "run").exists, "nothing was recorded")
        watcher, begun = Watcher(tmp_path / "run"), []
        while job.poll() is None and not begun:
            begun = [notice for notice in watcher.look() if notice.finding.class_ == "loss.not_finite"]
            time.sleep(0.5)
    finally:
        job.kill()
        job.wait()
    assert [(one.event, one.finding.ranks, one.finding.cause) for one in begun] == [
        (BEGINS, (1,), "loss NaN in step 60")
    ]
