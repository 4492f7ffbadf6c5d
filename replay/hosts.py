"""Cores of the hosts on which a run's ranks ran, and how busy they were in its steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.replay.graph import Graph, computed_once
from dpro.schema import COUNTERS, STEPS, WORKERS

LIMIT = "cgroup_cpu_limit_cores"
_OF_CGROUP = "cgroup_cpu_s"
_IDLE = ("cpu_idle_s", "cpu_iowait_s")
_STATES = (
    *_IDLE, "cpu_user_s", "cpu_nice_s", "cpu_system_s", "cpu_irq_s", "cpu_softirq_s", "cpu_steal_s",
)  # fmt: skip


class Host(NamedTuple):
    """A host of a run.

    Attributes:
        name: "" where it was not recorded.
        ranks: number of the run's ranks on it.
        cores: those that the ranks may use.
        busy: share of the cores' time that was worked in the run's steps, by whomever; 1.0 at most; None
            where it was not sampled.
    """

    name: str
    ranks: int
    cores: float
    busy: float | None


@computed_once
def hosts_of(graph: Graph) -> list[Host]:
    """Return the hosts of a graph's run whose cores were sampled, by name; none without a run."""
    if graph.run is None:
        return []
    columns = ["host", "rank", "counter", "time_ns", "value"]
    wanted = pl.col("counter").is_in(["cpus", LIMIT, _OF_CGROUP, *_STATES])
    sampled = graph.run.table(COUNTERS, columns).filter(wanted)
    ranks = graph.run.table(WORKERS, ["rank", "host"]).group_by("host").agg(pl.col("rank").n_unique())
    num_ranks = dict(ranks.iter_rows())
    steps = graph.run.table(STEPS, ["start_ns", "duration_ns"])
    begun, ended = steps["start_ns"].min(), (steps["start_ns"] + steps["duration_ns"]).max()
    hosts = []
    for (name,), of_host in sampled.sort("host").group_by("host", maintain_order=True):
        cores = of_host.filter(pl.col("counter").is_in(["cpus", LIMIT]), pl.col("value") > 0)
        if not cores.is_empty() and name in num_ranks:
            medians = cores.group_by("counter").agg(pl.col("value").median())
            allowed = float(medians["value"].to_numpy().min())
            during = of_host.filter(pl.col("time_ns").is_between(begun, ended))
            is_limited = LIMIT in medians["counter"]
            hosts.append(Host(str(name), num_ranks[name], allowed, _busy(during, is_limited, allowed)))
    return hosts


def _busy(sampled: pl.DataFrame, is_limited: bool, cores: float) -> float | None:
    """Return the share of the cores' time that was worked between the first sample and the last one.

    A counter has a row where it has changed, so the last value of each is that of the last sample.
    """
    worked = _grown(sampled.filter(pl.col("rank") == -1, pl.col("counter").is_in(list(_STATES))))
    total = sum(worked.values())
    shares = [1 - sum(worked.get(name, 0.0) for name in _IDLE) / total] if total > 0 else []
    if is_limited:  # the host may have many more cores than the job's cgroup may use
        of_cgroup = sampled.filter(pl.col("counter") == _OF_CGROUP, pl.col("rank") == -1)
        if of_cgroup.height < 2:
            return None
        lasted_ns = int(np.ptp(of_cgroup["time_ns"].to_numpy()))
        shares.append(_grown(of_cgroup)[_OF_CGROUP] / (cores * lasted_ns / 1e9))
    return min(max(shares), 1.0) if shares else None


def _grown(sampled: pl.DataFrame) -> dict[str, float]:
    """Return by how much each counter grew."""
    ends = sampled.sort("time_ns").group_by("counter").agg(pl.col("value").last() - pl.col("value").first())
    return dict(ends.iter_rows())
