"""The command `dpro goodput RUN...`: where all the time of a job went, over all its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.options import NumberRange
from dpro.cli.output import console, json_option, print_json, warn
from dpro.errors import InputError, UsageError
from dpro.remote import is_url
from dpro.units import NS_PER_H, NS_PER_S, format_duration, format_rate
from dpro.words import counted

if TYPE_CHECKING:
    from dpro.extensions.goodput.document import AttemptDocument, GoodputDocument
    from dpro.extensions.goodput.life import JobLife, ThroughputDocument
    from dpro.extensions.goodput.outlook import GoodputPrediction, OutlookDocument
    from dpro.extensions.goodput.stages import FailureRate
    from dpro.extensions.goodput.starts import StartDocument, StartPart
    from dpro.extensions.goodput.target import TargetDocument
    from dpro.store import Run


BAR = 30  # characters of the largest class
MIN_STAGE = 0.01  # of a start: shorter stages are left out
SOURCES = ("mtbf_per_gpu", "failures", "preset")  # options that give the failure rate
MANY, MIN_GAIN_H = 10, 0.05  # failures from which they are rounded; smallest gain
IN_WORDS = {  # change -> description
    "checkpoint": "another checkpoint interval",
    "async": "save in the background",
    "peers": "save to other hosts' memory",
    "neighbour": "rebuild failed stages from neighbours",
    "spares": "spare hosts",
    "smaller": "continue with fewer replicas",
    "detect": "another hang timeout",
    "start": "another startup time",
    "caches": "start with warm caches",
    "sharded": "save in shards",
    "hosts": "more or fewer hosts",
}
HOURS = 720.0  # predicted by default
MAX_HOURS = 1e6


@click.command()
@click.argument("runs", type=click.Path(), metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="CHANGE",
    help="Change to predict; several are applied together.",
)
@click.option(
    "--hours",
    type=NumberRange(0, MAX_HOURS, min_open=True),
    show_default=f"{HOURS:g}",
    help="Length of the prediction in hours; 720 is a month.",
)
@click.option(
    "--mtbf-per-gpu",
    type=NumberRange(0, 1e12, min_open=True),
    metavar="HOURS",
    help="Mean time between failures per GPU, including its share of its host.",
)
@click.option(
    "--failures",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="LOG",
    help="Failure log of a similar job, CSV with columns time and host.",
)
@click.option(
    "--target-loss",
    type=NumberRange(-1e300, 1e300),
    metavar="LOSS",
    help="Also report the time to this training loss (needs `dpro record --watch-loss`).",
)
@click.option("--preset", type=click.Choice(["rsc-1", "llama-3", "bloom"]), help="Published failure rate.")
@json_option
def goodput(runs: tuple[str, ...], as_json: bool, **asked: Any) -> None:
    """Account for a job's time across all its restarts, and rank changes that would save time.

    \b
    Where the time went:
      dpro goodput RUN                 one run and its restarts
      dpro goodput RUN_1 RUN_2 RUN_3   a job that was started three times
      dpro goodput FOLDER              all runs in a folder, e.g. a Slurm array

    \b
    What would save most:
      dpro goodput RUN --hours 720          a month at the observed failure rate
      dpro goodput RUN --preset llama-3     at a published failure rate
      dpro goodput RUN --mtbf-per-gpu 50000 --edit checkpoint:every=200

    Every second of every rank is in exactly one class, so the classes add up to the wall time:

    \b
      productive   steps done for the first time: the goodput
      straggler    share of productive lost to slow ranks, hosts and links
      evaluation   work without gradients
      checkpoint   training stalled by saving a checkpoint
      repeated     steps lost in a failed attempt and done again
      hang, shutdown    after the last step of an attempt that hung, or failed
      launch, imports, process_group, set_up, load, warm_up    startup stages
      finish       after the last step of a successful attempt
      recording    dpro's own overhead between steps
      down         no process was running

    ETTR counts stragglers and evaluation as training. The checkpoint that an attempt loaded shows the step
    at which it resumed. `dpro dashboard RUN` plots all classes (view Goodput).

    A search tries changes to checkpointing and startup, one at a time, in 200 simulated jobs with timings
    from this one. --edit predicts your own changes, all applied together:

    \b
      checkpoint:every=200[,stall=5]   save every 200 steps; stall in seconds
      async:stall=2                    save in the background
      peers:every=1,stall=0.2          save to the memory of other hosts
      sharded:ranks=8                  each of 8 ranks saves one shard
      neighbour:steps=1                rebuild failed stages from neighbours
      spares:hosts=2[,repair=24]       spare hosts; repair time in hours
      smaller:replicas=16[,repair=24]  continue with fewer replicas meanwhile
      detect:s=30                      kill hanging processes after 30 s
      start:s=60, caches:left=0.1      a faster start; share of warm-up left
      hosts:count=256                  scale the job to more hosts

    docs/goodput.md explains each change, and compares predictions with real jobs.
    """
    import msgspec

    from dpro.extensions.goodput.attempts import ensure_one_job
    from dpro.extensions.goodput.document import goodput_document
    from dpro.extensions.goodput.life import life_of

    with ExitStack() as stack:
        opened_runs = [opened(path, stack) for path in runs_of(runs)]
        life = life_of(opened_runs)
        ensure_one_job(life.attempts, opened_runs)
        document = goodput_document(life, runs)
        if not document.wall_s:
            raise InputError(f"{', '.join(runs)}: when its ranks began and ended was not recorded")
        if asked["edits"] or asked["hours"] or any(asked[name] for name in SOURCES):
            from dpro.extensions.goodput.outlook import outlook

            predicted = outlook(life, _rate(life, asked), asked["edits"], asked["hours"] or HOURS)
            document = msgspec.structs.replace(document, outlook=predicted)
        if asked["target_loss"] is not None:
            from dpro.extensions.goodput.target import time_to_loss

            target = time_to_loss(life, asked["target_loss"])
            document = msgspec.structs.replace(document, target=target)
    if as_json:
        print_json(document)
    else:
        _print(document)
        for note in document.notes:
            warn(note)


def _rate(life: JobLife, asked: Mapping[str, Any]) -> FailureRate | None:
    """Return the failure rate that the options give; None where they give none.

    Raises:
        UsageError: several options give one.
        InputError: a log cannot be read.
    """
    from dpro.extensions.goodput.stages import PRESETS, observed_failures, rate_of_log, rate_per_gpu, read_log

    given = [name for name in SOURCES if asked[name]]
    if len(given) > 1:
        raise UsageError(f"give one of {', '.join('--' + name.replace('_', '-') for name in given)}")
    hosts = observed_failures(life).hosts
    if asked["mtbf_per_gpu"]:
        gpus = life.pieces["rank"].n_unique()
        return rate_per_gpu(asked["mtbf_per_gpu"], -(-gpus // hosts))
    if asked["failures"]:
        return rate_of_log(read_log(asked["failures"]), hosts)
    return PRESETS[asked["preset"]] if asked["preset"] else None


def _print(document: GoodputDocument) -> None:
    out = console()
    wall = format_duration(document.wall_s * NS_PER_S)
    count = len(document.attempts)
    out.print(
        f"goodput {document.goodput:.1%} of {wall} on {_ranks(document.ranks)}; "
        f"{counted(document.steps, 'step')} done in {counted(count, 'attempt')}; ETTR {document.ettr:.1%}"
    )
    largest = max((part.share for part in document.classes), default=1.0)
    for part in document.classes:
        bar = "█" * round(BAR * part.share / largest)
        took = format_duration(part.rank_hours * NS_PER_H / max(document.ranks, 1))
        out.print(f"  {part.class_.replace('_', ' '):<14}{part.share:>7.2%}  {took:>9} a rank  {bar}")
    if document.starts:
        _print_start(document.starts[-1], document.ranks)
    for line in _throughput(document.throughput):
        out.print(line)
    if document.recording is not None:
        from dpro.analysis.recording import recording_in_words

        out.print(f"Recording cost {recording_in_words(document.recording)}")
    if document.saving_background_s:
        took = format_duration(document.saving_background_s * NS_PER_S)
        out.print(f"In the background, in no class: {took} of saving, all ranks")
    for number, attempt in enumerate(document.attempts):
        out.print(f"attempt {number}: {_ranks(attempt.ranks)}, {_progress(attempt)}; {attempt.cause}")
    if document.target is not None:
        out.print(_target(document.target))
    if document.outlook is not None:
        _print_outlook(document.outlook)


def _target(target: TargetDocument) -> str:
    """Word the time to a target loss."""
    if target.wall_s is None:
        lowest = f"lowest {target.lowest:.4g}, at step {target.lowest_step:,}"
        return f"Loss {target.loss:g} was not reached: {lowest}"
    return f"Loss {target.loss:g} was reached after {_seconds(target.wall_s)}, at step {target.step:,}"


def _print_start(start: StartDocument, ranks: int) -> None:
    on, total = f"rank {start.rank}", _seconds(start.total_s)
    longest = f" on {on}, the slowest" if ranks > 1 else ""
    console().print(f"Start of attempt {start.attempt}: {total} until its first step ended{longest}")
    if ranks > 1:
        console().print(f"  {'':<14}{on:>10}{'median':>10}{'longest':>10}")
    for stage in start.stages:
        if stage.longest_s >= MIN_STAGE * start.total_s:
            times = [stage.last_s, stage.median_s, stage.longest_s] if ranks > 1 else [stage.last_s]
            columns = "".join(f"{_seconds(time):>10}" for time in times)
            rank = f" on rank {stage.rank}" if ranks > 1 else ""
            console().print(f"  {stage.stage.replace('_', ' '):<14}{columns}{rank}")
            for part in stage.parts:
                console().print(f"      {_part_in_words(part)}")
    if not start.has_parts:
        console().print(
            "  its imports and process groups were not recorded one by one: recorded by an older dpro"
        )


def _part_in_words(part: StartPart) -> str:
    """Describe a part, as in `group of 8 ranks (nccl) 12 s, 9 s of it until rank 3 came`."""
    waited = (
        part.waited_s is not None and f", {_seconds(part.waited_s)} of it until rank {part.waited_for} came"
    )
    return f"{part.what} {_seconds(part.took_s)}{waited or ''}"


def _seconds(seconds: float) -> str:
    return format_duration(seconds * NS_PER_S)


def _throughput(throughput: ThroughputDocument) -> list[str]:
    """Return lines with MFU and tokens per second, in steps and over all time, or why they are unknown."""
    lines = [f"MFU: not known: {throughput.mfu_unknown}"]
    if throughput.mfu is not None and throughput.mfu_overall is not None:
        overall = f"{throughput.mfu_overall:.1%} over all the time"
        lines = [f"MFU: {throughput.mfu:.1%} in a typical step, {overall}"]
    rate, over_all, what = throughput.tokens_per_s, throughput.tokens_per_s_overall, "tokens"
    if rate is None:
        rate, over_all, what = throughput.samples_per_s, throughput.samples_per_s_overall, "samples"
    if rate is None or over_all is None:
        return [*lines, f"tokens per second: not known: {throughput.rate_unknown}"]
    overall = f"{format_rate(over_all)} over all the time"
    return [*lines, f"{what} per second: {format_rate(rate)} in steps, {overall}"]


def _progress(attempt: AttemptDocument) -> str:
    if not attempt.steps:
        return "no step"
    again = f", {attempt.repeated:,} of them done again" if attempt.repeated else ""
    lost = f", {attempt.lost:,} of them lost with it" if attempt.lost else ""
    last = attempt.first_step + attempt.steps - 1
    which = f"steps {attempt.first_step:,} to {last:,}" if attempt.steps > 1 else f"step {last:,}"
    return f"{which}{again}{lost}"


def _ranks(count: int) -> str:
    return counted(count, "rank")


def _print_outlook(outlook: OutlookDocument) -> None:
    out = console()
    base, *changes = outlook.predictions
    hosts = f"{outlook.hours:,.5g} h on {outlook.hosts:,} host{'s' * (outlook.hosts != 1)}"
    often = f"{base.failures:,.0f}" if base.failures >= MANY else f"{base.failures:,.2g}"
    out.print(
        f"Predicted for {hosts} with {often} failures, by {outlook.rate}: ETTR {base.goodput:.1%} "
        f"({base.low:.1%} to {base.high:.1%} in nine of ten simulated jobs)"
    )
    gaining = [change for change in changes if change.gain_h is not None and change.gain_h >= MIN_GAIN_H]
    if gaining:
        out.print(f"Hours of training that a change gains in these {outlook.hours:,.5g} h, most first:")
    for change in gaining:
        _print_change(change)
    others = [change for change in changes if change not in gaining]
    if others:
        out.print("These gain nothing:" if gaining else "No change that was tried gains anything:")
    for change in others:
        _print_change(change)
    if not outlook.stages.get("every") and not any(
        "checkpoint:" in edit for change in changes for edit in change.edits
    ):
        out.print(
            "The job saved no checkpoint, so a failure loses all its steps: --edit "
            "checkpoint:every=200,stall=5 predicts the gain of saving, if each save stalls training for 5 s"
        )
    out.print("Unproven for this job: docs/goodput.md has how far such predictions were from real jobs.")


def _print_change(change: GoodputPrediction) -> None:
    hours = (change.gain_h or 0.0, change.gain_low_h or 0.0, change.gain_high_h or 0.0)
    mean, low, high = (round(value, 1) + 0.0 for value in hours)  # no -0.0
    gained = f"{mean:+9,.1f} h ({low:+,.1f} to {high:+,.1f})"
    what = ", ".join(IN_WORDS[edit.partition(":")[0]] for edit in change.edits)
    console().print(f"{gained}  ETTR {change.goodput:.1%}  {' '.join(change.edits)}  ({what})")


# The runs of one job, as a user names them: one run, several, or a folder of them, finished or running.


def runs_of(given: Sequence[str]) -> list[str]:
    """Return the named runs, with folders replaced by their runs.

    Runs in a folder that cannot be opened are left out with a warning, so that a start without records costs
    no other.

    Args:
        given: runs, traces, URLs, or folders of runs.

    Raises:
        InputError: no run of a folder can be opened.
    """
    from dpro.cli.runs import runs_in, why_not

    paths: list[str] = []
    for path in given:
        inside = [] if is_url(path) else runs_in(Path(path))
        broken = {run: why for run in inside if (why := why_not(run))}
        if inside and len(broken) == len(inside):
            raise InputError(f"{path}: none of its runs can be opened; {inside[0]}: {broken[inside[0]]}")
        for run, why in broken.items():
            warn(f"{run}: left out: {why}")
        paths += [str(run) for run in inside if run not in broken] if inside else [path]
    return paths


def opened(path: str, until: ExitStack) -> Run:
    """Open a run; of one that is being recorded, the records of some of its ranks up to now.

    Raises:
        InputError: as `dpro.opening.open_path`.
    """
    from dpro.cli.analysis import open_quietly
    from dpro.cli.runs import is_live

    if is_url(path) or not is_live(Path(path)):
        return open_quietly(path)
    from dpro.extensions.goodput.running import run_so_far

    run = until.enter_context(run_so_far(Path(path)))
    of = f"{len(run.manifest.ranks)} of {run.manifest.world_size} ranks"
    warn(f"{path} is still being recorded: this is the account so far, of {of}, without what stragglers cost")
    return run
