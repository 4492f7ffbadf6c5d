"""The command `dpro scrub`: a copy of a run to share."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dpro.cli.analysis import open_quietly, run_argument
from dpro.cli.output import console, ensure_writable, json_option, print_json, write_text


@click.command()
@run_argument
@click.argument("copy", metavar="COPY", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--names", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write the mapping from new names to old ones as JSON, to interpret answers about the copy.",
)  # fmt: skip
@json_option
def scrub(run: str, copy: Path, names: Path | None, as_json: bool) -> None:
    """Copy a run without the names of hosts, addresses, paths, commands and modules.

    \b
    dpro scrub RUN COPY
    dpro scrub RUN COPY --names names.json      also write the name mapping

    The copy has consistent new names for everything that the job named, and gives the answers of RUN.
    Operators and kernels keep their names, because dpro classifies them by name: review your own ones. Times,
    sizes, versions, hardware ids and scheduler job ids stay unchanged.
    """
    from dpro.extensions.scrub.scrub import LEFT_OUT, ScrubDocument
    from dpro.extensions.scrub.scrub import scrub as write_copy
    from dpro.words import counted

    if names is not None:
        ensure_writable(names)
    opened = open_quietly(run)
    given = write_copy(opened, copy)
    kinds = (given.hosts, given.addresses, given.words)
    if names is not None:
        write_text(
            names, json.dumps({new: old for kind in kinds for old, new in kind.items()}, indent=1) + "\n"
        )
    hosts, addresses, words = map(len, kinds)
    if as_json:
        print_json(
            ScrubDocument(
                run=run, copy=str(copy), hosts=hosts, addresses=addresses, names=words, left_out=LEFT_OUT
            )
        )
        return
    renamed = f"{counted(hosts, 'host')}, {addresses} addresses and {counted(words, 'other name')}"
    console().print(f"{copy}: new names for {renamed}")
    console().print(f"not copied: {LEFT_OUT}")
