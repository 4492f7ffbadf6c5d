"""Files of different formats that describe one rank, merged as that rank's tables.

In: staged files. Out: one part per table. A table of intervals comes from one file; collectives that a
second file knows as calls only, samples, and facts of the worker are added to those of the first. Two files
that describe the same are an error that names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from dpro.errors import InputError
from dpro.ingest.assembly.staging import RankFacts, part_name
from dpro.ingest.flight_recorder import in_words, newest
from dpro.ingest.formats import EXECUTION_TRACE, FLIGHT_RECORDER, KINETO
from dpro.ingest.trace import RankTrace
from dpro.schema import (
    CLOCK_SAMPLES,
    COLLECTIVES,
    COUNTERS,
    PROCESS_GROUPS,
    SENDS,
    SPANS,
    TABLES,
    WORKERS,
    conform,
)
from dpro.store import merge_counts, write_part

_ADDED = frozenset(table.name for table in (COLLECTIVES, SENDS, PROCESS_GROUPS, COUNTERS, CLOCK_SAMPLES))
_FROM_ONE_FILE = TABLES.keys() - _ADDED - {WORKERS.name}
_IDS_OF_A_FILE = 1 << 32  # `collective_id` of the second file of a rank starts here, and so on
LEFT_OUT = "left out: "
_FURTHER = "further execution traces of a rank"


@dataclass(frozen=True)
class StagedPiece:
    """One file's share of one rank: where it is staged, and what it is."""

    path: str
    format: str
    folder: Path
    share: RankFacts


@dataclass(frozen=True)
class Remarks:
    """What merging one rank left out, by reason, and its warnings."""

    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def useful(pieces: Sequence[StagedPiece]) -> tuple[list[StagedPiece], Remarks]:
    """Leave out files that add nothing to others.

    These are execution traces (all but one where there is a Kineto trace, else those without times), and
    flight recorder dumps that newer ones supersede.

    Returns:
        The others, the one that has the spans first, and remarks on those left out.
    """
    others = [piece for piece in pieces if piece.format != EXECUTION_TRACE]
    traces = [piece for piece in pieces if piece.format == EXECUTION_TRACE]
    remarks = Remarks()
    if any(piece.format == KINETO for piece in others):
        if len(traces) > 1:
            remarks.skipped[_FURTHER] = len(traces) - 1
        traces = traces[:1]
    else:
        lacks = [_lack_of_times(piece) for piece in traces]
        remarks.warnings.extend(LEFT_OUT + lack for lack in lacks if lack)
        traces = [piece for piece, lack in zip(traces, lacks, strict=True) if not lack]
    others = _newest_dumps(others, remarks)
    ordered = sorted([*others, *traces], key=lambda piece: SPANS.name not in piece.share.tables)
    return sorted(ordered, key=lambda piece: piece.format != KINETO), remarks


def _newest_dumps(pieces: Sequence[StagedPiece], remarks: Remarks) -> list[StagedPiece]:
    dumps = [piece for piece in pieces if piece.format == FLIGHT_RECORDER]
    if len(dumps) < 2:
        return list(pieces)
    kept = [dumps[at] for at in newest([_trace(piece).frames for piece in dumps])]
    left = [piece for piece in dumps if piece not in kept]
    if left:
        paths = [[piece.path for piece in each] for each in (kept, left)]
        remarks.warnings.append(in_words(dumps[0].share.rank, *paths))
    return [piece for piece in pieces if piece not in left]


def _lack_of_times(piece: StagedPiece) -> str:
    """Why an execution trace needs the Kineto trace of its process; empty where it does not."""
    from dpro.ingest.execution_trace import refuse_alone

    try:
        refuse_alone(_trace(piece), piece.path)
    except InputError as error:
        return str(error)
    return ""


def clash(first: StagedPiece, second: StagedPiece) -> str:
    """What two files of one rank both describe and only one may; empty where they fit together."""
    if first.format == second.format:
        return first.format
    if {first.format, second.format} == {KINETO, EXECUTION_TRACE}:
        return ""
    both = _FROM_ONE_FILE.intersection(first.share.tables, second.share.tables)
    return ", ".join(sorted(both))


def refuse_clashes(pieces: Sequence[StagedPiece]) -> None:
    """Refuse files of one rank that do not fit together.

    Raises:
        InputError: two of them describe the same; it names both.
    """
    for number, second in enumerate(pieces):
        for first in pieces[:number]:
            both_dumps = first.format == second.format == FLIGHT_RECORDER  # of groups that are not the same
            if (what := clash(first, second)) and not both_dumps:
                also = "" if first.format == second.format else f" and have its {what}"
                rank = second.share.rank
                raise InputError(
                    f"{first.path} and {second.path}: both are rank {rank}{also}; import one of them"
                )


def merge_rank(rank: int, pieces: Sequence[StagedPiece], run: Path) -> Remarks:
    """Write the tables of a rank that several files describe.

    Args:
        pieces: files that fit together; where they differ on a fact, the first counts.

    Returns:
        What was left out, and warnings.

    Raises:
        InputError: a staged part cannot be read.
    """
    traces = _combined([(piece.format, _trace(piece)) for piece in pieces])
    for name, table in TABLES.items():
        frames = [conform(table, trace.frames[name]) for trace in traces if name in trace.frames]
        if not frames:
            continue
        if name == WORKERS.name:
            merged = _first_known(frames)
        elif name == COLLECTIVES.name:
            merged = pl.concat(_numbered_apart(frames))
        else:
            merged = pl.concat(frames) if name in _ADDED else frames[0]
        write_part(run, table, part_name(rank), merged)
    return Remarks(
        skipped=merge_counts(trace.skipped for trace in traces),
        warnings=[warning for trace in traces for warning in trace.warnings],
    )


def _combined(traces: Sequence[tuple[str, RankTrace]]) -> list[RankTrace]:
    """The traces, with Kineto's and the execution trace of the same process combined."""
    by_format = dict(traces)
    if KINETO not in by_format or EXECUTION_TRACE not in by_format:
        return [trace for _, trace in traces]
    from dpro.ingest.execution_trace import combine

    whole = combine(by_format[KINETO], by_format[EXECUTION_TRACE])
    rest = [trace for name, trace in traces if name not in (KINETO, EXECUTION_TRACE)]
    return [whole, *rest]


def _trace(piece: StagedPiece) -> RankTrace:
    frames = {}
    for name in piece.share.tables:
        part = piece.folder / name / f"{part_name(piece.share.rank)}.parquet"
        frames[name] = pl.read_parquet(part, glob=False)
    return RankTrace(piece.share.rank, piece.share.world_size, frames)


def _first_known(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """One row: each column from the first file that knows it, the sources together."""
    sources = ", ".join(dict.fromkeys(source for frame in frames for source in frame["source"]))
    rows = pl.concat(frames)
    known = {
        name: next((value for value in rows[name] if value != column.default), rows[name][0])
        for name, column in WORKERS.columns.items()
    }
    return pl.DataFrame([known | {"source": sources}], schema=WORKERS.dtypes)


def _numbered_apart(frames: Sequence[pl.DataFrame]) -> Iterable[pl.DataFrame]:
    """Ids that are unique within a file made unique within the rank; -1 stays none."""
    for number, frame in enumerate(frames):
        identifier = pl.col("collective_id")
        moved = pl.when(identifier >= 0).then(identifier + number * _IDS_OF_A_FILE).otherwise(identifier)
        yield frame.with_columns(moved.alias("collective_id"))
