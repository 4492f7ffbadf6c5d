"""Adds a server's part to answers about a run of a server.

Takes the documents of `dpro report` and `dpro diagnose`, or a report to send; returns them with the server's
part.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from dpro.analysis.answers.diagnosis import DiagnosisDocument
from dpro.analysis.answers.report import ReportDocument
from dpro.detect.words import FindingInWords
from dpro.documents import Document
from dpro.extensions.serving.document import ServingDocument, has_serving, serving_document
from dpro.extensions.serving.findings import costs_in_words
from dpro.extensions.serving.latency import number
from dpro.store import Run
from dpro.verdict.report import ReportTable, RunReport


class ServerDiagnosis(DiagnosisDocument, frozen=True, kw_only=True):
    """What is slow or broken, with evidence and cost.

    Attributes:
        serving: the answer of `dpro serving`; only for a run of a server.
    """

    serving: ServingDocument | UnsetType = UNSET


class ServerReport(ReportDocument, frozen=True, kw_only=True):
    """Where the time of each step went.

    Attributes:
        serving: the answer of `dpro serving`; only for a run of a server.
    """

    serving: ServingDocument | UnsetType = UNSET


def with_server(document: Document, run: Run) -> Document:
    """Add the server's part to a diagnosis or a report; return other answers unchanged."""
    kinds = {DiagnosisDocument: ServerDiagnosis, ReportDocument: ServerReport}
    kind = kinds.get(type(document))
    if kind is None:
        return document
    serving = serving_document(run) if has_serving(run) else UNSET
    answer: Document = kind(**asdict(document), serving=serving)
    return answer


def sent_with_server(report: RunReport, run: Run) -> RunReport:
    """Put the sentences, findings and latencies of the server first in a report to send."""
    if not has_serving(run):
        return report
    document = serving_document(run)
    limits, *others = document.sentences
    findings = [
        FindingInWords("server", limits, f"server: {limits}", others, ""),
        *(
            FindingInWords(
                title := f"server, {finding.class_}",
                costs := f"Costs at most {costs_in_words(finding)}.",
                f"{title}: {costs}",
                finding.evidence,
                finding.help,
            )
            for finding in document.findings
        ),
    ]
    rows = [
        [name.removesuffix("_ms"), *map(number, (row.requests, row.mean, row.p50, row.p90, row.p99))]
        for name, row in document.latency.items()
    ]
    header = ("ms", "requests", "mean", "p50", "p90", "p99")
    tables = [ReportTable("Latency of requests", header, rows)] if rows else []
    return replace(
        report,
        findings=[*findings, *report.findings],
        tables=[*tables, *report.tables],
    )
