"""The `dpro` command: one module per sub-command, imported only on use.

Takes arguments; prints text for people on stdout, or one JSON object with `--json`, and progress, warnings
and errors on stderr. A `DproError`, an `InternalError`, a usage error, a missing library, a full disk or a
Rust panic becomes one line and an exit code; nothing else is caught.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import signal
import sys
from contextlib import nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING

import click

from dpro._version import __version__
from dpro.cli.output import NO_ROOM, drop_output, escape_output, fail, flush_output, paged, progress, warn
from dpro.errors import DproError, InternalError, MissingExtra, UsageError, first_line
from dpro.panics import is_panic
from dpro.plugins import Command, commands, installed, load, options_of
from dpro.stages import set_display
from dpro.words import nearest_of, shortened

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Sections of `dpro --help`, in the order in which a new user needs them; other sections of extensions follow.
RECORD, ANSWER, CHANGE, OPERATE, SHARE, SET_UP = "Record", "Answer", "Change", "Operate", "Share", "Set up"
SECTIONS = (RECORD, ANSWER, CHANGE, OPERATE, SHARE, SET_UP)
# Modules load on use, so help stays fast.
CORE: dict[str, Command] = {
    "record": Command("dpro.cli.record:record", "Record an unmodified job under any launcher.", RECORD),
    "attach": Command("dpro.cli.attach:attach", "Inspect a running job.", RECORD),
    "import": Command("dpro.cli.import_:import_", "Import traces of other tools as a run.", RECORD),
    "explain": Command(
        "dpro.cli.explain:explain",
        "Show what limits the job, what is at fault, what to do first.",
        ANSWER,
        paged=True,
    ),
    "diagnose": Command(
        "dpro.cli.diagnose:diagnose",
        "Find what is slow or hangs, why, and its cost per step.",
        ANSWER,
        paged=True,
    ),
    "report": Command("dpro.cli.report:report", "Break down the time of each step.", ANSWER, paged=True),
    "diff": Command("dpro.cli.diff:diff", "Explain why one run is slower than another.", ANSWER, paged=True),
    "info": Command("dpro.cli.info:info", "Show what a run contains and what it lacks.", ANSWER, paged=True),
    "replay": Command(
        "dpro.cli.replay:replay", "Replay a run's graph and report how well it fits.", ANSWER, paged=True
    ),
    "whatif": Command(
        "dpro.cli.whatif:whatif", "Predict how a change would affect step time.", CHANGE, paged=True
    ),
    "demo": Command("dpro.cli.demo:demo", "Try dpro: record a small real job and explain it.", SET_UP),
    "completion": Command("dpro.cli.completion:completion", "Print a script for shell completion.", SET_UP),
}


def all_commands() -> dict[str, Command]:
    """Return the commands of the core and of all extensions, in the order of their sections."""
    listed = CORE | {name: command for name, command in commands().items() if name not in CORE}
    sections = [*SECTIONS, *(command.section for command in listed.values())]
    return dict(sorted(listed.items(), key=lambda item: sections.index(item[1].section)))


REPLAY = ("numba", "scipy")  # libraries that any analysis may need
# Threshold of garbage collection. Libraries create 100,000 objects at import, none of them garbage: with
# Python's threshold of 700, collections during imports take 50 ms.
MANY_OBJECTS = 10_000
_HELP = (["-h"], ["--help"])
MAX_MESSAGE = 300  # characters of a usage error, which may repeat a long argument


class LazyGroup(click.Group):
    """A group whose commands are listed without being imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of commands in the order of the help."""
        return list(all_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, with the options that extensions add; None if there is none."""
        named = all_commands().get(cmd_name)
        if named is None:
            return None
        command = load(named.place)
        assert isinstance(command, click.Command)
        given = {parameter.name for parameter in command.params}
        command.params += [option for option in options_of(cmd_name) if option.name not in given]
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command, and page the help, which begins with what is needed first."""
        with paged() if args[:1] in _HELP else nullcontext():
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command to run: `explain` for a path, `--help` for `help`; for typos, suggest a name."""
        listed = all_commands()
        if args and args[0] == "help":
            args = [*args[1:2], "--help"]
            if len(args) == 1:
                with paged():
                    click.echo(ctx.get_help())
                ctx.exit()
        if args and args[0] not in listed and _is_path(args[0]):
            if len(args) > 1 and _is_path(args[1]) and not ctx.resilient_parsing:
                ctx.fail(f"two runs: `dpro diff {args[0]} {args[1]}` compares them")
            args = ["explain", *args]
        if args and args[0] not in listed and not args[0].startswith("-") and not ctx.resilient_parsing:
            beside: list[str] = []
            with suppress(OSError):  # the working directory is gone, or not readable
                beside = os.listdir()
            near = nearest_of(args[0], [*listed, *beside])
            meant = f" Did you mean {near!r}?" if near else ""
            if not near and shutil.which(args[0]):
                meant = f" To record it: dpro record -o RUN -- {shlex.join(args)}"
            ctx.fail(f"No such command, file or folder: {args[0]!r}.{meant}")
        if not ctx.resilient_parsing:
            for complaint in installed().complaints:
                warn(complaint)
            is_paged = args and args[0] in listed and listed[args[0]].paged and "--json" not in args
            if is_paged or args[1:2] in _HELP:
                ctx.with_resource(paged())
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions of commands, without importing them, and of options."""
        from dpro.cli.completion import commands

        return [*commands(all_commands(), incomplete), *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section, without importing them."""
        listed = all_commands()
        width = max(map(len, listed))
        for section in dict.fromkeys(command.section for command in listed.values()):
            rows = [(name.ljust(width), of.help) for name, of in listed.items() if of.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)


def _is_path(word: str) -> bool:
    """Return whether a word is an existing file or folder, or looks like a path."""
    return os.path.exists(word) or os.sep in word or word.startswith((".", "~"))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="dpro")
def cli() -> None:
    """Find what limits a distributed training job, what is broken, and what would make it faster.

    \b
    dpro record -o RUN -- torchrun --nproc-per-node 8 train.py
    dpro RUN                what limits the job, and what to do first
    dpro diagnose RUN       what is slow or hangs, and why
    dpro whatif RUN         what would help, and by how much

    RUN can also be a folder of traces; it is imported on the fly.
    """


def main() -> None:
    """Run the command line; report an error that a user can act on as one line on stderr and an exit code."""
    escape_output()
    set_display(progress)
    keep_interrupts()
    gc.set_threshold(MANY_OBJECTS)
    try:
        try:
            exit_code = cli(prog_name="dpro", standalone_mode=False)  # also for `python -m dpro`
        finally:
            flush_output()
        sys.exit(exit_code)
    except click.Abort:
        click.echo("Aborted!", err=True)
        sys.exit(1)
    except click.exceptions.NoArgsIsHelpError as error:
        with paged():
            click.echo(error.format_message())
        sys.exit(error.exit_code)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            near = nearest_of(error.option_name, error.possibilities or ())
            error = click.NoSuchOption(error.option_name, error.message, [near] if near else [], error.ctx)
        # Without an argument of an option, click does not say of which command.
        asked = " ".join(["dpro", *(name for name in sys.argv[1:2] if name in all_commands())])
        if isinstance(error, click.UsageError) and error.ctx:
            asked = error.ctx.command_path
        message = shortened(error.format_message().removesuffix("."), MAX_MESSAGE)
        fail(UsageError(f"{message} (see `{asked} --help`)"))
    except (DproError, InternalError) as error:
        fail(error)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in REPLAY:
            raise
        fail(MissingExtra(library, "replay"))
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        drop_output()
        fail(DproError(f"{error.filename or 'the output'}: cannot be written ({error.strerror})"))
    except BaseException as error:
        if not is_panic(error):
            raise
        fail(InternalError(first_line(error)))


_SOON_S = 0.01  # long enough for the destructor or callback to end


def keep_interrupts() -> None:
    """From now on, raise a lost Ctrl-C again soon after; call this in the main thread.

    Python raises `KeyboardInterrupt` at an arbitrary point. In a destructor, or in a callback from a C
    library, it cannot propagate: Python prints it, and the command continues as if nothing had happened.
    """
    report = sys.unraisablehook

    def raise_later(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _SOON_S)
        else:
            report(unraisable)

    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = raise_later


def _raise(_signal: int, _frame: FrameType | None) -> None:
    """Raise a lost Ctrl-C, unless one is being handled, whose clean-up must not be interrupted."""
    handled = sys.exception()
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    if handled is None:
        raise KeyboardInterrupt
