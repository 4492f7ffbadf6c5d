"""Along which axis of parallelism slow transfers are.

In: a finding, and the groups of ranks whose transfers are slow. Out: the finding, with the axis as evidence
where it is known and one for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dpro.detect.findings import Finding
from dpro.detect.network.traffic import Traffic
from dpro.replay.mesh import axis_of_group, mesh_of_run


def with_axis(finding: Finding, traffic: Traffic, groups: Iterable[str]) -> Finding:
    """The finding, with the axis along which ranks of all slow groups differ; as it was where there is none.

    Args:
        groups: `members` of slow transfers, as `recorded_transfers` gives them.
    """
    if traffic.run is None:
        return finding
    mesh = mesh_of_run(traffic.run)
    axes = {axis_of_group(mesh, [int(rank) for rank in members.split(",")]) for members in groups}
    axis = axes.pop() if len(axes) == 1 else ""
    if not axis:
        return finding
    return replace(finding, axis=axis, evidence=(*finding.evidence, f"these transfers are along {axis}"))
