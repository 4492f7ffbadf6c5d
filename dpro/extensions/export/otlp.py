"""Export of steps and findings to an OpenTelemetry receiver: one span for the run, and one per step and rank.

Takes a run and its findings; posts spans by OTLP over HTTP. Findings are events of the run's span, whose
status is an error if something hangs or is dead. Ids are derived from the run, so sending it again gives the
same trace.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import polars as pl

from dpro._version import __version__
from dpro.detect.findings import Finding
from dpro.documents import Document
from dpro.errors import InputError, UsageError, needs_extra
from dpro.schema import STEPS, WORKERS
from dpro.selection import Selection
from dpro.store import Run
from dpro.timed import with_times

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

BATCH = 512  # spans per request
MAX_LINES = 1000  # of OpenTelemetry's log, after which the buffering handler drops them
TIMEOUT_S = 10.0  # of a request, including retries
PATH = "/v1/traces"  # by the OTLP specification, for a URL without a path


class SentDocument(Document, frozen=True, kw_only=True):
    """A sent trace.

    Attributes:
        run: the run, as the user named it.
        url: URL of the receiver.
        trace_id: id of the trace, in hexadecimal digits.
        spans: number of spans.
        findings: number of findings, as events of the run's span.
    """

    run: str
    url: str
    trace_id: str
    spans: int
    findings: int


def receiver_of(url: str) -> str:
    """Return the full URL of a receiver; one without a path gets that of the OTLP specification.

    Raises:
        UsageError: the URL is not one of HTTP or HTTPS.
        MissingExtra: OpenTelemetry is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"--otlp {url}: give a URL that begins with http:// or https://, as http://host:4318"
        )
    with needs_extra("otlp"):
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    return url if parts.path.strip("/") else f"{url.rstrip('/')}{PATH}"


def send(
    run: Run, url: str, findings: Sequence[Finding], ahead: Mapping[str, int], selection: Selection
) -> SentDocument:
    """Send a run's steps and findings.

    Args:
        url: URL from `receiver_of`.
        ahead: lead of each host's clock over the timeline's, in ns.
        selection: steps and ranks to send.

    Raises:
        InputError: the receiver does not accept the spans, or the run has no steps.
        UsageError: the selection is empty.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    whole = _steps(run, ahead)
    trace = int.from_bytes(_digest(run.manifest.command, run.manifest.hosts, whole["start_ns"].min())[:16])
    steps = selection.checked(whole)
    spans = _spans(run, trace, steps, findings)
    said = BufferingHandler(MAX_LINES)
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(said)
    propagates, logger.propagate = logger.propagate, False  # its lines become the reason in our error
    exporter = OTLPSpanExporter(url, timeout=TIMEOUT_S)
    try:
        while batch := list(islice(spans, BATCH)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                reason = said.buffer[0].getMessage() if said.buffer else "no reason was given"
                raise InputError(f"{url}: the spans were not received ({reason})")
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
        logger.removeHandler(said)
        logger.propagate = propagates
    return SentDocument(
        run=run.label, url=url, trace_id=f"{trace:032x}", spans=steps.height + 1, findings=len(findings)
    )


def _steps(run: Run, ahead: Mapping[str, int]) -> pl.DataFrame:
    """Return steps on the timeline's clock, with `end_ns`, and the step's time `step_ns`, null if unknown."""
    steps = with_times(run.table(STEPS))
    hosts = run.table(WORKERS).select("rank", "host").unique("rank")
    moved = pl.col("start_ns") - pl.col("host").replace_strict(ahead, default=0, return_dtype=pl.Int64)
    steps = steps.filter(pl.col("duration_ns") >= 0).join(hosts, on="rank", how="left", maintain_order="left")
    if steps.is_empty():
        raise InputError(f"{run.label}: no step of it has an end")
    return steps.with_columns(
        start_ns=moved, end_ns=moved + pl.col("duration_ns"), step_ns=pl.col("time_ns").replace(-1, None)
    )


def _spans(run: Run, trace: int, steps: pl.DataFrame, findings: Sequence[Finding]) -> Iterator[ReadableSpan]:
    """Yield the span of the run, then those of its steps."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    def context(*of: object) -> SpanContext:
        identity = int.from_bytes(_digest(trace, *of)[:8]) | 1
        return SpanContext(trace, identity, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    manifest = run.manifest
    of_run: dict[str, Any] = {
        "resource": Resource({"service.name": "dpro", "dpro.run": run.label}),
        "instrumentation_scope": InstrumentationScope("dpro", __version__),
    }
    start_ns, end_ns = (
        int(ns) for ns in steps.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    )
    broken = [finding.title for finding in findings if finding.of_hang]
    whole = context("run")
    yield ReadableSpan(
        "run", whole, start_time=start_ns, end_time=end_ns,
        attributes={"dpro.world_size": manifest.world_size, "dpro.command": " ".join(manifest.command),
                    "dpro.hosts": manifest.hosts, "dpro.gpus": sorted(set(manifest.gpus))},
        events=[Event("finding", _of_finding(finding), end_ns) for finding in findings],
        status=Status(StatusCode.ERROR, "; ".join(broken)) if broken else Status(StatusCode.UNSET), **of_run,
    )  # fmt: skip
    for row in steps.iter_rows(named=True):
        facts = {"host.name": row["host"], "dpro.step_ns": row["step_ns"], "dpro.window": row["window"]}
        facts = {name: value for name, value in facts.items() if value not in (None, -1)}
        yield ReadableSpan(
            "step", context(row["rank"], row["step"], row["start_ns"]), parent=whole,
            attributes={"dpro.rank": row["rank"], "dpro.step": row["step"]} | facts,
            start_time=row["start_ns"], end_time=row["end_ns"], **of_run,
        )  # fmt: skip


def _of_finding(finding: Finding) -> dict[str, Any]:
    """Return the attributes of a finding's event; the cost is absent where unknown."""
    cost = {} if finding.cost_ms is None else {"dpro.cost_ms_per_step": finding.cost_ms}
    return {
        "dpro.class": finding.class_, "dpro.component": finding.component, "dpro.ranks": list(finding.ranks),
        "dpro.confidence": finding.confidence, "dpro.cause": finding.cause,
        "dpro.evidence": list(finding.evidence), "dpro.remedy": finding.remedy,
    } | cost  # fmt: skip


def _digest(*of: object) -> bytes:
    return hashlib.sha256("\0".join(map(str, of)).encode(errors="surrogateescape")).digest()
