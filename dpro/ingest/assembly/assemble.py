"""Staged files assembled as one run.

In: a staging folder with a note and parts for each file. Out: a run directory, moved to its place by one
rename when it is whole. Repeating it after a crash gives the same run. Files that do not state their rank are
numbered here.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from dpro._version import __version__
from dpro.errors import InputError
from dpro.folders import made_whole
from dpro.ingest.assembly.merge import (
    LEFT_OUT,
    Remarks,
    StagedPiece,
    clash,
    merge_rank,
    refuse_clashes,
    useful,
)
from dpro.ingest.assembly.staging import (
    FileNote,
    ImportTask,
    RankFacts,
    give_up,
    note_of,
    part_name,
    read_notes,
    settle,
)
from dpro.schema import TABLES
from dpro.store import Manifest, merge_counts, write_manifest

Spread: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any], Callable[[Any, str], Any]], Iterator[Any]]
"""`parallel.run_tasks` with its workers chosen."""

_MAX_RANKS_NAMED = 8


@dataclass(frozen=True)
class _Merge:
    """Task: one rank that several files describe."""

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
    """Make the run from what is staged.

    Args:
        run: the run directory to make; it does not exist, or is empty.

    Returns:
        The manifest of the run.

    Raises:
        InputError: no file could be read, or two are of the same rank.
        OSError: the run cannot be written.
    """
    notes = _with_ranks(read_notes(staging), tasks, spread)
    left_out = [LEFT_OUT + note.failure for note in notes if note.failure]
    by_rank, remarks = _by_rank(notes, tasks)
    if not by_rank:
        reasons = [*left_out, *(line for remark in remarks for line in remark.warnings)]
        raise InputError(reasons[0].removeprefix(LEFT_OUT))
    with made_whole(run, within=staging) as whole:
        remarks += _place(by_rank, whole, spread)
        remarks.append(Remarks(dict(skipped), left_out))
        manifest = _manifest(by_rank, notes, remarks, warnings)
        write_manifest(whole, manifest)
    return manifest


def _pieces(note: FileNote, folder: Path) -> list[StagedPiece]:
    return [StagedPiece(note.path, note.format, folder, share) for share in note.shares if not note.failure]


def _all_pieces(notes: Sequence[FileNote], tasks: Sequence[ImportTask]) -> dict[int, list[StagedPiece]]:
    """What was read of each rank, in order of the files' names."""
    folders = {task.number: task.folder for task in tasks}
    by_rank = defaultdict(list)
    for note in notes:
        for piece in _pieces(note, folders[note.number]):
            by_rank[piece.share.rank].append(piece)
    return dict(sorted(by_rank.items()))


def _by_rank(
    notes: Sequence[FileNote], tasks: Sequence[ImportTask]
) -> tuple[dict[int, list[StagedPiece]], list[Remarks]]:
    """The pieces used of each rank, and remarks on those left out.

    Raises:
        InputError: two files describe the same of one rank.
    """
    by_rank, remarks = {}, []
    for rank, found in _all_pieces(notes, tasks).items():
        pieces, remark = useful(found)
        refuse_clashes(pieces)
        remarks.append(remark)
        if pieces:
            by_rank[rank] = pieces
    return by_rank, remarks


def _with_ranks(notes: list[FileNote], tasks: Sequence[ImportTask], spread: Spread) -> list[FileNote]:
    """Give each file that does not state its rank the first rank that it fits, in order of the names."""
    unranked = [note for note in notes if not note.failure and not note.states_its_rank]
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
    for _ in spread(settle, stale, give_up):
        pass
    return sorted([*settled, *(note_of(task) for task in again)], key=lambda note: note.number)


def _fits(note: FileNote, folder: Path, there: Sequence[StagedPiece]) -> bool:
    return not any(clash(piece, other) for piece in _pieces(note, folder) for other in there)


def _place(by_rank: Mapping[int, list[StagedPiece]], folder: Path, spread: Spread) -> list[Remarks]:
    """Put the parts of every rank into the run: as they are staged, or merged where files share a rank."""
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
    """Link a part into the run, so that the staged one stays for another attempt."""
    try:
        os.link(part, folder / part.name)
    except OSError:  # a file system without hard links
        shutil.copyfile(part, folder / part.name)


def _merge(task: _Merge) -> tuple[int, Remarks]:
    return task.rank, merge_rank(task.rank, task.pieces, task.folder)


def _not_merged(task: _Merge, why: str) -> tuple[int, Remarks]:
    names = ", ".join(piece.path for piece in task.pieces)
    raise InputError(f"{names}: cannot be merged as rank {task.rank} ({why}); import one of them")


def _manifest(
    by_rank: Mapping[int, list[StagedPiece]],
    notes: Sequence[FileNote],
    remarks: Sequence[Remarks],
    warnings: Sequence[str],
) -> Manifest:
    pieces = [piece for rank in by_rank for piece in by_rank[rank]]
    shares = [piece.share for piece in pieces]
    assumed = [
        f"{Path(note.path).name}: nothing states its rank; taken as rank {note.rank}, in order of the names"
        for note in notes
        if note.rank is not None and not note.failure
    ]
    of_files = [warning for share in shares for warning in share.warnings]
    world_size = max([*(share.world_size for share in shares), max(by_rank) + 1])
    manifest = Manifest(
        world_size=world_size,
        ranks=sorted(by_rank),
        created_by=f"dpro {__version__} import",
        hosts=sorted({share.host for share in shares if share.host}),
        gpus=sorted({gpu for share in shares for gpu in share.gpus}),
        versions=_versions(shares),
        sources=_sources(pieces),
        warnings=[*warnings, *of_files, *assumed, *(line for remark in remarks for line in remark.warnings)],
        skipped=merge_counts([*(share.skipped for share in shares), *(remark.skipped for remark in remarks)]),
    )
    if manifest.missing_ranks:
        manifest.warnings.append(missing_in_words(manifest.missing_ranks, world_size))
    return manifest


def _versions(shares: Sequence[RankFacts]) -> dict[str, str]:
    versions = {name: version for share in shares for name, version in share.versions.items()}
    return dict(sorted(versions.items()))


def _sources(pieces: Sequence[StagedPiece]) -> dict[str, str]:
    """The formats that each table was read from."""
    formats: dict[str, set[str]] = defaultdict(set)
    for piece in pieces:
        for name in piece.share.tables:
            formats[name].add(piece.format)
    return {name: ", ".join(sorted(formats[name])) for name in sorted(formats)}


def missing_in_words(missing: Sequence[int], world_size: int) -> str:
    """One line on the ranks that left no record."""
    named = ", ".join(map(str, missing[:_MAX_RANKS_NAMED]))
    more = " …" if len(missing) > _MAX_RANKS_NAMED else ""
    return f"{len(missing)} of {world_size} ranks are missing: {named}{more}"
