"""Options that several commands have: numbers in bounds, and those of pretended ranks, which others refuse.

Bounds are far above what makes sense, and below what takes for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from dpro.errors import UsageError

MAX_STEPS = 1 << 40  # of a job
MAX_WINDOW_STEPS = 1_000_000
MAX_SIZE = 1 << 24  # sequences of a step, tokens of a sequence
MAX_PID = 1 << 22  # Linux's own bound
DAY_S = 86_400


class NumberRange(click.FloatRange):
    """Numbers from one to another; none that is no number, which click lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of a text."""
        number = float(super().convert(value, param, ctx))
        if number != number:
            self.fail(f"{value} is no number", param, ctx)
        return number


# The options of `dpro record` for pretended ranks, where another command is given one of them.

OPTIONS = ("--pretend-world", "--pretend-ranks", "--pretend-per-host")


def refuses_pretending(why: str) -> Callable[[Any], Any]:
    """Refuse to pretend ranks, and say why."""

    def refuse(_: click.Context, option: click.Parameter, given: str | None) -> None:
        if given is not None:
            raise UsageError(f"{option.opts[0]} is of dpro record: {why}")

    def decorate(function: Any) -> Any:
        for name in OPTIONS:
            function = click.option(name, hidden=True, expose_value=False, callback=refuse)(function)
        return function

    return decorate
