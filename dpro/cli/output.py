"""Output of all commands: one JSON object for programs, text for people, progress on stderr.

Control characters in names, hosts, paths and messages never reach the terminal: `escape_output` puts
`printable` before both streams, and consoles, which emit control characters themselves, apply it to their
text. JSON escapes control characters, so that programs read what was recorded.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar, cast

import click

from dpro.errors import DproError, InternalError, UsageError
from dpro.limits import without_waiting
from dpro.words import one_line, printable

if TYPE_CHECKING:
    from msgspec import Struct
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress as Bar
    from rich.progress import Task
    from rich.segment import Segment
    from typing_extensions import Buffer

    from dpro.analysis.end import JobEnd
    from dpro.selection import Selection


MIN_WIDTH = 40  # columns; on a narrower terminal, lines are wrapped at this width
_COPIED = "--edit "  # marks lines that users copy to the command line, which are never wrapped

_LABELLED = re.compile(r"[A-Za-z](?: ?\w){0,9} {2,}(?=\S)")
_WITH_UNIT = re.compile(r"(\d) (?=(?:[nmu]?s|[kMGT]?B(?:/s)?|%)\b)")

# Written to the terminal at exit by colorama, which numba imports if it is installed.
_RESET = "\x1b[0m"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a full or failing disk

_BAR: ContextVar[Bar | None] = ContextVar("bar", default=None)

F = TypeVar("F", bound=Callable[..., Any])


class _Printable:
    """A wrapper of a text stream that writes only printable text."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.buffer = _Decoded(self)

    def write(self, text: str) -> int:
        self.stream.write(text if text == _RESET else printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Decoded(io.BufferedIOBase):
    """The binary buffer of a `_Printable`, which decodes bytes and writes them as printable text."""

    def __init__(self, stream: _Printable) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        return self._stream.write(bytes(data).decode(errors="surrogateescape"))


def escape_output() -> None:
    """From now on, let only printable text reach stdout and stderr, warnings and tracebacks included."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Printable):  # None if it was closed
            with suppress(AttributeError):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Printable(stream))


def flush_output() -> None:
    """Flush stdout, unless its reader is gone or it was closed.

    Raises:
        OSError: the disk is full.
    """
    with suppress(BrokenPipeError, ValueError, AttributeError):
        sys.stdout.flush()


def drop_output() -> None:
    """Discard the buffered and all further output to stdout."""
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _own_stream(stream: TextIO) -> TextIO:
    """Return the stream under a `_Printable`, for consoles, which filter their text themselves."""
    return stream.stream if isinstance(stream, _Printable) else stream


class _Screen(io.StringIO):
    """A buffer for terminal output; it claims to be a terminal, so that text is styled."""

    def isatty(self) -> bool:
        return True


@contextmanager
def paged() -> Iterator[None]:
    """Buffer the output inside, and show it in the user's pager if it is longer than the terminal, like git.

    Does nothing if stdin or stdout is not a terminal.
    """
    if sys.stdout is None or sys.stdin is None or not (sys.stdout.isatty() and sys.stdin.isatty()):
        yield
        return
    terminal, screen = sys.stdout, _Screen()
    sys.stdout = cast(TextIO, _Printable(screen))
    try:
        yield
    finally:
        sys.stdout = terminal
        text = screen.getvalue()
        if text.count("\n") < shutil.get_terminal_size().lines:
            _own_stream(terminal).write(text)
        else:
            # Git's default. Without -R in a user's own options, `less` would show bold text as ESC[1m.
            options = os.environ.setdefault("LESS", "FRX")
            click.echo_via_pager(text.removesuffix("\n"), color="r" in options.lower())


@contextmanager
def protocol_on_stdout() -> Iterator[None]:
    """Restore the original stdout inside the block, for a protocol between programs."""
    spoken = sys.stdout
    sys.stdout = _own_stream(spoken)
    try:
        yield
    finally:
        sys.stdout = spoken


def wrapped(text: str, width: int) -> str:
    """Wrap the long lines of a text at words, except lines to be copied to the command line.

    Continuation lines are aligned with the value of a `label  value`, otherwise indented by two.
    """
    lines = []
    for line in text.splitlines() or [""]:
        if len(line) <= width or _COPIED in line:
            lines.append(line)
            continue
        label = _LABELLED.match(line)
        begin = " " * (label.end() if label else len(line) - len(line.lstrip()) + 2)
        together = _WITH_UNIT.sub("\\1\xa0", line)
        parts = textwrap.wrap(
            together, max(width, MIN_WIDTH), subsequent_indent=begin, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        lines += [part.replace("\xa0", " ") for part in parts]
    return "\n".join(lines)


@cache
def _console_class() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        """A console that emits its own control characters, but none that are in texts.

        On a terminal, lines of text wrap at words. In a pipe or a file, each stays one line, as with git, uv
        and ruff, so that `grep`, `diff` and `sort` see whole facts.
        """

        def print(self, *objects: Any, **options: Any) -> None:
            if self.is_terminal and self.soft_wrap:
                objects = tuple(
                    wrapped(text, self.width) if isinstance(text, str) else text for text in objects
                )
            super().print(*objects, **options)

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole


def json_option(command: F) -> F:
    """Add `--json` to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(
        command
    )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines unwrapped, and an empty line after them."""
    for line in lines:
        click.echo(line)
    click.echo()


def print_json(document: Struct) -> None:
    """Print one object on stdout, with `schema_version` first.

    Raises:
        ValueError: the document contains a NaN or an infinity, which JSON cannot express.
    """
    from dpro.documents import encode

    click.echo(encode(document))


def print_end(end: JobEnd) -> None:
    """Print one line if the job failed, hung, was ended or is stalled."""
    if end.comes_first:
        console().print(end.sentence)


def print_selection(selection: Selection) -> None:
    """Print one line if not all steps and ranks are selected."""
    if selection:
        console().print(f"Selected: {selection}")


def console() -> Console:
    """Return a console for text on stdout, without interpreting markup in names."""
    return _console_class()(
        file=_own_stream(sys.stdout), highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def stderr_console() -> Console:
    """Return a console on stderr, for progress and warnings."""
    return _console_class()(
        file=_own_stream(sys.stderr), stderr=True, highlight=False, markup=False, emoji=False
    )


@contextmanager
def progress(what: str, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if it is a terminal; yield a function of the amount done and in total.

    A nested bar takes the place of the outer one, a bar in bytes only once the total is known.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda *_: None
        return
    with _bar_on_stderr() as bar:
        around = [task.id for task in bar.tasks if task.visible]
        hidden = in_bytes

        def show_around(visible: bool) -> None:
            for task in around:
                bar.update(task, visible=visible)

        def report(done: int, total: int) -> None:
            nonlocal hidden
            if first := hidden:
                hidden = False
                show_around(False)
            bar.update(here, completed=done, total=total, visible=True, refresh=first)

        show_around(in_bytes)
        here = bar.add_task(what, total=None, visible=not in_bytes, in_bytes=in_bytes)
        try:
            yield report
        finally:
            bar.remove_task(here)
            show_around(True)


@contextmanager
def _bar_on_stderr() -> Iterator[Bar]:
    """Yield the bar that is on display, or show a new one inside the block."""
    if (shown := _BAR.get()) is not None:
        yield shown
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Amount(DownloadColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:
                return Text()
            return super().render(task) if task.fields["in_bytes"] else Text(f"{task.percentage:>3.0f}%")

    columns = TextColumn("{task.description}", markup=False), BarColumn(), Amount(), TimeRemainingColumn()
    with Bar(*columns, console=stderr_console(), transient=True) as bar:
        token = _BAR.set(bar)
        try:
            yield bar
        finally:
            _BAR.reset(token)


def warn(message: str) -> None:
    """Print a warning as one line on stderr."""
    _say(f"warning: {one_line(message)}")


def fail(error: DproError | InternalError) -> NoReturn:
    """Print an error as one line on stderr, and exit with its code."""
    _say(one_line(str(error)))
    sys.exit(error.exit_code)


def _say(what: str) -> None:
    """Print one line on stderr, wrapped at words if it is a terminal."""
    line, stderr = f"dpro: {what}", sys.stderr
    on_terminal = stderr is not None and stderr.isatty()
    click.echo(wrapped(line, shutil.get_terminal_size().columns) if on_terminal else line, err=True)


def parse_share(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """Parse a share such as `1%` or `0.01`, as a callback of an option; None if the option is absent.

    Raises:
        click.BadParameter: the text is not a number between 0 and 1, both excluded.
    """
    if value is None:
        return None
    try:
        number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise click.BadParameter(f"{value} is not a share: give one such as 1% or 0.01")
    return number


def ensure_writable(path: Path) -> None:
    """Raise if a file cannot be written, before the work for it begins.

    Raises:
        UsageError: its folder does not exist or is not writable, or the path is a folder itself.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which replaces `path` when the block succeeds.

    Args:
        path: final path; anything but a file, such as a pipe, is written directly.

    Raises:
        UsageError: the file cannot be written, or is a pipe that no process reads.
    """
    from tempfile import TemporaryDirectory

    target = Path(os.path.realpath(path))  # for a loop of links, one of them
    can_be_replaced = (target.is_file() or not target.exists()) and os.access(target.parent, os.W_OK)
    try:
        if not can_be_replaced:
            with open(path, "ab", opener=without_waiting):
                yield path
            return
        with TemporaryDirectory(dir=target.parent, prefix=".dpro-") as folder:
            place = Path(folder) / target.name
            yield place
            os.replace(place, target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def write_text(path: Path, text: str) -> Path:
    """Write a file atomically, and return its path.

    Raises:
        UsageError: the file cannot be written.
    """
    with atomic_file(path) as place:
        place.write_text(text, encoding="utf-8")
    return path
