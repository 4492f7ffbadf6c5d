"""`dpro try`: predict a change, apply it to the real job, measure it, and log the result for `dpro ledger`.

Takes changes and a command; records the job unchanged and changed, alternating; prints predicted and measured
step time, each with an interval, and adds an entry to the ledger.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.completion import matching
from dpro.cli.options import MAX_STEPS, MAX_WINDOW_STEPS
from dpro.cli.output import console, json_option, print_json, stderr_console, warn
from dpro.errors import DproError, InputError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from dpro.arrays import Floats
    from dpro.documents import Document
    from dpro.extensions.trial.changes import Change
    from dpro.extensions.trial.documents import TimesDocument, TryDocument
    from dpro.extensions.trial.ledger import LedgerEntry, Ratio
    from dpro.extensions.trial.measure import Decision, MeasuredChange
    from dpro.extensions.trial.probes import ProbeDocument
    from dpro.replay.whatif.predict import Prediction
    from dpro.store import Run


def changes(_context: click.Context, _argument: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the word being typed with examples of changes."""
    from dpro.extensions.trial.changes import CHANGES

    return matching([(row.example, row.summary) for row in CHANGES.values()], typed)


class _WithJob(click.Command):
    """A command that takes the words after `--` as the job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split off the job, so that the other words are changes."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["job"] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show the job in the usage line."""
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the available changes."""
        from dpro.extensions.trial.changes import CHANGES, PROBE_SUMMARIES, VARIABLE_EXAMPLE, VARIABLE_SUMMARY

        rows = [(row.example, row.summary) for row in CHANGES.values()] + [*PROBE_SUMMARIES.items()]
        with formatter.section("Changes, by example"):
            formatter.write_dl([*rows, (VARIABLE_EXAMPLE, VARIABLE_SUMMARY)], col_max=40)


@dataclass(frozen=True)
class TrialPlan:
    """What to try, and how.

    Attributes:
        changes: applied to the job together.
        options: of `dpro record`, for all recordings.
        repeats: pairs of recordings; with `until_decided`, the maximum.
        until_decided: whether to stop once the result is decided, or would need too many pairs.
        skip: steps at the beginning of each recording that are not measured.
        baseline: an earlier run of the unchanged job, used as its first recording; None to record one.
        show: whether to show the job's output.
    """

    changes: tuple[Change, ...]
    command: tuple[str, ...]
    folder: Path
    options: tuple[str, ...]
    repeats: int
    until_decided: bool
    skip: int
    baseline: Path | None
    show: bool

    @property
    def uneven(self) -> bool:
        """Whether only some steps are changed."""
        return any(change.uneven for change in self.changes)

    @property
    def samples(self) -> float:
        """Samples of a step of the changed job divided by those of the unchanged job."""
        return math.prod(change.samples for change in self.changes)


@click.command("try", cls=_WithJob)
@click.argument("edits", nargs=-1, metavar="[EDIT...]", shell_complete=changes)
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
    help="Apply a tensor plan, and the edits that belong to it.",
)  # fmt: skip
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the runs.  [default: dpro-try-YYYYmmdd-HHMMSS]",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, metavar="N",
    help="Number of recordings of the unchanged job and of the changed job, alternating.",
)  # fmt: skip
@click.option(
    "--pairs", type=click.IntRange(2, 1000), metavar="N",
    help="Instead of --repeats: record up to N pairs, and stop once the result is decided or would need "
    "more pairs.",
)  # fmt: skip
@click.option(
    "--baseline", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="RUN",
    help="Existing recording of the unchanged job, to predict from; it replaces the first recording.",
)  # fmt: skip
@click.option(
    "--skip-steps", "skip", type=click.IntRange(5, MAX_STEPS), default=10, show_default=True, metavar="S",
    help="Steps at the beginning to exclude from the measurement.",
)  # fmt: skip
@click.option(
    "--window-steps", type=click.IntRange(2, MAX_WINDOW_STEPS), default=5, show_default=True, metavar="K",
    help="Steps per deep window; predictions use these steps.",
)  # fmt: skip
@click.option(
    "--every",
    type=click.IntRange(2, MAX_STEPS),
    metavar="N",
    help="Start a deep window every N steps, as in `dpro record`.",
)
@click.option("-v", "--verbose", "show", is_flag=True, help="Show the job's output on stderr.")
@json_option
@click.pass_context
def try_(
    ctx: click.Context, /, edits: tuple[str, ...], plan_file: Path | None, folder: Path | None,
    window_steps: int, every: int | None, as_json: bool, repeats: int, pairs: int | None, **rest: Any,
) -> None:  # fmt: skip
    """Predict a change, apply it to the real job, measure it, and report the prediction error.

    \b
    dpro try bucket:mb=1 -- torchrun --nproc-per-node 2 train.py
    dpro try compress:to=bf16 --repeats 5 -- torchrun --nproc-per-node 8 train.py
    dpro try dataloader:workers=2,persistent_workers=true -- python train.py
    dpro try accumulate:steps=2 --pairs 10 -- torchrun --nproc-per-node 2 train.py
    dpro try compress:probe -- torchrun --nproc-per-node 2 train.py
    dpro try --plan plan.json -- torchrun --nproc-per-node 2 train.py

    The script stays unmodified: the recorder applies the changes. Several EDITs are applied together. If one
    cannot be applied on some rank, the trial fails and says why. The job runs twice per repeat, so keep it
    short, for example a hundred steps. Its output goes to files next to the runs.

    A single pair gives no verdict, nor does a machine that was busier on one side. Otherwise the result goes
    into the ledger (`dpro ledger`), which widens later intervals for this kind of change. The loss of the
    changed job is compared with the loss of the unchanged job.

    A probe changes nothing: it records the job once and measures the error that a change would introduce.
    An EDIT with a budget (compress:budget=0.05) probes first, and chooses a codec for each gradient bucket.
    """
    from dpro.extensions.trial.changes import changes_of_plan, ensure_compatible, parse_change
    from dpro.extensions.trial.probes import ensure_probes_alone, options_of

    command = tuple(ctx.meta["job"])
    edits += changes_of_plan(plan_file) if plan_file else ()
    if not edits:
        raise UsageError("no change given: dpro try EDIT... -- COMMAND..., or --plan FILE")
    if not command:
        raise UsageError("no command given: dpro try EDIT... -- COMMAND...")
    changes = tuple(map(parse_change, edits))
    ensure_compatible(changes, os.environ)
    ensure_probes_alone(changes, rest["skip"])
    folder = folder or Path(time.strftime("dpro-try-%Y%m%d-%H%M%S"))
    options = ["--window-steps", str(window_steps), "--skip", str(rest["skip"])]
    options += ["--every", str(every)] if every else []
    options += ["--modules"] * any(change.family == "modules.recompute" for change in changes)
    options += options_of(changes)
    rest |= {"repeats": pairs or repeats, "until_decided": pairs is not None}
    plan = TrialPlan(changes, command, _made(folder), tuple(options), **rest)
    if changes[0].is_probe:
        document: Document = probe(_record(plan, "probe", changes), changes, quiet=as_json)
    else:
        document = _try_changes(plan, quiet=as_json)
    if as_json:
        print_json(document)


def _made(folder: Path) -> Path:
    from dpro.collectors.launch.recording import ensure_mine

    try:
        folder.mkdir(parents=True, exist_ok=True)
        ensure_mine([folder.resolve()], within=False)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder}: cannot record there ({error.strerror})") from error
    if occupied:
        raise UsageError(f"{folder}: exists and is not empty; name another folder with -o, or remove it")
    return folder


def _try_changes(plan: TrialPlan, quiet: bool) -> TryDocument:
    """Try the changes, print progress and result, and add the result to the ledger."""
    from dpro.extensions.trial.documents import RunsOfTry
    from dpro.extensions.trial.ledger import append
    from dpro.extensions.trial.measure import CONFIDENCE, compare, confidence_of, step_times

    first = _first_baseline(plan)
    step_times(first, plan.skip)  # if there are too few, fail before the other runs
    plan = replace(plan, changes=with_choices(plan.changes, first))
    guess = _predict(plan.changes, first)
    if not quiet:
        _print_guess(plan, guess)
    begun = time.monotonic()
    baselines, changed, decision = _recorded(plan, first)
    clock, before, after = _times(plan, baselines, changed)
    confidence = confidence_of(plan.repeats) if plan.until_decided else CONFIDENCE
    measured = compare(before, after, plan.uneven, plan.samples, confidence)
    measured = replace(measured, withheld=_withheld(plan, baselines, changed, measured))
    ledger = "" if measured.withheld else str(append(_entry(plan, guess, measured, changed[0])))
    document = _document(
        plan, guess, measured, changed[0], clock=clock, ledger=ledger,
        runs=RunsOfTry(*([str(run.path) for run in side] for side in (baselines, changed))),
        stopped=_why_stopped(decision, len(changed), plan.repeats, time.monotonic() - begun),
        pairs_needed=decision.needed if decision else None,
        **_compare_training(plan, baselines, changed),
    )  # fmt: skip
    if not quiet:
        print_result(document)
    return document


def _withheld(
    plan: TrialPlan, baselines: Sequence[Run], changed: Sequence[Run], measured: MeasuredChange
) -> str:
    """Return why the recordings do not show the effect of the change; empty if they do."""
    from dpro.extensions.trial.measure import ONE_PAIR, core_use_of, load_differs

    if measured.num_pairs == 1:
        return ONE_PAIR
    if any(change.changes_threads for change in plan.changes):
        return ""
    before, after = ([core_use_of(run, plan.skip) for run in side] for side in (baselines, changed))
    return load_differs(before, after, measured)


def _first_baseline(plan: TrialPlan) -> Run:
    from dpro.cli.analysis import open_quietly
    from dpro.collectors.inside.environment import masked_command
    from dpro.extensions.trial.probes import changes_nothing, probes_of

    if plan.baseline is None:
        return _record(plan, "baseline-1", probes_of(plan.changes))
    run = open_quietly(plan.baseline)
    for made in run.manifest.applied:
        if not changes_nothing(made.edit):
            raise InputError(f"{plan.baseline}: its job was changed: {made.edit}")
    if run.manifest.command != masked_command(plan.command):
        warn(f"{plan.baseline} has another command: {' '.join(run.manifest.command)}")
    return run


def _recorded(plan: TrialPlan, first: Run) -> tuple[list[Run], list[Run], Decision | None]:
    """Record both sides in alternating order, so that drift affects both equally.

    Returns:
        Runs of the unchanged job, runs of the changed job, and the decision, None without `until_decided`.
    """
    from dpro.extensions.trial.measure import decide, ratios

    baselines, changed, decision = [first], [], None
    for number in range(1, plan.repeats + 1):
        ahead = number % 2 == 0  # the changed job goes first
        for side in ("changed", "baseline") if ahead else ("baseline", "changed"):
            if side == "changed":
                changed.append(_record(plan, f"changed-{number}", plan.changes))
            elif number > 1:
                baselines.append(_record(plan, f"baseline-{number}", ()))
        if plan.until_decided:
            _, before, after = _times(plan, baselines, changed)
            decision = decide((ratios(before, after, plan.uneven) / plan.samples).tolist(), plan.repeats)
            if decision.stop:
                break
    return baselines, changed, decision


def _times(
    plan: TrialPlan, baselines: Sequence[Run], changed: Sequence[Run]
) -> tuple[str, list[Floats], list[Floats]]:
    """Return the clock, and the step times of each run of both sides, in ns."""
    from dpro.extensions.trial.measure import times_by_one_clock

    clock, times = times_by_one_clock([*baselines, *changed], plan.skip)
    return clock, times[: len(baselines)], times[len(baselines) :]


def _why_stopped(decision: Decision | None, pairs: int, most: int, seconds: float) -> str:
    """Word why no more pairs were recorded, and how long a decision would take if there is none."""
    if decision is None:
        return ""
    if decision.decided:
        return f"decided after {pairs} of at most {most} pairs"
    minutes = decision.needed * seconds / pairs / 60
    return f"not decided after {pairs} pairs: about {decision.needed} would be needed, {minutes:.0f} minutes"


def _compare_training(plan: TrialPlan, baselines: Sequence[Run], changed: Sequence[Run]) -> dict[str, Any]:
    """Return `training`, which compares the losses of both sides, and why they are `not_compared`."""
    from dpro.extensions.trial.measure import NOT_SEEN, compare_losses, losses_of

    for change in plan.changes:
        if not change.keeps_loss:
            return {"training": None, "not_compared": f"{change.text} changes what the job learns"}
    passes = math.prod(change.passes for change in plan.changes)
    sides = ([losses for losses in map(losses_of, side) if losses.size] for side in (baselines, changed))
    before, after = sides
    if not before or len(after) < len(changed):
        return {"training": None, "not_compared": NOT_SEEN}
    compared = compare_losses(before, after, passes)
    if compared is None:
        return {"training": None, "not_compared": "too few passes"}
    return {"training": compared, "not_compared": ""}


def _record(plan: TrialPlan, name: str, changes: tuple[Change, ...]) -> Run:
    from dpro.extensions.trial.job import ensure_applied, record_job
    from dpro.opening import ensure_finished

    path = plan.folder / name
    times = "" if name == "probe" else f" of {plan.repeats}"
    with stderr_console().status(f"{name}{times} …"):
        record_job(path, plan.command, changes, plan.options, plan.show)
        ensure_finished(path)
    return ensure_applied(path, changes)


@dataclass(frozen=True)
class TriedPrediction:
    """Prediction of the changes, or why there is none.

    Attributes:
        prediction: its interval is widened by the ledger; None if there is none.
        baseline_ns: the replayed step that the prediction is relative to.
        reason: why there is no prediction; else empty.
    """

    prediction: Prediction | None = None
    baseline_ns: float = 0.0
    reason: str = ""


def _predict(changes: Sequence[Change], run: Run) -> TriedPrediction:
    """Predict the changes from a run of the unchanged job."""
    from dpro.analysis.predictions import predict_edits
    from dpro.cli.analysis import analyse
    from dpro.replay.whatif.registry import parse_edit

    try:
        edits = [parse_edit(edit) for change in changes for edit in change.edits]
        if not all(change.edits for change in changes):
            raise UsageError("no what-if edit predicts this")
    except UsageError:
        return TriedPrediction(reason="no what-if edit predicts this")
    try:
        analysis = analyse(str(run.path))
        prediction = predict_edits(analysis, edits)
    except DproError as error:  # the change can still be measured
        return TriedPrediction(reason=str(error))
    return TriedPrediction(prediction, analysis.baseline_ns)


def _ratio(prediction: Prediction | None, baseline_ns: float) -> Ratio | None:
    from dpro.extensions.trial.ledger import Ratio

    if prediction is None:
        return None
    times = (prediction.predicted_ns, prediction.low_ns, prediction.high_ns)
    return Ratio(*(float(time_ns / baseline_ns) for time_ns in times))


def _entry(plan: TrialPlan, guess: TriedPrediction, measured: MeasuredChange, changed: Run) -> LedgerEntry:
    from dpro.extensions.trial.ledger import LedgerEntry, Ratio, joint_kind
    from dpro.units import ms

    return LedgerEntry(
        kind=joint_kind(change.kind for change in plan.changes),
        edits=[change.text for change in plan.changes],
        predicted=_ratio(guess.prediction, guess.baseline_ns),
        measured=Ratio(measured.ratio, measured.low, measured.high),
        noise=measured.noise,
        baseline_ms=ms(measured.baseline_ns),
        pairs=measured.num_pairs,
        steps=measured.num_steps,
        world_size=changed.manifest.world_size,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        run=str(plan.folder.resolve()),
        gpus=changed.manifest.gpus,
        versions={name: changed.manifest.versions.get(name, "") for name in ("dpro", "torch")},
        command=changed.manifest.command,
    )


def _document(
    plan: TrialPlan, guess: TriedPrediction, measured: MeasuredChange, changed: Run, **places: Any
) -> TryDocument:
    """Return predictions and measurements as a document; `places` are the clock, the runs and the ledger."""
    from dpro.extensions.trial.documents import TryDocument, times_document
    from dpro.units import ms

    base_ms = ms(measured.baseline_ns)
    predicted = _ratio(guess.prediction, guess.baseline_ns)
    samples = plan.samples
    return TryDocument(
        edits=[change.text for change in plan.changes],
        applied=changed.manifest.applied,
        baseline_ms=base_ms,
        predicted=times_document(predicted, base_ms, samples) if predicted else None,
        not_predicted=guess.reason,
        calibration=guess.prediction.widened if guess.prediction else "",
        measured=times_document(measured, base_ms, samples),
        noise=measured.noise,
        pairs=measured.num_pairs,
        steps=measured.num_steps,
        samples=samples,
        verdict=measured.verdict,
        inside_interval=predicted.low <= measured.ratio <= predicted.high if predicted else None,
        **places,
    )


def _print_guess(plan: TrialPlan, guess: TriedPrediction) -> None:
    from dpro.units import ms

    out = console()
    out.print(" and ".join(change.text for change in plan.changes))
    prediction = guess.prediction
    if prediction is None:
        out.print(f"  not predicted: {guess.reason}")
    else:
        low, high = ms(prediction.low_ns), ms(prediction.high_ns)
        speedup = plan.samples * guess.baseline_ns / prediction.predicted_ns
        out.print(
            f"  predicted  x{speedup:.2f}, of steps recorded in depth: "
            f"{ms(prediction.predicted_ns):.2f} ms ({low:.2f} to {high:.2f}) instead of "
            f"{ms(guess.baseline_ns):.2f} ms"
        )
    if prediction and prediction.widened:
        out.print(f"             interval {prediction.widened}")


# Printing of the results of `dpro try`.


def print_result(document: TryDocument) -> None:
    """Print prediction and measurement."""
    from dpro.cli.info import changes_in_words

    out = console()
    times, predicted = document.measured, document.predicted
    for line in changes_in_words(document.applied):
        out.print(f"  applied    {line}")
    if predicted:
        out.print(f"  predicted  {_line(predicted)}")
    out.print(f"  measured   {_line(times)} instead of {document.baseline_ms:.2f} ms: {document.verdict}")
    pairs = f"{document.pairs} pair{'s' * (document.pairs > 1)}"
    timed = ", timed by the device" if document.clock == "device" else ""
    out.print(f"             {pairs} of recordings, {document.steps} steps each at least{timed}")
    if document.noise is not None:
        out.print(f"             noise: recordings of the unchanged job differ by {document.noise:.1%}")
    if document.samples != 1:
        out.print(f"             a step has {document.samples:g} times as many samples: x is per sample")
    if document.stopped:
        out.print(f"             {document.stopped}")
    out.print(f"  training   {_training_line(document)}")
    if predicted:
        off = predicted.ms / times.ms - 1
        inside = "inside" if document.inside_interval else "outside"
        out.print(f"  the prediction is off by {off:+.1%}; the measurement is {inside} its interval")


def _training_line(document: TryDocument) -> str:
    from dpro.extensions.trial.measure import NOT_SEEN

    learnt = document.training
    if learnt is None:
        seen = "loss was not seen: " if document.not_compared == NOT_SEEN else "losses are not compared: "
        return f"{seen}{document.not_compared}"
    base, changed = (
        f"{loss:.4g}" if loss is not None else "not finite" for loss in (learnt.base, learnt.changed)
    )
    spread = (
        "" if learnt.spread is None else f"; recordings of the job as it is differ by {learnt.spread:.2g}"
    )
    says = "training differs" if learnt.differs else "training is the same"
    return f"{says}: loss {changed} instead of {base}, over {learnt.passes} passes{spread}"


def _line(times: TimesDocument) -> str:
    interval = f"{times.low_ms:.2f} to {times.high_ms:.2f}"
    return f"x{times.speedup:.2f}  {times.ms:.2f} ms per step ({interval})"


# Probes of `dpro try`: record the job with one, print its measurements, choose by them.

MAX_BUCKETS, MAX_MODULES = 20, 60  # to print
PRECISIONS = ("bf16", "fp16", "fp8", "int8")


def probe(run: Run, changes: Sequence[Change], quiet: bool) -> ProbeDocument:
    """Return the measurements of a probe, and print them unless `quiet`.

    Raises:
        Unanswerable: the job was too short for the probe.
    """
    from dpro.extensions.trial.probes import probe_document

    document = probe_document(run, [change.text for change in changes])
    if not quiet:
        _print(document)
    return document


def with_choices(changes: tuple[Change, ...], run: Run) -> tuple[Change, ...]:
    """Return changes with the choices for this job.

    Raises:
        Unanswerable: nothing can be chosen.
    """
    from dpro.cli.analysis import analyse
    from dpro.extensions.trial.probes import resolved

    if not any(change.probe for change in changes):
        return changes
    return resolved(changes, analyse(str(run.path)).built.predictive)


def _print(document: ProbeDocument) -> None:
    if document.codecs:
        _print_codecs(document)
    if document.sensitivities:
        _print_sensitivities(document)


def _print_codecs(document: ProbeDocument) -> None:
    from rich.table import Table

    out = console()
    table = Table("bucket", "gradients of", "MB", "codec", "lost", "ms", box=None)
    kept = [bucket for bucket in document.codecs if bucket.bucket < MAX_BUCKETS]
    for bucket in kept:
        names = bucket.names[0] if len(bucket.names) == 1 else f"{bucket.names[0]} … {bucket.names[-1]}"
        size = f"{4 * bucket.elements / 2**20:.2f}"
        table.add_row(str(bucket.bucket), names, size, bucket.codec, f"{bucket.lost:.2%}", f"{bucket.ms:.3f}")
    out.print(table)
    if len(kept) < len(document.codecs):
        out.print(f"and further buckets, in {document.run}")
    out.print("lost: norm of the error over norm of the gradients; ms: to compress and decompress")
    out.print(f"next: dpro whatif {document.run} --edit compress:budget=0.05")


def _print_sensitivities(document: ProbeDocument) -> None:
    from rich.table import Table

    out = console()
    table = Table("module", "trace", "by", *PRECISIONS, box=None)
    rows = {(row.module, row.precision): row for row in document.sensitivities}
    modules = list(dict.fromkeys(row.module for row in document.sensitivities))
    for module in modules[:MAX_MODULES]:
        first, *others = [rows[module, precision] for precision in PRECISIONS]
        losses = (f"{row.loss:.2g}" for row in (first, *others))
        table.add_row(module, f"{first.trace:.3g}", first.method, *losses)
    out.print(table)
    if len(modules) > MAX_MODULES:
        out.print(f"and further modules, in {document.run}")
    out.print("by precision: what it may add to the loss, as a share of it; weights only")
    out.print(f"next: dpro whatif {document.run} --edit precision:budget=0.01")


if TYPE_CHECKING:
    from dpro.extensions.trial.documents import EntryDocument, KindDocument, LedgerDocument
    from dpro.extensions.trial.ledger import Ratio


@click.command()
@json_option
def ledger(as_json: bool) -> None:
    """Compare predictions with measurements, per kind of change, for all trials of `dpro try`.

    These errors widen the intervals of later predictions, once there are three trials of a kind of change.
    """
    from dpro.extensions.trial.documents import ledger_document
    from dpro.extensions.trial.ledger import read

    document = ledger_document(*read())
    if as_json:
        print_json(document)
    else:
        _print_ledger(document)


def _print_ledger(document: LedgerDocument) -> None:
    out = console()
    for kind in document.kinds:
        out.print(_title(kind))
        for entry in document.entries:
            if entry.kind == kind.kind:
                out.print(f"  {_entry_line(entry)}")
    if not document.kinds:
        out.print(f"Nothing was tried yet ({document.path}): dpro try EDIT... -- COMMAND...")
    if document.damaged:
        out.print(f"{document.damaged} damaged lines of {document.path} are skipped.")


def _title(kind: KindDocument) -> str:
    tries = f"{kind.kind}: {kind.tries} tr{'ies' if kind.tries > 1 else 'y'}"
    if not kind.predicted:
        return f"{tries}, nothing predicts them"
    text = (
        f"{tries}, predictions off by {kind.median_error_pct:.1f}% (median), "
        f"{kind.worst_error_pct:.1f}% at worst; "
        f"{kind.inside_interval} of {kind.predicted} inside their interval"
    )
    widens = kind.widens_by_pct
    return text if widens is None else f"{text}; further intervals are widened by {widens:.1f}%"


def _entry_line(entry: EntryDocument) -> str:
    base = entry.baseline_ms
    predicted, measured = entry.predicted, entry.measured
    words = [entry.time[:10], " ".join(entry.edits), f"of {base:.2f} ms:"]
    words += [f"predicted {_entry_times(predicted, base)}"] if predicted else []
    words += [f"measured {_entry_times(measured, base)}"]
    if predicted and not measured.is_vague:
        words.append(f"off by {100 * (predicted.ratio / measured.ratio - 1):+.1f}%")
    return "  ".join(words)


def _entry_times(ratio: Ratio, base: float) -> str:
    from dpro.extensions.trial.ledger import TOO_WIDE

    if ratio.is_vague:
        return f"{ratio.ratio * base:.2f} ms ({TOO_WIDE})"
    return f"{ratio.ratio * base:.2f} ms ({ratio.low * base:.2f} to {ratio.high * base:.2f})"
