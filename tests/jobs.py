"""Real jobs for the tests of recording: small scripts, run through the real command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dpro.opening import ensure_finished
from dpro.store import Run, open_run

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "sample_traces" / "train.py"
PATIENCE_S = 600  # for a busy machine: only what hangs takes so long
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TWO_RANKS = [sys.executable, str(ROOT / "tests" / "ranks.py"), "2"]  # where it need not be torchrun
RECORD = [sys.executable, "-m", "dpro", "record", "--quiet"]

# A model so small that a step takes about a millisecond. The optimizers of torch import the compiler,
# which takes longer than all the rest.
MODEL = """
class Descent(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def add_param_group(self, group):
        self.param_groups.append(group)

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad

model = torch.nn.Linear(4, 4)
optimizer = Descent(model.parameters())

def train_step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""

# A store for each start of a job that torchrun restarts: in its own, gloo at times finds earlier addresses.
OWN_STORE = """
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store{attempt}", rank=rank, world_size=2)
"""


def imports(*modules: str) -> str:
    """The head of a job. The collector skips what torch makes: the job starts and ends a second sooner.

    Args:
        modules: what else to import so; for DDP `COMPILER`, which it imports late.
    """
    names = ", ".join(["sys", "torch", *modules])
    return f"import gc\ngc.disable()\nimport {names}\ngc.freeze()\ngc.enable()\n"


COMPILER = "torch._dynamo"
TINY = imports() + MODEL


def environment(**extra: object) -> dict[str, str | bytes]:
    base = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))
    }
    given = {name: value if isinstance(value, bytes) else str(value) for name, value in extra.items()}
    return base | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | given


def start(command: list[str], cwd: Path, **extra: object) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment(**extra), stdout=pipe, stderr=pipe)


# What 1 in 300 jobs of torch says without a recorder: its threads abort it at its exit, all work done.
ABORTED_AT_EXIT = b"terminate called without an active exception\n"


def complete(command: list[str], cwd: Path, **extra: object) -> subprocess.CompletedProcess[bytes]:
    process = start(command, cwd, **extra)
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill_left(mark: str) -> None:
    """Kill processes with a variable in their environment: jobs of a test that failed would go on for ever.

    Args:
        mark: the variable and its value, as `name=value`.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            inherited = (process / "environ").read_bytes().split(b"\0")
            if mark.encode() in inherited and b"resource_tracker" not in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def script(folder: Path, body: str, *modules: str) -> list[str]:
    """A job with a tiny model, in a file; `modules` are imported as `imports` does."""
    path = folder / "job.py"
    path.write_text(imports(*modules) + MODEL + textwrap.dedent(body))
    return [sys.executable, str(path)]


def head_start(folder: Path, program: Path) -> str:
    """A script that runs a program with DDP as it is, except that it begins as jobs here do."""
    path = folder / program.name
    body = f"import runpy\nrunpy.run_path({str(program)!r}, run_name='__main__')\n"
    path.write_text(imports(COMPILER) + body)
    return str(path)


def record(
    folder: Path, command: list[str], *options: str, **extra: object
) -> tuple[Run, subprocess.CompletedProcess[bytes]]:
    """Record a command into `folder/run` and open it; `extra` is added to its environment."""
    done = complete([*RECORD, "-o", "run", *options, "--", *command], folder, **extra)
    return opened(folder / "run"), done


def opened(run: Path) -> Run:
    ensure_finished(run)
    return open_run(run)


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"{path} never came")


def wait_until(condition: Callable[[], object], complaint: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def sidecar_of(run: Path) -> int:
    """The process that keeps the marker of a run's only recording open; the job has it closed by `exec`."""
    [marker] = (run.resolve() / ".recording").glob("*.json")
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if descriptor.readlink() == marker:
                return int(descriptor.parts[2])
    raise AssertionError("no sidecar")


def children(pid: int) -> list[int]:
    """The processes that a process has started and not outlived."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = []
    with suppress(OSError):
        for task in tasks:
            found += [int(word) for word in task.read_text().split()]
    return found


def kill(*pids: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to those of some processes that still live."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port() -> int:
    """A port that is not in use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
