"""`dpro memory`: show GPU memory at its peak by origin, or its change between two snapshots."""

from __future__ import annotations

from pathlib import Path

import click

from dpro.cli.output import console, json_option, print_json

ROWS = 12


@click.command()
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@click.option(
    "-n", "most", type=click.IntRange(1, 10_000), default=ROWS, show_default=True, help="Rows of a GPU."
)
@json_option
def memory(snapshot: Path, other: Path | None, most: int, as_json: bool) -> None:
    """Show what held GPU memory in a snapshot of PyTorch's allocator.

    \b
    dpro memory snapshot.pickle          what held the peak, what grows
    dpro memory old.pickle new.pickle    what holds more or less in the second

    In the script, torch.cuda.memory._record_memory_history() at the start and
    torch.cuda.memory._dump_snapshot("snapshot.pickle") where memory is full, or in an `except` of
    torch.OutOfMemoryError, write such files. They are read as data: nothing in them is run.
    """
    from dpro.extensions.memory.answer import (
        lines_of_change,
        lines_of_memory,
        memory_change_document,
        memory_document,
    )

    out = console()
    if other is not None:
        changes = memory_change_document(snapshot, other)
        if as_json:
            print_json(changes)
            return
        lines = lines_of_change(changes, most)
    else:
        document = memory_document(snapshot)
        if as_json:
            print_json(document)
            return
        lines = lines_of_memory(document, most)
    for line in lines:
        out.print(line)
