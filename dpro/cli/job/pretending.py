"""The options of `dpro record` for pretended ranks, where another command is given one of them.

In: why that command has none. Out: hidden options that end it with one line, which names the command to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from dpro.errors import UsageError

OPTIONS = ("--pretend-world", "--pretend-ranks", "--pretend-per-host")


def refuses_pretending(why: str) -> Callable[[Any], Any]:
    """Refuse to pretend ranks.

    Args:
        why: the reason, to follow the option's name.

    Returns:
        A decorator of a command's function.
    """

    def refuse(_: click.Context, option: click.Parameter, given: str | None) -> None:
        if given is not None:
            raise UsageError(f"{option.opts[0]} is of dpro record: {why}")

    def decorate(function: Any) -> Any:
        for name in OPTIONS:
            function = click.option(name, hidden=True, expose_value=False, callback=refuse)(function)
        return function

    return decorate
