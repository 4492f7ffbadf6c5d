"""A process that runs `dpro` commands one after the other, as asked, and says what they took.

In: on standard input, one JSON object a line: `arguments` of a command, `out`, the file its output goes to.
Out: one line for each: exit code (None where an exception went through), peak of its memory, processor time.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

MAX_DATA_BYTES = 3 << 30  # what a bug may take of the machine; what is asked for is less, and measured


def run(arguments: list[str]) -> int | None:
    from dpro.cli import main

    sys.argv = ["dpro", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return None
    return 0


def measured(arguments: list[str]) -> dict[str, Any]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the command before took is not this one's
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = cpu_s()
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return {"code": code, "peak_bytes": int(peak.split()[1]) << 10, "cpu_s": cpu_s() - before}


def cpu_s() -> float:
    return sum(os.times()[:4])


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    questions = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in questions:
        asked = json.loads(line)
        out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        print(json.dumps(measured(asked["arguments"])), file=answers)


if __name__ == "__main__":
    main()
