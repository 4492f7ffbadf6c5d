"""Results of detectors: one finding per thing that is slow or broken."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType, field

from dpro.detect.observations import Observation, ObservationDocument, observation_documents
from dpro.documents import DocumentPart, finite
from dpro.units import ms
from dpro.words import short_name, shortened

TIME_SLICES = "shared-gpu"  # kind of observation: other processes use shares of a GPU's time
HIDDEN = "hidden-by-queue"  # kind of observation: queued GPU work hides a slow host in most steps
PAUSES = "pauses"  # a class
START = "warm-up"  # the component of its finding about the first steps of a job
MAX_LENGTH_RATIO = 1.5  # factor by which steps differ in length if only the share of a cost carries over
NETWORK = ("slow.link", "slow.nic", "slow.fabric")  # classes
_CLASS_WORDS = {  # the verdict of a hang says which kind it is
    "hang.host": "hang",
    "hang.device": "hang",
    "hang.rank": "hang",
    "hang.comm": "hang",
    "hang.mismatch": "mismatch",
    "dead.rank": "dead",
    "slow.compute": "slow compute",
    "slow.host": "slow host work",
    "slow.link": "slow link",
    "slow.nic": "slow network card",
    "slow.fabric": "slow network",
    "slow.regression": "slower than before",
    "imbalance.stage": "uneven stages",
    "imbalance.data": "uneven data",
    "memory.growth": "growing memory",
    "loss.not_finite": "not finite",
    "loss.jump": "jump",
}

_LONGEST_NAME = 64  # characters: has room for a DataLoader's `__next__`
_PYTHON_SPAN = re.compile(r"(\S*\.py)\((\d+)\): (.+)")  # a Python call in profilers' traces
_STACK_LINE = re.compile(r"(.+):(\d+) (.+)")  # a Python call in stacks of hung jobs


class CodeLocation(DocumentPart, frozen=True):
    """Location in the code where time is spent.

    Attributes:
        name: of a function, an operator, a kernel or a range.
        file: of a Python function, or of the job's own one that calls it; empty where that is not known.
        line: in the file; 0 where that is not known.
    """

    name: str
    file: str = ""
    line: int = 0

    @classmethod
    def of(cls, name: str) -> CodeLocation:
        """Return the location that a span or a line of a stack names."""
        python = _PYTHON_SPAN.search(name) or _STACK_LINE.fullmatch(name)
        return cls(python[3], python[1], int(python[2])) if python else cls(name)

    @property
    def in_words(self) -> str:
        """A function with file name and line; other names shortened, with numbers of layers as `*`."""
        if self.file:
            line = self.file.rpartition("/")[2] + (f":{self.line}" if self.line else "")
            return line if self.name == "<module>" else f"{self.name} ({line})"
        return shortened(re.sub(r"\.\d+\b", ".*", short_name(self.name)).strip("# "), _LONGEST_NAME)


@dataclass(frozen=True)
class Finding:
    """One thing that is slow or broken.

    Attributes:
        class_: its class, such as `slow.host`.
        component_kind, component_id: what is at fault: `rank` 1, `job` `input pipeline`.
        ranks: ranks that it concerns.
        severity: share of the step that it costs; of pauses, share of the wall time.
        confidence: 0 to 1.
        cost_ns: time that it costs per step, from a replay with the component healed; of pauses, the average.
        observations: its evidence.
        cause: what within the component takes the time; empty where that is the component itself.
        axis: axis of parallelism of the slow transfers, or along which others wait most for a late rank, such
            as `tp`; empty where it is not known or not a single one.
        place: where in the code its time is spent; None where that is not known.
        remedy: what to do about it, in words; empty where the finding does not know.
        waited_ns: of a hang, how long ranks have waited by its end; else 0.
        part_ranks: the ranks that make up the component, such as the two ends of a link; empty where the
            component is not one of ranks, or they are all of `ranks`.
    """

    class_: str
    component_kind: str
    component_id: str
    ranks: tuple[int, ...]
    severity: float
    confidence: float
    cost_ns: float
    observations: tuple[Observation, ...]
    cause: str = ""
    axis: str = ""
    place: CodeLocation | None = None
    remedy: str = ""
    waited_ns: int = 0
    part_ranks: tuple[int, ...] = ()

    @property
    def costs_pauses(self) -> bool:
        """Whether its cost is lost in only some steps: it belongs to the mean step, not the usual one."""
        return self.class_ == PAUSES or any(one.kind == HIDDEN for one in self.observations)

    def of_usual_step(self, step_ns: float) -> Finding:
        """Return the finding with cost and severity relative to the usual step.

        The cost of pauses, which is outside the usual step, does not change. Costs of time slices are known
        as a share of the recorded time; costs found in steps of a very different length, such as steps
        outside deep windows, are converted by their share, too.
        """
        if self.costs_pauses or self.of_hang or not 0 < self.cost_ns < math.inf:
            return self
        elsewhere = (
            not 1 / MAX_LENGTH_RATIO <= self.cost_ns / max(self.severity * step_ns, 1.0) <= MAX_LENGTH_RATIO
        )
        by_share = elsewhere or any(one.kind == TIME_SLICES for one in self.observations)
        cost_ns = min(self.severity, 1.0) * step_ns if by_share else min(self.cost_ns, step_ns)
        return replace(self, cost_ns=cost_ns, severity=round(cost_ns / step_ns, 4))

    @property
    def evidence(self) -> tuple[str, ...]:
        """The observations in words, one line each."""
        return tuple(one.text for one in self.observations)

    def observing(self, *more: Observation) -> Finding:
        """Return the finding with more observations."""
        return replace(self, observations=(*self.observations, *more))

    @property
    def component(self) -> str:
        """What is at fault, in words: `rank 1`."""
        return self.component_id if self.of_job else f"{self.component_kind} {self.component_id}"

    @property
    def of_job(self) -> bool:
        """Whether the finding is about the job as a whole, with no part of it at fault."""
        return self.component_kind == "job"

    @property
    def of_hang(self) -> bool:
        """Whether the finding is about ranks that are stuck or dead, which ended the steps."""
        return self.class_.startswith(("hang.", "dead."))

    @property
    def of_numbers(self) -> bool:
        """Whether the finding is about what the job computes, and costs no time."""
        return self.class_.startswith("loss.")

    @property
    def cost_ms(self) -> float | None:
        """Cost per step, in ms; None where there are no more steps."""
        return None if self.of_hang else ms(self.cost_ns)

    @property
    def title(self) -> str:
        """Class and component in words: `slow host work: rank 1`."""
        return f"{class_in_words(self.class_)}: {self.component}"


def class_in_words(class_: str) -> str:
    """Return the words of a class: `slow host work`; of a class of an extension, the class itself."""
    return _CLASS_WORDS.get(class_, class_)


def costliest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, costliest first."""
    return sorted(findings, key=lambda finding: -finding.cost_ns)


def ranks_of(findings: Iterable[Finding]) -> set[int]:
    """Return the ranks that any of the findings concerns."""
    return {rank for finding in findings for rank in finding.ranks}


class ComponentDocument(DocumentPart, frozen=True):
    """The component that is slow or broken.

    Attributes:
        kind: such as `rank`, `host`, `link` or `job`.
        id: which one.
    """

    kind: str
    id: str


class FindingDocument(DocumentPart, frozen=True, kw_only=True):
    """One thing that is slow or broken.

    Attributes:
        class: such as `slow.host`, as docs/diagnosis.md lists them.
        component: what is slow or broken.
        ranks: ranks that it concerns.
        severity: share of the step that it costs; null where that is not known.
        confidence: 0 to 1; null where it is not known.
        cost_ms_per_step: by how much the mean step would be shorter without it; null where steps have ended.
        waited_ms: of a hang, how long ranks have waited by its end; else null.
        cause: what within the component takes the time; empty where that is the component itself.
        place: where in the code; null where that is not known.
        remedy: what to do about it; empty where that is not known.
        evidence: what was observed, one line each.
        observations: the figures behind each line of `evidence`, in their order; none in older logs.
        axis: axis of parallelism of the slow transfers, or along which others wait most for a late rank:
            `tp`, or `dp x tp` where ranks of a group differ along both; absent where it is not known, or not
            equal for all groups.
    """

    class_: str = field(name="class")
    component: ComponentDocument
    ranks: list[int]
    severity: float | None
    confidence: float | None
    cost_ms_per_step: float | None
    waited_ms: float | None = None
    cause: str = ""
    place: CodeLocation | None = None
    remedy: str = ""
    evidence: list[str]
    observations: list[ObservationDocument] = field(default_factory=list)
    axis: str | UnsetType = UNSET


def finding_document(finding: Finding, remedy: str = "") -> FindingDocument:
    """Return the document of a finding.

    Args:
        remedy: what to do about it, where the finding itself does not say.
    """
    return FindingDocument(
        class_=finding.class_,
        component=ComponentDocument(finding.component_kind, finding.component_id),
        ranks=list(finding.ranks),
        severity=finite(finding.severity),
        confidence=finite(finding.confidence),
        cost_ms_per_step=finite(finding.cost_ms),
        waited_ms=ms(finding.waited_ns) if finding.of_hang else None,
        cause=finding.cause,
        place=finding.place,
        remedy=finding.remedy or remedy,
        evidence=list(finding.evidence),
        observations=observation_documents(finding.observations),
        axis=finding.axis or UNSET,
    )
