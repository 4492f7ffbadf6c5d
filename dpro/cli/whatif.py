"""`dpro whatif`: predict the step time under edits, or rank the edits worth trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dpro.cli.analysis import analyse, layout_option, network_option, run_argument, steps_option
from dpro.cli.completion import edits as complete_edits
from dpro.cli.output import (
    console,
    json_option,
    print_end,
    print_json,
    print_lines,
    print_selection,
    progress,
)
from dpro.errors import UsageError
from dpro.plugins import hooks_of
from dpro.units import format_bytes
from dpro.words import capitalised, one_line

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.answers.whatif import TrustedDocument, WhatIf, WhatIfDocument
    from dpro.replay.whatif.predict import Prediction, Refusal
    from dpro.replay.whatif.search import Interaction
    from dpro.selection import Ranges, Selection
    from dpro.store import Run
    from dpro.verdict.advice import Advice

ROWS = 12  # largest number of predictions listed in each block
_INDENT = 9 * " "  # before edits
MAX_CHANGES = 8  # changes listed without `--all`


class Proposal(NamedTuple):
    """Edits that options of an extension request, in place of a search.

    Attributes:
        edits: edits to predict together, in the syntax of `--edit`.
        lines: lines to print after the prediction.
        document: function from the document of the prediction to that of `--json`.
        trial: command that tries the edits; empty if none can, None for the default command.
    """

    edits: Sequence[str]
    lines: Sequence[str]
    document: Callable[[WhatIfDocument], WhatIfDocument]
    trial: str | None = None


class _WithEdits(click.Command):
    """A command whose help ends with examples of edits, which are imported only then."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List one example of each edit."""
        from dpro.replay.whatif.registry import help_rows

        with formatter.section("Edits, by example (all their keys: --list)"):
            formatter.write_dl(help_rows(), col_max=40)


def _list(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from dpro.replay.whatif.registry import list_text

        click.echo(list_text())
        ctx.exit()


@click.command(cls=_WithEdits, context_settings={"allow_extra_args": True})
@run_argument
@layout_option
@click.option(
    "-e",
    "--edit",
    "edits",
    multiple=True,
    metavar="EDIT",
    shell_complete=complete_edits,
    help="Edit to predict; several are applied together, in order. Without --edit, dpro ranks likely edits.",
)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="List all edits and their keys.",
)
@click.option(
    "--sensitivity",
    "with_curves",
    is_flag=True,
    help="Show how much faster network, kernels, host or input must be before something else is the limit.",
)
@click.option(
    "--pareto",
    "with_memory",
    is_flag=True,
    help="Trade time for memory: larger batches, activation recomputation (needs `dpro record --memory`).",
)
@click.option(
    "--budget",
    type=click.IntRange(1, 1_000_000),
    help="Maximum number of replays in a search, without --edit.  [default: 100]",
)
@click.option(
    "--all", "in_full", is_flag=True, help="List all predictions, not only the changes you can make."
)
@click.option(
    "--bounds", is_flag=True, help="List upper bounds and hypothetical changes, which are not advice."
)
@click.option("--why-not", is_flag=True, help="List what the run cannot answer, grouped by what to record.")
@network_option
@click.option(
    "--device-table",
    "device_tables",
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help="Matmul times on a device: a table (docs/devices.md), or a run recorded there with --shapes.",
)
@steps_option
@click.option("--ranks", hidden=True)
@json_option
@click.pass_context
def whatif(
    ctx: click.Context,
    /,
    run: str,
    edits: tuple[str, ...],
    with_curves: bool,
    with_memory: bool,
    budget: int | None,
    in_full: bool,
    bounds: bool,
    why_not: bool,
    network_table: str | None,
    device_tables: tuple[str, ...],
    steps: Ranges,
    ranks: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict how a change would affect throughput and mean step time, with intervals.

    \b
    dpro whatif RUN                           what limits it, what would help
    dpro whatif RUN --all                     all predictions
    dpro whatif RUN --sensitivity             is a faster network worth it?
    dpro whatif RUN --pareto                  time against memory
    dpro whatif RUN --edit heal:rank=1 --edit network:bandwidth=2
    dpro whatif RUN --edit 'scale:name=*gemm*,kind=kernel,factor=0.5'
    dpro whatif RUN --edit heal:rank=1 --steps 5-7    only these steps

    Names are shell patterns; all conditions must hold; put a value that contains a comma in double quotes.
    --steps still changes and replays the whole job, but reports step times and the interval of these steps
    only. --ranks is refused, since a step ends with its last rank; edits such as heal:rank=1 change one rank.
    A question that the run cannot answer is refused, with the reason and what to record instead. The exit
    code is 1 if every question was refused.
    """
    from dpro.replay.whatif.registry import parse_edit
    from dpro.selection import Selection

    parsed = [parse_edit(text) for text in edits]
    selection = Selection(steps)
    _refuse_misuse(ctx, options)
    if with_curves:
        _sensitivity(analyse(run, network_table, device_tables), as_json)
        return
    if with_memory:
        _pareto(analyse(run, network_table, device_tables), as_json)
        return
    from dpro.analysis.answers.whatif import what_if
    from dpro.verdict.verdict import with_account

    analysis = analyse(run, network_table, device_tables)
    proposal = _proposal(analysis, ctx.params)
    if proposal is not None:
        parsed = [*map(parse_edit, proposal.edits), *parsed]
        budget = None
    with progress("Trying edits") as report:
        answer = what_if(analysis, parsed, budget, progress=report, selection=selection)
    refused_alone = parsed and answer.document.refused and not answer.predictions
    if as_json:
        document = answer.document if proposal is None else proposal.document(answer.document)
        print_json(with_account(document, analysis))
    elif refused_alone:
        for line in refused_in_words(answer.document.refused):
            console().print(line)
    else:
        asked = bool(parsed)
        listed = Listed(asked, in_full or asked, in_full or asked or bounds, in_full or asked or why_not)
        _print_whole(answer, analysis, selection, listed, proposal)
    if answer.document.refused and not answer.predictions:
        ctx.exit(1)


def _refuse_misuse(ctx: click.Context, options: Mapping[str, Any]) -> None:
    """Raise if options cannot be combined.

    Args:
        options: options of extensions, by name.

    Raises:
        UsageError: two options exclude each other, or an argument is left over.
    """
    given, run = ctx.params, ctx.params["run"]
    if ctx.args:
        meant = " ".join(f"--edit {text}" for text in ctx.args)
        raise UsageError(f"{ctx.args[0]}: put edits after --edit: dpro whatif {run} {meant}")
    if given["ranks"]:
        raise UsageError(
            "--ranks: ranks wait for each other, so a predicted step covers the whole job; "
            "to change the work of one rank, use an edit such as --edit heal:rank=1"
        )
    with_curves, with_memory = given["with_curves"], given["with_memory"]
    if given["steps"] and (with_curves or with_memory):
        raise UsageError("--sensitivity and --pareto use all steps: omit --steps")
    unused = next((option for option, value in options.items() if value), "")
    if (with_curves or with_memory) and unused:
        option = f"--{unused.replace('_', '-')}"
        raise UsageError(f"{option}: --sensitivity and --pareto have their own edits: omit one of them")
    has_edits, has_budget = bool(given["edits"]), given["budget"] is not None
    if with_curves and has_edits:
        raise UsageError("--sensitivity uses the unchanged run: omit --edit")
    if with_curves and has_budget:
        raise UsageError("--budget limits the search, and --sensitivity does no search: omit --budget")
    if with_memory and (has_edits or has_budget):
        raise UsageError("--pareto has its own edits: omit --edit and --budget")
    if has_edits and has_budget:
        raise UsageError("--budget limits the search, which --edit turns off: omit one of them")


def _proposal(analysis: Analysis, given: Mapping[str, Any]) -> Proposal | None:
    """Return the edits that options of an extension request; None without such options."""
    return next(filter(None, (ask(analysis, given) for ask in hooks_of("whatif"))), None)


def _sensitivity(analysis: Analysis, as_json: bool) -> None:
    from dpro.analysis.answers.whatif import sensitivity_of
    from dpro.replay.whatif.sensitivity import curve_sentence

    document = sensitivity_of(analysis)
    if as_json:
        print_json(document)
        return
    out = console()
    _print_trust(document)
    for curve in document.sensitivity:
        out.print(curve_sentence(curve))
        if curve.then is None:
            continue
        steps = zip(curve.factors, curve.step_ms)
        out.print("  " + "  ".join(f"x{factor:g} {step:.2f} ms" for factor, step in steps))


def _pareto(analysis: Analysis, as_json: bool) -> None:
    from dpro.analysis.answers.whatif import pareto_of
    from dpro.replay.whatif.registry import parse_edit

    document = pareto_of(analysis)
    if as_json:
        print_json(document)
        return
    out = console()
    _print_trust(document)
    out.print(
        "Throughput, time for a batch of today's size, and memory of a step (*: no other is better at both)"
    )
    for point in document.pareto:
        what = " and ".join(parse_edit(edit).describe() for edit in point.edits) or "as it is"
        room = "" if point.fits is not False else ", which does not fit into memory"
        memory = format_bytes(point.within_step_bytes)
        speedup = "not known" if point.speedup is None else f"x{point.speedup:.2f}"
        time = f"{speedup} {point.ms_per_batch:10.2f} ms"
        out.print(f"{'*' if point.best else ' '} {time} {memory:>12}  {what}{room}")


def _print_trust(document: TrustedDocument | WhatIfDocument) -> None:
    out = console()
    out.print(document.trust.verdict)
    for reason in (*document.reasons, *document.assumed):
        out.print(f"  - {reason}")


class Listed(NamedTuple):
    """What the answer lists.

    Attributes:
        asked: whether the user gave edits, rather than searching for them.
        changes: whether to list all changes, rather than `MAX_CHANGES`.
        bounds: whether to list bounds.
        refused: whether to list refused edits.
    """

    asked: bool
    changes: bool
    bounds: bool
    refused: bool


def _print_whole(
    answer: WhatIf, analysis: Analysis, selection: Selection, listed: Listed, proposal: Proposal | None
) -> None:
    """Print the verdict or the end of the job, then the answer; after a hang, only that to given edits."""
    from dpro.analysis.summary import heals_as_advised
    from dpro.verdict.verdict import advised_predictions, explain
    from dpro.verdict.words import lines_of

    out = console()
    explains = not listed.asked and not selection
    if explains:
        print_lines(lines_of(explain(analysis)))  # which begin with how the job ended
    else:
        print_end(analysis.end)
    print_selection(selection)
    if analysis.end.hung and not listed.asked:
        out.print("End the hang first: without --edit, nothing is predicted for a job that hung.")
        return
    if analysis.end.hung:
        out.print("The job hung: these predictions are for the steps before that, and none fixes the hang.")
    healed = [row for row in answer.predictions if not row.is_advice]
    tries = explain(analysis).advice if explains or healed else []
    if explains:
        advised = advised_predictions(analysis)
    else:
        advised = [row for row in healed if heals_as_advised(row, [advice.edit for advice in tries])]
    trial = None if proposal is None else proposal.trial
    _print(answer, analysis.run, listed, explains, advised, tries, trial)
    if explains and (line := unpredicted_in_words(tries)):
        out.print(line)
    for line in () if proposal is None else proposal.lines:
        out.print(line)


def _print(
    answer: WhatIf,
    run: Run,
    listed: Listed,
    explained: bool,
    advised: Sequence[Prediction],
    tries: Sequence[Advice],
    trial: str | None,
) -> None:
    """Print trust, the unchanged step, predictions in blocks, and what was not answered.

    Args:
        explained: whether the verdict is already on the screen, with TRY and the cost of recording.
        advised: predictions of what TRY advises, always listed, and first.
        tries: what TRY advises, as far as it is needed.
        trial: command that tries the edits; empty if none can, None for the default command.
    """
    from dpro.analysis.step_time import usual_step_in_words
    from dpro.analysis.summary import WORTH_SHOWING
    from dpro.analysis.unanswered import pretended_lines
    from dpro.replay.fidelity.accuracy import windows_mislead
    from dpro.replay.steps import steps_of

    out, document = console(), answer.document
    _print_trust(document)
    base, measured = document.baseline_ms, document.measured_ms
    for line in pretended_lines(run.manifest, document.pretended):
        out.print(line)
    if document.of_operations:
        out.print(f"The mean step of the whole operations takes {base:.2f} ms (measured {measured:.2f} ms).")
    elif not run.manifest.is_pretended:
        out.print(usual_step_in_words(base, measured, windows_mislead(steps_of(run))))
    for line in () if explained else document.recording:
        out.print(f"{capitalised(line)}.")
    others = [row for row in answer.predictions if all(row.edits != one.edits for one in advised)]
    worth = [row for row in others if listed.asked or row.speedup >= WORTH_SHOWING]
    changes = [row for row in worth if row.is_advice]
    if not listed.changes:
        changes = changes[: max(MAX_CHANGES - len(advised), 0)]
    bounds = [row for row in worth if listed.bounds and not row.is_advice]
    shown = sorted(
        [*advised, *changes, *bounds], key=lambda row: _place_of(row, document.answerable, advised)
    )
    _print_blocks(shown, document.answerable, advised, AS_EXPLAINED if listed.asked else None)
    left = len(others) - len(worth) + len(document.little)
    if left and listed.changes:
        out.print(f"{left} more would change little or nothing (--json has them)")
    to_make = [row for row in shown if row.is_advice or row in advised]
    for note in shown[0].notes if listed.asked and shown and not to_make else ():
        out.print(f"  - {note}")
    for line in how_in_words(to_make, tries, explained):
        out.print(line)
    sure = [row for row in to_make if listed.asked or row in advised or row.effect == "faster"]
    if line := measuring_in_words(sure, to_make, run, trial):
        out.print(line)
    _print_left(document, listed, hidden=len(worth) + len(advised) - len(shown))


def _print_left(document: WhatIfDocument, listed: Listed, hidden: int) -> None:
    """Print what is not shown above, what pairs of changes save, and why others were not answered.

    Args:
        hidden: number of predictions that are not shown.
    """
    out, refused = console(), len(document.refused)
    more = [f"{hidden} more (--all)"] if hidden and not listed.changes else []
    more += [f"{refused} not answerable (--why-not)"] if refused and not listed.refused else []
    if more:
        out.print("; ".join(more))
    pairs = document.interactions if listed.changes else []
    for line in (*map(_together_in_words, pairs), *document.widened):
        out.print(line)
    if document.untried:
        out.print(f"not tried, since the budget was used up: {', '.join(document.untried)}")
    for line in refused_in_words(document.refused) if listed.refused else ():
        out.print(line)


def _together_in_words(pair: Interaction) -> str:
    """Return how much two changes save together, beside the sum of what each saves."""
    how = "more" if pair.together_ms > pair.apart_ms else "less"
    saved = f"{pair.together_ms:.2f} ms) than in sum ({pair.apart_ms:.2f} ms"
    return f"  {' and '.join(pair.edits)} save {how} together ({saved})"


def unpredicted_in_words(tries: Sequence[Advice]) -> str:
    """Return which gains under TRY no edit predicts, in a line; empty if edits predict all."""
    without = [
        str(number)
        for number, advice in enumerate(tries, 1)
        if not advice.edit and advice.gain_low is not None
    ]
    if len(without) == 1:
        return f"The gain of TRY {without[0]} is estimated from the run; no single edit predicts it."
    named = " and ".join(without)
    return (
        f"The gains of TRY {named} are estimated from the run; no single edit predicts them." if named else ""
    )


def refused_in_words(refused: Sequence[Refusal]) -> list[str]:
    """Return one line per reason for which edits were not answered."""
    edits: dict[str, list[str]] = {}
    for refusal in refused:
        edits.setdefault(refusal.reason, []).append(str(refusal.edit))
    return [one_line(f"not answered: {', '.join(names)}: {reason}") for reason, names in edits.items()]


def _place_of(row: Prediction, answerable: bool, advised: Sequence[Prediction]) -> tuple[int, bool, float]:
    """Return the place of a prediction in the list: its group, whether training changes, its gain, negated.

    What TRY advises stays in the order of TRY, and bounds change no training.
    """
    from dpro.analysis.summary import HEADINGS, group_of

    group = group_of(row, answerable, row in advised)
    if group == "advised":
        return list(HEADINGS).index(group), False, 0.0
    return list(HEADINGS).index(group), bool(row.training) and row.is_advice, -row.speedup


AS_EXPLAINED = "Advised by `dpro explain`"


def _print_blocks(
    shown: Sequence[Prediction],
    answerable: bool,
    advised: Sequence[Prediction],
    as_advised: str | None = None,
) -> None:
    """Print predictions in blocks by certainty, in the given order.

    Args:
        answerable: whether the replay fits; without that, no effect is certain.
        advised: predictions of what TRY advises.
        as_advised: heading of these where TRY is not on the screen; else None.
    """
    from itertools import groupby

    from dpro.analysis.summary import HEADINGS, effort_in_words, gain_in_words, step_in_words

    out = console()
    if shown:
        out.print("Throughput (samples per second) and the step:")
    headings = list((HEADINGS | ({"advised": as_advised} if as_advised else {})).values())
    for (place, alters), rows in groupby(shown, lambda row: _place_of(row, answerable, advised)[:2]):
        out.print(f"{headings[place]}{', by changing the training' if alters else ''}:")
        for row in list(rows)[:ROWS]:
            out.print(f"  {gain_in_words(row)}  {step_in_words(row)}: {row.what()}")
            edits = " ".join(f"--edit '{edit}'" for edit in row.edits)
            block = f"({effort_in_words(row)})"
            fits = not out.is_terminal or len(_INDENT) + len(edits) + 2 + len(block) <= out.width
            out.print(f"{_INDENT}{edits}{'  ' if fits else chr(10) + _INDENT}{block}")


def how_in_words(shown: Sequence[Prediction], tries: Sequence[Advice], explained: bool) -> list[str]:
    """Return how to make the first change, and the notes on it; nothing if no edit predicts TRY 1.

    Args:
        shown: predictions of changes, those of TRY first.
        tries: what TRY advises. It says better than an edit how to end a fault, as it has the finding.
        explained: whether TRY is on the screen, so that the first change is that of TRY 1.
    """
    of_try = explained and bool(tries)
    if not shown or (of_try and not tries[0].edit):
        return []
    first = shown[0]
    by_edit = {advice.edit: advice for advice in tries}
    advice = by_edit.get(" ".join(map(str, first.edits)))
    how = first.how()
    if advice is not None and not first.is_advice:
        how = f"{advice.do} (assumes that {advice.assumes})"
    label = "How to do TRY 1" if of_try else f"How to make the {'first ' * (len(shown) > 1)}change"
    return [*(f"  - {note}" for note in (*first.notes, *first.training)), f"{label}: {how}"]


def measuring_in_words(
    sure: Sequence[Prediction], shown: Sequence[Prediction], run: Run, trial: str | None = None
) -> str:
    """Return how to measure the first change that can be tried; empty if none can.

    Args:
        sure: those of the predictions shown that are worth a measurement; changes of the training come last.
        trial: command that tries the edits; empty if none can, None for the default command.
    """
    if trial is not None:
        return f"To measure it: {trial}" if trial else ""
    for one in [*sure[:1], *sorted(sure[1:], key=lambda one: bool(one.training))]:
        if line := next(filter(None, (say([one], run) for say in hooks_of("tried"))), ""):
            return f"To measure {'it' if one is shown[0] else 'one of them'}: {line}"
    return ""
