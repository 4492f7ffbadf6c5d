"""`dpro export`: write the timelines of a run to a file for other viewers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import analyse, layout_option, ranks_option, run_argument, steps_option
from dpro.cli.output import (
    atomic_file,
    console,
    ensure_writable,
    json_option,
    print_json,
    print_selection,
    warn,
)
from dpro.errors import Unanswerable, UsageError
from dpro.units import ms

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.extensions.export.drawing import Drawing
    from dpro.selection import Ranges, RankChoice, Selection

_OF_PERFETTO = (".pftrace", ".perfetto-trace", ".perfetto", ".pb")  # ends of names of such files, by custom
VIEWER = "https://ui.perfetto.dev"
_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@run_argument
@layout_option
@click.option(
    "-o", "--output", type=_FILE, metavar="FILE", help="Write FILE: Chrome trace JSON for .json and .json.gz."
)
@click.option("--chrome", type=_FILE, metavar="FILE", help="Write Chrome trace JSON; compressed for FILE.gz.")
@click.option(
    "--perfetto",
    type=_FILE,
    metavar="FILE",
    help="Write a Perfetto protobuf trace, with exact times; compressed.",
)
@click.option(
    "--otlp", metavar="URL", default="", help="Send steps and findings to an OpenTelemetry receiver."
)
@steps_option
@ranks_option
@json_option
def export(
    run: str,
    output: Path | None,
    chrome: Path | None,
    perfetto: Path | None,
    otlp: str,
    steps: Ranges,
    ranks: RankChoice,
    as_json: bool,
) -> None:
    """Write the timelines of all ranks into one file, on one aligned clock, or send their steps.

    Measured and replayed timelines are separate groups, with one track per thread and stream; a collective
    is split into waiting and transfer. Each group has a track group for its critical path, and the findings
    of `dpro diagnose` have another, per step. Spans carry their known arguments (shapes, bytes, dtype,
    process group, bucket). Arrows connect launches to kernels, forward to backward, the last member of
    a collective to the others, and the spans of the critical path. Telemetry becomes counters.

    \b
    dpro export RUN -o run.pftrace              open it in https://ui.perfetto.dev
    dpro export RUN -o run.json.gz              also for chrome://tracing
    dpro export RUN -o run.pftrace --steps 3-8 --ranks 0,2-3
    dpro export RUN --otlp http://collector:4318

    --steps and --ranks restrict the export to the slices of these steps and ranks, the arrows between them,
    and the telemetry of these ranks and of hosts from the first slice to the last.

    --otlp sends one span for the run, with findings as its events, and one span per step and rank;
    OTEL_EXPORTER_OTLP_HEADERS sets headers, for example for authentication.
    """
    if output is not None:
        if chrome or perfetto:
            raise UsageError("-o excludes --perfetto and --chrome, which name a file each")
        is_chrome = output.name.endswith((".json", ".json.gz"))
        if not is_chrome and not output.name.removesuffix(".gz").endswith(_OF_PERFETTO):
            raise UsageError(
                f"{output}: its name does not say which format: end it in .pftrace (Perfetto) or .json.gz "
                "(Chrome), or name it after --perfetto or --chrome"
            )
        chrome, perfetto = (output, None) if is_chrome else (None, output)
    if otlp:
        if chrome or perfetto:
            raise UsageError("--otlp excludes -o, --perfetto and --chrome: use two commands")
        _send(run, otlp, steps, ranks, as_json)
        return
    files = {"chrome": chrome, "perfetto": perfetto}
    wanted = {form: path for form, path in files.items() if path is not None}
    if not wanted:
        raise UsageError("name a file to write with -o FILE, or --otlp URL")
    for path in wanted.values():
        ensure_writable(path)
    from dpro.analysis.selected import selection_of
    from dpro.selection import selection_document
    from dpro.timelines.slices import path_in, path_offsets

    analysis = analyse(run)
    selection = selection_of(steps, ranks, analysis.run)
    drawn = drawing_of(analysis, selection)
    for form, path in wanted.items():
        _write(drawn, form, path)
    recorded = None if analysis.built.of_operations else analysis.replayed
    offset, _ = path_offsets(analysis.timeline, path_in(drawn.rows), recorded)
    if as_json:
        from dpro.extensions.export.drawing import ExportDocument, FileDocument, PathOffset

        written = ExportDocument(
            run=run,
            slices=drawn.rows.height,
            arrows=drawn.arrows.height,
            files=[FileDocument(form, str(path)) for form, path in wanted.items()],
            critical_path_replayed_later=PathOffset(*map(ms, offset)),
            selection=selection_document(selection),
        )
        print_json(written)
    else:
        print_selection(selection)
        for path in wanted.values():
            console().print(f"{path}: {drawn.rows.height:,} slices, {drawn.arrows.height:,} arrows")
        console().print(f"next: open {'it' if len(wanted) == 1 else 'one of them'} in {VIEWER}")


def _send(run: str, otlp: str, steps: Ranges, ranks: RankChoice, as_json: bool) -> None:
    from dpro.extensions.export.otlp import receiver_of, send

    url = receiver_of(otlp)
    from dpro.analysis.selected import selection_of

    analysis = analyse(run)
    selection = selection_of(steps, ranks, analysis.run)
    try:
        findings = analysis.verdict[0]
    except Unanswerable as error:
        warn(f"findings are not sent: {error}")
        findings = []
    sent = send(analysis.run, url, findings, analysis.clocks[0], selection)
    if as_json:
        print_json(sent)
    else:
        print_selection(selection)
        console().print(f"{url}: trace {sent.trace_id}, {sent.spans:,} spans, {sent.findings} findings")


def drawing_of(analysis: Analysis, selection: Selection | None = None) -> Drawing:
    """Return the content of an exported timeline of a run.

    Args:
        selection: steps and ranks to draw; None for all.

    Raises:
        UsageError: the selection is empty.
    """
    from dpro.analysis.selected import replayed_steps
    from dpro.extensions.export.drawing import drawing
    from dpro.selection import Selection

    selection = selection or Selection()
    if selection:
        selection.checked(replayed_steps(analysis))
    return drawing(analysis.timeline, analysis.verdict[0], analysis.clocks[0], selection)


def _write(drawn: Drawing, form: str, path: Path) -> None:
    from dpro.extensions.export.formats import write_chrome, write_perfetto

    with atomic_file(path) as place:
        {"chrome": write_chrome, "perfetto": write_perfetto}[form](drawn, place)
