"""Turning on NCCL's Inspector, a profiler plug-in that comes with the sources of NCCL 2.28 and later.

In: the plug-in to load. Out: variables for the job. What it writes is taken in by `inspector_logs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dpro.errors import UsageError

LOGS = "nccl"  # the folder of its logs, in that of the launch
PLUGIN = "NCCL_PROFILER_PLUGIN"
_FOLDER = "NCCL_INSPECTOR_DUMP_DIR"


def check_plugin(plugin: str, given: Mapping[str, str]) -> str:
    """Return the value of the variable that names the plug-in to NCCL.

    Args:
        plugin: the path of a library, or a name by which NCCL finds one: `inspector` is
            libnccl-profiler-inspector.so on the library path of the job.

    Raises:
        UsageError: there is no such library, or the job has a plug-in or a folder of its own.
    """
    for name in (PLUGIN, _FOLDER):
        if name in given:
            raise UsageError(f"--nccl-inspector: {name} is set already; unset it, or leave the option out")
    if "/" not in plugin and not plugin.endswith(".so"):
        return plugin
    if not Path(plugin).is_file():
        raise UsageError(f"--nccl-inspector {plugin}: no such file")
    return str(Path(plugin).resolve())


def variables(plugin: str, logs: Path, given: Mapping[str, str]) -> dict[str, str]:
    """What makes NCCL load the Inspector and the Inspector write; how often and how much is the user's say.

    Args:
        plugin: the library, or the name by which NCCL finds it itself.
        logs: where the logs go.
    """
    wanted = {
        PLUGIN: plugin,
        "NCCL_INSPECTOR_ENABLE": "1",
        _FOLDER: str(logs),
        "NCCL_INSPECTOR_DUMP_VERBOSE": "1",  # otherwise its lines lack times
        # The first versions keep only the latest collective of each communicator between two dumps.
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
    }
    return {name: value for name, value in wanted.items() if name not in given}
