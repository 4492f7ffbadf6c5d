"""What is measured of a job and changes nothing in it: the parts that all such probes share.

In: functions that measure, on copies, between a few early steps that are not measured otherwise. Out: a file
with rows of the probe's table. What fails is said in the report, and the job goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from ...recorder import Recorder

BEGINS_AT_STEP, STEPS = 4, 3  # DDP's buckets are final by then; before the first deep window of `dpro try`
REPEATS = 2


def timed(device: Any, action: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """The result of an action, and the shorter of two times that it takes, ns: the first may have to warm up.

    Args:
        action: may be called several times.
    """
    times = []
    for _ in range(REPEATS):
        _wait(device)
        begun_ns = time.perf_counter_ns()
        result = action(*arguments)
        _wait(device)
        times.append(time.perf_counter_ns() - begun_ns)
    return result, min(times)


def _wait(device: Any) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def save(recorder: Recorder, table: str, rows: list[dict[str, Any]]) -> None:
    """Write rows for a table.

    Args:
        rows: all of this process; nothing is written where there are none.
    """
    if rows and recorder.folder is not None:
        recorder.write_file(f"{table}.json", json.dumps(rows).encode())
