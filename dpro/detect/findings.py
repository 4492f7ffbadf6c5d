"""What a detector says: one finding per thing that is slow or broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something is slow or broken.

    Attributes:
        class_: one of the classes of the design, such as `slow.host`.
        component_kind, component_id: what is at fault: `rank` 1, `job` `input pipeline`.
        ranks: ranks it concerns.
        severity: share of the step it costs.
        confidence: 0 to 1.
        cost_ns: what it costs per step, found by replaying with the component healed.
        evidence: what was seen, one line each.
        cause: what within the component takes the time, empty where that is the component itself.
    """

    class_: str
    component_kind: str
    component_id: str
    ranks: tuple[int, ...]
    severity: float
    confidence: float
    cost_ns: float
    evidence: tuple[str, ...]
    cause: str = ""
