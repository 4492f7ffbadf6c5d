"""All detectors, in the order in which their findings exclude each other."""

from __future__ import annotations

from dpro.detect.findings import Finding
from dpro.detect.imbalance.micro_batches import equal_batches
from dpro.detect.imbalance.stages import find_uneven_work_of_stages, with_doubt
from dpro.detect.imbalance.windows import BalancedJob, hand_out_evenly
from dpro.detect.network.degradation import find_slower_transfers
from dpro.detect.network.traffic import Traffic, traffic_of
from dpro.detect.network.transfers import find_slow_network
from dpro.detect.pipeline_slowdown import (
    Slowdown,
    analyse_slowdown,
    find_slow_workers,
    find_uneven_stages,
    is_longer_in_most,
    without_launches,
)
from dpro.detect.stragglers.input_bound import find_slow_input
from dpro.detect.stragglers.masked import find_hidden_work
from dpro.detect.stragglers.persistent import find_longer_work
from dpro.detect.stragglers.replayed import find_stragglers
from dpro.detect.stragglers.work_causes import INPUT_PIPELINE
from dpro.replay.graph import Graph


def diagnose_graph(graph: Graph) -> list[Finding]:
    """What is slow in a run, costliest first; empty when nothing is.

    Args:
        graph: the run's graph.
    """
    even = hand_out_evenly(graph)
    if not even.told and not _find_slow_ranks(graph):
        even = BalancedJob(graph, [], True, {})
    stages = find_uneven_work_of_stages(even.graph)
    stragglers = with_doubt(even.leaves(_find_slow_ranks(even.graph)), stages)
    explained = sum(finding.cost_ns for finding in stragglers if finding.cause == INPUT_PIPELINE)
    named = {rank for finding in stragglers for rank in finding.ranks}
    hidden = even.leaves(find_hidden_work(even.graph, named))
    network = diagnose_traffic(traffic_of(graph))
    slow = [*stragglers, *hidden, *find_slow_input(graph, explained)]
    return sorted([*even.findings, *stages, *slow, *network], key=lambda finding: -finding.cost_ns)


def _find_slow_ranks(graph: Graph) -> list[Finding]:
    """Ranks that the step waits for, and those whose own work is longer though it hardly does."""
    found = find_stragglers(graph)
    return [*found, *find_longer_work(graph, {rank for finding in found for rank in finding.ranks})]


def diagnose_traffic(traffic: Traffic) -> list[Finding]:
    """What is slow in the network: against its like, and against what it was where that tells more.

    Args:
        traffic: of the job.
    """
    slow = find_slow_network(traffic)
    slower = find_slower_transfers(traffic)
    told = [set(finding.ranks) for finding in slow]
    return [*slow, *(each for each in slower if not any(set(each.ranks) <= ranks for ranks in told))]


def diagnose_operations(graph: Graph, slowdown: Slowdown) -> list[Finding]:
    """What is slow in a run of whole operations, costliest first; empty when nothing is.

    Args:
        graph: the run's graph.
        slowdown: its `analyse_slowdown`.
    """
    free = without_launches(graph)
    even, data = equal_batches(free)
    workers, stages = find_slow_workers(graph, slowdown), find_uneven_stages(even)
    if even is not free:  # what varies with the data may hide a slow worker, or look like what one costs
        at_equal_work = find_slow_workers(even, analyse_slowdown(even))
        named = {rank for finding in at_equal_work for rank in finding.ranks}
        # A single stage does not show what is a worker's and what its data's: who stands out anyway stays.
        alone = len({place.stage for place in graph.places.values()}) == 1
        left = [each for each in workers if alone and not named & {*each.ranks}]
        workers = [*at_equal_work, *left]
        stages = [each for each in stages if is_longer_in_most(free, each)]
    findings = [*data, *workers, *stages]
    return sorted(findings, key=lambda finding: -finding.cost_ns)
