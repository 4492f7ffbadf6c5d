"""What other distributions add to dpro, by their entry points.

In: a group of entry points. Out: those that are installed, not loaded.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, distributions
from itertools import chain


def entries_of(group: str) -> list[EntryPoint]:
    """Entry points of a group, by name; of a distribution that is found twice, the first counts.

    `importlib.metadata.entry_points` parses those of every distribution, which takes several times as long.

    Args:
        group: such as `dpro.importers`.
    """
    entries: dict[str, list[EntryPoint]] = {}
    for distribution in distributions():
        if f"[{group}]" in (distribution.read_text("entry_points.txt") or ""):
            entries.setdefault(distribution.name, list(distribution.entry_points.select(group=group)))
    return sorted(chain.from_iterable(entries.values()), key=lambda entry: (entry.name, entry.value))
