"""`dpro attach`: inspect a running job."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dpro.cli.options import DAY_S, MAX_PID, MAX_WINDOW_STEPS, NumberRange
from dpro.cli.output import console, json_option, print_json, stderr_console
from dpro.errors import InputError, UsageError
from dpro.plugins import hooks_of

if TYPE_CHECKING:
    from dpro.collectors.attach import Answers, AttachDocument, RankStacks, RankWindow
    from dpro.collectors.launch.recording import Launch

P = TypeVar("P")

STACKS_S = 3.0
DUMPED_S = 3.0


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--pid", type=click.IntRange(1, MAX_PID), metavar="PID", help="Process of the job, instead of RUN."
)
@click.option(
    "--steps",
    type=click.IntRange(1, MAX_WINDOW_STEPS),
    metavar="K",
    help="Record K steps in depth, on all ranks.",
)
@click.option("--off", "switch", flag_value="off", help="Stop deep windows, except those of --steps.")
@click.option("--on", "switch", flag_value="on", help="Record deep windows as --budget or --every allows.")
@click.option("--stacks", is_flag=True, help="Show where all threads of all ranks are, as one tree.")
@click.option("--native", is_flag=True, help="With --stacks: calls of C and child processes, too, by py-spy.")
@click.option("-o", "--output", "copy", type=click.Path(path_type=Path), metavar="COPY",
              help="Copy the recording so far into a run that can be read now.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=NumberRange(0, DAY_S), default=300.0, show_default=True,
              metavar="SECONDS",
              help="How long to wait for the window.")  # fmt: skip
@json_option
def attach(
    run: Path | None,
    pid: int | None,
    steps: int | None,
    switch: str | None,
    stacks: bool,
    native: bool,
    copy: Path | None,
    timeout_s: float,
    as_json: bool,
    **_of_extensions: Any,
) -> None:
    """Inspect a running job.

    \b
    dpro attach RUN --steps 3              record 3 steps in depth, on all ranks
    dpro attach RUN --steps 3 -o NOW       and copy the recording so far
    dpro attach --pid 4711 --stacks        where all threads of all ranks are
    dpro attach RUN --off                  only windows of --steps, until --on

    The job must have been started with `dpro record`. A job that was started without it, but with
    KINETO_USE_DAEMON=1, can be profiled by `dpro attach --pid PID --steps K -o RUN`; PID can be its launcher.
    """
    if native and not stacks:
        raise UsageError("--native requires --stacks")
    if sum(map(bool, (steps, switch, stacks))) > 1 or not (steps or switch or stacks or copy):
        raise UsageError("give one of --steps, --stacks, --off, --on and -o")
    if run is not None and pid is None and str(run).isdecimal() and not run.exists():
        run, pid = None, int(str(run))  # as py-spy and gdb take it
    if (run is None) == (pid is None):
        raise UsageError("name the job by RUN or by --pid")
    if pid is not None and steps and copy:
        profiled = (profile(pid, steps, copy, timeout_s) for profile in hooks_of("attach"))
        if (answer := next(filter(None, profiled), None)) is not None:
            profile_document, line = answer
            if as_json:
                print_json(profile_document)
            else:
                console().print(line)
            return
    folder = (run or _run_of(pid)).resolve()
    document = _request(folder, steps, switch, stacks, native, timeout_s)
    if copy is not None:
        from msgspec.structs import replace

        _copy(folder, copy)
        document = replace(document, copy=str(copy))
    if as_json:
        print_json(document)
    else:
        console().print("\n".join(in_words(document)))


def _request(
    folder: Path, steps: int | None, switch: str | None, stacks: bool, native: bool, timeout_s: float
) -> AttachDocument:
    """Send the request of the options to the job, and return its answer; only a copy needs no request."""
    from dpro.collectors import attach as attaching

    run = str(folder)
    if stacks:
        given = attaching.read_stacks(folder, STACKS_S)
        given = attaching.with_native_stacks(given, folder) if native else given
        ranks = _replies(given, attaching.RankStacks)
        return attaching.StacksDocument(run=run, ranks=ranks, silent_ranks=given.silent)
    if switch:
        given = attaching.ask(folder, switch, timeout_s, lambda given: bool(given.given))
        return attaching.SwitchDocument(run=run, from_step=first_window(given)["from_step"])
    if steps:
        with stderr_console().status(f"waiting for {steps} steps"):
            given = attaching.ask(folder, "window", timeout_s, lambda _: False, steps=steps)
        window = first_window(given)["window"]
        replies = _replies(given, attaching.RankWindow)
        return attaching.WindowDocument(run=run, ranks=replies, silent_ranks=given.silent, window=window)
    return attaching.AttachDocument(run=run)


def _replies(answers: Answers, kind: type[P]) -> list[P]:
    """Return the replies in the order of ranks, converted to a kind of record.

    Raises:
        InputError: a reply does not fit, since another version of dpro records the job.
    """
    import msgspec

    try:
        return msgspec.convert([answers.given[rank] for rank in sorted(answers.given)], list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise InputError(f"a rank's reply is from another version of dpro ({error})") from error


def _run_of(pid: int | None) -> Path:
    from dpro.collectors.attach import run_of

    assert pid is not None
    run = run_of(pid)
    if run is None:
        works = "; --steps with -o works if it was started with KINETO_USE_DAEMON=1"
        raise InputError(
            f"process {pid}: not started by `dpro record`{works if any(hooks_of('attach')) else ''}"
        )
    return run


def first_window(answers: Answers) -> Mapping[str, Any]:
    """Return the answer of the lowest rank that answered.

    Raises:
        InputError: no rank answered, or the job cannot record windows.
    """
    if not answers.given:
        raise InputError(
            "no rank answered: the job is not stepping, or its rank 0 uses another folder; try on its host"
        )
    first = answers.given[min(answers.given)]
    if "window" not in first and "from_step" not in first:
        raise InputError(f"nothing to wait for: {first['why_not']}")
    return first


def _copy(run: Path, to: Path) -> None:
    """Copy the run and finish the copy; wait first for the calls of the latest window, saved after it."""
    from dpro.collectors.attach import copy_run
    from dpro.collectors.finish import finish
    from dpro.opening import readers

    time.sleep(DUMPED_S / 3)

    def finish_copy(launch: Launch) -> None:
        finish(launch, readers(), None, {})

    copy_run(run, to.resolve(), finish_copy)


def in_words(document: AttachDocument) -> list[str]:
    """Return the lines of a document, for people."""
    from dpro.collectors.attach import StacksDocument, SwitchDocument, WindowDocument

    lines = []
    if isinstance(document, StacksDocument):
        lines += _stacks_in_words(document.ranks)
    if isinstance(document, WindowDocument):
        lines += map(_window_in_words, document.ranks)
    if isinstance(document, StacksDocument | WindowDocument):
        lines += [f"rank {rank}: did not answer" for rank in document.silent_ranks]
    if isinstance(document, SwitchDocument):
        lines.append(f"takes effect at step {document.from_step}")
    if isinstance(document, WindowDocument) and not document.copy:
        lines.append(f"next: dpro attach {shlex.quote(document.run)} -o COPY, then dpro COPY")
    if document.copy:
        lines.append(f"copied to {document.copy}; next: dpro {shlex.quote(document.copy)}")
    return lines


def _window_in_words(answer: RankWindow) -> str:
    if answer.why_not or not answer.steps:
        return f"rank {answer.rank}: not recorded: {answer.why_not}"
    first, end = answer.steps
    return f"rank {answer.rank}: steps {first} to {end - 1} are window {answer.window}"


def _stacks_in_words(answers: Sequence[RankStacks]) -> list[str]:
    """Return the lines of all ranks' stacks, merged to one tree per kind of thread."""
    from dpro.detect.hang.stack_tree import StackedThread, lines_of, merge_stacks
    from dpro.recorders import RECORDER_FRAMES
    from dpro.words import ranks_in_words

    threads = [
        StackedThread(
            answer.rank,
            thread.name,
            [
                f"{one.file}:{one.line} {one.function}"
                for one in thread.frames
                if not re.search(RECORDER_FRAMES, one.file)
            ],
        )
        for answer in answers
        for thread in answer.threads
    ]
    lines = [line for kind, tree in merge_stacks(threads).items() for line in lines_of(kind, tree)]
    held = [answer.rank for answer in answers if answer.by_signal is True]
    return [*lines, *([f"{ranks_in_words(held)}: a call in C holds the interpreter lock"] if held else [])]
