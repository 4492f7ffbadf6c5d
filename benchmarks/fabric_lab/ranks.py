"""Starts a rank of a job on each host of a lab, in a given order.

python benchmarks/fabric_lab/ranks.py NAMESPACE/HOST,… ADDRESS PORT -- COMMAND…        (root)

COMMAND is run once as each rank, in the namespace of its host and under the host's name. Ends when all have
ended, with the largest exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> None:
    """Start all ranks, wait for them, and exit."""
    places, address, port = sys.argv[1:4]
    command = sys.argv[5:]
    ranks = []
    spaces = [place.split("/") for place in places.split(",")]
    for rank, (space, host) in enumerate(spaces):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(spaces)),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides that hosts have no names
        }
        named = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *command]
        ranks.append(subprocess.Popen(["ip", "netns", "exec", space, *named], env=environment))
    sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    main()
