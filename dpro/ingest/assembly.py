"""Assembly of a run from staged files.

Reads a staging folder with a note and parts for each file; writes a run directory and moves it to its place
by one rename. Repeating it after a crash gives the same run. Files that do not state their rank are numbered
here, and files of several formats that describe one rank are merged.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl

from dpro._version import __version__
from dpro.errors import InputError
from dpro.folders import made_whole
from dpro.ingest.flight_recorder import in_words, newest
from dpro.ingest.formats import FLIGHT_RECORDER, KINETO, addition_to
from dpro.ingest.staging import (
    FileNote,
    ImportTask,
    RankFacts,
    assign_rank,
    give_up,
    note_of,
    part_name,
    read_notes,
)
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
from dpro.store import Manifest, merge_counts, write_manifest, write_part
from dpro.words import missing_in_words

Spread: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any], Callable[[Any, str], Any]], Iterator[Any]]
"""`importer.run_tasks` bound to its workers."""


@dataclass(frozen=True)
class _Merge:
    """Task: merge the files that describe one rank."""

    rank: int
    pieces: list[StagedPiece]
    folder: Path


def assemble(
    staging: Path,
    run: Path,
    tasks: Sequence[ImportTask],
    spread: Spread,
    *,
    skipped: Mapping[str, int],
    warnings: Sequence[str],
) -> Manifest:
    """Make the run from the staged files.

    Args:
        run: the run directory to make; it does not exist, or is empty.
        skipped: counts of files that were not read, by reason.
        warnings: warnings to add to the manifest.

    Returns:
        The manifest of the run.

    Raises:
        InputError: no file could be read, or two files are of the same rank.
        OSError: the run cannot be written.
    """
    notes = _with_ranks(read_notes(staging), tasks, spread)
    left_out = [LEFT_OUT + note.failure for note in notes if note.failure]
    by_rank, remarks = {}, []
    for rank, staged in _all_pieces(notes, tasks).items():
        pieces, remark = without_redundant(staged)
        refuse_clashes(pieces)
        remarks.append(remark)
        if pieces:
            by_rank[rank] = pieces
    if not by_rank:
        reasons = [*left_out, *(line for remark in remarks for line in remark.warnings)]
        reasons.append(f"{notes[0].path}: cannot be used alone; give the folder with the files it belongs to")
        raise InputError(reasons[0].removeprefix(LEFT_OUT))
    with made_whole(run, within=staging) as whole:
        remarks += _place_parts(by_rank, whole, spread)
        remarks.append(Remarks(dict(skipped), left_out))
        manifest = _manifest(by_rank, notes, remarks, warnings)
        write_manifest(whole, manifest)
    return manifest


def _pieces(note: FileNote, folder: Path) -> list[StagedPiece]:
    return [StagedPiece(note.path, note.format, folder, share) for share in note.shares if not note.failure]


def _all_pieces(notes: Sequence[FileNote], tasks: Sequence[ImportTask]) -> dict[int, list[StagedPiece]]:
    """Return the staged pieces of each rank, in order of file names."""
    folders = {task.number: task.folder for task in tasks}
    by_rank = defaultdict(list)
    for note in notes:
        for piece in _pieces(note, folders[note.number]):
            by_rank[piece.share.rank].append(piece)
    return dict(sorted(by_rank.items()))


def _with_ranks(notes: list[FileNote], tasks: Sequence[ImportTask], spread: Spread) -> list[FileNote]:
    """Give each file that does not state its rank the lowest rank that it fits, in order of file names."""
    unranked = [note for note in notes if not note.failure and not note.states_its_rank]
    unranked.sort(key=lambda note: _by_numbers(note.path))
    if not unranked:
        return notes
    settled = [note for note in notes if note.states_its_rank]
    by_number = {task.number: task for task in tasks}
    taken = _all_pieces(settled, tasks)
    again = []
    for note in unranked:
        task = by_number[note.number]
        rank = next(rank for rank in range(len(taken) + 1) if _fits(note, task.folder, taken.get(rank, [])))
        taken.setdefault(rank, []).extend(_pieces(note, task.folder))
        again.append(replace(task, rank=rank))
    stale = [task for task, note in zip(again, unranked, strict=True) if note.rank != task.rank]
    for _ in spread(assign_rank, stale, give_up):
        pass
    return sorted([*settled, *(note_of(task) for task in again)], key=lambda note: note.number)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `host-2` comes before `host-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _fits(note: FileNote, folder: Path, there: Sequence[StagedPiece]) -> bool:
    return not any(clash(piece, other) for piece in _pieces(note, folder) for other in there)


def _place_parts(by_rank: Mapping[int, list[StagedPiece]], folder: Path, spread: Spread) -> list[Remarks]:
    """Put the parts of every rank into the run, merging the files of ranks that several describe."""
    for name in TABLES:
        (folder / name).mkdir()
    merges = []
    for rank, pieces in by_rank.items():
        if len(pieces) > 1:
            merges.append(_Merge(rank, pieces, folder))
            continue
        for name in pieces[0].share.tables:
            _link(pieces[0].folder / name / f"{part_name(rank)}.parquet", folder / name)
    merged = dict(spread(_merge, merges, _not_merged))
    for name in TABLES:
        if not any((folder / name).iterdir()):
            (folder / name).rmdir()
    return [merged[rank] for rank in sorted(merged)]


def _link(part: Path, folder: Path) -> None:
    """Link a part into the run; the staged part stays for another attempt."""
    try:
        os.link(part, folder / part.name)
    except OSError:  # a file system without hard links
        shutil.copyfile(part, folder / part.name)


def _merge(task: _Merge) -> tuple[int, Remarks]:
    return task.rank, merge_rank(task.rank, task.pieces, task.folder)


def _not_merged(task: _Merge, why: str) -> tuple[int, Remarks]:
    names = ", ".join(piece.path for piece in task.pieces)
    raise InputError(f"{names}: cannot be merged as rank {task.rank} ({why}); {ONE_OF_THEM}")


def _manifest(
    by_rank: Mapping[int, list[StagedPiece]],
    notes: Sequence[FileNote],
    remarks: Sequence[Remarks],
    warnings: Sequence[str],
) -> Manifest:
    pieces = [piece for rank in by_rank for piece in by_rank[rank]]
    shares = [piece.share for piece in pieces]
    assumed = [
        f"{Path(note.path).name}: no rank information; assumed to be rank {note.rank}, by order of file names"
        for note in notes
        if note.rank is not None and not note.failure
    ]
    of_files = [warning for share in shares for warning in share.warnings]
    world_size = max([*(share.world_size for share in shares), max(by_rank) + 1])
    versions = {name: version for share in shares for name, version in share.versions.items()}
    formats: dict[str, set[str]] = defaultdict(set)
    for piece in pieces:
        for name in piece.share.tables:
            formats[name].add(piece.format)
    manifest = Manifest(
        world_size=world_size,
        ranks=sorted(by_rank),
        created_by=f"dpro {__version__} import",
        hosts=sorted({share.host for share in shares if share.host}),
        gpus=sorted({gpu for share in shares for gpu in share.gpus}),
        versions=dict(sorted(versions.items())),
        sources={name: ", ".join(sorted(formats[name])) for name in sorted(formats)},
        warnings=[*warnings, *of_files, *assumed, *(line for remark in remarks for line in remark.warnings)],
        represents=min(share.represents for share in shares),
        skipped=merge_counts([*(share.skipped for share in shares), *(remark.skipped for remark in remarks)]),
    )
    if manifest.missing_ranks:
        manifest.warnings.append(missing_in_words(manifest.missing_ranks, world_size))
    return manifest


# Files of different formats that describe one rank are merged. A table of intervals comes from one file;
# collectives that a second file has only as calls, samples, and facts of the worker are added to it. Two
# files with the same content are an error that names both.

_ADDED = frozenset(table.name for table in (COLLECTIVES, SENDS, PROCESS_GROUPS, COUNTERS, CLOCK_SAMPLES))
_FROM_ONE_FILE = TABLES.keys() - _ADDED - {WORKERS.name}
_IDS_OF_A_FILE = 1 << 32  # offset of `collective_id` between the files of a rank
LEFT_OUT = "left out: "
ONE_JOB = "if each is a job of its own, give dpro one of them, such as {0} or {1}"
ONE_OF_THEM = "give dpro one of them, or import each as a separate run (`dpro import FILE -o RUN`)"


@dataclass(frozen=True)
class StagedPiece:
    """A file's share of one rank: path, format, staging folder and facts."""

    path: str
    format: str
    folder: Path
    share: RankFacts


@dataclass(frozen=True)
class Remarks:
    """What merging one rank left out: counts by reason, and warnings."""

    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def without_redundant(pieces: Sequence[StagedPiece]) -> tuple[list[StagedPiece], Remarks]:
    """Leave out files that add nothing to others.

    These are additions to Kineto traces (all but one where there is a Kineto trace, else those of no use
    alone), and flight recorder dumps that newer ones supersede.

    Returns:
        The remaining files, the one with spans first, and remarks on the others.
    """
    added = [piece for piece in pieces if addition_to(KINETO, piece.format)]
    others = [piece for piece in pieces if piece not in added]
    remarks = Remarks()
    if any(piece.format == KINETO for piece in others):
        if len(added) > 1:
            remarks.skipped[f"further {added[1].format}s of a rank"] = len(added) - 1
        added = added[:1]
    else:
        lacks = [_lack_alone(piece) for piece in added]
        remarks.warnings.extend(LEFT_OUT + lack for lack in lacks if lack)
        added = [piece for piece, lack in zip(added, lacks, strict=True) if not lack]
    others = _newest_dumps(others, remarks)
    ordered = sorted([*others, *added], key=lambda piece: SPANS.name not in piece.share.tables)
    return sorted(ordered, key=lambda piece: piece.format != KINETO), remarks


def _newest_dumps(pieces: Sequence[StagedPiece], remarks: Remarks) -> list[StagedPiece]:
    dumps = [piece for piece in pieces if piece.format == FLIGHT_RECORDER]
    if len(dumps) < 2:
        return list(pieces)
    kept = [dumps[place] for place in newest([_trace(piece).frames for piece in dumps])]
    left = [piece for piece in dumps if piece not in kept]
    if left:
        paths = [[piece.path for piece in side] for side in (kept, left)]
        remarks.warnings.append(in_words(dumps[0].share.rank, *paths))
    return [piece for piece in pieces if piece not in left]


def _lack_alone(piece: StagedPiece) -> str:
    """Return why a file needs the Kineto trace of its process; empty where it does not."""
    importer = addition_to(KINETO, piece.format)
    assert importer is not None
    try:
        importer.refuse_alone(_trace(piece), piece.path)
    except InputError as error:
        return str(error)
    return ""


def clash(first: StagedPiece, second: StagedPiece) -> str:
    """Return what two files of one rank both describe but only one may; empty where they fit together."""
    if first.format == second.format:
        return first.format
    if addition_to(first.format, second.format) or addition_to(second.format, first.format):
        return ""
    tables = _FROM_ONE_FILE.intersection(first.share.tables, second.share.tables)
    return ", ".join(sorted(tables))


def refuse_clashes(pieces: Sequence[StagedPiece]) -> None:
    """Raise if files of one rank do not fit together.

    Raises:
        InputError: two of them describe the same; names both.
    """
    for number, second in enumerate(pieces):
        for first in pieces[:number]:
            both_dumps = first.format == second.format == FLIGHT_RECORDER  # dumps of different groups
            if (what := clash(first, second)) and not both_dumps:
                also = "" if first.format == second.format else f" and have its {what}"
                rank = second.share.rank
                them = f"{first.path} and {second.path}"
                what_to_do = _one_of(first.path, second.path)
                raise InputError(f"{them}: both are rank {rank}{also}; {what_to_do}")


def _one_of(first: str, second: str) -> str:
    """Return what to do about two files of one rank; names a file where its folder has the other one, too."""
    folders = os.path.dirname(first), os.path.dirname(second)
    if folders[0] == folders[1]:
        return ONE_OF_THEM
    ways = zip((first, second), folders, (second, first), strict=True)
    return ONE_JOB.format(*(path if other.startswith(f"{at}/") else at for path, at, other in ways))


def merge_rank(rank: int, pieces: Sequence[StagedPiece], run: Path) -> Remarks:
    """Write the tables of a rank that several files describe.

    Args:
        pieces: files that fit together; where they differ on a fact, the first counts.

    Returns:
        Counts of rows left out, and warnings.

    Raises:
        InputError: a staged part cannot be read.
    """
    traces = _combined([(piece.format, _trace(piece)) for piece in pieces])
    for name, table in TABLES.items():
        frames = [conform(table, trace.frames[name]) for trace in traces if name in trace.frames]
        if not frames:
            continue
        if name == WORKERS.name:
            sources = ", ".join(dict.fromkeys(source for frame in frames for source in frame["source"]))
            rows = pl.concat(frames)
            known_facts = {
                name: next((value for value in rows[name] if value != column.default), rows[name][0])
                for name, column in WORKERS.columns.items()
            }
            merged = pl.DataFrame([known_facts | {"source": sources}], schema=WORKERS.dtypes)
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
    """Return the traces, with the Kineto trace of a process and what adds to it combined into one."""
    whole = dict(traces).get(KINETO)
    if whole is None:
        return [trace for _, trace in traces]
    rest = []
    for name, trace in traces:
        if addition := addition_to(KINETO, name):
            whole = addition.combine(whole, trace)
        elif name != KINETO:
            rest.append(trace)
    return [whole, *rest]


def _trace(piece: StagedPiece) -> RankTrace:
    frames = {}
    for name in piece.share.tables:
        part = piece.folder / name / f"{part_name(piece.share.rank)}.parquet"
        frames[name] = pl.read_parquet(part, glob=False)
    return RankTrace(piece.share.rank, piece.share.world_size, frames)


def _numbered_apart(frames: Sequence[pl.DataFrame]) -> Iterable[pl.DataFrame]:
    """Make ids that are unique within a file unique within the rank; -1 stays none."""
    for number, frame in enumerate(frames):
        identifier = pl.col("collective_id")
        moved = pl.when(identifier >= 0).then(identifier + number * _IDS_OF_A_FILE).otherwise(identifier)
        yield frame.with_columns(moved.alias("collective_id"))
