"""`dpro try` on real jobs: predicted, changed from the outside, measured, remembered."""

import json
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from dpro.store import AppliedChange, open_run
from tests.jobs import (
    COMPILER,
    PATIENCE_S,
    TINY,
    TORCHRUN,
    TWO_RANKS,
    complete,
    imports,
    start,
    wait_for,
    wait_until,
)

pytest.importorskip("torch")

TRY = [sys.executable, "-m", "dpro", "try"]
DDP = (
    imports(COMPILER)
    + """
import time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
STEPS, WIDTH = 30, 128

def main(model=lambda: torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]), check=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        if check:
            check(step, ddp)
    print("trained to the end")
    # From torch 2.13 on, gloo's threads need the GIL to free what a backward pass reduced, and the end of the
    # process group waits for them with the GIL: plain jobs hang there, too, on a busy machine.
    time.sleep(0.5)
    dist.destroy_process_group()
"""
)


def tried(folder, edits, script, *options, launcher=TWO_RANKS, **extra):
    """`dpro try` of a script; its exit code, its JSON and what it said on stderr."""
    (folder / "job.py").write_text(script)
    command = [*TRY, *edits, "-o", "runs", "--json", *options, "--", *launcher, "job.py"]
    done = complete(command, folder, XDG_DATA_HOME=folder / "data", **extra)
    document = json.loads(done.stdout) if done.stdout else {}
    return done.returncode, document, done.stderr.decode()


def entries(folder):
    ledger = folder / "data" / "dpro" / "ledger"
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


# One try of a real data-parallel job, seen from all sides.


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    edits = ["bucket:mb=0.05", "ddp:static_graph=true"]
    return folder, *tried(folder, edits, DDP + "main()", "--repeats", "2")


@pytest.mark.slow
def test_buckets_of_an_unchanged_script_get_the_size_that_is_tried(bucket):
    folder, code, document, stderr = bucket
    assert code == 0, stderr
    from dpro.schema import BUCKETS

    sizes = {
        side: open_run(folder / document["runs"][side][0]).table(BUCKETS).filter(rank=0)["bytes"].to_list()
        for side in ("baseline", "changed")
    }
    assert len(sizes["baseline"]) == 1
    assert len(sizes["changed"]) == 4
    assert sum(sizes["baseline"]) == sum(sizes["changed"])


@pytest.mark.slow
def test_what_was_applied_where_is_in_the_manifest_of_every_rank(bucket):
    folder, _, document, _ = bucket
    manifest = open_run(folder / document["runs"]["changed"][0]).manifest
    assert msgspec.convert(document["applied"], list[AppliedChange]) == manifest.applied
    assert {(made.rank, made.edit) for made in manifest.applied} == {
        (rank, edit) for rank in (0, 1) for edit in document["edits"]
    }
    for made in manifest.applied:
        [place] = made.applied
        assert place.where.startswith("DistributedDataParallel at job.py:")
    assert open_run(folder / document["runs"]["baseline"][0]).manifest.applied == []


def test_what_was_measured_is_in_the_ledger(bucket):
    folder, _, document, _ = bucket
    if document["verdict"].startswith("not judged"):  # the load of this machine has changed meanwhile
        assert (entries(folder), document["ledger"]) == ([], "")
        return
    [entry] = entries(folder)
    assert entry["kind"] == "bucket:mb + ddp:static_graph=true"
    assert entry["measured"]["ratio"] == pytest.approx(1 / document["measured"]["speedup"])
    assert entry["measured"]["low"] <= entry["measured"]["ratio"] <= entry["measured"]["high"]
    assert (entry["pairs"], entry["world_size"]) == (2, 2)
    listed = complete(
        [sys.executable, "-m", "dpro", "ledger", "--json"], folder, XDG_DATA_HOME=folder / "data"
    )
    assert json.loads(listed.stdout)["entries"][0]["edits"] == document["edits"]


def test_output_of_the_job_is_beside_the_runs(bucket):
    folder, _, _, _ = bucket
    for name in ("baseline-1", "changed-1"):
        assert (folder / "runs" / f"{name}.log").read_text().count("trained to the end") == 2


@pytest.mark.slow
def test_a_baseline_that_was_recorded_before_is_taken(bucket):
    folder, _, document, _ = bucket
    again = folder / "again"
    again.mkdir()
    earlier = document["runs"]["baseline"][0]
    code, second, stderr = tried(
        again, ["ddp:gradient_as_bucket_view=true"], DDP + "main()", "--repeats", "1", "--baseline",
        str(folder / earlier),
    )  # fmt: skip
    assert code == 0, stderr
    assert second["runs"]["baseline"] == [str(folder / earlier)]
    assert second["verdict"].startswith("not judged: one pair")
    assert second["ledger"] == ""
    assert second["predicted"] is None
    assert "no what-if edit predicts this" in second["not_predicted"]


# A clear gain, predicted and measured.

SLEEPING = (
    TINY
    + """
import time
from torch.utils.data import DataLoader

class Disk(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.ones(4)

for batch in DataLoader(Disk()):
    model(batch).sum().backward()
    optimizer.step()
"""
)


@pytest.mark.slow
def test_workers_that_read_ahead_are_measured_to_help(tmp_path):
    code, document, stderr = tried(
        tmp_path, ["workers:count=3"], SLEEPING, "--repeats", "2", launcher=[sys.executable]
    )
    assert code == 0, stderr
    assert document["verdict"] == "faster"
    assert document["measured"]["speedup"] > 1.5
    assert document["predicted"]["speedup"] > 1.5
    assert document["applied"][0]["applied"][0]["where"].startswith("DataLoader at job.py:")


# What cannot be applied is an error, never a try that measured nothing.

ENDLESS = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.RMSprop(model.parameters())
for step in range(100_000):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if step == 40 and not CHANGED:
        break
"""


@pytest.mark.slow
def test_a_change_that_cannot_be_made_ends_the_job_and_the_try_with_the_reason(tmp_path):
    # Only a job that is ended from outside gets past the changed run.
    script = "import os\nCHANGED = 'changed' in os.environ.get('PYTHONPATH', '')\n" + ENDLESS
    code, document, stderr = tried(
        tmp_path, ["optimizer:impl=fused"], script, "--repeats", "1", launcher=[sys.executable]
    )
    assert (code, document) == (1, {})
    assert "rank 0: optimizer:impl=fused: RMSprop has no fused version" in stderr
    assert entries(tmp_path) == []


def test_a_job_that_fails_is_an_error_of_the_try(tmp_path):
    code, document, stderr = tried(
        tmp_path, ["compile"], "raise SystemExit('out of cheese')", launcher=[sys.executable]
    )
    assert (code, document) == (1, {})
    assert "the job ended with exit code 1: out of cheese" in stderr
    assert "baseline-1.log" in stderr


@pytest.mark.slow
def test_a_try_of_a_job_that_fails_on_one_rank_says_what_that_rank_raised(tmp_path):
    fails = """
def check(step, ddp):
    if step == 5 and dist.get_rank() == 1:
        raise ValueError("out of cheese")

main(check=check)
"""
    code, document, stderr = tried(tmp_path, ["gc"], DDP + fails, launcher=TORCHRUN)
    assert (code, document) == (1, {})
    assert "the job ended with exit code 1: ValueError: out of cheese (job.py:" in stderr
    assert "baseline-1.log" in stderr


def test_a_try_that_is_ended_ends_its_job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('begun.tmp').write_text(str(os.getpid()))\n"
        "os.rename('begun.tmp', 'begun')\n"
        "time.sleep(1000)\n"
    )
    trying = start([*TRY, "gc", "-o", "runs", "--", sys.executable, "job.py"], tmp_path)
    wait_for(tmp_path / "begun")
    job = int((tmp_path / "begun").read_text())
    trying.terminate()
    trying.communicate(timeout=PATIENCE_S)
    assert trying.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not Path(f"/proc/{job}").exists(), "the job goes on")


def test_a_job_that_is_too_short_is_refused_before_it_runs_again(tmp_path):
    code, _, stderr = tried(
        tmp_path, ["gc"], SLEEPING.replace("return 40", "return 15"), launcher=[sys.executable]
    )
    assert code == 1
    assert "let the job run longer" in stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["baseline-1", "baseline-1.log"]


def test_what_is_not_a_change_is_refused_before_anything_runs(tmp_path):
    code, _, stderr = tried(tmp_path, ["bukket:mb=1"], "")
    assert code == 2
    assert "did you mean 'bucket'" in stderr
    assert not (tmp_path / "runs").exists()


def test_without_a_job_there_is_nothing_to_try(tmp_path):
    done = complete([*TRY, "gc"], tmp_path)
    assert done.returncode == 2
    assert b"no command given" in done.stderr


# Changes to communication, on two ranks that could differ.

CHECKED = """
def check(step, ddp):
    mine = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    if dist.get_rank() == 0:
        print(step, "same" if torch.equal(*theirs) else "differ")
"""


@pytest.mark.slow
def test_with_local_updates_ranks_differ_between_averages_and_agree_after_each(tmp_path):
    code, _, stderr = tried(
        tmp_path, ["local-updates:every=4"], DDP + CHECKED + "main(check=check)", "--repeats", "1"
    )
    assert code == 0, stderr
    log = (tmp_path / "runs" / "changed-1.log").read_text().splitlines()
    same = [int(line.split()[0]) for line in log if line.endswith(" same")]
    assert same == [0, 1, 2, *range(3, 30, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "repeats"),
    [
        ("compress:to=fp16", 2),
        ("compress:to=bf16", 1),
        ("compress:powersgd_rank=2", 1),
        ("compress:topk=0.25", 1),
    ],
)
def test_ranks_stay_equal_under_compression(tmp_path, edit, repeats):
    job = DDP + CHECKED + "main(check=check)"
    code, document, stderr = tried(tmp_path, [edit], job, "--repeats", str(repeats))
    assert code == 0, stderr
    assert document["pairs"] == repeats
    assert (document["noise"] is not None) == (repeats > 1)
    logs = [path.read_text() for path in (tmp_path / "runs").glob("changed-*.log")]
    assert [log.count("same") for log in logs] == [30] * repeats


@pytest.mark.slow
def test_a_model_is_compiled_and_run_under_autocast_on_all_ranks(tmp_path):
    code, document, stderr = tried(
        tmp_path, ["compile", "autocast:dtype=bf16"], DDP + "main()", "--repeats", "1"
    )
    assert code == 0, stderr
    assert {made["rank"] for made in document["applied"]} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(("edit", "differs"), [("compress:topk=0.0001", True), ("compress:to=bf16", False)])
def test_a_change_that_breaks_training_is_seen(tmp_path, edit, differs):
    code, document, stderr = tried(tmp_path, [edit], DDP.replace("1e-3", "1.0") + "main()", "--repeats", "1")
    assert code == 0, stderr
    training = document["training"]
    assert training["differs"] is differs, training
    assert (training["changed"] > 1.02 * training["base"]) is differs
