"""How numbers are written in answers on servers.

In: a number. Out: text with three significant digits, without an exponent.
"""

from __future__ import annotations


def number(value: float) -> str:
    """A number: `0.0213`, `16.4`, `581`, `17,570`; large ones have all their digits before the point."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):.6f}".rstrip("0").rstrip(".")


def counted(count: int, noun: str) -> str:
    """A count of something: `1 request`, `1,200 requests`.

    Args:
        noun: in the singular; the plural ends in s.
    """
    return f"{count:,} {noun}" + "s" * (count != 1)
