"""`dpro goodput RUN...`: where all the time of a job went, over all its attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dpro.cli.output import console, json_option, print_json, warn
from dpro.units import NS_PER_H, NS_PER_S, format_duration

if TYPE_CHECKING:
    from dpro.goodput.document import GoodputDocument

BAR = 30  # characters of the largest class


@click.command()
@click.argument("runs", type=click.Path(), metavar="RUN...", nargs=-1, required=True)
@json_option
def goodput(runs: tuple[str, ...], as_json: bool) -> None:
    """Where all the time of a job went, over all its attempts.

    \b
    dpro goodput RUN                 a job that torchrun restarted: all its attempts
    dpro goodput RUN_1 RUN_2 RUN_3   a job that the scheduler started three times

    Every second of every rank is in exactly one class: steps done for the first time, steps done again since
    the last checkpoint, starting, saving, waiting for a straggler, standing still after a failure, down.
    Which step an attempt resumed from follows from the checkpoint that it loaded.
    """
    from dpro.cli.runs import open_quietly
    from dpro.goodput.document import goodput_document, life_of

    life = life_of([open_quietly(run) for run in runs])
    document = goodput_document(life, runs)
    if as_json:
        print_json(document)
    else:
        _print(document)
        for note in document.notes:
            warn(note)


def _print(document: GoodputDocument) -> None:
    out = console()
    wall = format_duration(document.wall_s * NS_PER_S)
    count = len(document.attempts)
    out.print(
        f"goodput {document.goodput:.1%} of {wall} on {document.ranks} ranks; "
        f"{document.steps:,} steps in {count} attempt{'s' * (count != 1)}; ETTR {document.ettr:.1%}"
    )
    largest = max((each.share for each in document.classes), default=1.0)
    for each in document.classes:
        bar = "█" * round(BAR * each.share / largest)
        took = format_duration(each.rank_hours * NS_PER_H / max(document.ranks, 1))
        out.print(f"  {each.class_.replace('_', ' '):<14}{each.share:>7.2%}  {took:>9} a rank  {bar}")
    if document.saving_background_s:
        took = format_duration(document.saving_background_s * NS_PER_S)
        out.print(f"In the background, in no class: {took} of saving, all ranks")
    for number, attempt in enumerate(document.attempts):
        again = f", {attempt.repeated:,} of them done again" if attempt.repeated else ""
        end = "ended well" if attempt.ended_well else "did not end well"
        out.print(
            f"attempt {number}: {attempt.ranks} ranks, from step {attempt.first_step:,}: "
            f"{attempt.steps:,} steps{again}; {end}"
        )
