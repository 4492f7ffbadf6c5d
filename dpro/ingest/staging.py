"""Reading of one source file into a staging folder, until the run is assembled.

Takes a file and its format; makes a folder with the file's tables as parts, and a note that describes them.
The folder gets its name when it is complete, so a task that dies leaves nothing, and can be repeated. Only
the note, counts and facts, returns to the calling process. `importer` distributes the tasks.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from dpro.errors import PLEASE_REPORT, DproError, InputError, InternalError, first_line
from dpro.ingest.formats import Format, Importer, registry
from dpro.ingest.reading.files import Source, blocks
from dpro.ingest.trace import RankTrace, of_rank
from dpro.limits import MAX_RANKS
from dpro.panics import is_panic
from dpro.schema import COLLECTIVES, TABLES
from dpro.store import write_part
from dpro.table import SchemaError

_FILES = "files"
_NOTE = "note.json"


@dataclass(frozen=True)
class ImportTask:
    """Task: read one file of an import.

    Attributes:
        number: index of the file in the order of names.
        source: the file, which may be the member of an archive.
        bytes: size on disk.
        staging: folder in which the import is prepared.
        rank: the rank to read it as; None for the one that the file states.
    """

    number: int
    source: Source
    format: str
    bytes: int
    staging: Path
    rank: int | None = None

    @property
    def folder(self) -> Path:
        """Folder of its tables."""
        return self.staging / _FILES / f"{self.number:06d}"

    @property
    def unpacked(self) -> Path:
        """Path of a member of an archive, if it has been unpacked."""
        return self.staging / "unpacked" / f"{self.number:06d}" / self.source.name


@dataclass(frozen=True)
class RankFacts:
    """A file's facts about one rank: those of its `RankTrace`, and which tables have rows."""

    rank: int
    world_size: int
    host: str
    gpus: list[str]
    versions: dict[str, str]
    skipped: dict[str, int]
    warnings: list[str]
    tables: list[str]
    represents: int = 1


@dataclass(frozen=True)
class FileNote:
    """Result of reading one file.

    Attributes:
        number: index of the file in the order of names.
        path: its label.
        shares: facts about each of its ranks.
        failure: why it could not be read; empty where it could.
        stamp: size and modification time of the file when it was read.
        rank: the rank it was read as, where neither the file nor its name states one; else None.
    """

    number: int
    path: str
    format: str
    shares: list[RankFacts] = field(default_factory=list)
    failure: str = ""
    stamp: str = ""
    rank: int | None = None

    @property
    def states_its_rank(self) -> bool:
        """Whether the file states the ranks of all its content."""
        return self.rank is None


def stage(task: ImportTask) -> FileNote:
    """Read one file and store its tables; for a file that cannot be read, store only the reason.

    Until `assign_rank`, a file that does not state its rank is read as the rank of its index among the files.

    Raises:
        OSError: the staging folder cannot be written.
    """
    with _made_whole(task) as folder:
        stamp = _stamp(task.source)
        try:
            importer = registry().named(task.format)
            traces, rank = _with_rank(importer, task)
            try:
                shares = [_write_share(trace, folder) for trace in traces]
            except SchemaError as error:
                raise _importer_error(importer, task.source.label, error) from error
            note = FileNote(task.number, task.source.label, task.format, shares, stamp=stamp, rank=rank)
        except DproError as error:
            note = FileNote(task.number, task.source.label, task.format, failure=str(error))
        _write_note(folder, note)
    return note


def assign_rank(task: ImportTask) -> FileNote:
    """Change the rank of a staged file that does not state one to that of its task.

    Raises:
        OSError: the staging folder cannot be written.
    """
    note, rank = note_of(task), task.rank
    if rank is None or any(_peers_follow_from_rank(_staged(task, share)) for share in note.shares):
        return stage(task)
    moved = [replace(share, rank=rank) if share.rank == note.rank else share for share in note.shares]
    with _made_whole(task) as folder:
        for before, after in zip(note.shares, moved, strict=True):
            for name, frame in _staged(task, before):
                write_part(folder, TABLES[name], part_name(after.rank), of_rank(frame, after.rank))
        note = replace(note, shares=moved, rank=rank)
        _write_note(folder, note)
    return note


def give_up(task: ImportTask, why: str) -> FileNote:
    """Store that a file cannot be read because the process that read it died."""
    label = task.source.label
    note = FileNote(task.number, label, task.format, failure=f"{label}: {why}")
    with _made_whole(task) as folder:
        _write_note(folder, note)
    return note


@contextmanager
def _made_whole(task: ImportTask) -> Iterator[Path]:
    """Yield a folder that replaces the task's folder when the block ends without an error."""
    temporary = task.folder.with_name(f".{task.folder.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()  # without parents: a task that outlives its import must not begin another
    try:
        yield temporary
        shutil.rmtree(task.folder, ignore_errors=True)
        os.replace(temporary, task.folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_task(importer: Importer, task: ImportTask) -> Iterator[RankTrace]:
    """Read a file rank by rank; an error of the importer names the importer.

    Raises:
        DproError: the file cannot be read in its format, or the importer failed.
    """
    label = task.source.label
    try:
        traces = _read_source(importer, task)
    except OSError as error:
        raise InputError(f"{label}: cannot be read ({error.strerror or error})") from error
    except BaseException as error:
        raise _importer_error(importer, label, error) from error
    for trace in [traces] if isinstance(traces, RankTrace) else traces:
        if max(trace.rank, trace.world_size) > MAX_RANKS:
            raise InputError(f"{label}: claims to be rank {trace.rank} of {trace.world_size}")
        yield trace


def _importer_error(importer: Importer, label: str, error: BaseException) -> BaseException:
    """Return an importer's error as one line that names the file; other errors stay as they are."""
    if is_panic(error) and KeyboardInterrupt.__name__ in str(error):
        return KeyboardInterrupt()  # Ctrl-C while a library in Rust called Python
    if isinstance(error, MemoryError):
        return InputError(f"{label}: takes more memory than there is; read it on a larger machine")
    if isinstance(error, DproError) or not (isinstance(error, Exception) or is_panic(error)):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = error.args[0] if isinstance(error, InternalError) else first_line(error)
    what = f"{type(error).__name__}: {said}"
    failed = f"the {importer.name} importer failed on it ({what}, {Path(frame.filename).name}:{frame.lineno})"
    if isinstance(importer, Format):
        return InputError(f"{label}: internal error: {failed}; {PLEASE_REPORT}")
    return InputError(f"{label}: {failed}; report it to the author of that importer")


def _read_source(importer: Importer, task: ImportTask) -> RankTrace | list[RankTrace]:
    """Call an importer with its file; unpack a member of an archive first if the importer needs a path."""
    source = task.source
    if source.member and task.unpacked.exists():
        source = Source(source.label, task.unpacked)
    if isinstance(importer, Format) and importer.streams:
        return importer.read(source, rank=task.rank)
    if not source.member:
        return _read_path(importer, source.path, task)
    with TemporaryDirectory(dir=task.staging, prefix="unpacked.") as folder:
        path = Path(folder) / source.name
        with path.open("wb") as file:
            file.writelines(blocks(source, []))  # a damaged member is truncated
        return _read_path(importer, path, task)


def _read_path(importer: Importer, path: Path, task: ImportTask) -> RankTrace | list[RankTrace]:
    """Call an importer with a path; its errors name the source instead of the path."""
    try:
        return importer.read(path, rank=task.rank)
    except DproError as error:
        raise type(error)(str(error).replace(str(path), task.source.label)) from error


def _with_rank(importer: Importer, task: ImportTask) -> tuple[list[RankTrace], int | None]:
    """Return the traces of a file, and the rank that it is read as; None where it states its own."""
    traces = list(read_task(importer, task))
    if task.rank is not None or all(trace.rank >= 0 for trace in traces):
        return traces, task.rank
    rank = task.number  # the final rank if no file states its rank
    if any(_peers_follow_from_rank(trace.frames.items()) for trace in traces):
        return list(read_task(importer, replace(task, rank=rank))), rank
    return [trace if trace.rank >= 0 else _with_rank_set(rank, trace) for trace in traces], rank


def _with_rank_set(rank: int, trace: RankTrace) -> RankTrace:
    return replace(trace, rank=rank, frames={name: of_rank(f, rank) for name, f in trace.frames.items()})


def _peers_follow_from_rank(tables: Iterable[tuple[str, pl.DataFrame]]) -> bool:
    """Return whether a rank sends or receives within a group: its peer then depends on its own rank."""
    within_group = pl.col("op").is_in(["send", "recv"]) & (pl.col("group_ranks") != "")
    return any(
        name == COLLECTIVES.name
        and {"op", "group_ranks"} <= set(frame.columns)
        and not frame.filter(within_group).is_empty()
        for name, frame in tables
    )


def _staged(task: ImportTask, share: RankFacts) -> Iterator[tuple[str, pl.DataFrame]]:
    for name in share.tables:
        yield name, pl.read_parquet(task.folder / name / f"{part_name(share.rank)}.parquet", glob=False)


def _write_share(trace: RankTrace, folder: Path) -> RankFacts:
    """Write one rank's tables; return its facts."""
    tables = []
    for name, frame in trace.frames.items():
        if write_part(folder, TABLES[name], part_name(trace.rank), frame):
            tables.append(name)
    return RankFacts(
        rank=trace.rank,
        world_size=trace.world_size,
        host=trace.host,
        gpus=list(trace.gpus),
        versions=dict(trace.versions),
        skipped=dict(trace.skipped),
        warnings=list(trace.warnings),
        tables=sorted(tables),
        represents=trace.represents,
    )


def part_name(rank: int) -> str:
    """Return the name of a rank's part in every table."""
    return f"rank{rank:05d}"


def make_staging(staging: Path) -> None:
    """Make the folder in which an import is prepared; it may exist."""
    (staging / _FILES).mkdir(parents=True, exist_ok=True)


def read_notes(staging: Path) -> list[FileNote]:
    """Read the notes of all staged files, in order of their names."""
    return [_note(path) for path in sorted((staging / _FILES).glob(f"[0-9]*/{_NOTE}"))]


def note_of(task: ImportTask) -> FileNote:
    """Read the note of a staged file."""
    return _note(task.folder / _NOTE)


def is_staged(task: ImportTask) -> bool:
    """Return whether a file is staged already, was readable, and has not changed since."""
    try:
        note = note_of(task)
        return not note.failure and note.stamp == _stamp(task.source)
    except OSError:
        return False


def _stamp(source: Source) -> str:
    status = source.path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _write_note(folder: Path, note: FileNote) -> None:
    (folder / _NOTE).write_text(json.dumps(asdict(note)), encoding="utf-8")


def _note(path: Path) -> FileNote:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    shares = [RankFacts(**share) for share in document.pop("shares")]
    return FileNote(**document, shares=shares)
