"""A job with its own profiler: torch.profiler with a schedule of waiting, warming up and recording.

python scheduled.py [--steps 60] [--no-profiler]

It prints one line of JSON at the end: the number of traces that its profiler has made, and their events.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, schedule


def main() -> None:
    """Train under the profiler, and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-profiler", action="store_true", help="the same training without one")
    options = parser.parse_args()
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(10))).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch, folder = torch.randn(32, 128, device=options.device), Path(tempfile.mkdtemp())

    def keep(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / f"{profiler.step_num}.json"))

    def train(end_step: Callable[[], None]) -> None:
        for _ in range(options.steps):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            end_step()

    if options.no_profiler:
        train(lambda: None)
        return
    with profile(schedule=schedule(wait=4, warmup=1, active=3), on_trace_ready=keep) as profiler:
        train(profiler.step)
    traces = [json.loads(path.read_text(encoding="utf-8"))["traceEvents"] for path in folder.iterdir()]
    kernels = [sum(event.get("cat") == "kernel" for event in trace) for trace in traces]
    print(json.dumps({"traces": len(traces), "events": sorted(map(len, traces)), "kernels": kernels}))


if __name__ == "__main__":
    main()
