"""Errors that a user can act on: each has one line that says what is wrong, where, and what to do.

The command line prints that line and exits with the error's code. An `InternalError` or a traceback means a
defect in dpro.
"""

from collections.abc import Iterator
from contextlib import contextmanager

PLEASE_REPORT = "this is a defect of dpro, not of what it was given: please report it with this line"


class DproError(Exception):
    """Something outside dpro is wrong: a file, an argument, the machine. Exit code 1."""

    exit_code = 1


class InputError(DproError):
    """A file or folder that cannot be read as intended: truncated, empty, not a trace."""


class UsageError(DproError):
    """A request for something that does not exist or does not make sense. Exit code 2."""

    exit_code = 2


class Unanswerable(DproError):
    """A question that the run lacks the data for; the message says what to record.

    Attributes:
        what: what is missing; without `do`, the whole message.
        do: what to do, or record; empty where it is not given by itself.
    """

    def __init__(self, what: str, do: str = "") -> None:
        super().__init__(what, do)
        self.what, self.do = what, do

    def __str__(self) -> str:
        """Return what is missing, then what to do."""
        return f"{self.what}; {self.do}" if self.do else self.what


class NothingToChange(Unanswerable):
    """An edit that changes nothing in the graph; if the graph is one rank's, it may change other ranks'."""


class InternalError(Exception):
    """A defect of dpro itself, not of its input. Exit code 1, with a request to report it."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the message as one line, with a request to report it."""
        return f"internal error: {super().__str__()}; {PLEASE_REPORT}"


class MissingExtra(DproError):
    """An optional library that a part of dpro needs, and that is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f'{library} is not installed: run `pip install "dpro-toolkit[{extra}]"`')


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an error's message, or the name of its class if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn an `ImportError` inside into advice to install `extra`; dpro's own are raised unchanged.

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
