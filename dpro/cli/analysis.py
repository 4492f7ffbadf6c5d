"""Shared parts of the commands that read a run: options, opening with progress and warnings, the graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from dpro.cli.completion import ranges as complete_ranges
from dpro.cli.output import progress, warn
from dpro.errors import UsageError

if TYPE_CHECKING:
    from polars import DataFrame

    from dpro.analysis.analysis import Analysis
    from dpro.ingest.importer import Progress
    from dpro.selection import Ranges, RankChoice
    from dpro.store import Run


run_argument = click.argument("run", type=click.Path(), metavar="RUN")


def _read_ranges(_context: click.Context, option: click.Parameter, text: str | None) -> Ranges:
    """Parse the value of `--steps`, as a callback; empty if the option is absent.

    Raises:
        UsageError: the text is not a list of numbers and ranges, or is empty.
    """
    if text is None:
        return ()
    from dpro.selection import parse_ranges

    ranges = parse_ranges(text, str(option.name))
    if not ranges:
        raise UsageError(f"--{option.name} is empty: give for instance 3, 3-8 or 3,5,7-9")
    return ranges


def _read_ranks(_context: click.Context, _option: click.Parameter, text: str | None) -> RankChoice:
    """Parse the value of `--ranks`, as a callback; empty if the option is absent.

    Raises:
        UsageError: the text is neither a list of numbers and ranges nor one of coordinates, or is empty.
    """
    from dpro.selection import RankChoice, parse_rank_choice

    if text is None:
        return RankChoice()
    choice = parse_rank_choice(text)
    if not choice:
        raise UsageError("--ranks is empty: give for instance 3, 3-8, 3,5,7-9, or tp=0")
    return choice


steps_option = click.option(
    "--steps",
    metavar="STEPS",
    callback=_read_ranges,
    shell_complete=complete_ranges,
    help="Only these steps: 3-8, or 3,5,7-9.",
)
ranks_option = click.option(
    "--ranks",
    metavar="RANKS",
    callback=_read_ranks,
    shell_complete=complete_ranges,
    help="Only these ranks: 0, or 0,2-3; or by their coordinates in the layout: tp=0, or dp=0-3,pp=1.",
)


def _read_layout(context: click.Context, _option: click.Parameter, text: str | None) -> None:
    """Parse the value of `--layout`, as a callback, and keep it in the context for `open_quietly`.

    Raises:
        UsageError: the text is not a layout.
    """
    if text is None:
        return
    from dpro.replay.mesh import parse_axes

    context.meta[LAYOUT] = parse_axes(text)


LAYOUT = "dpro.layout"
layout_option = click.option(
    "--layout",
    metavar="LAYOUT",
    callback=_read_layout,
    expose_value=False,
    help="Parallel layout of RUN, if not recorded: tp=8, or dp=4,tp=2; dp defaults to the remaining ranks.",
)


network_option = click.option(
    "--network-table",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Measured communication times (Parquet or CSV; docs/curves.md lists the columns).",
)


def analyse(path: str, network_table: str | None = None, device_tables: Sequence[str] = ()) -> Analysis:
    """Open or import RUN, and build its graph or load it from the cache.

    Args:
        network_table: file of measured communication times; None without one.
        device_tables: files, folders of tables, or runs with measured matmul times.

    Raises:
        InputError: RUN or a table cannot be read.
        Unanswerable: the run has no spans.
    """
    from dpro.analysis.analysis import Analysis

    network = read_network(network_table)
    products = _products(device_tables) if device_tables else None
    return with_graph(Analysis(open_or_import(path), network, products))


def read_network(path: str | None) -> DataFrame | None:
    """Read a measured network table; return None without a path.

    Raises:
        InputError: the table cannot be read.
    """
    if path is None:
        return None
    from dpro.replay.cost.tables import read_frame

    return read_frame(path)


def _products(paths: Sequence[str]) -> DataFrame:
    """Read the measured matrix products of files, of folders of tables, and of runs.

    Raises:
        InputError: a path cannot be read, or is a folder of something else: traces are not imported, since
            that takes long.
    """
    import polars

    from dpro.analysis.analysis import Analysis
    from dpro.errors import InputError
    from dpro.opening import is_trace_folder
    from dpro.replay.cost.kernels.products import FILE, is_table, read_products
    from dpro.replay.whatif.edits.device import products_of

    products = []
    for path in paths:
        if is_table(path):
            products.append(read_products(path))
            continue
        if is_trace_folder(path):
            raise InputError(
                f"{path}: neither a run nor a folder with {FILE}; `dpro import` turns traces into a run"
            )
        products.append(products_of(with_graph(Analysis(open_or_import(path))).built.graph))
    return polars.concat(products)


def with_graph(analysis: Analysis) -> Analysis:
    """Build or load the graph of an analysis, and return the analysis.

    Raises:
        Unanswerable: the run has no spans.
    """
    from dpro.analysis.graphs import ranks_built_once

    if context := click.get_current_context(silent=True):
        context.with_resource(ranks_built_once())
    _ = analysis.trust
    return analysis


def open_or_import(path: str | os.PathLike[str]) -> Run:
    """Open a run, or import traces; print the warnings of an import, or the damage of a run.

    Raises:
        InputError: the path does not exist, cannot be read, or is still being recorded.
    """
    run = open_quietly(path)
    for warning in run.damage if run.source is None else run.manifest.warnings:
        warn(warning)
    return run


def open_quietly(path: str | os.PathLike[str]) -> Run:
    """Open a run, or import traces, without printing warnings; apply `--layout`.

    Raises:
        InputError: the path does not exist, cannot be read, or is still being recorded.
    """
    from dpro.opening import open_path

    run = open_path(path, progress_bar)
    context = click.get_current_context(silent=True)
    layout = context.meta.get(LAYOUT) if context else None
    if not layout:
        return run
    from dpro.replay.mesh import with_layout

    return with_layout(run, layout)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar of bytes read and time left on stderr, if it is a terminal."""
    with progress("Looking for traces"), progress("Reading traces", in_bytes=True) as report:
        yield report
