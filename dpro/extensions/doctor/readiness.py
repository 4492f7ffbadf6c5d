"""Readiness of a machine to record and analyse: what is there, what is missing, and what to do about it.

Inspects the machine and the Python that runs the jobs; returns a `Check` per question. Changes nothing on the
machine, and does not test whether recording works: only a recording shows that.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dpro.collectors.launch.absence import OLDEST_TORCH
from dpro.collectors.telemetry.gpus import GpuLibrary, Unavailable, libraries
from dpro.collectors.telemetry.node import PortCounters, find_ports
from dpro.documents import Document
from dpro.folders import lock, written_whole
from dpro.units import format_bytes

READY, LIMITED, MISSING = "ready", "limited", "missing"
ASK_TORCH_S = 120
MIN_FREE_BYTES = 1 << 30
_TIME_ERROR = 5  # TIME_ERROR of adjtimex(2): the clock is not synchronised
_SHORT_RING = 2000  # PyTorch's default number of flight recorder entries

# Runs in the job's Python, which may differ from dpro's.
_ASK_TORCH = """
import json, os, torch
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = ""
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or "",
    "nccl": nccl, "gpus": torch.cuda.device_count(),
    "distributed": torch.distributed.is_available(),
    "python": ".".join(map(str, __import__("sys").version_info[:3])),
}))
"""


@dataclass(frozen=True)
class Check:
    """The answer to one question about the machine.

    Attributes:
        name: subject of the question.
        state: ready; limited, where a function does less than it could; missing, where it cannot work at all.
        what: what was found.
        advice: what to do; empty where nothing is needed.
    """

    name: str
    state: str
    what: str
    advice: str = ""


class ReadinessDocument(Document, frozen=True, kw_only=True):
    """Readiness of this machine.

    Attributes:
        ready: whether nothing is missing.
        checks: the answer to each question.
    """

    ready: bool
    checks: list[Check]


def torch_of(python: str) -> tuple[Check, dict[str, Any]]:
    """Return the check of a Python's PyTorch, and torch's facts (empty where it cannot be imported)."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=ASK_TORCH_S, check=True
        )
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        return Check(
            "torch", MISSING, f"{python}: {error.strerror}", "name the job's Python with --python"
        ), {}
    except subprocess.TimeoutExpired:
        return Check(
            "torch",
            LIMITED,
            f"{python} did not import torch within {ASK_TORCH_S} s: the machine is busy, or its disk slow",
            "try again when the machine is idle; it is unknown whether torch is installed",
        ), {}
    except (subprocess.SubprocessError, ValueError, IndexError):
        return Check(
            "torch",
            MISSING,
            f"{python} cannot import torch",
            "name the job's Python with --python; traces can be imported without torch",
        ), {}
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"HIP {facts['hip']}" if facts["hip"] else "CPU"
    what = f"torch {facts['torch']} ({build}), Python {facts['python']}"
    what += f", NCCL {facts['nccl']}" if facts["nccl"] else ""
    version = tuple(int(part) for part in facts["torch"].split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Check("torch", MISSING, what, f"recording needs torch {oldest} or newer"), facts
    if not facts["distributed"]:
        return Check("torch", LIMITED, what, "built without torch.distributed: no collectives"), facts
    return Check("torch", READY, what), facts


def environment(variables: Mapping[str, str]) -> Iterator[Check]:
    """Yield variables that disable or limit the recorder; one positive check where there are none."""
    hindrances = list(_hindrances(variables))
    yield from hindrances or [Check("environment", READY, "nothing in it disables the recorder")]


def _hindrances(variables: Mapping[str, str]) -> Iterator[Check]:
    if variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Check(
            "environment", MISSING, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables the recorder", "unset it"
        )
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        size = variables.get(name, "")
        if size.isdigit() and int(size) < _SHORT_RING:
            lost = "no collective calls are kept" if int(size) == 0 else "few collective calls are kept"
            yield Check(
                "environment", LIMITED, f"{name}={size}: {lost}", f"unset it, or give {_SHORT_RING} or more"
            )
    if variables.get("KINETO_USE_DAEMON"):
        yield Check(
            "environment",
            READY,
            "KINETO_USE_DAEMON is set: `dpro attach --pid` can profile jobs without dpro",
        )


def gpus(facts: Mapping[str, Any], proc: Path = Path("/proc")) -> Iterator[Check]:
    """Yield checks of the GPUs that torch sees, of the driver's restrictions, and of GPU telemetry."""
    driver = proc / "driver" / "nvidia"
    others = [library for library in libraries() if library.name != "NVML" and library.driver.exists()]
    if not driver.exists() and not others and not facts.get("gpus"):
        yield Check("GPU", READY, "none: jobs on the CPU can still be recorded")
        return
    if not facts:
        yield Check("GPU", LIMITED, "a driver is loaded; the GPUs visible to torch are unknown", "see torch")
    elif not facts.get("gpus"):
        yield Check(
            "GPU", LIMITED, "a driver is loaded, but torch sees no GPU",
            "check CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, the container runtime, and torch's build",
        )  # fmt: skip
    else:
        yield Check("GPU", READY, f"torch sees {facts['gpus']}")
    if _only_admin(driver / "params"):
        yield Check(
            "CUPTI", READY,
            "kernels and copies can be traced; the driver restricts hardware counters to administrators",
            "nothing to do: dpro reads no hardware counters of kernels",
        )  # fmt: skip
    if driver.exists() or not others:
        yield _nvml()
    yield from map(_telemetry, others)


def attached(facts: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[Check]:
    """Yield a warning if deep windows leave CUPTI attached to a job on NVIDIA GPUs, which slows launches."""
    if not (facts.get("gpus") and facts.get("cuda")) or variables.get("TEARDOWN_CUPTI") == "1":
        return
    yield Check(
        "CUPTI",
        LIMITED,
        "a deep window leaves it attached: launch-bound jobs are slower from then on (docs/gpu.md)",
        "--no-windows, or TEARDOWN_CUPTI=1 before the job starts (CUDA 12.6 or newer; docs/gpu.md)",
    )


def _only_admin(params: Path) -> bool:
    try:
        return "RmProfilingAdminOnly: 1" in params.read_text()
    except OSError:
        return False


def _nvml() -> Check:
    try:
        import pynvml
    except ImportError:
        return Check(
            "telemetry", LIMITED, "nvidia-ml-py is not installed: GPUs are not sampled",
            "pip install 'dpro-toolkit[gpu]'",
        )  # fmt: skip
    try:
        pynvml.nvmlInit()
        count, version = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Check("telemetry", LIMITED, f"NVML: {error}", "GPUs are not sampled; is the driver loaded?")
    return Check("telemetry", READY, f"NVML reports {count} GPUs, driver {version}")


def _telemetry(library: GpuLibrary) -> Check:
    try:
        library.open(lambda _: None)
    except Unavailable as reason:
        what = str(reason) or f"{library.name} finds no GPU"
        return Check("telemetry", LIMITED, what, "GPUs are not sampled")
    return Check("telemetry", READY, f"{library.name} answers")


def network(find: Callable[[], list[PortCounters]] = find_ports) -> Check:
    """Check which ports have readable counters."""
    ports = [port.device for port in find()]
    if not ports:
        return Check("network", LIMITED, "no port with readable counters", "the network is not recorded")
    return Check("network", READY, f"counters of {', '.join(ports)}")


class _Timex(ctypes.Structure):
    """Head of `struct timex`, see adjtimex(2); times are in microseconds."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock() -> Check:
    """Check whether the clock of this host is synchronised."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    return judged_clock(state, timex.maxerror)


def judged_clock(state: int, worst_us: int) -> Check:
    """Interpret the kernel's answer about the clock.

    Args:
        state: return value of adjtimex(2).
        worst_us: its `maxerror`.
    """
    instead = "dpro compares the clocks of a job's hosts itself"
    if state < 0:
        return Check("clock", LIMITED, "the kernel does not report the clock's accuracy", instead)
    if state == _TIME_ERROR:
        return Check("clock", LIMITED, "the clock is not synchronised (no NTP, no PTP)", instead)
    return Check("clock", READY, f"synchronised, within {worst_us / 1000:.3g} ms at worst")


def folder(path: Path, mounts: Path = Path("/proc/mounts")) -> Check:
    """Check whether runs can be recorded into a folder: files, locks, renames, free space.

    Args:
        path: the folder, which must exist.
    """
    name = "folder"
    kind = _file_system(path.resolve(), mounts)
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix=".dpro-doctor-") as inside:
            with written_whole(Path(inside), "probe") as file:
                lock(file, wait=False)
            free = shutil.disk_usage(inside).free
    except OSError as error:
        what = f"{path} ({kind}): {error.strerror or error}"
        return Check(name, MISSING, what, "record into another folder: it needs write access and flock")
    what = f"{path} ({kind}): files, locks and renames work, {format_bytes(free)} free"
    if free < MIN_FREE_BYTES:
        return Check(name, LIMITED, what, "recording stops when the disk is full; the job continues")
    return Check(name, READY, what)


def _file_system(path: Path, mounts: Path) -> str:
    """Return the type of the file system that a path is on, such as nfs4 or lustre."""
    best, kind = "", "unknown file system"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, point, this, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and path.is_relative_to(point):
            best, kind = point, this
    return kind


def stacks(proc: Path = Path("/proc")) -> Check:
    """Check access to the stacks of a running job."""
    scope = proc / "sys" / "kernel" / "yama" / "ptrace_scope"
    try:
        level = scope.read_text().strip()
    except OSError:
        level = "0"
    limited = f"ptrace is restricted (level {level}), which dpro does not use: " if level != "0" else ""
    return Check("stacks", READY, f"{limited}`dpro attach --stacks` asks the recorder inside the job")


EXTRAS = {  # distribution -> its purpose, and the extra that installs it
    "numba": ("replay, whatif and diagnose", "replay"),
    "dash": ("the dashboard", "dashboard"),
    "nvidia-ml-py": ("GPU telemetry", "gpu"),
    "perfetto": ("export to Perfetto's own format", "perfetto"),
    "zstandard": ("traces compressed as .zst", "zstd"),
}


def extras() -> Iterator[Check]:
    """Yield which optional packages are installed beside dpro, and a check for each that is not."""
    there, lacking = [], []
    for name, (purpose, extra) in EXTRAS.items():
        try:
            there.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lacking.append(
                Check("packages", LIMITED, f"no {name}: {purpose}", f"pip install 'dpro-toolkit[{extra}]'")
            )
    if there:
        yield Check("packages", READY, ", ".join(there))
    yield from lacking
