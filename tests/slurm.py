"""A real Slurm on one machine: a controller and some nodes, for as long as a test needs them.

Debian's packages have all of it: `apt install --no-install-recommends slurmctld slurmd slurm-client munge`.
Nodes are daemons of their own with names of their own; what runs on one has to take that name itself
(`ON_NODE`). The daemons want to be root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.jobs import environment, free_port, wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare")
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
TaskProlog={folder}/prolog
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# What a task does to have the name of its node, as it would have on a machine of its own.
ON_NODE = ("unshare", "--uts", "sh", "-c", 'hostname "$SLURMD_NODENAME"; exec "$@"', "sh")


def why_none() -> str:
    """Why no cluster can be started here; empty where one can."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: apt install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "the daemons of Slurm are started by root"


@contextmanager
def cluster(num_nodes: int, prolog: str = "") -> Iterator[dict[str, str]]:
    """A cluster with nodes `n0`, `n1`, …; its commands need the variables that are returned.

    Args:
        prolog: a line of the script whose output is the environment of all tasks.
    """
    with TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        (folder / "prolog").write_text(f"#!/bin/sh\n{prolog}\n")
        (folder / "prolog").chmod(0o755)
        host = socket.gethostname()
        settings = SETTINGS.format(folder=folder, host=host, port=free_port())
        nodes = [
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4"
            for node in range(num_nodes)
        ]
        (folder / "slurm.conf").write_text(settings + "\n".join(nodes) + "\n")
        variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        files = {
            "socket": "munge",
            "key-file": "key",
            "pid-file": "munged.pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        munge = [f"--{name}={folder / file}" for name, file in files.items()]
        try:
            _start(["munged", "--force", *munge], variables)
            _start(["slurmctld", "-c"], variables)
            for node in range(num_nodes):
                _start(["slurmd", "-N", f"n{node}"], variables)
            idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
            wait_until(lambda: said(idle, variables) == str(num_nodes), "the nodes never came", 60)
            yield variables
        finally:
            subprocess.run(
                ["scancel", "--full", "--user=root"], env=environment(**variables), capture_output=True
            )
            time.sleep(1)  # for what is cancelled
            for file in sorted(folder.glob("*.pid"), reverse=True):  # munged last
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int(file.read_text()), signal.SIGTERM)
            time.sleep(1)


def said(command: list[str], variables: dict[str, str]) -> str:
    """What a command of the cluster prints."""
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def _start(daemon: list[str], variables: dict[str, str]) -> None:
    subprocess.run(daemon, env=environment(**variables), check=True, timeout=60)
