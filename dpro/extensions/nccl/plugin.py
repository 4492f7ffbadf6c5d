"""NCCL's Inspector in recorded jobs, a profiler plug-in in the sources of NCCL 2.28 and later.

Takes the option of `dpro record`; sets the variables by which NCCL in the job loads the plug-in and writes
its logs into the folder of the launch. Reads no log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.errors import UsageError

if TYPE_CHECKING:
    from dpro.collectors.launch.recording import Launch
    from dpro.collectors.launch.start import Request

INSPECTOR_LOGS = "nccl"  # folder of its logs in that of the launch
INSPECTOR_PLUGIN = "NCCL_PROFILER_PLUGIN"
_INSPECTOR_FOLDER = "NCCL_INSPECTOR_DUMP_DIR"
OPTIONS = (
    click.Option(
        ["--nccl-inspector"],
        default="",
        metavar="PLUGIN",
        help="Load the NCCL Inspector and record its measurements. PLUGIN is the path of "
        "libnccl-profiler-inspector.so, or `inspector` if it is on the job's library path.",
    ),
)


def load_inspector(request: Request, given: Mapping[str, Any]) -> None:
    """Have NCCL in the job load the plug-in that the option names, if any.

    Raises:
        UsageError: there is no such plug-in, or the job already sets one.
    """
    plugin = given["nccl_inspector"] and check_plugin(given["nccl_inspector"], os.environ)
    request.extra["nccl_inspector"] = plugin
    if plugin:
        request.prepare.append(partial(_prepare, plugin))


def _prepare(plugin: str, recording: Launch, environment: Mapping[str, str]) -> dict[str, str]:
    logs = recording.raw / INSPECTOR_LOGS
    logs.mkdir()
    return inspector_variables(plugin, logs, environment)


def check_plugin(plugin: str, given: Mapping[str, str]) -> str:
    """Return the value of the variable that names the plug-in to NCCL.

    Args:
        plugin: the path of a library, or a name by which NCCL finds one: `inspector` is
            libnccl-profiler-inspector.so on the library path of the job.

    Raises:
        UsageError: there is no such library, or the job already sets a plug-in or its folder.
    """
    for name in (INSPECTOR_PLUGIN, _INSPECTOR_FOLDER):
        if name in given:
            raise UsageError(f"--nccl-inspector: {name} is set already; unset it, or leave the option out")
    if "/" not in plugin and not plugin.endswith(".so"):
        return plugin
    if not Path(plugin).is_file():
        raise UsageError(f"--nccl-inspector {plugin}: no such file")
    return str(Path(plugin).resolve())


def inspector_variables(plugin: str, logs: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make NCCL load the Inspector and it write; variables the user set are kept."""
    wanted = {
        INSPECTOR_PLUGIN: plugin,
        "NCCL_INSPECTOR_ENABLE": "1",
        _INSPECTOR_FOLDER: str(logs),
        "NCCL_INSPECTOR_DUMP_VERBOSE": "1",  # otherwise its lines lack times
        # The first versions keep only the latest collective of each communicator between two dumps.
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
    }
    return {name: value for name, value in wanted.items() if name not in given}
