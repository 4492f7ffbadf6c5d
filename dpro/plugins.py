"""What other distributions add to dpro, by their entry points.

In: a group of entry points. Out: those that are installed, not loaded.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, distributions


def entries_of(group: str) -> list[EntryPoint]:
    """Entry points of a group, by name; of a distribution that is found twice, the first counts.

    `importlib.metadata.entry_points` parses those of every distribution, which takes several times as long.

    Args:
        group: such as `dpro.importers`.
    """
    found: dict[str, list[EntryPoint]] = {}
    for each in distributions():
        if f"[{group}]" in (each.read_text("entry_points.txt") or ""):
            found.setdefault(each.name, list(each.entry_points.select(group=group)))
    entries = [entry for of_one in found.values() for entry in of_one]
    return sorted(entries, key=lambda entry: (entry.name, entry.value))
