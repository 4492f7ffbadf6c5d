"""How recorded jobs end: exit codes, signals, and processes that are killed."""

import os
import signal
import sys

import pytest

from dpro.analysis.analysis import Analysis
from dpro.collectors.liveness import wait_until_finished
from dpro.detect.hang.memory import filled_by
from dpro.errors import InputError
from dpro.schema import CHECKPOINTS, COUNTERS, OUT_OF_MEMORY, STEPS, WORKERS
from dpro.store import open_run
from tests.jobs import (
    PATIENCE_S,
    RECORD,
    TORCHRUN,
    TWO_RANKS,
    complete,
    opened,
    record,
    script,
    sidecar_of,
    start,
    wait_for,
    wait_until,
)

pytest.importorskip("torch")


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_exit_code_of_python_is_passed_on(tmp_path, code):
    run, done = record(tmp_path, script(tmp_path, f"for _ in range(4): train_step()\nsys.exit({code})"))
    assert done.returncode == code
    assert run.manifest.exit_status in (code, None)
    assert run.table(WORKERS)["exit_code"].to_list() in ([code], [-1])


def test_torchrun_keeps_its_exit_code_and_the_rank_its_own(tmp_path):
    body = """
    import os
    import torch.distributed as dist
    dist.init_process_group("gloo")
    train_step()
    if dist.get_rank() == 1:
        os._exit(5)
    dist.barrier()
    """
    command = [*TORCHRUN, script(tmp_path, body)[1]]
    run, done = record(tmp_path, command)
    assert done.returncode == 1
    assert run.manifest.ranks == [0, 1]
    assert run.table(WORKERS).filter(rank=1)["exit_code"].to_list() in ([5], [-1])


@pytest.mark.slow
def test_a_rank_that_ends_at_once_has_a_status(tmp_path):
    body = """
    import os, signal
    train_step()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [
        "sh",
        "-c",
        f"{' '.join(script(tmp_path, body))}; exit 3",
    ]  # its parent asks for the status at once
    statuses = []
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        run, _ = record(folder, command)
        statuses += run.table(WORKERS)["exit_signal"].to_list()
    assert statuses == [signal.SIGKILL] * 6


def test_text_of_the_job_that_no_file_can_hold_is_spelt_out(tmp_path):
    body = """
    import pathlib, threading
    threading.Thread(target=threading.Event().wait, name="thread \\ud800", daemon=True).start()
    for _ in range(4): train_step()
    pathlib.Path("model \\udcff").mkdir()
    torch.save({}, "model \\udcff/last.pt")
    raise ValueError("no \\ud800")
    """
    command = [*script(tmp_path, body), b"--name=\xff"]
    run, done = record(tmp_path, command, NCCL_X=b"\xff")
    assert b"no \\ud800" in done.stderr
    assert run.table(STEPS).height == 3
    assert run.table(CHECKPOINTS)["path"][0].endswith(r"/model \udcff/last.pt")
    assert run.table(WORKERS)["error"][0].startswith(r"ValueError: no \ud800")
    manifest = run.manifest
    assert (manifest.command[-1], manifest.environment["NCCL_X"]) == (r"--name=\udcff", r"\udcff")
    assert manifest.warnings == []
    assert "no \\ud800 (job.py:" in manifest.error


FOREVER = """
import pathlib, time
try:
    for number in range(100_000):
        train_step()
        if number > 40:
            time.sleep(0.01)
        if number == 42:  # what ended 10 ms before a kill is recorded
            pathlib.Path("running").touch()
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGINT, 3),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_signals_reach_the_job_and_the_run_opens(tmp_path, number, code):
    job = start([*RECORD, "-o", "run", "--", *script(tmp_path, FOREVER)], tmp_path)
    wait_for(tmp_path / "running")
    job.send_signal(number)
    stdout, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == code
    assert (b"interrupted" in stdout) == (number == signal.SIGINT)
    run = opened(tmp_path / "run")
    assert run.table(STEPS)["step"].to_list()[:40] == list(range(1, 41))
    assert run.manifest.exit_status in (code, None)
    if number != signal.SIGINT:
        assert run.table(WORKERS)["exit_signal"].to_list() in ([number], [-1])


@pytest.mark.slow
def test_run_opens_when_a_rank_and_the_launcher_are_killed(tmp_path):
    body = 'import torch.distributed as dist, os\ndist.init_process_group("gloo")\n' + FOREVER.replace(
        '"running"', 'f"rank{dist.get_rank()}-{os.getpid()}"'
    )
    job = start([*RECORD, "-o", "run", "--", *TORCHRUN, script(tmp_path, body)[1]], tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("rank?-*"))) == 2, "a rank never trained")
    pids = [int(path.name.split("-")[1]) for path in tmp_path.glob("rank?-*")]
    for pid in [job.pid, *pids]:
        os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=PATIENCE_S)
    run = opened(tmp_path / "run")
    assert run.manifest.ranks == [0, 1]
    for rank in (0, 1):
        assert run.table(STEPS).filter(rank=rank)["step"].max() >= 40
    assert set(run.table(WORKERS)["exit_signal"]) <= {signal.SIGKILL, -1}


def test_run_whose_sidecar_was_killed_is_finished_by_its_reader(tmp_path):
    job = start([*RECORD, "-o", "run", "--", *script(tmp_path, FOREVER)], tmp_path)
    wait_for(tmp_path / "running")
    with pytest.raises(InputError, match="still being recorded"):
        wait_until_finished(tmp_path / "run")
    os.kill(sidecar_of(tmp_path / "run"), signal.SIGKILL)
    with pytest.raises(InputError, match="still being recorded"):
        opened(tmp_path / "run")
    answer = complete([sys.executable, "-m", "dpro", "attach", "run", "-o", "copy"], tmp_path)
    assert open_run(tmp_path / "copy").table(STEPS).height >= 40, answer.stderr
    job.kill()
    job.communicate(timeout=PATIENCE_S)
    assert not (tmp_path / "run" / "manifest.json").exists()
    assert len(wait_until_finished(tmp_path / "run")) == 1
    run = opened(tmp_path / "run")
    assert run.table(STEPS).height >= 40
    assert -1 in run.table(COUNTERS)["rank"]
    assert {path.name for path in run.path.iterdir() if path.name.startswith(".")} == set()


REPLACES_ITSELF = """
import os
for _ in range(10): train_step()
if "again" not in sys.argv:
    try:
        os.execv("/nowhere", ["nothing"])
    except OSError:
        for _ in range(10): train_step()
    os.execve(sys.executable, [sys.executable, *sys.argv, "again"], ENVIRONMENT)
sys.exit(3)
"""


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_process_that_replaces_itself_is_another_attempt_or_said_to_be_missing(tmp_path, recorded):
    kept = "os.environ" if recorded else "{k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}"
    command = script(tmp_path, REPLACES_ITSELF.replace("ENVIRONMENT", kept))
    run, done = record(tmp_path, command)
    assert done.returncode == 3, done.stderr
    first = open_run(run.path / "attempts" / "0") if recorded else run
    assert first.table(STEPS)["step"].to_list() == list(range(1, 20))
    lost = "recorded as a separate attempt" if recorded else "which was not recorded"
    [said] = [warning for warning in first.manifest.warnings if "replaced itself" in warning]
    assert f"rank 0: its process replaced itself by another program, {lost}: {sys.executable} " in said
    assert said.endswith("job.py again")
    if recorded:
        assert run.table(STEPS)["step"].to_list() == list(range(1, 10))
        assert first.table(WORKERS)["exit_code"].to_list() == [-1]
    assert run.table(WORKERS)["exit_code"].to_list() == [3]
    assert run.manifest.exit_status == 3


def test_a_rank_that_runs_out_of_gpu_memory_names_what_filled_it_and_its_peer_is_blamed_for_nothing(tmp_path):
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    inner = model.forward
    def forward(given):
        if refuses:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
                                         "capacity of 4.00 GiB of which 1.00 GiB is free.")
        return inner(given)
    model.forward = forward
    kept = torch.empty(1 << 18)
    for step in range(8):
        refuses = step == 5 and dist.get_rank() == 1
        train_step()
        dist.barrier()
    """
    run, done = record(tmp_path, [*TWO_RANKS, script(tmp_path, body)[1]], "--no-windows")
    assert done.returncode != 0
    assert b"dpro" not in done.stderr
    (row,) = run.table(OUT_OF_MEMORY).to_dicts()
    assert (row["rank"], row["requested_bytes"], row["module"]) == (1, 2 << 30, "Linear")
    assert (row["kinds"][0], row["bytes"][0]) == ("other tensors", 1 << 20)
    analysis = Analysis(run)
    (finding,) = analysis.hangs
    assert (finding.class_, finding.ranks, finding.cause) == ("dead.rank", (1,), "out of memory")
    assert filled_by(finding) == "other tensors"
    assert "Tried to allocate 2.00 GiB" in str(analysis.end.sentence)
