"""Whether two launchers that record into one run start parts of one job.

In: what schedulers and users give each launcher: variables of its environment, its command, its host. Out:
why the two cannot be of one job; nothing where they may be. Launchers of one job, one per node or rank, share
what is the job's, as an address to meet at, and differ in their place in it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from dpro.collectors.inside.process.environment import masked_command
from dpro.collectors.inside.process.kernel import host_clock

# What all launchers of a job share. The first ones are of a whole allocation, in which several jobs may run.
_ALLOCATIONS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")
_JOBS = ("SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID")  # fmt: skip
# What differs between them, as variables and as options of a command (`--node-rank 1`, `--machine_rank=1`).
_PLACES = ("RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_PLACE = re.compile(r"-{1,2}[\w-]*(rank|node[-_]id|local[-_]addr)[\w-]*(=.*)?", re.IGNORECASE)
_MEETING = re.compile(r"--rdzv[-_](id|endpoint)\b.*")  # of torchrun, which finds the places itself


def part(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """What a launcher is to be compared by, as JSON.

    Args:
        command: the job's.
        environment: the launcher's.
    """
    words, places = _without_places(masked_command(command))
    return {
        "host": [socket.gethostname(), host_clock()],
        "ids": {name: environment[name] for name in (*_ALLOCATIONS, *_JOBS) if environment.get(name)},
        "places": {name: environment[name] for name in _PLACES if environment.get(name)} | places,
        "command": words,
    }


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Why two launchers that run at the same time are not of one job; empty where they may be.

    Args:
        mine: as of `part`.
    """
    shared = [name for name in mine["ids"] if name in theirs["ids"]]
    for name in shared:
        if mine["ids"][name] != theirs["ids"][name]:
            return f"its {name} is {theirs['ids'][name]}, and here it is {mine['ids'][name]}"
    if mine["places"] and mine["places"] == theirs["places"]:
        place = ", ".join(f"{name} {value}" for name, value in mine["places"].items())
        return f"it has the same {place}"
    meets = any(name in _JOBS for name in shared)
    if mine["command"] != theirs["command"] and not meets:
        return f"its command is {' '.join(theirs['command'])}"
    meets = meets or any(map(_MEETING.fullmatch, mine["command"]))
    if mine["host"] == theirs["host"] and not mine["places"] and not meets:
        return "it is the same command on the same host"
    return ""


def _without_places(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command without the options that say where in a job it is, and these."""
    words: list[str] = []
    places: dict[str, str] = {}
    option = ""
    for word in command:
        place = _PLACE.fullmatch(word)
        if option:
            places[option], option = word, ""
        elif place and place[2]:
            places[word.partition("=")[0]] = place[2][1:]
        elif place:
            option = word
        else:
            words.append(word)
    return words, places
