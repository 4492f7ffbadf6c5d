"""CPU time of the recorder's hooks in the small server, timed within its engine's thread.

    dpro record --no-windows -o RUN -- PYTHON benchmarks/serving_server/hooks.py --rate 1000 --requests 150 \\
        --prompt 64 --output 48 --max-batch 16

In: the arguments of `server.py`. Out: its JSON object with `hooks`: calls, and mean us of CPU of each, by
hook, and `share` of the CPU time of the process while it answers. The recorder's own threads are left out.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import server
import torch  # noqa: F401 # lets the recorder in

HOOKS = "serving.transformers"


def main() -> None:
    """Serve, and print the time of hooks."""
    took: dict[str, list[float]] = {}
    recorder: Any = importlib.import_module("_dpro_inside_the_job.recorder").Recorder
    call = recorder.call

    def timed(self: Any, action: Any, *arguments: Any) -> None:
        begun = time.thread_time()
        call(self, action, *arguments)
        if action.__module__.endswith(HOOKS):
            took.setdefault(action.__name__, []).append(time.thread_time() - begun)

    recorder.call = timed
    said = server.serve(server.arguments())
    hooks = {name: [len(each), 1e6 * sum(each) / len(each)] for name, each in took.items()}
    share = sum(map(sum, took.values())) / said["cpu_seconds"]
    json.dump(said | {"hooks": hooks, "share": share}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
