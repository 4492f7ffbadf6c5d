"""The node as the kernel sees it: CPUs, memory, pressure, limits of the cgroup, disk; and its processes.

In: /proc and the cgroup file systems. Out: values by counter. Durations are cumulative, in seconds: what
happened between two samples is their difference. A file that is not there leaves its counters out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpro.collectors.telemetry.files import read_number, read_pairs, read_text

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63


def read_node(proc: Path = Path("/proc")) -> dict[str, float]:
    """CPU time, load, memory and pressure of the whole node."""
    words = (read_text(proc / "stat") or "").partition("\n")[0].split()[1:]
    values: dict[str, float] = {f"cpu_{name}_s": int(word) / _TICKS for name, word in zip(_CPU_STATES, words)}
    load = (read_text(proc / "loadavg") or "").split()  # "0.20 0.18 0.12 1/80 11206"
    if len(load) >= 4:
        values |= {"load_1m": float(load[0]), "runnable_threads": int(load[3].partition("/")[0])}
    memory = read_pairs(proc / "meminfo")
    if "MemAvailable" in memory:
        values["memory_available_bytes"] = memory["MemAvailable"] << 10
        values["memory_total_bytes"] = memory["MemTotal"] << 10
        values["swap_used_bytes"] = (memory["SwapTotal"] - memory["SwapFree"]) << 10
    for resource in ("cpu", "io", "memory"):
        for line in (read_text(proc / "pressure" / resource) or "").splitlines():
            kind, total_us = line.split()[0], line.rpartition("total=")[2]  # "some avg10=0.00 … total=1234"
            values[f"pressure_{resource}_{kind}_s"] = int(total_us) / 1e6
    return values


def read_node_rarely(run: Path, proc: Path = Path("/proc")) -> dict[str, float]:
    """What changes slowly or costs more to read: swapping, kills for want of memory, lost packets, disk.

    Args:
        proc: where procfs is mounted.
    """
    kernel = read_pairs(proc / "vmstat")
    names = {"pswpin": "swapped_in_pages", "pswpout": "swapped_out_pages", "oom_kill": "oom_kills"}
    values: dict[str, float] = {names[name]: kernel[name] for name in names if name in kernel}
    values["cpus"] = os.cpu_count() or 0
    lines = [line.split() for line in (read_text(proc / "net/snmp") or "").splitlines()]
    for head, numbers in zip(lines[::2], lines[1::2]):
        if head[0] == "Tcp:" and "RetransSegs" in head:
            values["tcp_retransmitted_segments"] = int(numbers[head.index("RetransSegs")])
    disk = os.statvfs(run)
    values["disk_free_bytes"] = disk.f_bavail * disk.f_frsize
    return values


@dataclass(frozen=True)
class Cgroup:
    """The folders that hold the limits of this process's cgroup: of CPU time, and of memory."""

    cpu: Path | None
    memory: Path | None

    def read(self) -> dict[str, float]:
        """How often and for how long the cgroup had used up its CPU time, its memory, and both limits."""
        values: dict[str, float] = {}
        if self.cpu is not None:
            stat = read_pairs(self.cpu / "cpu.stat")
            if "nr_throttled" in stat:
                values["cgroup_throttled_periods"] = stat["nr_throttled"]
            if "throttled_usec" in stat:
                values["cgroup_throttled_s"] = stat["throttled_usec"] / 1e6
            elif "throttled_time" in stat:
                values["cgroup_throttled_s"] = stat["throttled_time"] / 1e9
            if (quota := _quota(self.cpu)) is not None:
                values["cgroup_cpu_limit_cores"] = quota
        if self.memory is not None:
            used = _first(self.memory, "memory.current", "memory.usage_in_bytes")
            limit = _first(self.memory, "memory.max", "memory.limit_in_bytes")
            values |= {} if used is None else {"cgroup_memory_bytes": used}
            values |= (
                {} if limit is None or limit >= _NO_LIMIT_BYTES else {"cgroup_memory_limit_bytes": limit}
            )
        return values


def find_cgroup(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> Cgroup:
    """Where this process is limited: for CPU time the innermost cgroup around it that has a limit.

    Args:
        sys: where sysfs is mounted.
        proc: where procfs is mounted.
    """
    cpu = list(_folders("cpu", ["cpu.stat"], sys, proc))
    memory = _folders("memory", ["memory.current", "memory.usage_in_bytes"], sys, proc)
    limited = (folder for folder in cpu if _quota(folder) is not None)
    return Cgroup(next(limited, next(iter(cpu), None)), next(memory, None))


def _folders(controller: str, files: Sequence[str], sys: Path, proc: Path) -> Iterator[Path]:
    """Cgroups around this process with one of the files, from the innermost; a container sees not all."""
    paths: dict[str, str] = {}  # of this process, by controller; the empty one is cgroup v2
    for line in (read_text(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path.strip("/"))
    top = sys / "fs" / "cgroup"
    roots = [(top, ""), (top / "unified", "")]
    if controller in paths and top.is_dir():
        first = [(root, controller) for root in top.iterdir() if controller in root.name.split(",")]
        roots = [*sorted(first), *roots]
    for root, key in roots:
        folder = root / paths.get(key, "")
        for around in (folder, *folder.parents):
            if any((around / file).is_file() for file in files):
                yield around
            if around == root:
                break


def _quota(folder: Path) -> float | None:
    """CPU time per time that a cgroup may use, in cores; None for no limit."""
    words = (read_text(folder / "cpu.max") or "").split()  # "max 100000", "150000 100000"
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _first(folder: Path, *names: str) -> int | None:
    values = [read_number(folder / name) for name in names]
    return next((value for value in values if value is not None), None)


def read_process(pid: int, proc: Path = Path("/proc")) -> dict[str, float]:
    """One process of the job: the CPU time it got, what its main thread waited for a core, and its memory.

    The kernel gives run-queue waits and context switches per thread; the main thread is the one that runs the
    training loop. Nothing is asked of the other threads.

    Args:
        proc: where procfs is mounted.

    Returns:
        Values by counter; none if it is gone.
    """
    folder = proc / str(pid)
    fields = (read_text(folder / "stat") or "").rpartition(")")[2].split()
    if len(fields) < 22 or fields[0] in "ZX":
        return {}
    values: dict[str, float] = {
        "cpu_user_s": int(fields[11]) / _TICKS,
        "cpu_system_s": int(fields[12]) / _TICKS,
        "major_faults": int(fields[9]),
        "threads": int(fields[17]),
        "memory_bytes": int(fields[21]) * _PAGE_BYTES,
    }
    scheduled = (
        read_text(folder / "schedstat") or ""
    ).split()  # ns on a core, ns waiting for one, time slices
    if len(scheduled) == 3:
        values["main_thread_cpu_s"] = int(scheduled[0]) / 1e9
        values["main_thread_runqueue_s"] = int(scheduled[1]) / 1e9
    status = read_pairs(folder / "status")
    for kind in ("voluntary", "nonvoluntary"):
        if (name := f"{kind}_ctxt_switches") in status:
            values[f"main_thread_switches_{kind}"] = status[name]
    return values
