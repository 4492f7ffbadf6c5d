"""`dpro report`: break down the time of each step, by kernel, collective and more."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dpro.cli.analysis import (
    layout_option,
    network_option,
    ranks_option,
    read_network,
    run_argument,
    steps_option,
)
from dpro.cli.following import print_following
from dpro.cli.output import (
    console,
    ensure_writable,
    json_option,
    print_end,
    print_json,
    print_lines,
    print_selection,
    stderr_console,
    write_text,
)
from dpro.errors import DproError, UsageError
from dpro.plugins import extended, hooks_of
from dpro.units import NS_PER_MS, distinct_sizes, format_bytes
from dpro.words import capitalised, counted, distinct_names, short_name, shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    import polars as pl
    from rich.console import RenderableType

    from dpro.analysis.analysis import Analysis
    from dpro.analysis.answers.report import ReportTables
    from dpro.selection import Ranges, RankChoice, Selection
    from dpro.store import Run
    from dpro.verdict.report import RunReport

STDOUT = Path("-")
_FILE = click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path)

DEFAULT_TOP = 15  # rows of a table that a screen holds
OVERLAPPING = (  # below the table of collectives
    "Waits of collectives count also while others wait or something computes; those of a rank's step do not."
)
_NOT_KNOWN, _LITTLE = "not known", 0.01  # name of an unknown operator; share of known time worth no table
_BESIDE_LAYER = 62  # characters of the other columns of the table of layers
_BESIDE_NAME, _MIN_NAME = 30, 24  # characters beside names in the table of kernels, and of a name at least
PARTS = {  # column -> header in two lines, so that the table fits 80 columns
    "compute_ns": "\ncompute",
    "copy_ns": "\ncopies",
    "exposed_transfer_ns": "\ntransfer",
    "exposed_wait_ns": "wait\nothers",
    "unsplit_comm_ns": "comm not\nsplit",
    "host_bound_ns": "host\nbound",
    "idle_ns": "\nidle",
    "overlapped_comm_ns": "over-\nlap",
}

HOST_FACTS = {  # column -> header in two lines
    "data_wait_ns": "data\nwait",
    "gc_ns": "garbage\ncollection",
    "run_queue_ns": "wait for\na core",
    "training_thread_cpu_ns": "CPU of\nthread",
    "cpu_ns": "CPU of\nprocess",
}


class ReportPage(NamedTuple):
    """A report page that an extension writes to a file.

    Attributes:
        path: path of the file.
        analysis_of: function from the run to its analysis.
        text_of: function from that analysis and the report to the text of the page.
    """

    path: Path
    analysis_of: Callable[[Run], Analysis]
    text_of: Callable[[Any, RunReport], str]


@click.command()
@run_argument
@layout_option
@click.option(
    "--top",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help=f"Number of kernels and collectives to list (text: {DEFAULT_TOP}, JSON: all).",
)
@steps_option
@ranks_option
@network_option
@click.option(
    "--markdown",
    type=_FILE,
    is_flag=False,
    flag_value=STDOUT,
    metavar="[FILE]",
    help="Write a report for an issue or a pull request, to FILE or stdout.",
)
@json_option
def report(
    run: str,
    top: int | None,
    steps: Ranges,
    ranks: RankChoice,
    network_table: str | None,
    markdown: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Break down the time of each step.

    \b
    dpro report RUN
    dpro report FOLDER_OF_TRACES --top 20
    dpro report RUN --steps 3-8 --ranks 0,2-3   only these steps and ranks
    dpro report RUN --ranks tp=0                one rank per tensor-parallel group
    dpro report RUN --markdown                  without figures, for an issue

    --markdown covers the health of the run, what is slow and its cost, what would help, where the time went,
    and how far to trust the answers. The same run gives identical output.

    The usual step of every rank is fully divided into compute, transfer, waiting for other ranks, host bound
    and idle. Work counts towards the step during which it ran.

    \b
    With GPUs, as seen from the GPU, over all streams:
      compute       kernels and fills other than communication
      transfer      exposed communication after all members arrived
      waiting       exposed communication before all members arrived
      overlapped    communication during compute (part of compute)
      host bound    idle because the next work was launched too late
      idle          idle for another reason, or for an unrecorded one
    Without GPUs, as seen from the main thread:
      compute       operators on the main thread
      transfer, waiting  communication on any thread while it runs no operator
      host bound    neither: Python, input pipeline, the optimizer's own code

    The time of a collective is waiting, until its last rank arrives, plus transfer, after that.
    This split needs collectives matched on all of their ranks. If
    less than 95% of a step's exposed communication is matched, the step is not split: JSON has null for
    exposed_wait_ms and exposed_transfer_ms, whose sum is exposed_comm_ms. Bandwidth is bus bandwidth, as in
    nccl-tests.

    For a run recorded by dpro, the last table covers all steps, in deep windows or not: time the training
    thread waited for its DataLoader, Python garbage collection, time that thread was runnable but had no
    core, CPU time of that thread and of the process, and micro-batches.

    For a trace of whole pipeline operations, a table shows the bubble of each stage: the time without
    compute between the first forward and the last backward of any stage.

    With --steps and --ranks, work counts towards the step during which it begins, and a rank may have waited
    for an unselected rank. Work in a deep window before its first or after its last step counts only if all
    steps are selected.

    RUN can be a run directory or a folder of traces.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.answers.report import report_document, report_tables
    from dpro.analysis.selected import select, selection_of
    from dpro.cli.analysis import open_or_import

    pages = [page for ask in hooks_of("report_pages") if (page := ask(given)) is not None]
    files = [page.path for page in pages] + [path for path in (markdown,) if path is not None]
    if (steps or ranks) and files:
        raise UsageError(
            "--steps, --ranks: a report in a file covers the whole run, like its findings and predictions; "
            "omit --html and --markdown, or select in `dpro dashboard`"
        )
    for path in files:
        if path != STDOUT:
            ensure_writable(path)
    opened = open_or_import(run)
    if files:
        _write(opened, pages, markdown, as_json)
        return
    selection = selection_of(steps, ranks, opened)
    whole = Analysis(opened, read_network(network_table))
    analysis = select(whole, selection)
    tables = report_tables(analysis, selection)
    if as_json:
        from dpro.verdict.verdict import with_account

        document = report_document(analysis, tables, top, selection)
        print_json(extended("answered", with_account(document, whole), opened))
    else:
        if selection:  # without one, the verdict begins with the end of the job
            print_end(analysis.end)
        print_selection(selection)
        _print(analysis, tables, top or DEFAULT_TOP, selection)
        for print_more in hooks_of("printed"):
            print_more(opened)
        print_following(run, whole, ["diagnose", "whatif"])


def _print(analysis: Analysis, tables: ReportTables, top: int, selection: Selection) -> None:
    """Print the tables, the mean step first."""
    from dpro.analysis.mean_step import facts_of, mean_step_of
    from dpro.analysis.step_time import pauses_in_words, step_time_in_words
    from dpro.analysis.unanswered import pretended_lines
    from dpro.replay.phases import limit_in_words
    from dpro.verdict.verdict import explain
    from dpro.verdict.words import lines_of

    ranks = "selected ranks" if selection.ranks else "all ranks"
    steps = "selected steps" if selection.steps else "all steps"
    out = console()
    for line in pretended_lines(analysis.run.manifest, analysis.pretended):
        out.print(line)
    if not selection:
        print_lines(lines_of(explain(analysis)))
    # What the verdict lacks; a selection has no verdict, so its typical step, too.
    said = step_time_in_words(analysis.steps) if selection else pauses_in_words(analysis.steps)
    for line in filter(None, [capitalised(said)]):
        out.print(line)
    for name, value in facts_of(mean_step_of(analysis)):
        out.print(f"{name}: {value}")
    out.print()
    out.print(_step_table(analysis.usual_breakdown))
    if tables.stages.height:
        cells = [
            [
                *map(str, (row["stage"], row["ranks"], row["steps"])),
                *(_ms(row[part]) for part in ("pipeline_ns", "compute_ns", "bubble_ns")),
                f"{row['bubble_share']:.1%}",
            ]
            for row in tables.stages.iter_rows(named=True)
        ]
        header = ["stage", "ranks", "steps", "pipeline ms", "compute ms", "bubble ms", "bubble"]
        out.print(_table("How long each stage of the pipeline is idle", header, cells))
    if tables.phases.height:
        cells = [
            [row["phase"], _ms(row["duration_ns"]), f"{row['share']:.1%}", limit_in_words(row)]
            for row in tables.phases.iter_rows(named=True)
        ]
        out.print(_table("Phases of a step", ["phase", "ms", "share", "limit"], cells))
    title = (
        "GPU kernels in deep windows"
        if tables.on_gpu
        else "CPU operators in deep windows, own time (no GPU work)"
    )
    out.print(_kernel_table(tables.kernels, top, f"{title}, {ranks}"))
    if tables.modules.height:
        out.print(_module_table(tables, top, ranks))
    if tables.layers.height:
        out.print(_layer_table(tables.layers, top, analysis))
    if tables.collectives.height:
        out.print(_collective_table(tables.collectives, top, ranks))
        if tables.collectives["wait_ns"].sum():
            out.print(OVERLAPPING)
    if tables.host.height:
        out.print(_host_table(tables.host, steps))


def _write(run: Run, pages: list[ReportPage], markdown: Path | None, as_json: bool) -> None:
    from dpro.analysis.analysis import Analysis
    from dpro.verdict.report import make_report, markdown_of

    if markdown == STDOUT and as_json:
        raise UsageError("--markdown and --json both write to stdout: name a file, as --markdown FILE")
    analysis, written = pages[0].analysis_of(run) if pages else Analysis(run), []
    with stderr_console().status("Working out what to say …"):
        made = extended("sent", make_report(analysis), run)
        written += [write_text(page.path, page.text_of(analysis, made)) for page in pages]
        if markdown == STDOUT:
            click.echo(markdown_of(made), nl=False)
        elif markdown is not None:
            written.append(write_text(markdown, markdown_of(made)))
    if as_json:
        from dpro.analysis.answers.report import ReportFilesDocument

        print_json(ReportFilesDocument(run=run.label, files=list(map(str, written))))
    for path in () if as_json else written:
        click.echo(f"{path}: {format_bytes(path.stat().st_size)}", err=markdown == STDOUT)


def _step_table(steps: pl.DataFrame) -> RenderableType:
    """Return a table with the mean step of each rank, and the share of each part."""
    from dpro.analysis.mean_step import mean_steps, shown_parts

    whole = "step" if (steps["step"] >= 0).all() else "window"
    means = mean_steps(steps, "rank")
    parts = [*shown_parts(means), "overlapped_comm_ns"]
    counts = means["steps"].unique().to_list()
    columns = ["rank"] if len(counts) == 1 else ["rank", "steps"]
    cells = [
        [
            *(str(row[name]) for name in columns),
            _ms(row["duration_ns"]),
            *(_share(row[part], row["duration_ns"]) for part in parts),
        ]
        for row in means.iter_rows(named=True)
    ]
    header = [*["\nrank", f"\n{whole}s"][: len(columns)], f"mean\n{whole} ms"]
    header += [PARTS[part] for part in parts]
    of_each = f" ({counted(counts[0], whole)} in depth)" if len(counts) == 1 else ""
    return _table(f"Where the usual {whole} of each rank goes{of_each}", header, cells)


def _kernel_table(kernels: pl.DataFrame, top: int, title: str) -> RenderableType:
    everything = float(kernels["total_ns"].sum())
    room = max(console().width - _BESIDE_NAME, _MIN_NAME)
    shown = kernels.head(top)
    names = distinct_names([short_name(name) for name in shown["name"]], room)
    cells = [
        [name, str(count), _ms(total_ns), _share(total_ns, everything)]
        for name, (count, total_ns) in zip(names, shown.select("count", "total_ns").iter_rows())
    ]
    header = ["name", "count", "total ms", "share"]
    return _table(f"{title}: {min(top, kernels.height)} of {kernels.height}", header, cells)


def _module_table(tables: ReportTables, top: int, ranks: str) -> RenderableType:
    """Return a table of GPU time by module, else by operator; a line if nearly all of it is unknown."""
    import polars as pl

    what = "module" if (tables.modules["module"] != "").any() else "operator"
    names = pl.col(what).replace("", _NOT_KNOWN).alias("name")
    sums = tables.modules.group_by(names).agg(pl.col("count", "total_ns").sum())
    sums = sums.sort("total_ns", "name", descending=[True, False])
    title, by = f"GPU time by {what}, {ranks}", tables.attribution
    eager, ambiguous, unknown = (by.get(how, 0) for how in ("eager", "ambiguous", "unknown"))
    if eager or ambiguous:
        title += f"; {counted(eager, 'CUDA-graph kernel')} attributed through eager launches"
        title += f", {ambiguous:,} ambiguous" if ambiguous else ""
    if unknown:
        title += f"; {counted(unknown, 'kernel')} of unknown operators"
    of_none = sum(sums.filter(name=_NOT_KNOWN)["total_ns"]) / max(sum(sums["total_ns"]), 1)
    if of_none > 1 - _LITTLE:
        share = f"{of_none:.1%} of it ({counted(unknown, 'kernel')})"
        return f"GPU time by {what}, {ranks}: not known for {share}\n"
    return _kernel_table(sums, top, title)


def _layer_table(layers: pl.DataFrame, top: int, analysis: Analysis) -> RenderableType:
    """Return a table of the load of ranks or experts by layer, with the cost of the imbalance if known."""
    from dpro.replay.experts import EXCHANGE, member_in_words

    cells, room = [], max(console().width - _BESIDE_LAYER, _MIN_NAME)
    for row in layers.head(top).iter_rows(named=True):
        sizes = [row["mean"], row["most"]]
        amounts = (
            map(format_bytes, sizes) if row["source"] == EXCHANGE else (f"{size:,.0f}" for size in sizes)
        )
        on = f"{member_in_words(**row)} of {row['members']}"
        cells.append([shortened(row["layer"], room), row["source"], *amounts, on, f"x{row['imbalance']:.2f}"])
    costs = []
    with suppress(DproError):  # a run that cannot be replayed
        costs = [finding.cost_ns for finding in analysis.verdict[0] if finding.class_ == "imbalance.data"]
    title = f"Work sent to ranks or experts, of a step: {min(top, layers.height)} of {layers.height}"
    title += f"; spread evenly, the step takes {_ms(max(costs))} ms less" if costs else ""
    return _table(title, ["layer", "by", "mean", "most", "on", "most/mean"], cells)


def _collective_table(collectives: pl.DataFrame, top: int, ranks: str) -> RenderableType:
    shown = collectives.head(top)
    numbers = [
        [
            size,
            "?" if row["hosts"] is None else str(row["hosts"]),
            str(row["count"]),
            _ms(row["total_ns"]),
            _ms(row["wait_ns"]),
            _ms(row["transfer_ns"]),
            _share(row["matched"], row["count"]),
            "?" if row["busbw_gbps"] is None else f"{row['busbw_gbps']:.3g}",
        ]
        for size, row in zip(distinct_sizes(shown["bytes"].to_list()), shown.iter_rows(named=True))
    ]
    header = [
        "\nbytes",
        "\nhosts",
        "\ncount",
        "total\nms",
        "wait\nms",
        "transfer\nms",
        "\nmatched",
        "bus\nGB/s",
    ]
    columns = [
        (name, column) for name, column in zip(header, zip(*numbers)) if not {*column} <= {"?", "100.0%"}
    ]  # drop a column that is unknown for all rows, or 100% for all
    taken = sum(2 + max(map(len, (*name.split("\n"), *column))) for name, column in columns)
    room = max(console().width - taken - 1, _MIN_NAME)
    names = (shortened(short_name(row["op"] or "?"), room) for row in shown.iter_rows(named=True))
    title = f"Collectives, {ranks}: {min(top, collectives.height)} of {collectives.height}"
    cells = [list(line) for line in zip(names, *(column for _, column in columns))]
    return _table(title, ["\nop", *(name for name, _ in columns)], cells)


def _host_table(ranks: pl.DataFrame, steps: str) -> RenderableType:
    """Return a table with the mean step of each rank, and the share of each activity of the host."""
    cells = []
    for row in ranks.iter_rows(named=True):
        shares = ["?" if row[fact] is None else _share(row[fact], row["duration_ns"]) for fact in HOST_FACTS]
        micro_batches = "?" if row["backward_calls"] is None else f"{row['backward_calls']:.3g}"
        cells.append([str(row["rank"]), str(row["steps"]), _ms(row["duration_ns"]), *shares, micro_batches])
    header = ["\nrank", "\nsteps", "mean\nhost ms", *HOST_FACTS.values(), "micro-\nbatches"]
    return _table(f"Host activity, {steps}, pauses included", header, cells)


def _table(title: str, header: list[str], cells: list[list[str]]) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True, min_width=4)
    for line in cells:
        table.add_row(*line)
    return table


def _ms(ns: float | None) -> str:
    return "?" if ns is None else f"{ns / NS_PER_MS:.2f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"
