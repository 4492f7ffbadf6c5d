"""Bounds of numbers in options: far above sensible values, and below those that would take forever."""

from __future__ import annotations

from typing import Any

import click

MAX_STEPS = 1 << 40  # of a job
MAX_WINDOW_STEPS = 1_000_000
MAX_SIZE = 1 << 24  # sequences of a step, tokens of a sequence
MAX_PID = 1 << 22  # Linux's own bound
DAY_S = 86_400


class NumberRange(click.FloatRange):
    """A range of numbers that also rejects NaN, which click accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text to a number within the range."""
        number = float(super().convert(value, param, ctx))
        if number != number:
            self.fail(f"{value} is not a number", param, ctx)
        return number
