"""Two hosts of a job on one machine: a torchrun each; the second is restarted after it failed.

`python hosts.py FOLDER REPAIR_S LEAST SCRIPT ARGUMENT...`, where LEAST is the number of hosts that suffice to
continue. It ends when the first host's torchrun ends. The file `host-1` has the pid of the second one, for
the process that injects failures.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs as a script

from benchmarks.campaigns.design import KEEP_ALIVE_S, KEEP_ALIVE_TIMES, LAST_CALL_S

POLL_S = 0.05
END_S = 10.0


def main() -> int:
    """Start both hosts, and the second again after each failure; return the first one's exit code."""
    folder, repair_s, least = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(host: int) -> subprocess.Popen[bytes]:
        settings = {
            "is_host": int(host == 0),
            "keep_alive_interval": KEEP_ALIVE_S,
            "keep_alive_max_attempt": KEEP_ALIVE_TIMES,
            "last_call_timeout": LAST_CALL_S,
        }
        options = {
            "nnodes": f"{least}:2",
            "nproc-per-node": 1,
            "max-restarts": 1000,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"127.0.0.1:{port}",
            "rdzv-id": "campaign",
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in settings.items()),
        }
        command = [f"--{name}={value}" for name, value in options.items()]
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *command, *sys.argv[4:]])

    first, second = start(0), start(1)
    (folder / "host-1").write_text(str(second.pid))
    failed_s = 0.0
    while first.poll() is None:
        if second.poll() is not None and not (folder / "stop").exists():
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s >= repair_s:
                second, failed_s = start(1), 0.0
                (folder / "host-1").write_text(str(second.pid))
        time.sleep(POLL_S)
    try:
        second.wait(END_S)
    except subprocess.TimeoutExpired:
        second.kill()
        second.wait()
    return first.returncode


if __name__ == "__main__":
    sys.exit(main())
