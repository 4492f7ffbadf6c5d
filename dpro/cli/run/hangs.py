"""The part of `dpro diagnose` that is about jobs that stand still: the verdict, how it came, what to do.

In: a run, or a folder of dumps. Out: text or JSON about what hangs; nothing, where the run is to be searched
for what is slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpro.cli.output import console, finding_document, print_json, warn
from dpro.detect.findings_log import logged_findings

if TYPE_CHECKING:
    import polars as pl

    from dpro.analysis.analysis import Analysis
    from dpro.analysis.end import End
    from dpro.detect.findings import Finding


class _Told(NamedTuple):
    """What is said of a job, whatever it was read from."""

    label: str
    findings: list[Finding]
    unknown: list[str]
    workers: pl.DataFrame
    while_it_ran: list[dict[str, Any]]
    end: End


def say_what_dumps_tell(folder: Path, as_json: bool) -> bool:
    """Print what hangs, from a folder of flight recorder dumps and nothing else: no run is made of them.

    Args:
        folder: a folder that is no run.
        as_json: print one object.

    Returns:
        Whether anything was printed.
    """
    from dpro.analysis.end import UNKNOWN, End
    from dpro.analysis.verdict import not_read
    from dpro.detect.hang.find import find_hangs
    from dpro.detect.hang.records import records_of
    from dpro.ingest.dumps import read_dumps
    from dpro.schema import WORKERS

    dumps = read_dumps(folder)
    if dumps is None:
        return False
    for warning in dumps.manifest.warnings:
        warn(warning)
    findings = find_hangs(records_of(dumps.frames, dumps.manifest.world_size))
    unknown = not_read(dumps.manifest)
    end = End(UNKNOWN, hung=any(each.class_.startswith("hang.") for each in findings))
    _say(_Told(str(folder), findings, unknown, dumps.frames[WORKERS.name], [], end), as_json)
    return True


def say_what_hangs(analysis: Analysis, as_json: bool) -> bool:
    """Print what hangs in a run, if anything does or the run can tell nothing else.

    Args:
        analysis: of the run.
        as_json: print one object.

    Returns:
        Whether anything was printed.
    """
    from dpro.analysis.verdict import what_hangs

    run, told = analysis.run, what_hangs(analysis)
    if told is None:
        return False
    _say(_Told(run.label, *told, analysis.workers, logged_findings(run.path), analysis.end), as_json)
    return True


def _say(told: _Told, as_json: bool) -> None:
    if as_json:
        print_json(_document(told))
    else:
        _print(told)


def _document(told: _Told) -> dict[str, Any]:
    from dpro.analysis.end import end_document

    return {
        "run": told.label,
        "findings": [finding_document(finding, None) for finding in told.findings],
        "healthy": not told.findings and not told.unknown and not told.end.bad,
        "answerable": True,
        "reasons": told.unknown,
        "while_it_ran": told.while_it_ran,
        "end": end_document(told.end),
    }


def _print(told: _Told) -> None:
    from dpro.detect.hang.evidence import advice_in_words, verdict_in_words

    out = console()
    if not told.findings:
        out.print("Nothing hangs that these calls can show; what is slow they do not tell.")
    for finding in told.findings:
        verdict = verdict_in_words(finding)
        out.print(f"{finding.class_}: {verdict} (confidence {finding.confidence:.2f})")
        for line in finding.evidence:
            out.print(f"  - {line}")
        out.print(f"  do: {advice_in_words(finding, told.workers)}")
    for reason in told.unknown:
        out.print(f"  not known: {reason}")
