"""`dpro diff`: explain why steps of run B take longer than steps of A; of more runs, show the limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import analyse, ranks_option, steps_option
from dpro.cli.following import print_following
from dpro.cli.output import console, json_option, parse_share, print_json, print_selection
from dpro.errors import UsageError
from dpro.units import format_ms, signed_ms
from dpro.words import short_name, shortened

if TYPE_CHECKING:
    from dpro.replay.difference import Contributor, DifferenceDocument
    from dpro.selection import Ranges, RankChoice

ROWS, MAX_RANKS = 15, 8
MAX_OF_RUN, MAX_OF_LIMIT, _MIN_DO = 24, 22, 20  # characters of a run's name, its limit, and its advice
EFFECT, WORK = "effect on the step", "work (A, B: time per step, mean of ranks)"
LESS, UNEXPLAINED = "all smaller contributions", "not explained by any kind of work"
_BESIDE_NAME, _MIN_NAME = 33, 40  # characters of the other columns, and of a name at least
_DECIMALS = 6  # of a contribution in ms: none below 1 ns gets a row
MIN_SHARE = 0.005  # share of the step: smaller contributions are not printed


@click.command()
@click.argument("runs", type=click.Path(), nargs=-1, required=True, metavar="A B [C…]")
@steps_option
@ranks_option
@click.option(
    "--fail-on", callback=parse_share, metavar="SHARE",
    help="Exit with 1 if steps of B take longer than steps of A by more than SHARE, for example 3%.",
)  # fmt: skip
@click.option("--markdown", is_flag=True, help="Print Markdown, as for a comment on a pull request.")
@json_option
@click.pass_context
def diff(
    ctx: click.Context,
    runs: tuple[str, ...],
    steps: Ranges,
    ranks: RankChoice,
    fail_on: float | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Explain why steps of run B take longer, or less time, than steps of run A.

    \b
    dpro diff BEFORE AFTER
    dpro diff BEFORE AFTER --fail-on 3%      for CI; with --markdown for a comment
    dpro diff TRACES_A TRACES_B
    dpro diff BEFORE AFTER --steps 5-7       steps with these numbers in both
    dpro diff BEFORE AFTER --ranks 0,2-3     only the work of these ranks
    dpro diff A B C D                        step, limit and first advice of each

    Each run is replayed with its work set to the other's durations, one kind of work at a time. So a kernel,
    operator or collective contributes its effect on the step time, not its own change in duration: hidden
    work contributes nothing. Contributions add up, and a remainder that no kind of work explains (other
    dependencies, other waits) is reported. The runs can differ in length, steps and ranks.

    With --ranks the step stays that of the whole job, since ranks wait for each other: what the work of other
    ranks changes counts as not explained.
    """
    from dpro.analysis.comparison import difference_of
    from dpro.analysis.selected import selection_of

    if markdown and as_json:
        raise UsageError("--markdown and --json both write to stdout: give one of them")
    if len(runs) == 1:
        raise click.UsageError(f"Missing argument 'B': a run to compare {runs[0]} with", ctx)
    if len(runs) != 2:
        if steps or ranks or markdown or fail_on is not None:
            only = "--steps, --ranks, --markdown and --fail-on"
            raise UsageError(f"give two runs: {only} do not work with more than two")
        _compare(runs, as_json)
        return
    before, after = map(analyse, runs)
    selection = selection_of(steps, ranks, before.run, after.run)
    difference = difference_of(before, after, selection)
    if as_json:
        from msgspec.structs import replace

        from dpro.verdict.verdict import account_of, with_account

        print_json(replace(with_account(difference, before), account_b=account_of(after)))
    elif markdown:
        click.echo(_in_markdown(difference, fail_on))
    else:
        print_selection(selection)
        _print(difference)
        print_following(runs[1], after, ["explain"])
    if _is_too_long(difference, fail_on):
        longer = f"{difference.known_change[2]:.1%} longer"
        click.echo(f"dpro: a step of B takes {longer} than one of A", err=True)
        ctx.exit(1)


def _is_too_long(document: DifferenceDocument, fail_on: float | None) -> bool:
    """Return whether B is slower by more than a share.

    By steps outside deep windows if there are enough, beyond their variation; else by steps in deep windows.
    """
    if fail_on is None:
        return False
    if document.measured is not None:
        is_clear = document.measured.is_clear or document.pauses is not None
        return is_clear and document.known_change[2] > fail_on
    return document.b_ms > (1 + fail_on) * document.a_ms


def _summary_lines(document: DifferenceDocument) -> list[str]:
    """Return the lines above the contributions: how the commands differ, and how the change was measured."""
    from dpro.analysis.comparison import UNLIKE, how_known, is_clear

    unlike = [doubt for doubt in document.doubts if doubt.startswith(UNLIKE)]
    said, rows = how_known(document), _rows_of(document)
    if not is_clear(document):
        said = said[:-1]  # the cause of what may be no change is not worth a word
    elif rows:
        if said:
            said[-1] += ", of which"
        said[:0] = _ranks_alone(document)
    elif document.delta_ms:
        rest = f"; {signed_ms(document.unexplained_ms)} is not explained" if document.unexplained_ms else ""
        said.append(f"no kind of work changed by {MIN_SHARE:.1%} of the step or more{rest}")
    return [*unlike, *filter(None, [document.commands]), *said]


def _ranks_alone(document: DifferenceDocument) -> list[str]:
    """Return the line about the part of each rank in the change, if one has any and there are several."""
    by_rank = sorted(document.by_rank.items(), key=lambda row: -abs(row[1]))
    least_ms = MIN_SHARE * document.a_ms
    parts = [f"rank {rank} {signed_ms(delta)}" for rank, delta in by_rank if abs(delta) >= least_ms]
    return [f"each rank alone: {', '.join(parts[:MAX_RANKS])}"] if len(by_rank) > 1 and parts else []


def _doubts_below(document: DifferenceDocument) -> list[str]:
    """Return the doubts that the lines above the contributions do not have."""
    above = _summary_lines(document)
    return [doubt for doubt in document.doubts if doubt not in above]


def _in_markdown(document: DifferenceDocument, fail_on: float | None) -> str:
    """Return the difference as Markdown for a pull request: the summary, then a table of contributions."""
    a_ms, b_ms, change = document.known_change
    mark = "\U0001f534 " if _is_too_long(document, fail_on) else "" if fail_on is None else "\U0001f7e2 "
    allowed = "" if fail_on is None else f" (limit: {fail_on:.1%} more)"
    lines = [
        f"{mark}**A step takes {format_ms(b_ms)} instead of {format_ms(a_ms)}: {change:+.1%}**{allowed}",
        "",
        f"A: `{_short_run_name(document.a)}`, B: `{_short_run_name(document.b)}`",
        *(part for line in _summary_lines(document) for part in ("", line)),
    ]
    rows = _rows_of(document)
    if rows:
        lines += ["", f"| {EFFECT} | A | B | {WORK} |", "|---:|---:|---:|---|"]
        for delta_ms, of_a, of_b, kind, name in rows:
            named = f"{kind} `{name.replace('|', '/').replace('`', '')}`" if name else kind
            lines.append(f"| {signed_ms(delta_ms)} | {of_a} | {of_b} | {named} |")
    return "\n".join([*lines, *(f"- {doubt}" for doubt in _doubts_below(document))])


def _rows_of(document: DifferenceDocument) -> list[tuple[float, str, str, str, str]]:
    """Return contributions: their part of the change in ms, their time in A and in B, their kind and name.

    Without one where the steps did not change clearly.
    """
    from dpro.analysis.comparison import is_clear

    if not is_clear(document):
        return []
    least_ms = MIN_SHARE * document.a_ms
    shown = [part for part in document.contributors if abs(part.delta_ms) >= least_ms][:ROWS]
    rows = [(part.delta_ms, *_cells_of(part), short_name(part.name)) for part in shown]
    less_ms = sum(part.delta_ms for part in document.contributors if part not in shown)
    for rest_ms, words in ((less_ms, LESS), (document.unexplained_ms, UNEXPLAINED)):
        rows += [(rest_ms, "", "", words, "")] if round(rest_ms, _DECIMALS) and shown else []
    return rows


def _cells_of(part: Contributor) -> tuple[str, str, str]:
    """Return the mean time of a kind of work in A and in B, and the kind.

    The step follows the rank that others wait for. Where its work changed one way and the mean of all ranks
    the other, the means would contradict the effect: they are left out.
    """
    if part.delta_ms * (part.b_ms - part.a_ms) < 0:
        return "", "", f"ranks differ in {part.kind or 'this'}"
    return format_ms(part.a_ms), format_ms(part.b_ms), part.kind


def _print(document: DifferenceDocument) -> None:
    from rich.table import Table

    out = console()
    a_ms, b_ms, change = document.known_change
    out.print(
        f"A {_short_run_name(document.a)} {format_ms(a_ms)} -> B {_short_run_name(document.b)} "
        f"{format_ms(b_ms)} a step: {signed_ms(b_ms - a_ms)} ({change:+.1%})"
    )
    for line in _summary_lines(document):
        out.print(line)
    if rows := _rows_of(document):
        table = Table(EFFECT.replace(" the", "\nthe"), "A", "B", WORK, box=None, pad_edge=False)
        for column in table.columns[:3]:
            column.justify, column.no_wrap = "right", True
        room = max(out.width - _BESIDE_NAME, _MIN_NAME)
        for delta_ms, of_a, of_b, kind, name in rows:
            table.add_row(signed_ms(delta_ms), of_a, of_b, shortened(f"{kind} {name}".strip(), room))
        out.print(table)
    for doubt in _doubts_below(document):
        out.print(f"  - {doubt}")


def _compare(runs: Sequence[str], as_json: bool) -> None:
    """Print the step, limit and first advice of each run, one line each."""
    from rich.table import Table

    from dpro.verdict.verdict import ComparedRuns, explain
    from dpro.verdict.words import worth_in_words

    explanations = [explain(analyse(run)) for run in runs]  # one run after the other is in memory
    if as_json:
        print_json(ComparedRuns(runs=explanations))
        return
    first_ms = explanations[0].step_ms
    header, rows = ("run", "step", "to first", "limit", "first to do"), []
    for explanation in explanations:
        step_ms, limit, advice = explanation.step_ms, explanation.limit, explanation.advice
        rows.append(
            (
                shortened(_short_run_name(explanation.run), MAX_OF_RUN),
                format_ms(step_ms) if step_ms else "",
                f"{step_ms / first_ms - 1:+.1%}" if step_ms and first_ms else "",
                limit.kind if limit else shortened(explanation.fault, MAX_OF_LIMIT),
                f"{advice[0].do}{worth_in_words(advice[0])}" if advice else "",
            )
        )
    out, table = console(), Table(*header, box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    taken = sum(2 + max(map(len, column)) for column in list(zip(header, *rows))[:-1])
    for *cells, do in rows:
        table.add_row(*cells, shortened(do, max(out.width - taken, _MIN_DO)))
    out.print(table)


def _short_run_name(run: str) -> str:
    return run.rstrip("/").rpartition("/")[2] or run
