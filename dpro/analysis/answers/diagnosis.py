"""The answer of `dpro diagnose`: what is slow or broken, from dumps, always-on tables, or the replay.

Takes an `Analysis`, or dumps; returns a `Diagnosis` and its document. A job that hangs is diagnosed from its
calls, one without deep windows from steps and calls, and any other from the replay of its graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from dpro.account import AccountedDocument
from dpro.analysis.analysis import Analysis
from dpro.analysis.end import NOT_WATCHED, JobEnd
from dpro.analysis.step_time import StepTimeDocument, step_time_document
from dpro.analysis.unanswered import not_read, refuse_pretended
from dpro.detect.findings import Finding, FindingDocument, finding_document
from dpro.detect.findings_log import LoggedFinding, logged_findings
from dpro.detect.hang.find import find_hangs
from dpro.detect.hang.records import records_of
from dpro.detect.pipeline_slowdown import Slowdown
from dpro.detect.words import describe
from dpro.schema import STEPS, WORKERS
from dpro.store import Manifest

LOGS, CALLS, STEPS_AND_CALLS, REPLAY = "logs", "calls", "steps and calls", "replay"


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run or of dumps.

    Attributes:
        label: the run or the folder, as the user named it.
        basis: `LOGS` without a run, `CALLS` for hangs, `STEPS_AND_CALLS` without deep windows, or `REPLAY`.
        findings: findings, the costliest first; on hangs, the surest first.
        unknown: what the records cannot show, one line each.
        notes: remarks that are worth a line without being findings.
        while_it_ran: findings of `dpro watch` while the job ran.
        answerable: whether the replay fits; True if the diagnosis does not rest on it.
        slowdown: slowdown against equally fast operations; None unless the run has whole operations.
    """

    label: str
    basis: str
    findings: Sequence[Finding]
    unknown: Sequence[str]
    end: JobEnd
    workers: pl.DataFrame
    steps: pl.DataFrame
    notes: Sequence[str] = ()
    while_it_ran: Sequence[LoggedFinding] = ()
    answerable: bool = True
    slowdown: Slowdown | None = None


class DiagnosisDocument(AccountedDocument, frozen=True, kw_only=True):
    """What is slow or broken, with evidence and cost.

    Attributes:
        run: the run, as the user named it.
        findings: findings, the costliest first; on hangs, the surest first.
        healthy: whether nothing is wrong, and the run could have shown it.
        step_time: time of a step; null if no step was timed, absent if the job hangs.
        answerable: whether the replay fits; true if the diagnosis does not rest on it.
        reasons: what the run cannot show.
        notes: remarks that are worth a line without being findings; absent for dumps and hanging jobs.
        while_it_ran: findings of `dpro watch` while the job ran.
        end: how the job ended.
        slowdown: ratios of step times; only for traces of whole operations.
    """

    run: str
    findings: list[FindingDocument]
    healthy: bool
    step_time: StepTimeDocument | UnsetType | None = UNSET
    answerable: bool
    reasons: list[str]
    notes: list[str] | UnsetType = UNSET
    while_it_ran: list[LoggedFinding]
    end: JobEnd
    slowdown: Slowdown | UnsetType = UNSET


def diagnose_dumps(label: str, frames: Mapping[str, pl.DataFrame], manifest: Manifest) -> Diagnosis:
    """Diagnose hangs from flight recorder dumps alone, without making a run of them."""
    findings = find_hangs(records_of(frames, manifest.world_size))
    end = replace(NOT_WATCHED, hung=any(finding.class_.startswith("hang.") for finding in findings))
    unknown = not_read(manifest)
    return Diagnosis(label, CALLS, findings, unknown, end, frames[WORKERS.name], STEPS.empty())


def diagnose_tables(analysis: Analysis) -> Diagnosis | None:
    """Diagnose hangs, else faults from steps and calls; None if the run needs the replay.

    Raises:
        Unanswerable: the run's ranks were pretended.
    """
    refuse_pretended(analysis.run)
    if analysis.verdict_on_hangs is not None:
        return _diagnosis(analysis, CALLS, *analysis.verdict_on_hangs)
    if analysis.verdict_by_calls is None:
        return None
    findings, unknown = analysis.verdict_by_calls
    return _diagnosis(analysis, STEPS_AND_CALLS, findings, unknown, notes=analysis.notes(findings))


def diagnose_replay(analysis: Analysis) -> Diagnosis:
    """Diagnose a run from the replay of its graph.

    Raises:
        Unanswerable: the run has no spans.
    """
    findings, unknown = analysis.verdict_by_replay
    return _diagnosis(
        analysis,
        REPLAY,
        findings,
        unknown,
        notes=analysis.notes(findings),
        answerable=analysis.trust.answerable,
        slowdown=analysis.operations_analysis and analysis.operations_analysis.slowdown,
    )


def _diagnosis(
    analysis: Analysis, basis: str, findings: Sequence[Finding], unknown: Sequence[str], **more: Any
) -> Diagnosis:
    return Diagnosis(
        analysis.run.label,
        basis,
        findings,
        unknown,
        analysis.end,
        analysis.workers,
        analysis.steps,
        while_it_ran=logged_findings(analysis.run.path),
        **more,
    )


def diagnosis_document(diagnosis: Diagnosis) -> DiagnosisDocument:
    """Return the document of a diagnosis; a run is healthy only if it could have shown a fault."""
    hangs = diagnosis.basis in (LOGS, CALLS)
    return DiagnosisDocument(
        run=diagnosis.label,
        findings=[
            finding_document(finding, describe(finding, diagnosis.workers).do)
            for finding in diagnosis.findings
        ],
        healthy=not diagnosis.findings and not diagnosis.unknown and not diagnosis.end.bad,
        step_time=UNSET if hangs else step_time_document(diagnosis.steps),
        answerable=diagnosis.answerable,
        reasons=list(diagnosis.unknown),
        notes=UNSET if hangs and not diagnosis.notes else list(diagnosis.notes),
        while_it_ran=list(diagnosis.while_it_ran),
        end=diagnosis.end,
        slowdown=UNSET if diagnosis.slowdown is None else diagnosis.slowdown,
    )
