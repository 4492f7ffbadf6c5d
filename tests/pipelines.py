"""Made-up pipeline-parallel jobs as operation-level traces: simulated operation by operation, times in ms.

The simulation knows nothing of dpro's graph: each stage runs the 1F1B schedule and computes what it has
received. A receive is posted when the compute before its own of that direction is done (the first backward
one with the send of the last forward but one), and all communication ends for its members at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.ingest.importer import import_sources
from dpro.store import Run, open_run

MS = 1_000_000
Times = dict[tuple[str, int, int], float]


@dataclass
class Job:
    """A pipeline: `num_stages` x `num_dp` ranks, numbered by stage and then by data-parallel rank.

    Attributes:
        forward, backward: ms of one micro-batch on (stage, dp).
        times: how many times as long the (forward, backward) of a micro-batch (step, dp, batch) take.
        message, gather, scatter, norm, update: ms of communication and of the optimizer.
        late: ms by which every operation begins later than it could.
        noise: standard deviation of the logarithm of each compute.
    """

    num_stages: int = 2
    num_dp: int = 2
    num_batches: int = 2
    num_steps: int = 1
    forward: Callable[[int, int], float] = lambda stage, dp: 10.0
    backward: Callable[[int, int], float] = lambda stage, dp: 20.0
    times: Callable[[int, int, int], tuple[float, float]] = lambda step, dp, batch: (1.0, 1.0)
    message: float = 1.0
    gather: float = 3.0
    scatter: float = 5.0
    norm: float = 2.0
    update: float = 4.0
    late: float = 0.0
    noise: float = 0.0
    seed: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        """All operations, one row each."""
        random = np.random.default_rng(self.seed)
        self.rows = []
        for step in range(self.num_steps):
            self._step(step, random)
        return self.rows

    def order(self, stage: int) -> list[tuple[str, int]]:
        """The computes of a stage in the order of 1F1B."""
        ahead = min(self.num_stages - stage, self.num_batches)
        order = [("forward", batch) for batch in range(ahead)]
        for batch in range(self.num_batches):
            order.append(("backward", batch))
            if ahead + batch < self.num_batches:
                order.append(("forward", ahead + batch))
        return order

    def _step(self, step: int, random: np.random.Generator) -> None:
        gathered = self.late + self.gather
        finished = np.zeros((self.num_stages, self.num_dp))
        for dp in range(self.num_dp):
            for stage in range(self.num_stages):
                self._add(step, stage, dp, "params-all-gather", self.late, gathered, mc=0)
            finished[:, dp] = self._pipeline(step, dp, gathered, random)
        ready = np.zeros_like(finished)
        for stage in range(self.num_stages):
            begin = finished[stage] + self.late
            ready[stage] = begin.max() + self.scatter
            for dp in range(self.num_dp):
                self._add(step, stage, dp, "grads-reduce-scatter", begin[dp], ready[stage, dp], mc=0)
        normed = ready.max() + self.late + self.norm
        for stage in range(self.num_stages):
            for dp in range(self.num_dp):
                began = ready[stage, dp] + self.late
                self._add(step, stage, dp, "optimizer-clip-main-grad", began, normed)
                update = normed + self.late
                self._add(step, stage, dp, "optimizer", update, update + self.update)

    def _pipeline(self, step: int, dp: int, gathered: float, random: np.random.Generator) -> np.ndarray:
        """Run the computes and messages of one data-parallel rank; when each stage ended its last compute."""
        last = self.num_stages - 1
        waiting = {stage: self.order(stage) for stage in range(self.num_stages)}
        free = dict.fromkeys(range(self.num_stages), gathered)
        sent, ended, arrived = ({} for _ in range(3))  # by direction, receiving or computing stage, batch
        while any(waiting.values()):
            for stage, order in waiting.items():
                while order:
                    way, batch = order[0]
                    needs = stage > 0 if way == "forward" else stage < last
                    if needs and (way, stage, batch) not in arrived:
                        break
                    order.pop(0)
                    begin = max(free[stage], arrived.get((way, stage, batch), 0.0)) + self.late
                    length = (self.forward if way == "forward" else self.backward)(stage, dp)
                    length *= self.times(step, dp, batch)[way == "backward"]
                    end = begin + length * float(np.exp(random.normal(0, self.noise)))
                    self._add(step, stage, dp, f"{way}-compute", begin, end, mc=0, mb_id=batch, seq_id=batch)
                    free[stage] = end
                    to = stage + 1 if way == "forward" else stage - 1
                    ended[way, stage, batch] = end
                    if 0 <= to <= last:
                        sent[way, to, batch] = end + self.late
                    self._deliver(step, dp, sent, ended, arrived)
        return np.array([free[stage] for stage in range(self.num_stages)])

    def _deliver(self, step: int, dp: int, sent: Times, ended: Times, arrived: Times) -> None:
        """Let messages arrive that are sent and whose receive is posted."""
        for (way, to, batch), at in sent.items():
            posted = self.late + (0.0 if batch == 0 else ended.get((way, to, batch - 1), np.inf))
            ahead = min(self.num_stages - to, self.num_batches)
            if way == "backward" and batch == 0 and ahead > 1:
                posted = ended["forward", to, ahead - 2] + self.late
            if (way, to, batch) in arrived or posted == np.inf:
                continue
            over = max(at, posted) + self.message
            stage = to - 1 if way == "forward" else to + 1
            self._add(step, stage, dp, f"{way}-send", at, over, seq_id=batch)
            self._add(step, to, dp, f"{way}-recv", posted, over, seq_id=batch)
            arrived[way, to, batch] = over

    def _add(self, step: int, stage: int, dp: int, name: str, start: float, end: float, **more: int) -> None:
        row = {"dp_rank": dp, "stage": stage, "rank": stage * self.num_dp + dp, "step": step, "optype": name}
        row |= {"start_ts": start / 1e3, "duration": (end - start) / 1e3, "seq_id": 0, "mc": -1, "mb_id": -1}
        self.rows.append(row | more)


def written(rows: list[dict[str, Any]], folder: Path) -> Run:
    """The operations as a trace in a folder, imported."""
    folder.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(rows).write_parquet(folder / "trace-X.parquet")
    import_sources([folder / "trace-X.parquet"], folder / "run")
    return open_run(folder / "run")
