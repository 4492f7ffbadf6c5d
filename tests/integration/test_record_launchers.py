"""`dpro record` gets into a job however it is started, and only into what trains."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import distribution
from pathlib import Path

import pytest

from dpro.schema import STEPS, WORKERS
from dpro.store import open_run
from tests.jobs import (
    OWN_STORE,
    PATIENCE_S,
    RECORD,
    ROOT,
    TORCHRUN,
    complete,
    free_port,
    opened,
    record,
    script,
    start,
    wait_until,
)

pytest.importorskip("torch")

TRAIN_8 = """
for _ in range(8): train_step()
print("trained", flush=True)
"""
STEPS_OF_8 = list(range(1, 8))  # the first step has no beginning that anything announces

# Data-parallel, with the rank and the rendezvous from the environment.
DDP_8 = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
for _ in range(8):
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def steps_by_rank(run) -> dict[int, list[int]]:
    steps = run.table(STEPS)
    return {rank: steps.filter(rank=rank)["step"].to_list() for rank in run.manifest.ranks}


# One process, started in many ways.


@pytest.mark.slow
def test_shells_and_wrappers_around_the_command_pass_the_recorder_on(tmp_path):
    wrapper = tmp_path / "sub" / "wrapper.sh"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\necho wrapped\ncd /\n{' '.join(script(tmp_path, TRAIN_8))}\n")
    wrapper.chmod(0o755)
    nested = ["nohup", "env", "FOO=1", "timeout", "80", "bash", "-c", "cd sub && ./wrapper.sh; exit 4"]
    run, done = record(tmp_path, nested)
    assert (done.returncode, done.stdout) == (4, b"wrapped\ntrained\n")
    assert steps_by_rank(run) == {0: STEPS_OF_8}
    assert run.manifest.warnings == []


@pytest.mark.slow
def test_module_with_the_user_s_own_path_and_sitecustomize_is_recorded(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    shutil.copy(script(tmp_path, TRAIN_8)[1], package / "__main__.py")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('customized', flush=True)\n")
    python_path = f"{ROOT}{os.pathsep}{own}"
    command = [sys.executable, "-s", "-B", "-O", "-m", "package"]
    recorded = complete([*RECORD, "-o", "run", "--", *command], tmp_path, PYTHONPATH=python_path)
    # Once for the job, and once for the command that records, which is Python, too.
    assert (recorded.stdout, recorded.stderr) == (b"customized\ncustomized\ntrained\n", b"")
    assert steps_by_rank(opened(tmp_path / "run")) == {0: STEPS_OF_8}


@pytest.mark.slow
def test_safe_path_does_not_keep_the_recorder_out(tmp_path):
    run, done = record(tmp_path, script(tmp_path, TRAIN_8), PYTHONSAFEPATH="1")
    assert done.stdout == b"trained\n", done.stderr
    assert steps_by_rank(run) == {0: STEPS_OF_8}


@pytest.mark.slow
def test_user_s_own_modules_are_the_user_s_whatever_their_names(tmp_path):
    names = ["replay", "collectors", "dashboards", "dpro_user", "dpro", "_dpro", "inside", "records", "hooks",
             "recorder", "windows", "flight", "exits", "environment", "patching", "clocks"]  # fmt: skip
    for name in names[:3]:
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    for name in names[3:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    before, after = names[::2], names[1::2]
    body = f"import {', '.join(after)}\nassert all(m.mine for m in [{', '.join(names)}])\n{TRAIN_8}"
    job = script(tmp_path, body)[1]
    Path(job).write_text(f"import {', '.join(before)}\n{Path(job).read_text()}")
    # From another folder: `python -m dpro` would find the user's `dpro` there as any module.
    command = [*RECORD, "-o", str(tmp_path / "run"), "--", sys.executable, job]
    done = complete(command, tmp_path / "dpro", PYTHONPATH=str(ROOT))
    assert done.stderr.replace(b"\n", b"")[-200:] == b""
    assert done.stdout == b"trained\n"
    assert steps_by_rank(opened(tmp_path / "run")) == {0: STEPS_OF_8}


@pytest.mark.slow
def test_environment_without_dpro_and_a_python_without_torch_are_no_trouble(tmp_path):
    python = environment_with_torch_only(tmp_path / "venv")
    other = next(iter(other_pythons()), sys.executable)
    body = """
    import importlib.util
    print("dpro" if importlib.util.find_spec("dpro") else "no dpro", flush=True)
    """
    job = script(tmp_path, textwrap.dedent(body) + TRAIN_8)[1]
    both = f"{other} -c 'print(1)' && {python} {job}"
    dpro = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dpro.cli import main; main()"
    recorder = [sys.executable, "-c", dpro, "record", "-o", "run", "--"]
    recorded = complete([*recorder, "bash", "-c", both], tmp_path, PYTHONPATH="")
    assert recorded.stdout == b"1\nno dpro\ntrained\n", recorded.stderr
    assert steps_by_rank(opened(tmp_path / "run")) == {0: STEPS_OF_8}


def environment_with_torch_only(folder: Path) -> Path:
    """A virtual environment that has torch and what that needs, as links, and neither dpro nor polars."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = (folder / "lib").glob("python3*/site-packages")
    needed, seen = ["torch"], set()
    while needed:
        name = needed.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except ImportError:
            continue
        tops = {file.parts[0] for file in found.files or () if ".." not in file.parts}
        for top in tops:
            target = Path(str(found.locate_file(top)))
            if target.exists() and not (packages / top).exists():
                (packages / top).symlink_to(target)
        needed += [
            name[0]
            for need in found.requires or ()
            if "extra ==" not in need and (name := re.match(r"[\w.-]+", need))
        ]
    assert not (packages / "dpro").exists()
    assert not (packages / "polars").exists()
    return folder / "bin" / "python"


def other_pythons() -> list[str]:
    """Interpreters of another version that pyenv has."""
    found = Path.home().glob(".pyenv/versions/3.*/bin/python3")
    mine = f"{sys.version_info.major}.{sys.version_info.minor}."
    return [str(path) for path in sorted(found) if not path.parts[-3].startswith(mine)]


# Several ranks.


@pytest.mark.slow
def test_only_ranks_record_among_the_processes_of_a_job_with_loader_workers(tmp_path):
    body = (
        DDP_8
        + """
import pathlib
from torch.utils.data import DataLoader

def note(batch):
    pathlib.Path(f"process-{os.getpid()}").touch()
    return batch

if __name__ == "__main__":
    pathlib.Path(f"process-{os.getpid()}").touch()
    for batch in DataLoader(list(range(8)), num_workers=2, collate_fn=note): pass
    dist.destroy_process_group()
"""
    )
    run, done = record(tmp_path, [*TORCHRUN, script(tmp_path, body)[1]])
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("process-*"))) == 6
    assert steps_by_rank(run) == {0: STEPS_OF_8, 1: STEPS_OF_8}
    assert run.table(WORKERS).height == 2


@pytest.mark.slow
def test_restart_by_torchrun_keeps_both_attempts(tmp_path):
    body = DDP_8.replace(
        "    optimizer.step()",
        """
    optimizer.step()
    if _ == 4 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(5)
""",
    )
    # A store of its own for each attempt: in torchrun's, gloo at times finds the addresses of the one before.
    body = body.replace('dist.init_process_group("gloo")', OWN_STORE, 1)
    command = [*TORCHRUN, "--max-restarts", "2", script(tmp_path, body)[1]]
    run, done = record(tmp_path, command)
    assert done.returncode == 0, done.stderr
    assert steps_by_rank(run) == {0: STEPS_OF_8, 1: STEPS_OF_8}
    assert len(run.manifest.warnings) == 1
    assert "the job began 2 times" in run.manifest.warnings[0]
    first = open_run(run.path / "attempts" / "0")
    assert steps_by_rank(first)[1] == [1, 2, 3, 4]
    assert first.table(WORKERS).filter(rank=1)["exit_code"].to_list() == [5]
    assert run.table(WORKERS)["exit_code"].to_list() == [0, 0]


@pytest.mark.slow
def test_elastic_rendezvous_is_recorded(tmp_path):
    elastic = [*TORCHRUN[:-2], "--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]  # fmt: skip
    run, done = record(tmp_path, [*elastic, script(tmp_path, DDP_8)[1]])
    assert done.returncode == 0, done.stderr
    assert steps_by_rank(run) == {0: STEPS_OF_8, 1: STEPS_OF_8}


@pytest.mark.slow
def test_processes_spawned_by_torch_are_the_ranks(tmp_path):
    body = f"""
    import os, torch.multiprocessing
    def train(rank):
        os.environ |= {{"RANK": str(rank), "WORLD_SIZE": "2"}}
        os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{free_port()}"}}
        exec(BODY, globals())
    BODY = {DDP_8!r}
    if __name__ == "__main__":
        torch.multiprocessing.spawn(train, nprocs=2)
        print("joined")
    """
    run, done = record(tmp_path, script(tmp_path, body))
    assert (done.returncode, done.stdout) == (0, b"joined\n"), done.stderr
    assert steps_by_rank(run) == {0: STEPS_OF_8, 1: STEPS_OF_8}
    assert run.table(WORKERS)["exit_code"].to_list() == [0, 0]


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
MPI_RANK = """
import os
os.environ |= {"RANK": os.environ["OMPI_COMM_WORLD_RANK"], "WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"]}
"""


@needs_mpirun
@pytest.mark.parametrize("recorder_first", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ranks_of_mpirun_are_recorded_with_the_recorder_before_or_behind_it(tmp_path, recorder_first):
    job = script(tmp_path, MPI_RANK + DDP_8)
    recorder = [*RECORD, "-o", "run", "--"]
    command = [*recorder, *MPIRUN, *job] if recorder_first else [*MPIRUN, *recorder, *job]
    done = complete(command, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    assert done.returncode == 0, done.stderr
    assert steps_by_rank(opened(tmp_path / "run")) == {0: STEPS_OF_8, 1: STEPS_OF_8}


def started_by_slurm(folder: Path, rank: int, host: str, body: list[str], **extra: object):
    """A task of a step of two tasks, on a host of its own where the machine lets us name one."""
    renamed = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"] if can_rename() else []
    variables = {"SLURM_PROCID": rank, "SLURM_LOCALID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_JOB_ID": 7,
                 "SLURM_STEP_ID": 0}  # fmt: skip
    return start([*renamed, *RECORD, "-o", "run", "--", *body], folder, **variables, **extra)


def can_rename() -> bool:
    return subprocess.run(["unshare", "--uts", "hostname", "x"], capture_output=True).returncode == 0


@pytest.mark.slow
def test_tasks_of_a_slurm_step_gather_in_one_run_from_several_hosts(tmp_path):
    body = """
    import os
    os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"]}
    """
    job = script(tmp_path, body + DDP_8.replace("\n", "\n    "))
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    tasks = [started_by_slurm(tmp_path, rank, f"node{rank}", job, **rendezvous) for rank in (0, 1)]
    outputs = [task.communicate(timeout=PATIENCE_S) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    run = opened(tmp_path / "run")
    assert steps_by_rank(run) == {0: STEPS_OF_8, 1: STEPS_OF_8}
    assert run.manifest.environment["SLURM_JOB_ID"] == "7"
    if can_rename():
        assert sorted(run.manifest.hosts) == ["node0", "node1"]
        assert run.table(WORKERS)["host"].to_list() == ["node0", "node1"]


@pytest.mark.slow
def test_task_that_starts_after_another_of_its_step_has_ended_joins_it(tmp_path):
    job = script(tmp_path, TRAIN_8 + "sys.exit(3 * (int(__import__('os').environ['SLURM_PROCID']) == 0))")
    codes = []
    for rank in (0, 1):
        task = started_by_slurm(tmp_path, rank, f"node{rank}", job)
        task.communicate(timeout=PATIENCE_S)
        codes.append(task.returncode)
        run = opened(tmp_path / "run")
    assert codes == [3, 0]
    assert steps_by_rank(run) == {0: STEPS_OF_8, 1: STEPS_OF_8}
    assert (run.manifest.world_size, run.manifest.exit_status) == (2, 3)


# The reason why nothing was recorded is reported.


@pytest.mark.slow
def test_reason_why_nothing_was_recorded_is_a_warning(tmp_path):
    body = """
    import os, pathlib, time
    deadline = time.monotonic() + 200
    found = []
    while not any(f"process {os.getpid()} " in text for text in found) and time.monotonic() < deadline:
        time.sleep(0.05)
        found = [path.read_text() for path in pathlib.Path().glob("run/.raw/*/absence.txt")]
    """
    python, job = script(tmp_path, textwrap.dedent(body) + "train_step()")
    ways = [
        f"{python} -I {job}",
        f"PYTHONPATH=. {python} {job}",
        f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 {python} {job}",
    ]
    run, done = record(tmp_path, ["bash", "-c", " & ".join([*ways, "wait"])])
    assert done.returncode == 0
    assert run.manifest.ranks == []
    for why in (
        "`python -I` ignores PYTHONPATH",
        "started with its own PYTHONPATH",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables",
    ):
        assert sum(why in warning for warning in run.manifest.warnings) == 1, run.manifest.warnings


# Where the run goes.


@pytest.mark.slow
def test_run_with_spaces_and_letters_of_all_kinds_in_its_path_is_made(tmp_path):
    folder = tmp_path / "ein Ordner – 実行"
    folder.mkdir()
    command = ["sh", "-c", 'cd / && exec "$@"', "sh", *script(folder, TRAIN_8)]
    done = complete([*RECORD, "-o", "der Lauf/ü 12:30", "--", *command], folder, LC_ALL="C")
    assert done.stdout == b"trained\n", done.stderr
    assert steps_by_rank(opened(folder / "der Lauf" / "ü 12:30")) == {0: STEPS_OF_8}


def test_place_where_nothing_can_be_recorded_is_refused_before_the_job_starts(tmp_path):
    done = complete([*RECORD, "-o", "/proc/run", "--", "touch", "started"], tmp_path)
    assert done.returncode == 2
    assert b"cannot record there" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert list(tmp_path.iterdir()) == []


# Secrets.


def test_no_planted_secret_reaches_any_file_of_the_run(tmp_path):
    secret = "Vq8x-planted-7Zr"
    body = """
    import os, pathlib, time
    for _ in range(30): train_step()
    raw = pathlib.Path("run/.raw")
    deadline = time.monotonic() + 200
    while not list(raw.glob("*/*/window0000.json")) and time.monotonic() < deadline: time.sleep(0.05)
    files = [path for path in pathlib.Path("run").rglob("*") if path.is_file()]
    secret = os.environ["PLANTED"].encode()
    print(len(files) > 5, [path.name for path in files if secret in path.read_bytes()])
    """
    command = [
        *script(tmp_path, body),
        "--token",
        secret,
        f"--api-key={secret}",
        f"https://me:{secret}@host/data",
    ]
    planted = {
        "PLANTED": secret,
        "HF_TOKEN": secret,
        "NCCL_SECRET": secret,
        "TORCH_X": f"https://u:{secret}@h",
    }
    run, done = record(tmp_path, command, **planted, NCCL_DEBUG="WARN")
    assert done.stdout == b"True []\n", done.stderr
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert run.manifest.environment["NCCL_DEBUG"] == "WARN"
    assert run.manifest.command[-3:] == ["***", "--api-key=***", "https://***@host/data"]


def test_masked_command_is_its_first_word(tmp_path):
    run, _ = record(tmp_path, [sys.executable, "-c", "pass", "x"], "--mask-command")
    assert run.manifest.command == [sys.executable, "***"]


# Two jobs, one folder.


@pytest.mark.parametrize("together", [pytest.param(True, marks=pytest.mark.slow), False])
def test_second_of_two_jobs_is_refused_in_a_line_and_the_first_is_recorded_alone(tmp_path, together):
    body = """
    import pathlib, time
    for _ in range(8): train_step()
    pathlib.Path(sys.argv[1]).touch()
    while not pathlib.Path("done").exists(): time.sleep(0.02)
    """
    jobs = []
    for name in "ab":
        jobs.append(start([*RECORD, "-o", "run", "--", *script(tmp_path, body), name], tmp_path))
        if not together:
            wait_until((tmp_path / "a").exists, "the first job never trained")
    wait_until(lambda: any(job.poll() is not None for job in jobs), "both go on")
    (tmp_path / "done").touch()
    outputs = [job.communicate(timeout=PATIENCE_S) for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 2], outputs
    refused = next(number for number, job in enumerate(jobs) if job.returncode == 2)
    assert refused == 1 or together
    assert b"another job is being recorded there (its command is " in outputs[refused][1]
    assert outputs[refused][1].count(b"\n") == 1
    run = opened(tmp_path / "run")
    assert steps_by_rank(run) == {0: list(range(1, 8))}
    assert run.manifest.command[-1] == "ba"[refused]
    assert run.manifest.warnings == []
