"""What a detector says: one finding per thing that is slow or broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType, field

from dpro.documents import DocumentPart
from dpro.units import ms

NETWORK = ("slow.link", "slow.nic", "slow.fabric")  # classes


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
        axis: of parallelism along which slow transfers are, or others wait most for a late rank, as `tp`;
            empty where it is not known or not one.
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
    axis: str = ""

    @property
    def component(self) -> str:
        """What is at fault, in words: `rank 1`."""
        return self.component_id if self.of_job else f"{self.component_kind} {self.component_id}"

    @property
    def of_job(self) -> bool:
        """Whether it is about the job as a whole, and no part of it is at fault."""
        return self.component_kind == "job"

    @property
    def of_hang(self) -> bool:
        """Whether it is about what ended the steps: ranks that are stuck or dead."""
        return self.class_.startswith(("hang.", "dead."))

    @property
    def cost_ms(self) -> float | None:
        """What it costs per step; None where there are no more steps."""
        return None if self.of_hang else ms(self.cost_ns)

    @property
    def title(self) -> str:
        """What is wrong with what: `slow.host: rank 1`."""
        return f"{self.class_}: {self.component}"


def costliest_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, costliest first."""
    return sorted(findings, key=lambda finding: -finding.cost_ns)


def ranks_of(findings: Iterable[Finding]) -> set[int]:
    """The ranks that any of the findings is about."""
    return {rank for finding in findings for rank in finding.ranks}


class ComponentDocument(DocumentPart, frozen=True):
    """What is slow or broken.

    Attributes:
        kind: such as `rank`, `host`, `link` or `job`.
        id: which one.
    """

    kind: str
    id: str


class FindingDocument(DocumentPart, frozen=True):
    """One thing that is slow or broken.

    Attributes:
        class: such as `slow.host`, as docs/diagnosis.md lists them.
        component: what is slow or broken.
        ranks: ranks that it concerns.
        severity: share of the step that it costs.
        confidence: 0 to 1.
        cost_ms_per_step: by how much the mean step would be shorter without it; null where steps have ended.
        evidence: what was observed, one line each.
        axis: of parallelism along which slow transfers are, or others wait most for a late rank: `tp`, or
            `dp x tp` where ranks of a group differ along both; absent where it is not known, or not the same
            for all groups.
    """

    class_: str = field(name="class")
    component: ComponentDocument
    ranks: list[int]
    severity: float
    confidence: float
    cost_ms_per_step: float | None
    evidence: list[str]
    axis: str | UnsetType = UNSET


def finding_document(finding: Finding) -> FindingDocument:
    """A finding for programs."""
    return FindingDocument(
        class_=finding.class_,
        component=ComponentDocument(finding.component_kind, finding.component_id),
        ranks=list(finding.ranks),
        severity=finding.severity,
        confidence=finding.confidence,
        cost_ms_per_step=finding.cost_ms,
        evidence=list(finding.evidence),
        axis=finding.axis or UNSET,
    )
