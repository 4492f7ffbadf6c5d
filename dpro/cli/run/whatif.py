"""`dpro whatif`: predict the step time under edits, or rank the edits worth trying."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.analysis import analyse, run_argument
from dpro.cli.completion import edits as complete_edits
from dpro.cli.output import console, json_option, print_json, progress
from dpro.cli.run.end import end_keys, print_end
from dpro.cli.run.replay import trust_document
from dpro.errors import UsageError
from dpro.units import format_bytes, ms

if TYPE_CHECKING:
    from rich.console import Console

    from dpro.analysis.analysis import Analysis
    from dpro.replay.fidelity.accuracy import Trust
    from dpro.replay.whatif.pareto import Point
    from dpro.replay.whatif.predict import Prediction, Refusal
    from dpro.replay.whatif.search import Interaction
    from dpro.replay.whatif.sensitivity import Curve

ROWS = 12
WORTH_SHOWING = 1.005  # of what was searched: less is nothing, and the JSON has it


class _WithEdits(click.Command):
    """A command whose help ends with the edits there are; they are loaded only to be shown."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List one example of each edit."""
        from dpro.replay.whatif.listing import help_rows

        with formatter.section("Edits, by example (all their keys: --list)"):
            formatter.write_dl(help_rows(), col_max=40)


def _list(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from dpro.replay.whatif.listing import list_text

        click.echo(list_text())
        ctx.exit()


@click.command(cls=_WithEdits)
@run_argument
@click.option(
    "-e",
    "--edit",
    "edits",
    multiple=True,
    metavar="EDIT",
    shell_complete=complete_edits,
    help="An edit to predict; several apply together, in order. Without any, the likely ones are ranked.",
)
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List all edits and keys."
)
@click.option(
    "--sensitivity",
    "with_curves",
    is_flag=True,
    help="How much faster network, kernels, host and input have to be until something else is the limit.",
)
@click.option(
    "--pareto",
    "with_memory",
    is_flag=True,
    help="Time against memory, of larger batches and recomputed activations (needs `dpro record --memory`).",
)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    help="How many predictions to make at most where no edit is given.  [default: 100]",
)
@json_option
@click.pass_context
def whatif(
    ctx: click.Context,
    run: str,
    edits: tuple[str, ...],
    with_curves: bool,
    with_memory: bool,
    budget: int | None,
    as_json: bool,
) -> None:
    """Predict what a change would do to the mean step time, with an interval.

    \b
    dpro whatif RUN                             what would help, alone and together
    dpro whatif RUN --sensitivity               is a faster network worth it?
    dpro whatif RUN --pareto                    time against memory
    dpro whatif RUN --edit heal:rank=1 --edit network:bandwidth=2
    dpro whatif RUN --edit 'scale:name=*gemm*,kind=kernel,factor=0.5'

    Names are shell patterns; conditions hold together; a value that holds a comma goes in double quotes.
    What the run cannot answer is refused, with the reason and what to record instead. Exits with 1 where
    everything that was asked for was refused.
    """
    from dpro.replay.whatif.parse import parse_edit

    parsed = [parse_edit(text) for text in edits]
    if with_curves:
        if parsed:
            raise UsageError("--sensitivity looks at the run as it is: give no --edit with it")
        if budget is not None:
            raise UsageError("--budget is for the search, which --sensitivity does not make")
        _sensitivity(run, as_json)
        return
    if with_memory:
        if parsed or budget is not None:
            raise UsageError("--pareto has edits of its own: give no --edit and no --budget with it")
        _pareto(run, as_json)
        return
    if parsed and budget is not None:
        raise UsageError("--budget is for the search: give no --edit with it")
    analysis = analyse(run)
    document, predictions, refused = whatif_document(analysis, parsed, budget)
    if as_json:
        print_json(document)
    else:
        print_end(analysis.end)
        _print(document, predictions, refused, searched=not parsed)
    if refused and not predictions:
        ctx.exit(1)


def _sensitivity(run: str, as_json: bool) -> None:
    from dpro.replay.whatif.sensitivity import in_words, sensitivity

    analysis = analyse(run)
    curves = sensitivity(analysis.built.predictive)
    document = {"run": analysis.run.label, **_trust_document(analysis.trust)}
    if as_json:
        print_json({**document, "sensitivity": [_curve_document(curve) for curve in curves]})
        return
    out = console()
    _print_trust(out, document)
    for curve in curves:
        out.print(in_words(curve))
        if curve.break_even is None:
            continue
        steps = zip(curve.factors, curve.step_ns)
        out.print("  " + "  ".join(f"x{factor:g} {ms(step):.2f} ms" for factor, step in steps))


def _pareto(run: str, as_json: bool) -> None:
    from dpro.replay.whatif.pareto import pareto

    analysis = analyse(run)
    points = pareto(analysis.built.predictive, analysis.trust)
    document = {"run": analysis.run.label, **_trust_document(analysis.trust)}
    if as_json:
        print_json({**document, "pareto": [_point_document(point) for point in points]})
        return
    out = console()
    _print_trust(out, document)
    out.print("Time for a batch of today's size, and what a step allocates; * where nothing else beats both.")
    for point in points:
        what = " and ".join(edit.describe() for edit in point.edits) or "as it is"
        room = "" if point.fits is not False else ", for which there is no room"
        memory = format_bytes(point.within_step_bytes)
        out.print(
            f"{'*' if point.best else ' '} {ms(point.ns_per_batch):10.2f} ms {memory:>12}  {what}{room}"
        )


def _point_document(point: Point) -> dict[str, Any]:
    return {
        "edits": [str(edit) for edit in point.edits],
        "ms_per_batch": ms(point.ns_per_batch),
        "within_step_bytes": point.within_step_bytes,
        "fits": point.fits,
        "best": point.best,
    }


def _trust_document(trust: Trust) -> dict[str, Any]:
    """How far to believe what follows from the replay, and why."""
    return {
        **trust_document(trust),
        "reasons": list(trust.reasons),
        "assumed": list(trust.assumed),
    }


def _print_trust(out: Console, document: dict[str, Any]) -> None:
    out.print(document["trust"]["verdict"])
    for reason in (*document["reasons"], *document["assumed"]):
        out.print(f"  - {reason}")


def _curve_document(curve: Curve) -> dict[str, Any]:
    return {
        "part": curve.part,
        "base_ms": ms(curve.base_ns),
        "factors": list(curve.factors),
        "step_ms": [ms(step) for step in curve.step_ns],
        "break_even": curve.break_even,
        "then": curve.then or None,
    }


def whatif_document(
    analysis: Analysis, edits: list[Any], budget: int | None = None
) -> tuple[dict[str, Any], list[Prediction], list[Refusal]]:
    """Predict the edits together, or search where there are none.

    Raises:
        Unanswerable: the run holds no whole step.
    """
    from dpro.errors import Unanswerable
    from dpro.replay.timeline import durations_of
    from dpro.replay.whatif.predict import Refusal, predict
    from dpro.replay.whatif.search import BUDGET, Found, explore
    from dpro.trial.calibrate import as_tried

    graph, trust = analysis.built.predictive, analysis.trust
    baseline = analysis.baseline
    if edits:
        try:
            found = Found([predict(graph, baseline, edits, trust)], [], [], [])
        except Unanswerable as error:
            found = Found([], [Refusal(" + ".join(map(str, edits)), str(error))], [], [])
    else:
        with progress("Trying edits") as tell:
            found = explore(graph, trust, BUDGET if budget is None else budget, tell, analysis.suspects)
    predictions, widened = as_tried(found.predictions)
    document = {
        "run": analysis.run.label,
        "baseline_ms": ms(float(durations_of(baseline)["duration_ns"].mean() or 0)),  # type: ignore[arg-type]
        "measured_ms": ms(float(trust.steps["measured_ns"].mean() or 0)),  # type: ignore[arg-type]
        "other_steps_ms": _steps_outside_windows(analysis),
        **_trust_document(trust),
        "predictions": [prediction_document(prediction) for prediction in predictions],
        "widened": widened,
        "interactions": [_interaction_document(interaction) for interaction in found.interactions],
        "untried": [str(edit) for edit in found.untried],
        "refused": [{"edit": refusal.edit, "reason": refusal.reason} for refusal in found.refused],
        **end_keys(analysis),
    }
    return document, predictions, found.refused


def _interaction_document(interaction: Interaction) -> dict[str, Any]:
    return {
        "edits": [str(edit) for edit in interaction.edits],
        "together_ms": ms(interaction.together_ns),
        "apart_ms": ms(interaction.apart_ns),
    }


def _how_to_try(predictions: list[Prediction]) -> str:
    """The command that makes the changes of the first prediction to the job; empty where that cannot be."""
    from dpro.trial.changes import kind_of_edit

    texts = [str(edit) for prediction in predictions[:1] for edit in prediction.edits]
    return f"dpro try {' '.join(texts)} -- COMMAND" if texts and all(map(kind_of_edit, texts)) else ""


def _steps_outside_windows(analysis: Analysis) -> float | None:
    """The typical step where no deep window slowed it down, ms; None where there are no such steps."""
    from dpro.replay.steps.typical import pace_of

    pace = pace_of(analysis.steps)
    return None if pace is None or pace.recorded else ms(pace.typical_ns)


def prediction_document(prediction: Prediction) -> dict[str, Any]:
    """One prediction as JSON."""
    return {
        "edits": [str(edit) for edit in prediction.edits],
        "predicted_ms": ms(prediction.predicted_ns),
        "speedup": prediction.speedup if math.isfinite(prediction.speedup) else None,
        "proven": prediction.proven,
        "block": prediction.block,
        "effect": prediction.effect,
        "low": ms(prediction.low_ns),
        "high": ms(prediction.high_ns),
        "how": prediction.how(),
        "notes": list(prediction.notes),
    }


def _print_blocks(out: Console, shown: list[Prediction]) -> None:
    """Predictions under what they rest on; of each block the largest gains."""
    from itertools import groupby

    from dpro.replay.whatif.predict import BLOCKS

    for block, rows in groupby(shown, lambda row: row.block):
        out.print(f"{BLOCKS[block].capitalize()}:")
        for row in list(rows)[:ROWS]:
            interval = f"({ms(row.low_ns):.2f} to {ms(row.high_ns):.2f})"
            unclear = "; the interval holds the step as it is" if row.effect == "unclear" else ""
            out.print(
                f"  x{row.speedup:.2f}  {ms(row.predicted_ns):.2f} ms {interval} if {row.what()}{unclear}"
            )
            out.print("         " + " ".join(f"--edit '{edit}'" for edit in row.edits))


def _print(
    document: dict[str, Any], predictions: list[Prediction], refused: list[Refusal], searched: bool
) -> None:
    out = console()
    _print_trust(out, document)
    base, measured = document["baseline_ms"], document["measured_ms"]
    out.print(f"The mean step in deep windows takes {base:.2f} ms (replayed; measured {measured:.2f} ms).")
    other = document["other_steps_ms"]
    if other is not None:
        out.print(f"Recording in depth slows steps down: the typical step outside takes {other:.2f} ms.")
    shown = [row for row in predictions if not searched or row.speedup >= WORTH_SHOWING]
    _print_blocks(out, shown)
    if len(shown) < len(predictions):
        out.print(f"{len(predictions) - len(shown)} more would change little or nothing (--json has them)")
    for note in shown[0].notes if shown else ():
        out.print(f"  - {note}")
    if shown:
        out.print(f"How, for the first: {shown[0].how()}")
    trial = _how_to_try(shown)
    if trial:
        out.print(f"To see what it really does: {trial}")
    for pair in document["interactions"]:
        more = "more" if pair["together_ms"] > pair["apart_ms"] else "less"
        told = f"{pair['together_ms']:.2f} ms) than in sum ({pair['apart_ms']:.2f} ms"
        out.print(f"  {' and '.join(pair['edits'])} save {more} together ({told})")
    for line in document["widened"]:
        out.print(line)
    if document["untried"]:
        out.print(f"not tried, for want of budget: {', '.join(document['untried'])}")
    for refusal in refused:
        out.print(f"not answered: {refusal.edit}: {refusal.reason}")
