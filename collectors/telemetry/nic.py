"""Counters of network ports: InfiniBand, RoCE and the like, and Ethernet, as sysfs shows them.

In: `/sys/class/infiniband` and `/sys/class/net`. Out: cumulative values as the kernel gives them; a counter
that goes down was reset. What ports move is read with every sample, what else they count with every tenth,
under the names their drivers give it: vendors count different things.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dpro.collectors.telemetry.files import read_number, read_text

_WORDS = 4  # InfiniBand counts data in words of four bytes
# What moves, by the names of the specification, of drivers that count bytes, and of Ethernet.
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
    """One port: its files, by the counter's name, with what a value is to be multiplied by."""

    device: str
    folder: Path
    traffic: dict[str, tuple[Path, int]] = field(default_factory=dict)
    others: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def add(self, folder: Path) -> None:
        """Take all counters of a folder that can be read and are not known from an earlier one."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name, factor = _TRAFFIC.get(path.name, (path.name, 1))
            counters = self.traffic if path.name in _TRAFFIC else self.others
            if name not in counters and path.name not in _NOT_COUNTERS and read_number(path) is not None:
                counters[name] = (path, factor)

    def read(self, everything: bool) -> dict[str, float]:
        """Values now; those that cannot be read just now are left out."""
        wanted = self.traffic | self.others if everything else self.traffic
        values: dict[str, float] = {}
        for name, (path, factor) in wanted.items():
            if (value := read_number(path)) is not None:
                values[name] = value * factor
        return values | self._state() if everything else values

    def _state(self) -> dict[str, float]:
        """Whether the port is up, and how fast."""
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
    """All ports worth watching: InfiniBand devices, and network interfaces in use.

    An interface is in use if it is up, and is hardware or has a route: of the many virtual ones of a node of
    containers few are. An InfiniBand port is named as NCCL names it, `mlx5_0:1`.

    Args:
        sys: where sysfs is mounted.
        proc: where procfs is mounted.
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
    routed = _routed(proc)
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if _is_up(folder) and (folder.name in routed or (folder / "device").exists()):
            port = PortCounters(folder.name, folder)
            port.add(folder / "statistics")
            yield port


def _is_up(folder: Path) -> bool:
    flags = int(read_text(folder / "flags") or "0", 16)
    down = (read_text(folder / "operstate") or "").strip() in ("down", "lowerlayerdown", "notpresent")
    return bool(flags & _UP) and not flags & _LOOPBACK and not down


def _routed(proc: Path) -> set[str]:
    """Interfaces that a route leads over."""
    four = [line.split()[0] for line in (read_text(proc / "net/route") or "").splitlines()[1:] if line]
    six = [line.split()[-1] for line in (read_text(proc / "net/ipv6_route") or "").splitlines() if line]
    return {*four, *six}
