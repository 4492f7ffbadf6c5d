"""`dpro info`: show what a run contains, and what it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import layout_option
from dpro.cli.following import print_following
from dpro.cli.output import console, json_option, print_end, print_json
from dpro.words import counted, ranks_in_words, short_name, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dpro.analysis.answers.info import (
        ClocksDocument,
        ContentsDocument,
        InfoDocument,
        Unclassified,
    )
    from dpro.store import AppliedChange

_LONGEST = 60  # characters of a kernel's name


@click.command()
@click.argument("run", metavar="RUN", type=click.Path())
@layout_option
@json_option
def info(run: str, as_json: bool) -> None:
    """Show what a run contains and what it lacks.

    \b
    dpro info RUN
    dpro info FOLDER_OF_TRACES --json

    Coverage is the share of the recorded data that dpro understands: collectives with known size and process
    group, steps in deep windows, GPU time of kernels classified by name.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.answers.info import info_document
    from dpro.cli.analysis import open_quietly

    analysis = Analysis(open_quietly(run))  # the warnings are part of what it prints
    document = info_document(analysis)
    if as_json:
        from dpro.verdict.verdict import with_account

        print_json(with_account(document, analysis))
    else:
        print_end(analysis.end)
        console().print("\n".join(in_words(document)))
        print_following(run, analysis, ["explain"])


def _clocks_in_words(clocks: ClocksDocument) -> list[str]:
    if not clocks.distinct:
        return []
    if clocks.distinct == 1:
        return ["clocks     one for all ranks"]
    if not clocks.samples:
        return [f"clocks     {clocks.distinct}, never compared: known only by the ends of collectives"]
    assert clocks.round_trip_us is not None
    bound = f"{clocks.round_trip_us / 2:.1f} us"
    return [f"clocks     {clocks.distinct}, compared in {clocks.compared} pairs to {bound} (median)"]


def in_words(document: InfoDocument) -> list[str]:
    """Return the lines of a document, for people: one fact per line, missing data last."""
    from dpro.analysis.answers.info import how_ended, telemetry_in_words
    from dpro.analysis.step_time import after_window_in_words
    from dpro.analysis.step_time import in_words as in_words_of_time
    from dpro.analysis.summary import other_warnings, ranks_recorded
    from dpro.detect.findings_log import describe_logged
    from dpro.replay.job_kind import kind_in_words

    coverage = document.coverage
    steps = f"none{': each deep window counts as one' * (coverage.windows > 1)}"
    if document.steps:
        steps = f"{document.steps:,} timed, {coverage.steps_in_windows:,} of them in deep windows"
    same: dict[str, list[int]] = {}
    for end in document.ended:
        same.setdefault(end.how, []).append(end.rank)
    ends = [
        f"{ranks_in_words(ranks)}: {how}" for how, ranks in sorted(same.items(), key=lambda item: item[1])
    ]
    status = document.exit_status
    if ends and status is not None:
        ends.append(f"the job: {how_ended(status if status >= 0 else -1, -status if status < 0 else -1)}")
    lines = [
        f"run        {document.run}",
        *([f"cache      {document.cache}"] if document.cache else []),
        f"ranks      {ranks_recorded(document.ranks, document.missing_ranks, document.world_size)}",
        *([f"role       {document.role}"] if document.role else []),
        *([f"pretended  {document.pretended}"] if document.pretended else []),
        *([f"job        {kind}"] if (kind := kind_in_words(document.kind)) else []),
        *([f"layout     {document.layout.line}"] if document.layout.line else []),
        *(f"layout     {line}" for line in document.layout.ambiguity),
        f"hosts      {', '.join(document.hosts) or 'not recorded'}",
        f"GPUs       {', '.join(document.gpus) or 'none recorded'}",
        *_clocks_in_words(document.clocks),
        *(f"telemetry  {line}" for line in telemetry_in_words(document.telemetry)),
        f"steps      {steps}",
        *([f"step time  {in_words_of_time(document.step_time)}"] if document.step_time else []),
        *([f"windows    none: {document.no_window}"] if document.no_window else []),
        *([f"ended      {'; '.join(ends)}"] if ends else []),
        *(f"attempt    before this one: {path}" for path in document.attempts),
        *(f"watched    {line}" for line in describe_logged(document.while_it_ran)),
        *(f"changed    {line}" for line in changes_in_words(document.applied)),
        f"rows       {rows_in_words(document)}",
        f"kernels    {unclassified_in_words(coverage.unclassified)}",
    ]
    if document.on_request and not document.no_window:
        lines.append("windows    on request only (--on-request)")
    lines += _cost_in_words(document)
    if document.after_first_window:
        lines.append(f"windows    {after_window_in_words(document.after_first_window)}")
    shares = {
        "size": coverage.collective_bytes_known,
        "process group": coverage.collective_group_known,
    }
    parts = [f"{what} known of {share:.1%}" for what, share in shares.items() if share is not None]
    lines += [f"coverage   collectives: {', '.join(parts)}"] if parts else []
    lines += [f"skipped    {reason}: {count:,}" for reason, count in document.skipped.items()]
    warnings = other_warnings(document.warnings, document.missing_ranks, document.world_size)
    return lines + [f"warning    {warning}" for warning in warnings]


def _cost_in_words(document: InfoDocument) -> list[str]:
    """Return the cost of recording, for older runs that of deep windows, as one line; empty if unknown."""
    from dpro.analysis.recording import recording_in_words

    windows = document.windows
    count, cost_ms, share = round(windows.count or 0), windows.cost_ms or 0.0, windows.share or 0.0
    if document.recording is not None:
        return [f"recording  cost {recording_in_words(document.recording, count, cost_ms)}"]
    if not count:
        return []
    from dpro.analysis.recording import windows_in_words

    return [f"windows    {windows_in_words(count, cost_ms)}, {share:.2%} of the time"]


def rows_in_words(document: InfoDocument | ContentsDocument) -> str:
    """Return the row counts of tables that have rows: `6,800 spans, 32 collectives`."""
    rows = (
        (name.removesuffix("s").replace("_", " "), count) for name, count in document.rows.items() if count
    )
    return ", ".join(counted(count, name) for name, count in rows) or "none"


def unclassified_in_words(unknown: Unclassified) -> str:
    """Return `12 of unknown kind, 3.1% of GPU time: my_kernel`, or that there are none."""
    if unknown.share is None:
        return "none"
    if not unknown.kernels:
        return "all of a known kind"
    names = ", ".join(shortened(short_name(name), _LONGEST) for name in unknown.names)
    return f"{unknown.kernels:,} of unknown kind, {unknown.share:.1%} of GPU time: {names}"


def changes_in_words(applied: Iterable[AppliedChange]) -> list[str]:
    """Return a line per place: `bucket:mb=1: DistributedDataParallel at train.py:12 (on 2 ranks)`."""
    ranks: dict[str, set[int]] = {}
    for change in applied:
        for what in _of_change(change):
            ranks.setdefault(f"{change.edit}: {what}", set()).add(change.rank)
    return [f"{line} (on {_ranks_of_change(sorted(who))})" for line, who in ranks.items()]


def _of_change(change: AppliedChange) -> Iterator[str]:
    for place in change.applied:
        instead_of = f", instead of {place.instead_of}" if place.instead_of else ""
        times = f", {place.times} times" if place.times > 1 else ""
        yield f"{place.where}{instead_of}{times}"
    for reason in change.refused:
        yield f"not made: {reason}"


def _ranks_of_change(who: list[int]) -> str:
    return f"rank {who[0]}" if len(who) == 1 else f"{len(who)} ranks"
