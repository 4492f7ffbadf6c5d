"""Two ranks of a job that talk over a link of a known speed, on one machine: network namespaces and `tc tbf`.

python benchmarks/limited_link.py RATE_MBIT -- COMMAND…        (root)

COMMAND is run twice, as rank 0 and 1, each in a namespace of its own, joined by a virtual cable that lets
RATE_MBIT through. Both end before this returns; it exits 0 when both do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

PORT = 29611
BURST, LATENCY = "64kb", "100ms"


def ip(*words: object) -> None:
    """Run one `ip` command."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def lay_cable(spaces: list[str], rate_mbit: int) -> None:
    """Make the namespaces, and the cable between them; each end sends no faster than the rate."""
    for space in spaces:
        ip("netns", "add", space)
    ends = [f"{space}v" for space in spaces]
    ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for rank, (space, end) in enumerate(zip(spaces, ends)):
        ip("link", "set", end, "netns", space)
        ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", end)
        ip("-n", space, "link", "set", end, "up")
        ip("-n", space, "link", "set", "lo", "up")
        shape = ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", BURST, "latency", LATENCY]
        subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", end, *shape], check=True)


def run_ranks(spaces: list[str], command: list[str]) -> int:
    """Run the command as rank 0 and 1; the larger exit code."""
    ranks = []
    for rank, space in enumerate(spaces):
        environment = os.environ | {
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": f"{space}v",
        }
        ranks.append(subprocess.Popen(["ip", "netns", "exec", space, *command], env=environment))
    return max(abs(rank.wait()) for rank in ranks)


def main() -> None:
    """Lay the cable, run, and take it away again."""
    rate, separator, *command = sys.argv[1:]
    if separator != "--" or not command:
        raise SystemExit(__doc__)
    spaces = [f"dp{os.getpid()}{side}" for side in "ab"]
    try:
        lay_cable(spaces, int(rate))
        code = run_ranks(spaces, command)
    finally:
        for space in spaces:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
