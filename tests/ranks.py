"""Starts the ranks of a job as a batch system does: `python ranks.py NUM SCRIPT ARGUMENT…`.

Torchrun imports torch first, which takes longer than most jobs of tests. Like torchrun, this ends the other
ranks a moment after one failed, and exits with 1 then.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

NOTICED_S = 0.1  # torchrun looks this often which ranks have failed


def main() -> int:
    num_ranks, *command = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": num_ranks}
    ranks = {}
    for rank in range(int(num_ranks)):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": num_ranks}
        process = subprocess.Popen([sys.executable, *command], env=os.environ | store | place)
        ranks[process.pid] = process
    failed = False
    while ranks:
        pid, status = os.wait()
        ended = ranks.pop(pid)
        ended.returncode = os.waitstatus_to_exitcode(status)
        if ended.returncode and not failed:
            failed = True
            time.sleep(NOTICED_S)
            for other in ranks:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)  # `terminate` would wait for it, and `os.wait` find none
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
