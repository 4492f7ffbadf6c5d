"""What a run says that an all-reduce between its hosts takes.

In: a run with deep windows. Out: the bus bandwidth that its own communication curve gives. What was recorded
while a host was slow is as slow: it is what the job had, not what the hosts can do.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpro.errors import DproError, Unanswerable

MIN_SAMPLES = 20  # all-reduces that a curve follows from, to be held against hosts
MAX_MISFIT = 0.1  # median distance of these from the curve


class RunBandwidth(NamedTuple):
    """What an all-reduce of a run reaches.

    Attributes:
        gbps: bus bandwidth as in the NCCL tests, 1e9 bytes/s.
        num_bytes: of the largest that was recorded.
        num_ranks: of its group.
        hosts: of its group.
        num_samples: all-reduces that the curve follows from.
        misfit: median distance of these from it, as a share of their time.
    """

    gbps: float
    num_bytes: int
    num_ranks: int
    hosts: frozenset[str] = frozenset()
    num_samples: int = 0
    misfit: float = 1.0

    def why_incomparable(self, hosts: Collection[str], num_devices: int, num_bytes: int) -> str:
        """Why an all-reduce that is slower than this shows nothing; empty where it does show something."""
        if {host.partition(".")[0] for host in hosts} != {host.partition(".")[0] for host in self.hosts}:
            return "the run's was between other hosts"
        if num_devices != self.num_ranks:
            return f"the run's was of {self.num_ranks} ranks, this one of {num_devices} devices"
        if num_bytes < self.num_bytes:
            return "the run's moved more bytes"
        if self.num_samples < MIN_SAMPLES or self.misfit > MAX_MISFIT:
            return (
                f"the run's curve is uncertain: {self.num_samples} all-reduces, which are {self.misfit:.0%} "
                "off it"
            )
        return ""


def run_bandwidth(run: Path) -> RunBandwidth:
    """The bus bandwidth of the largest all-reduces between hosts, by the curve of their group.

    Raises:
        Unanswerable: the run has none, or no deep windows.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.opening import open_path
    from dpro.replay.cost.transfers import fit_costs, messages_by_kind

    analysis = Analysis(open_path(run))
    host = dict(analysis.workers.select("rank", "host").iter_rows())
    try:
        graph = analysis.built.graph
    except DproError as error:
        raise Unanswerable(f"{run}: no communication to compare with: {error}") from error
    bandwidths = []
    nodes, costs = graph.nodes, fit_costs(graph)
    for kind, numbers in messages_by_kind(graph).items():
        of_kind = np.isin(nodes.message, numbers)
        num_bytes, num_ranks = int(nodes.bytes[of_kind].max(initial=0)), graph.messages[numbers[0]].num_ranks
        hosts = {host.get(int(rank), "") for rank in np.unique(nodes.rank[of_kind])}
        if kind[0] == "all_reduce" and kind in costs and num_bytes > 0 and len(hosts) > 1:
            ns = float(costs[kind].time_ns(num_bytes))
            gbps, cost = 2 * (num_ranks - 1) / num_ranks * num_bytes / ns, costs[kind]
            samples, misfit = cost.num_samples, float(cost.misfit)
            bandwidths.append(RunBandwidth(gbps, num_bytes, num_ranks, frozenset(hosts), samples, misfit))
    if not bandwidths:
        raise Unanswerable(f"{run}: no all-reduce between hosts was recorded to compare with")
    return max(bandwidths, key=lambda bandwidth: (bandwidth.num_ranks, bandwidth.num_bytes))
