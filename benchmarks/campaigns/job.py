"""A training job whose steps sleep, and whose shards are written by torch.distributed.checkpoint.

It resumes from the last complete checkpoint in its folder, and writes its own log: a line as each step ends,
and for each save. It trains until the file `stop` exists. Run by torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Descent(torch.optim.Optimizer):
    """Gradient descent; torch's optimizers import the compiler, which takes longer than the rest."""

    def __init__(self, parameters: Any) -> None:
        """Begin without state.

        Args:
            parameters: to update.
        """
        super().__init__(parameters, {})

    def add_param_group(self, group: Any) -> None:
        """Add a group without filling in defaults."""
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Average the gradients over all ranks, and update."""
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
            parameter -= 1e-3 * parameter.grad / dist.get_world_size()
            parameter.grad = None


class SlowWriter(dcp.FileSystemWriter):
    """Writes shards as the library does, but waits first: a slow file system."""

    def __init__(self, path: Path, seconds: float) -> None:
        """Begin without writing.

        Args:
            path: folder of the checkpoint.
            seconds: to wait.
        """
        super().__init__(path, single_file_per_rank=True)
        self._seconds = seconds

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, then write."""
        time.sleep(self._seconds)
        return super().write_data(*args, **kwargs)


def last_whole(folder: Path) -> Path | None:
    """Return the folder of the latest complete checkpoint; None if there is none."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def main() -> None:
    """Train until the file `stop` exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--save-s", type=float, required=True)
    parser.add_argument("--in-background", action="store_true")
    asked = parser.parse_args()
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    written = asked.folder / f"new-{rank}"
    written.write_text(f"{os.getpid()} {os.getppid()}")
    written.rename(asked.folder / f"pid-{rank}")
    model = torch.nn.Linear(256, 256)
    optimizer = Descent(list(model.parameters()))
    state = {"model": model.state_dict(), "done": torch.zeros(1, dtype=torch.int64)}
    if (path := last_whole(asked.folder)) is not None:
        dcp.load(state, checkpoint_id=path)
    aside = dist.new_group(backend="gloo")  # saves in the background must not meet training's calls
    saved: Future[Any] | None = None
    stopping = torch.zeros(1)
    with (asked.folder / f"log-{rank}.jsonl").open("a", buffering=1) as log:
        resumed = {"resumed": int(state["done"]), "ranks": dist.get_world_size(), "at_s": time.time()}
        log.write(json.dumps(resumed) + "\n")
        while not stopping:
            time.sleep(asked.step_s)
            model(torch.ones(4, 256)).sum().backward()
            optimizer.step()
            state["done"] += 1
            done = int(state["done"])
            log.write(json.dumps({"done": done, "at_s": time.time()}) + "\n")
            if done % asked.every == 0:
                begun_s = time.time()
                writer = SlowWriter(asked.folder / f"step-{done}", asked.save_s)
                if saved is not None:
                    saved.result()
                if asked.in_background:
                    saved = dcp.async_save(
                        state, storage_writer=writer, checkpoint_id=writer.path, process_group=aside
                    )
                else:
                    dcp.save(state, storage_writer=writer, checkpoint_id=writer.path)
                log.write(json.dumps({"save": done, "at_s": begun_s, "took_s": time.time() - begun_s}) + "\n")
            stopping.fill_(float((asked.folder / "stop").exists()))
            dist.all_reduce(stopping, dist.ReduceOp.MAX)
    if saved is not None:
        saved.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
