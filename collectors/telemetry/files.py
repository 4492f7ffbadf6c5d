"""Small files of /proc and /sys, as numbers. A file that cannot be read (absent, or refused) is None."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_BYTES = 1 << 16


def read_text(path: str | Path) -> str | None:
    """What a small file holds; None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_number(path: str | Path) -> int | None:
    """The number a file begins with; None if it cannot be read or does not begin with one."""
    words = (read_text(path) or "").split(maxsplit=1)
    try:
        return int(words[0]) if words else None
    except ValueError:
        return None


def read_pairs(path: str | Path) -> dict[str, int]:
    """A file of lines `name value …`, with or without a colon; lines of another form are left out."""
    lines = [line.split() for line in (read_text(path) or "").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
