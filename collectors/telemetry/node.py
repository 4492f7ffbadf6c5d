"""Counters of the node from the kernel: CPUs, memory, pressure, limits, disk, processes and network ports.

Reads /proc, the cgroup file systems, `/sys/class/infiniband` and `/sys/class/net`; returns values by counter.
Durations and counts are cumulative: the activity between two samples is their difference, and a count that
decreases was reset. Counters of a file that is absent or unreadable are left out.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 encodes "no limit" as a number near 2**63


def read_node(proc: Path = Path("/proc")) -> dict[str, float]:
    """Return CPU time, load, memory and pressure of the whole node."""
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
    """Return slow-changing or costly counters: swapping, OOM kills, CPUs, TCP retransmits, free disk."""
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
    """Folders with the CPU and memory limits of a process's cgroup; None where there is none."""

    cpu: Path | None
    memory: Path | None

    def read(self) -> dict[str, float]:
        """Return CPU time and throttling of the cgroup, its memory use, and its CPU and memory limits."""
        values: dict[str, float] = {}
        if self.cpu is not None:
            stat = read_pairs(self.cpu / "cpu.stat")
            if "usage_usec" in stat:
                values["cgroup_cpu_s"] = stat["usage_usec"] / 1e6
            elif (used_ns := read_number(self.cpu / "cpuacct.usage")) is not None:
                values["cgroup_cpu_s"] = used_ns / 1e9
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


def find_cgroup(sys: Path = Path("/sys"), proc: Path = Path("/proc"), process: str = "self") -> Cgroup:
    """Return the cgroups that limit a process: for CPU time, the innermost enclosing one with a limit."""
    cpu = list(_folders("cpu", ["cpu.stat"], sys, proc / process))
    memory = _folders("memory", ["memory.current", "memory.usage_in_bytes"], sys, proc / process)
    limited = (folder for folder in cpu if _quota(folder) is not None)
    return Cgroup(next(limited, next(iter(cpu), None)), next(memory, None))


def _folders(controller: str, files: Sequence[str], sys: Path, process: Path) -> Iterator[Path]:
    """Yield the enclosing cgroups of a process that have one of the files, innermost first.

    In a container, the outer ones may not be visible.
    """
    paths: dict[str, str] = {}  # by controller; the empty one is cgroup v2
    for line in (read_text(process / "cgroup") or "").splitlines():
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
    """Return the CPU limit of a cgroup, in cores; None for no limit."""
    words = (read_text(folder / "cpu.max") or "").split()  # "max 100000", "150000 100000"
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _first(folder: Path, *names: str) -> int | None:
    values = [read_number(folder / name) for name in names]
    return next((value for value in values if value is not None), None)


def read_process(pid: int, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> dict[str, float]:
    """Return CPU time, memory and faults of a process, and its main thread's run-queue wait and switches.

    The kernel reports run-queue waits and context switches per thread; only the main thread, which runs the
    training loop, is read.

    Returns:
        Values by counter; empty if the process has ended.
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
    return values | _throttling(pid, proc, sys)


def _throttling(pid: int, proc: Path, sys: Path) -> dict[str, float]:
    """Return the throttling of a process's own cgroup; empty where it has no CPU limit."""
    cgroup = find_cgroup(sys, proc, str(pid))
    values = replace(cgroup, memory=None).read() if cgroup.cpu is not None else {}
    return values if "cgroup_cpu_limit_cores" in values else {}


# Small files of /proc and /sys.

_MAX_BYTES = 1 << 16


def read_text(path: str | Path) -> str | None:
    """Return the content of a small file; None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_number(path: str | Path) -> int | None:
    """Return the number at the start of a file; None if it cannot be read or does not start with one."""
    words = (read_text(path) or "").split(maxsplit=1)
    try:
        return int(words[0]) if words else None
    except ValueError:
        return None


def read_pairs(path: str | Path) -> dict[str, int]:
    """Parse a file of lines `name value …`, with or without a colon; other lines are skipped."""
    lines = [line.split() for line in (read_text(path) or "").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


# Network ports: InfiniBand, RoCE and the like, and Ethernet. Traffic is read with every sample, other
# counters with every tenth, under the names of their drivers, since they differ between vendors.

_WORDS = 4  # InfiniBand counts data in words of four bytes
# Traffic counters by the names of the specification, of drivers that count bytes, and of Ethernet.
_TRAFFIC = {
    "port_xmit_data": ("tx_bytes", _WORDS),
    "port_rcv_data": ("rx_bytes", _WORDS),
    "tx_bytes": ("tx_bytes", 1),
    "rx_bytes": ("rx_bytes", 1),
}
_NOT_COUNTERS = frozenset(["lifespan"])
_UP = 0x1  # IFF_UP
_LOOPBACK = 0x8  # IFF_LOOPBACK


@dataclass
class PortCounters:
    """A network port and its counter files: path and factor of each value, by counter."""

    device: str
    folder: Path
    traffic: dict[str, tuple[Path, int]] = field(default_factory=dict)
    others: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def add(self, folder: Path) -> None:
        """Add all readable counters of a folder that are not known from an earlier one."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name, factor = _TRAFFIC.get(path.name, (path.name, 1))
            counters = self.traffic if path.name in _TRAFFIC else self.others
            if name not in counters and path.name not in _NOT_COUNTERS and read_number(path) is not None:
                counters[name] = (path, factor)

    def read(self, everything: bool) -> dict[str, float]:
        """Return current values, without those that cannot be read.

        Args:
            everything: include all counters and the state, not traffic only.
        """
        wanted = self.traffic | self.others if everything else self.traffic
        values: dict[str, float] = {}
        for name, (path, factor) in wanted.items():
            if (value := read_number(path)) is not None:
                values[name] = value * factor
        return values | self._state() if everything else values

    def _state(self) -> dict[str, float]:
        """Return whether the port is up, and its rate."""
        infiniband = read_text(self.folder / "state")  # "4: ACTIVE"
        if infiniband is not None:
            rate = read_number(self.folder / "rate")  # "400 Gb/sec (4X NDR)"
            state: dict[str, float] = {"up": float(infiniband.startswith("4:"))}
            return state | ({"rate_gbps": float(rate)} if rate else {})
        if read_text(self.folder / "flags") is None:
            return {}
        speed = read_number(self.folder / "speed") or 0  # Mb/s; -1 or an error where a device has none
        return {"up": float(_is_up(self.folder))} | ({"rate_gbps": speed / 1e3} if speed > 0 else {})


def find_ports(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> list[PortCounters]:
    """Return all ports worth watching: InfiniBand devices, and network interfaces in use.

    An interface is in use if it is up, and is hardware or has a route; most of the many virtual interfaces of
    a container host are not. An InfiniBand port is named as in NCCL, `mlx5_0:1`.
    """
    ports = [*_infiniband(sys / "class" / "infiniband"), *_interfaces(sys / "class" / "net", proc)]
    return [port for port in ports if port.traffic or port.others]


def _infiniband(root: Path) -> Iterator[PortCounters]:
    for folder in sorted(root.glob("*/ports/*")):
        port = PortCounters(f"{folder.parents[1].name}:{folder.name}", folder)
        port.add(folder / "counters")
        port.add(folder / "hw_counters")
        yield port


def _interfaces(root: Path, proc: Path) -> Iterator[PortCounters]:
    four = [line.split()[0] for line in (read_text(proc / "net/route") or "").splitlines()[1:] if line]
    six = [line.split()[-1] for line in (read_text(proc / "net/ipv6_route") or "").splitlines() if line]
    routed = {*four, *six}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if _is_up(folder) and (folder.name in routed or (folder / "device").exists()):
            port = PortCounters(folder.name, folder)
            port.add(folder / "statistics")
            yield port


def _is_up(folder: Path) -> bool:
    flags = int(read_text(folder / "flags") or "0", 16)
    down = (read_text(folder / "operstate") or "").strip() in ("down", "lowerlayerdown", "notpresent")
    return bool(flags & _UP) and not flags & _LOOPBACK and not down


# TCP connections of the job from the kernel's counts: data sent and retransmitted, round trip and rate, per
# pair of addresses, summed over the connections of a process between them. The kernel returns all connections
# in one dump (sock_diag(7), `struct tcp_info`); those of a process are found through its descriptors.
# Connections within the host are left out, and peers that were sent little data.

MAX_PEERS = 64  # peers kept per process: those that were sent most
MIN_BYTES = 1 << 16  # peers that were sent less do not delay a step
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _DUMP = 4, 20, 0x301  # request, root, match
_DONE, _ERROR = 3, 2  # types of netlink messages
_INFO = 2  # INET_DIAG_INFO
_ESTABLISHED = 1
_ANSWER_BYTES, _READ_BYTES = 72, 1 << 17
_MESSAGE = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_SOCKET = struct.Struct("!HH16s16s")  # ports and addresses
# Offset and format of fields of `struct tcp_info`.
_RTT, _AGAIN, _ACKNOWLEDGED, _SEGMENTS, _RATE = (68, "I"), (100, "I"), (120, "Q"), (156, "I"), (160, "Q")


class TcpCounts(NamedTuple):
    """The kernel's counts of one TCP connection.

    Attributes:
        sent_bytes: bytes acknowledged by the peer.
        segments: data segments sent, with retransmitted ones.
        again: retransmitted segments.
        rtt_us: round trip time.
        rate: recent delivery rate, bytes per second.
    """

    inode: int
    local: str
    remote: str
    sent_bytes: int
    segments: int
    again: int
    rtt_us: int
    rate: int


def established() -> list[TcpCounts]:
    """Return the TCP connections of this network namespace that lead to another host.

    Raises:
        OSError: the kernel does not answer.
    """
    connections = []
    for family in (socket.AF_INET, socket.AF_INET6):
        connections += [counted for answer in _dump(family) if (counted := _parse_connection(family, answer))]
    return [connection for connection in connections if leaves_host(connection)]


def leaves_host(connection: TcpCounts) -> bool:
    """Return whether a connection leads to another host."""
    return connection.local != connection.remote and not connection.remote.startswith(("127.", "::1"))


def _dump(family: int) -> Iterator[bytes]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 1 << _ESTABLISHED)
    header = _MESSAGE.pack(_MESSAGE.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.sendto(header + request, (0, 0))
        while True:
            data = kernel.recv(_READ_BYTES)
            offset = 0
            while offset + _MESSAGE.size <= len(data):
                size, kind, *_ = _MESSAGE.unpack_from(data, offset)
                if kind in (_DONE, _ERROR) or size < _MESSAGE.size:
                    return
                yield data[offset + _MESSAGE.size : offset + size]
                offset += (size + 3) & ~3


def _parse_connection(family: int, answer: bytes) -> TcpCounts | None:
    """Parse the connection of an answer; None where an old kernel reports too little."""
    _, _, source, target = _SOCKET.unpack_from(answer, 4)
    size = 4 if family == socket.AF_INET else 16
    local, remote = (
        socket.inet_ntop(family, packed[:size]).removeprefix("::ffff:") for packed in (source, target)
    )
    inode = struct.unpack_from("=I", answer, _ANSWER_BYTES - 4)[0]
    info = _attribute(answer, _INFO)
    if len(info) < _RATE[0] + 8:
        return None
    rtt, again, sent, segments, rate = (
        struct.unpack_from(f"={form}", info, offset)[0]
        for offset, form in (_RTT, _AGAIN, _ACKNOWLEDGED, _SEGMENTS, _RATE)
    )
    return TcpCounts(inode, local, remote, sent, segments, again, rtt, rate)


def _attribute(answer: bytes, wanted: int) -> bytes:
    offset = _ANSWER_BYTES
    while offset + 4 <= len(answer):
        size, kind = struct.unpack_from("=HH", answer, offset)
        if size < 4:
            break
        if kind == wanted:
            return answer[offset + 4 : offset + size]
        offset += (size + 3) & ~3
    return b""


def inodes_of(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """Return the inodes of a process's open sockets; empty if it has ended or belongs to another user."""
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(proc / str(pid) / "fd"):
            with suppress(OSError):
                name = os.readlink(entry.path)
                if name.startswith("socket:["):
                    inodes.add(int(name[8:-1]))
    return inodes


def by_peer(connections: Iterable[TcpCounts], inodes: set[int]) -> dict[str, dict[str, float]]:
    """Return the values of a process's connections by pair of addresses, `10.0.0.1>10.0.0.2`.

    Args:
        inodes: sockets of the process.

    Returns:
        At most `MAX_PEERS` pairs, each with at least `MIN_BYTES` sent.
    """
    by_pair: dict[str, list[TcpCounts]] = {}
    for connection in connections:
        if connection.inode in inodes:
            by_pair.setdefault(f"{connection.local}>{connection.remote}", []).append(connection)
    values = {
        pair: {
            "tcp_sent_bytes": float(sum(connection.sent_bytes for connection in several)),
            "tcp_sent_segments": float(sum(connection.segments for connection in several)),
            "tcp_retransmitted_segments": float(sum(connection.again for connection in several)),
            "tcp_rtt_us": float(max(connection.rtt_us for connection in several)),
            "tcp_delivered_gbps": max(connection.rate for connection in several) / 1e9,
        }
        for pair, several in by_pair.items()
    }
    kept = sorted(values, key=lambda pair: -values[pair]["tcp_sent_bytes"])[:MAX_PEERS]
    return {pair: values[pair] for pair in kept if values[pair]["tcp_sent_bytes"] >= MIN_BYTES}
