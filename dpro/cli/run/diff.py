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
    from dpro.analysis.answers.difference import difference_of
    from dpro.analysis.selected import selection_of

    before, after = analyse(a), analyse(b)
    selection = selection_of(steps, ranks, before.run, after.run)
    found = difference_of(before, after, selection)
    if as_json:
        print_json(found)
    else:
        print_selection(selection)
        _print(found)
    if fail_on is not None and found.b_ms > (1 + fail_on) * found.a_ms:
        click.echo(
            f"dpro: a step of B takes {found.b_ms / found.a_ms - 1:.1%} longer than one of A", err=True
        )
        ctx.exit(1)


def _print(found: DifferenceDocument) -> None:
    out = console()
    out.print(
        f"The mean step in deep windows takes {format_ms(found.a_ms)} in A and "
        f"{format_ms(found.b_ms)} in B: {_signed(found.delta_ms)} ({found.delta_ms / found.a_ms:+.1%})."
    )
    shown = [each for each in found.contributors if abs(each.delta_ms) >= MIN_SHARE * found.a_ms][:ROWS]
    for each in shown:
        out.print(
            f"  {_signed(each.delta_ms):>10}  {each.kind} {shortened(each.name, LONGEST_NAME + 1)}: "
            f"{format_ms(each.a_ms)} per rank and step in A, {format_ms(each.b_ms)} in B"
        )
    less = sum(each.delta_ms for each in found.contributors if each not in shown)
    if less:
        out.print(f"  {_signed(less):>10}  all that contributes less")
    out.print(f"  {_signed(found.unexplained_ms):>10}  not explained by any kind of work")
    if len(found.by_rank) > 1 and any(abs(each) >= MIN_SHARE * found.a_ms for each in found.by_rank.values()):
        ranks = ", ".join(f"rank {rank} {_signed(each)}" for rank, each in found.by_rank.items())
        out.print(f"Work of single ranks, each taken for itself: {ranks}")
    for doubt in found.doubts:
        out.print(f"  - {doubt}")


def _signed(ms: float) -> str:
    return f"{'-' if ms < 0 else '+'}{format_ms(abs(ms))}"
