"""`dpro diff A B`: what explains that one run takes longer per step than another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import analyse, ranks_option, steps_option
from dpro.cli.output import console, json_option, print_json, print_selection, share
from dpro.units import format_ms
from dpro.words import shortened

if TYPE_CHECKING:
    from dpro.replay.difference import DifferenceDocument
    from dpro.selection import Ranges, RankChoice

ROWS = 15
LONGEST_NAME = 70  # printed: names of kernels have hundreds of characters
MIN_SHARE = 0.005  # of the step: what contributes less is not printed


@click.command()
@click.argument("a", type=click.Path(), metavar="A")
@click.argument("b", type=click.Path(), metavar="B")
@steps_option
@ranks_option
@click.option(
    "--fail-on", callback=share, metavar="SHARE",
    help="Exit with 1 if a step of B takes longer than one of A by this share or more, such as 3%.",
)  # fmt: skip
@json_option
@click.pass_context
def diff(
    ctx: click.Context, a: str, b: str, steps: Ranges, ranks: RankChoice, fail_on: float | None, as_json: bool
) -> None:
    """What explains that a step of run B takes longer, or shorter, than one of run A.

    \b
    dpro diff BEFORE AFTER
    dpro diff BEFORE AFTER --fail-on 3%      in a pipeline of tests
    dpro diff TRACES_A TRACES_B
    dpro diff BEFORE AFTER --steps 5-7       steps that have these numbers in both
    dpro diff BEFORE AFTER --ranks 0,2-3     what the work of these ranks explains

    Each run is replayed with its work made as long as the other's, one kind of work after the other. So what
    a kernel, an operator or a collective contributes is what it changes in the step, not how much longer it
    is: work that something else hides contributes nothing. Contributions add up; what no kind of work
    explains (other dependencies, other waits) is said. The runs may have other lengths, steps and ranks.

    With --ranks the step stays that of the whole job, since ranks wait for each other: what the work of other
    ranks changes counts as not explained.
    """
    from dpro.analysis.selected import difference_of, selection_of

    before, after = analyse(a), analyse(b)
    selection = selection_of(steps, ranks, before.run, after.run)
    difference = difference_of(before, after, selection)
    if as_json:
        print_json(difference)
    else:
        print_selection(selection)
        _print(difference)
    if fail_on is not None and difference.b_ms > (1 + fail_on) * difference.a_ms:
        longer = f"{difference.b_ms / difference.a_ms - 1:.1%} longer"
        click.echo(f"dpro: a step of B takes {longer} than one of A", err=True)
        ctx.exit(1)


def _print(document: DifferenceDocument) -> None:
    out = console()
    out.print(
        f"The mean step in deep windows takes {format_ms(document.a_ms)} in A and "
        f"{format_ms(document.b_ms)} in B: {_signed(document.delta_ms)} "
        f"({document.delta_ms / document.a_ms:+.1%})."
    )
    shown = [part for part in document.contributors if abs(part.delta_ms) >= MIN_SHARE * document.a_ms][:ROWS]
    for part in shown:
        out.print(
            f"  {_signed(part.delta_ms):>10}  {part.kind} {shortened(part.name, LONGEST_NAME + 1)}: "
            f"{format_ms(part.a_ms)} per rank and step in A, {format_ms(part.b_ms)} in B"
        )
    less = sum(part.delta_ms for part in document.contributors if part not in shown)
    if less:
        out.print(f"  {_signed(less):>10}  all that contributes less")
    out.print(f"  {_signed(document.unexplained_ms):>10}  not explained by any kind of work")
    most_ms = max(map(abs, document.by_rank.values()), default=0.0)
    if len(document.by_rank) > 1 and most_ms >= MIN_SHARE * document.a_ms:
        ranks = ", ".join(f"rank {rank} {_signed(delta_ms)}" for rank, delta_ms in document.by_rank.items())
        out.print(f"Work of single ranks, each taken for itself: {ranks}")
    for doubt in document.doubts:
        out.print(f"  - {doubt}")


def _signed(ms: float) -> str:
    return f"{'-' if ms < 0 else '+'}{format_ms(abs(ms))}"
