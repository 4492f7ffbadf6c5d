"""Hosts, leaves and spines as network namespaces, joined by cables with a rate in each direction.

In: a number of hosts, leaves and spines. Out: `Lab`, for the duration of a block, which removes it
completely. The remains of a lab whose process was killed are removed before the next one is built
(`lifetime`). Each cable is a pair of virtual devices. Both ends are shaped: packets are put by their source
port into one of 256 queues that take turns, so flows share a cable evenly, as max-min fairness assumes (with
one queue for all, the kernel's congestion control would decide each flow's share). Leaves choose among spines
by a hash over addresses and ports that does not depend on the device (policy 3).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.fabric_lab.lifetime import ended_in_order, lab_name, remove, remove_left_over
from dpro.topology.file import HostEntry, LinkEntry, SwitchEntry, TopologyFile

QUEUES = 256
MTU = 1500
CLONE_NEWNET = 0x40000000
SEED = 12345  # of the hash
PINNED = 100  # priority of rules and first number of tables that name a spine
# By rate of a cable, Mbit/s: bytes of a segment, kB of a burst, bytes that wait in a queue. With smaller ones
# no flow reaches its share; with a turn shorter than a burst, shares are uneven.
RATES = {
    50: (6000, 8, 100_000),
    100: (6000, 8, 100_000),
    200: (12000, 16, 200_000),
    400: (24000, 32, 400_000),
}


class CableEnd(NamedTuple):
    """An end of a cable: a device of a namespace."""

    where: str
    device: str


@dataclass
class Lab:
    """A running fabric.

    Attributes:
        name: prefix of the names of its namespaces.
        hosts, leaves, spines: how many.
        host_mbit, spine_mbit: of a cable of a host, and of one between switches.
        failed: cables between switches that are down, as (leaf, spine).
        rates: Mbit/s of cables between switches that were changed by `slow`.
        cut: ends of cables whose rate was changed by `limit`, with their original rate.
        lossy: ends of cables that lose part of the incoming packets.
    """

    name: str
    hosts: int
    leaves: int
    spines: int
    host_mbit: int
    spine_mbit: int
    failed: set[tuple[int, int]] = field(default_factory=set)
    rates: dict[tuple[int, int], int] = field(default_factory=dict)
    cut: dict[CableEnd, int] = field(default_factory=dict)
    lossy: set[CableEnd] = field(default_factory=set)

    def host(self, number: int) -> str:
        """Return the namespace of a host."""
        return f"{self.name}h{number}"

    def leaf(self, number: int) -> str:
        """Return the namespace of a leaf."""
        return f"{self.name}l{number}"

    def spine(self, number: int) -> str:
        """Return the namespace of a spine."""
        return f"{self.name}s{number}"

    def leaf_of(self, host: int) -> int:
        """Return the leaf of a host; each leaf has consecutive hosts."""
        return host * self.leaves // self.hosts

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.{self.leaf_of(host) + 1}.{host + 1}.2"

    @property
    def batch(self) -> int:
        """Segments that a host's kernel passes on at a time, and acknowledges at once."""
        return RATES[_like(self.host_mbit)][0] // MTU

    def topology(self) -> TopologyFile:
        """Return the fabric as dpro describes one, without failed cables and with changed rates."""
        hosts = HostEntry(f"h[0-{self.hosts - 1}]", 1, 100.0, 1, float(self.host_mbit) / 1e3)
        switches = [
            SwitchEntry(f"l[0-{self.leaves - 1}]", "leaf"),
            SwitchEntry(f"s[0-{self.spines - 1}]", "spine"),
        ]
        links = [
            LinkEntry(f"h{host}:nic0", f"l{self.leaf_of(host)}", self.host_mbit / 1e3)
            for host in range(self.hosts)
        ]
        links += [
            LinkEntry(f"l{leaf}", f"s{spine}", self.rates.get((leaf, spine), self.spine_mbit) / 1e3)
            for leaf in range(self.leaves)
            for spine in range(self.spines)
            if (leaf, spine) not in self.failed
        ]
        return TopologyFile(hosts=[hosts], switches=switches, links=links)

    def fail(self, leaf: int, spine: int) -> None:
        """Take a cable down, and have all leaves route around it, as a routing protocol would."""
        self.failed.add((leaf, spine))
        _ip(f"link set dev s{spine} down", self.leaf(leaf))
        for each in range(self.leaves):
            self._route(each)

    def slow(self, leaf: int, spine: int, mbit: int) -> None:
        """Change the rate of a cable, both ways."""
        self.rates[leaf, spine] = mbit
        for where, device in ((self.leaf(leaf), f"s{spine}"), (self.spine(spine), f"l{leaf}")):
            _tc([f"qdisc del dev {device} root"], where)
            _tc(_shaping(device, mbit), where)

    def slow_port(self, host: int, mbit: int) -> None:
        """Change the rate of a host's cable, both ways; `heal` does not undo it."""
        for where, device in ((self.host(host), "eth0"), (self.leaf(self.leaf_of(host)), f"h{host}")):
            _tc([f"qdisc del dev {device} root"], where)
            _tc(_shaping(device, mbit), where)

    def port_ends(self, host: int) -> tuple[CableEnd, CableEnd]:
        """Return the ends of a host's cable: at the host, and at its leaf."""
        return CableEnd(self.host(host), "eth0"), CableEnd(self.leaf(self.leaf_of(host)), f"h{host}")

    def cable_ends(self, leaf: int, spine: int) -> tuple[CableEnd, CableEnd]:
        """Return the ends of a cable between switches: at the leaf, and at the spine."""
        return CableEnd(self.leaf(leaf), f"s{spine}"), CableEnd(self.spine(spine), f"l{leaf}")

    def limit(self, end: CableEnd, mbit: int) -> None:
        """Change the rate at which an end of a cable sends, until `heal`."""
        of_host = end.device.startswith(("eth", "h"))
        self.cut.setdefault(end, self.host_mbit if of_host else self.spine_mbit)
        self._limit(end, mbit)

    def lose(self, end: CableEnd, share: float) -> None:
        """Have an end of a cable drop a share of the incoming packets, each of several segments."""
        # Classic BPF: a random word; below the share of its range the packet is dropped (2), else it passes.
        program = f"4,32 0 0 4294963256,53 1 0 {int(share * 2**32)},6 0 0 2,6 0 0 0"
        device = f"dev {end.device}"
        _tc_one(f"qdisc add {device} ingress", end.where)
        run([*_words(f"tc -n {end.where} filter add {device} parent ffff: protocol ip prio 1 bpf da"),
             "bytecode", program])  # fmt: skip
        self.lossy.add(end)

    def _limit(self, end: CableEnd, mbit: int) -> None:
        _, burst, _ = RATES[_like(mbit)]
        rate = f"rate {mbit}mbit ceil {mbit}mbit burst {burst}kb cburst {burst}kb"
        _tc_one(f"class change dev {end.device} parent 1: classid 1:fff htb {rate}", end.where)

    def pin(self, spines: Mapping[tuple[int, int], int]) -> None:
        """Pin the flows between two hosts to one spine, both ways; all others go by hash.

        Args:
            spines: by two hosts of different leaves, their spine.
        """
        for leaf in range(self.leaves):
            for _ in self.rules(leaf):
                _ip(f"rule del pref {PINNED}", self.leaf(leaf))
        for pair, spine in spines.items():
            for begin, end in (pair, pair[::-1]):
                ends = f"iif h{begin} from {self.address(begin)} to {self.address(end)}"
                _ip(f"rule add pref {PINNED} {ends} lookup {PINNED + spine}", self.leaf(self.leaf_of(begin)))

    def rules(self, leaf: int) -> list[str]:
        """Return the rules of a leaf that name a spine, as the kernel lists them."""
        return _ip(f"rule list pref {PINNED}", self.leaf(leaf)).splitlines()

    def heal(self) -> None:
        """Undo failures, losses and rates changed by `slow` or `limit`."""
        for end, mbit in self.cut.items():
            self._limit(end, mbit)
        for end in self.lossy:
            _tc_one(f"qdisc del dev {end.device} ingress", end.where)
        self.cut.clear()
        self.lossy.clear()
        for leaf, spine in list(self.failed):
            _ip(f"link set dev s{spine} up", self.leaf(leaf))
            self.failed.discard((leaf, spine))
        for leaf, spine in list(self.rates):
            self.slow(leaf, spine, self.spine_mbit)
            del self.rates[leaf, spine]
        for leaf in range(self.leaves):
            self._route(leaf)

    def _route(self, leaf: int) -> None:
        """Set the routes of a leaf to the hosts of other leaves: over all spines that reach them, or one."""
        for spine in range(self.spines):
            if (leaf, spine) not in self.failed:
                hop = f"via 10.{100 + spine}.{leaf}.2 dev s{spine}"
                _ip(f"route replace 10.0.0.0/8 {hop} table {PINNED + spine}", self.leaf(leaf))
        for other in range(self.leaves):
            if other == leaf:
                continue
            hops = " ".join(
                f"nexthop via 10.{100 + spine}.{leaf}.2 dev s{spine}"
                for spine in range(self.spines)
                if not {(leaf, spine), (other, spine)} & self.failed
            )
            _ip(f"route replace 10.{other + 1}.0.0/16 {hops}", self.leaf(leaf))


@contextmanager
def lab(hosts: int, leaves: int, spines: int, host_mbit: int, spine_mbit: int) -> Iterator[Lab]:
    """Build a fabric, and remove it at the end.

    Args:
        hosts, leaves, spines: how many.
        host_mbit, spine_mbit: rates of cables, keys of `RATES`.

    Raises:
        SystemExit: this process may not make network namespaces.
    """
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: run it as root on a machine that is yours")
    remove_left_over()
    made = Lab(lab_name(), hosts, leaves, spines, host_mbit, spine_mbit)
    with ended_in_order():
        try:
            _build(made)
            yield made
        finally:
            remove(_namespaces(made))


def _namespaces(made: Lab) -> list[str]:
    return [
        *map(made.host, range(made.hosts)),
        *map(made.leaf, range(made.leaves)),
        *map(made.spine, range(made.spines)),
    ]


def _build(made: Lab) -> None:
    for name in _namespaces(made):
        run(["ip", "netns", "add", name])
        _ip("link set lo up", name)
        settings = {
            "ip_forward": 1,
            "conf/all/rp_filter": 0,
            "conf/default/rp_filter": 0,
            "conf/all/ignore_routes_with_linkdown": 1,
            "fib_multipath_hash_policy": 3,
            "fib_multipath_hash_fields": 0x37,
            "fib_multipath_hash_seed": SEED,
        }
        script = "".join(f"echo {value} > /proc/sys/net/ipv4/{key}\n" for key, value in settings.items())
        run(["ip", "netns", "exec", name, "sh", "-c", script])
    for host in range(made.hosts):
        leaf = made.leaf_of(host)
        _cable(made.host(host), "eth0", made.leaf(leaf), f"h{host}", made.host_mbit)
        network = f"10.{leaf + 1}.{host + 1}"
        _ip(f"addr add {network}.2/24 dev eth0", made.host(host))
        _ip(f"addr add {network}.1/24 dev h{host}", made.leaf(leaf))
        _ip(f"route add default via {network}.1 congctl cubic", made.host(host))
    for leaf in range(made.leaves):
        for spine in range(made.spines):
            _cable(made.leaf(leaf), f"s{spine}", made.spine(spine), f"l{leaf}", made.spine_mbit)
            _ip(f"addr add 10.{100 + spine}.{leaf}.1/30 dev s{spine}", made.leaf(leaf))
            _ip(f"addr add 10.{100 + spine}.{leaf}.2/30 dev l{leaf}", made.spine(spine))
            _ip(f"route add 10.{leaf + 1}.0.0/16 via 10.{100 + spine}.{leaf}.1", made.spine(spine))
    for leaf in range(made.leaves):
        made._route(leaf)


def _cable(begin: str, begin_device: str, end: str, end_device: str, mbit: int) -> None:
    peer = f"peer name {end_device} netns {end} mtu {MTU}"
    run(_words(f"ip link add {begin_device} netns {begin} mtu {MTU} type veth {peer}"))
    for where, device in ((begin, begin_device), (end, end_device)):
        _ip(f"link set dev {device} gso_max_size {RATES[_like(mbit)][0]}", where)
        _ip(f"link set dev {device} up", where)
        _tc(_shaping(device, mbit), where)


def _like(mbit: int) -> int:
    """Return the rate in `RATES` whose queues suit a rate."""
    return min((each for each in RATES if each >= mbit), default=max(RATES))


def _shaping(device: str, mbit: int) -> list[str]:
    segments, burst, limit = RATES[_like(mbit)]
    turns = f"burst {burst}kb cburst {burst}kb quantum {segments + 600}"
    each = f"rate {1000 * mbit // 512}kbit ceil {mbit}mbit {turns}"
    rule = f"filter add dev {device} parent 1: prio 1"
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:fff htb rate {mbit}mbit {turns}",
    ]
    for queue in range(1, QUEUES + 1):
        lines += [
            f"class add dev {device} parent 1:fff classid 1:{queue:x} htb {each}",
            f"qdisc add dev {device} parent 1:{queue:x} bfifo limit {limit}",
        ]
    # The low byte of the source port names the queue.
    match = "protocol ip u32 ht 800:: match u32 0 0 hashkey mask 0x00ff0000 at 20 link 2:"
    lines += [f"{rule} handle 2: protocol ip u32 divisor 256", f"{rule} {match}"]
    queues = (f"ht 2:{low:x}: match u32 0 0 flowid 1:{low + 1:x}" for low in range(QUEUES))
    return lines + [f"{rule} protocol ip u32 {queue}" for queue in queues]


def _words(text: str) -> list[str]:
    return text.split()


def run(command: list[str], given: str | None = None) -> str:
    """Run a command and return its output.

    Args:
        command: its words.
        given: on its standard input.

    Raises:
        CalledProcessError: it failed; the end of its errors is printed.
    """
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(command)[:200]}: {done.stderr.strip()[:300]}", file=sys.stderr)
        done.check_returncode()
    return done.stdout


def _ip(words: str, where: str) -> str:
    return run(["ip", "-n", where, *_words(words)])


def _tc_one(words: str, where: str) -> None:
    run(["tc", "-n", where, *_words(words)])


def _tc(lines: list[str], where: str) -> None:
    run(["tc", "-n", where, "-batch", "-"], "\n".join(lines) + "\n")


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Move this thread into a namespace, where it opens sockets, and back at the end."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if setns(other, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        yield
    finally:
        setns(own, CLONE_NEWNET)
        os.close(own)
        os.close(other)


def taken(made: Lab, begin: int, end: int, port: int, to_port: int) -> str:
    """Ask the kernel for the spine of a flow; empty within a leaf.

    Args:
        made: the lab.
        begin, end: hosts.
        port, to_port: source and destination port.
    """
    leaf = made.leaf_of(begin)
    if leaf == made.leaf_of(end):
        return ""
    said = _ip(
        f"route get {made.address(end)} from {made.address(begin)} iif h{begin} ipproto tcp "
        f"sport {port} dport {to_port}",
        made.leaf(leaf),
    )
    return said.split(" dev ")[1].split()[0]
