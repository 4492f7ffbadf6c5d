"""Errors that a user can act on: each carries one line that says what is wrong, where, and what to do.

The command line prints that line and exits with the error's code; an `InternalError` or a traceback means a
defect in dpro.
"""

from collections.abc import Iterator
from contextlib import contextmanager

PLEASE_REPORT = "this is a defect of dpro, not of what it was given: please report it with this line"


class DproError(Exception):
    """Something outside dpro is wrong: a file, an argument, the machine. Exit code 1."""

    exit_code = 1


class InputError(DproError):
    """A source that cannot be read as what it should be: truncated, empty, not a trace."""


class UsageError(DproError):
    """The command was asked for something that does not exist or does not make sense. Exit code 2."""

    exit_code = 2


class Unanswerable(DproError):
    """The run lacks what the question needs; the message says what to record instead."""


class NothingToChange(Unanswerable):
    """The graph holds nothing that an edit changes; of a graph of one rank, others may."""


class InternalError(Exception):
    """A defect of dpro itself, whatever the user gave it. Exit code 1, with a request to report it."""

    exit_code = 1

    def __str__(self) -> str:
        """The line, with what to do."""
        return f"internal error: {super().__str__()}; {PLEASE_REPORT}"


class MissingExtra(DproError):
    """A part of dpro that needs a library which is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        """Name the library that is missing and the extra that brings it."""
        super().__init__(f'{library} is not installed: run `pip install "dpro-toolkit[{extra}]"`')


def first_line(error: BaseException) -> str:
    """What an error of some library says in one line, or what it is called where it says nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """What is imported inside comes with an extra.

    Raises:
        MissingExtra: a library is not installed.
    """
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library == "dpro":
            raise
        raise MissingExtra(library, extra) from error
