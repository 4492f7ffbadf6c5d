"""Runs ranks of a job that talk over links of a known speed and delay, on one machine: network namespaces.

python benchmarks/recording/limited_link.py RATE_MBIT [--ranks 2] [--delay-us DELAY] -- COMMAND…        (root)

COMMAND is run twice, as rank 0 and 1, each in its own namespace, joined by a virtual cable with a rate of
RATE_MBIT; more ranks each have such a cable to one switch. All end before this returns; it exits 0 if all do.
Without a delay the kernel shapes the cable (`tc tbf`). The kernel delays only with netem, which many kernels
lack; so with a delay, packets pass through this program, between two TUN devices, and each is delayed
according to rate and delay.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

PORT = 29611
BURST, LATENCY = "64kb", "100ms"
MTU = 9000  # large, since each packet takes time on the cores that ranks share
HELD = 1 << 20  # bytes in transit before the sender is blocked: the buffer of a small switch
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def ip(*words: object) -> None:
    """Run one `ip` command."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def into(space: str, rank: int, end: str) -> None:
    """Put one end of the cable into its namespace, and turn it on."""
    ip("link", "set", end, "netns", space)
    ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", end)
    ip("-n", space, "link", "set", end, "up")
    ip("-n", space, "link", "set", "lo", "up")


def lay_cable(spaces: list[str], rate_mbit: int) -> None:
    """Lay a cable between the namespaces; each end sends no faster than the rate."""
    ends = [f"{space}v" for space in spaces]
    ip("link", "add", ends[0], "mtu", MTU, "type", "veth", "peer", "name", ends[1], "mtu", MTU)
    for rank, (space, end) in enumerate(zip(spaces, ends)):
        into(space, rank, end)
        shape(space, end, rate_mbit)


def shape(space: str, end: str, rate_mbit: int) -> None:
    """Let one end of a cable send no faster than the rate."""
    limit = ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", BURST, "latency", LATENCY]
    subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", end, *limit], check=True)


def lay_cables_to_switch(spaces: list[str], rate_mbit: int) -> Callable[[], None]:
    """Lay a cable from each namespace to a switch, limited both ways; return a function that removes them."""
    switch = f"dp{os.getpid()}s"
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge", "mtu", MTU, "up")
    for rank, space in enumerate(spaces):
        end, port = f"{space}v", f"{space}p"
        ip("link", "add", end, "mtu", MTU, "type", "veth", "peer", "name", port, "mtu", MTU)
        into(space, rank, end)
        ip("link", "set", port, "netns", switch)
        ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        shape(space, end, rate_mbit)
        shape(switch, port, rate_mbit)
    return lambda: ip("netns", "del", switch)


def lay_slow_cable(spaces: list[str], rate_mbit: int, delay_us: int) -> Callable[[], None]:
    """Lay a cable with a delay; return the function that removes it."""
    sockets = []
    for rank, space in enumerate(spaces):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", f"{space}v".encode(), IFF_TUN | IFF_NO_PI))
        ip("link", "set", f"{space}v", "mtu", MTU)
        into(space, rank, f"{space}v")
        sockets.append(device)
    over = Event()
    carrier = Thread(target=carry, args=(sockets, rate_mbit * 1e6, delay_us * 1e-6, over))
    carrier.start()

    def take_away() -> None:
        over.set()
        carrier.join()
        for device in sockets:
            os.close(device)

    return take_away


def carry(devices: list[int], rate: float, delay_s: float, over: Event) -> None:
    """Carry packets between two devices, in both directions at once, until `over` is set.

    Args:
        devices: file descriptors of both ends.
        rate: bits per second, each way.
        delay_s: of a packet, in addition to the time of its bits.
        over: set when it ends.
    """
    with suppress(PermissionError):  # if ranks run before all other programs, so must their cable
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    on_the_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    held, free_at = [0, 0], [0.0, 0.0]
    while not over.is_set():
        due = min((packets[0][0] for packets in on_the_way if packets), default=float("inf"))
        wait = min(max(due - time.monotonic(), 0.0), 0.1)
        willing = [device for side, device in enumerate(devices) if held[side] < HELD]
        readable, _, _ = select.select(willing, [], [], wait)
        for device in readable:
            side = devices.index(device)
            with suppress(BlockingIOError):
                while held[side] < HELD:
                    packet = os.read(device, 1 << 16)
                    free_at[side] = max(free_at[side], time.monotonic()) + 8 * len(packet) / rate
                    on_the_way[side].append((free_at[side] + delay_s, packet))
                    held[side] += len(packet)
        now = time.monotonic()
        for side, packets in enumerate(on_the_way):
            while packets and packets[0][0] <= now:
                packet = packets.popleft()[1]
                held[side] -= len(packet)
                with suppress(OSError):  # full, or the other end is not up yet: lost, as on a real cable
                    os.write(devices[1 - side], packet)


def run_ranks(spaces: list[str], command: list[str]) -> int:
    """Run the command once as each rank; return the largest exit code."""
    ranks = []
    for rank, space in enumerate(spaces):
        environment = os.environ | {
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": str(len(spaces)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": f"{space}v",
        }
        ranks.append(subprocess.Popen(["ip", "netns", "exec", space, *command], env=environment))
    return max(abs(rank.wait()) for rank in ranks)


def main() -> None:
    """Lay the cable, run the ranks, and remove it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rate_mbit", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--delay-us", type=int, default=0)
    words = sys.argv[1:]
    before = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:before]), words[before + 1 :]
    if not command:
        parser.error("no command")
    if options.delay_us and options.ranks != 2:
        parser.error("a delay is between two ranks")
    spaces = [f"dp{os.getpid()}{'abcdefgh'[rank]}" for rank in range(options.ranks)]
    take_away: Callable[[], None] = lambda: None  # noqa: E731
    try:
        for space in spaces:
            ip("netns", "add", space)
        if options.delay_us:
            take_away = lay_slow_cable(spaces, options.rate_mbit, options.delay_us)
        elif options.ranks > 2:
            take_away = lay_cables_to_switch(spaces, options.rate_mbit)
        else:
            lay_cable(spaces, options.rate_mbit)
        code = run_ranks(spaces, command)
    finally:
        take_away()
        for space in spaces:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
