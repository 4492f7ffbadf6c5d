"""Files of other tools into a run directory.

In: files and folders. Out: a run, written beside its place and moved there when whole, so that a failed
import leaves nothing behind. One rank is held in memory at a time. What a file's bytes mean is its reader's
business.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from dpro._version import __version__
from dpro.errors import InputError, UsageError
from dpro.ingest.files import read_head
from dpro.ingest.formats import Format, find_format, why_passed_over
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES
from dpro.store import Manifest, merge_counts, write_manifest, write_part

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (files read, files in all)."""

_MOST_RANKS_NAMED = 8


@dataclass
class _Found:
    """What an import has come across so far."""

    files: dict[int, Path] = field(default_factory=dict)  # by rank
    world_sizes: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    skipped: list[dict[str, int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def import_sources(sources: Sequence[Path], run: Path, *, progress: Progress | None = None) -> Manifest:
    """Import files and folders as one run.

    Args:
        sources: files, or folders that are searched to the bottom; content decides what is a trace.
        run: the run directory to make.
        progress: told after each file.

    Returns:
        The manifest of the run.

    Raises:
        UsageError: the run directory exists and is not empty.
        InputError: a source does not exist, holds no trace, cannot be read, or two files are of one rank.
    """
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UsageError(f"{run}: exists already; choose another output or remove it")
    traces, passed_over = _find_traces(sources)
    run.parent.mkdir(parents=True, exist_ok=True)
    temporary = run.with_name(f".{run.name}.{os.getpid()}.importing")
    try:
        temporary.mkdir()
        found = _read_all(traces, temporary, progress or (lambda done, total: None))
        found.skipped.append(passed_over)
        manifest = _manifest(found)
        write_manifest(temporary, manifest)
        os.replace(temporary, run)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _find_traces(sources: Sequence[Path]) -> tuple[list[tuple[Path, Format]], dict[str, int]]:
    """Files of a known format, in order of their names, and the count of the others by reason."""
    traces, passed_over = [], Counter[str]()
    for path in sorted({file for source in sources for file in _files(source)}):
        head = read_head(path)
        known = find_format(head)
        if known:
            traces.append((path, known))
        else:
            passed_over[why_passed_over(head)] += 1
    if not traces:
        names = ", ".join(str(source) for source in sources)
        held = "; ".join(f"{count} {reason}" for reason, count in sorted(passed_over.items()))
        given = "give torch.profiler traces or flight recorder dumps"
        raise InputError(f"{names}: no trace found ({held or 'no files'}); {given}")
    return traces, dict(passed_over)


def _files(source: Path) -> Iterable[Path]:
    if not source.exists():
        raise InputError(f"{source}: no such file or folder")
    if source.is_file():
        return [source]
    return [path for path in source.rglob("*") if path.is_file()]


def _read_all(traces: Sequence[tuple[Path, Format]], folder: Path, progress: Progress) -> _Found:
    """Read and write rank after rank; files that do not tell their rank come last, in order of names."""
    found = _Found()
    unranked: list[tuple[Path, Format]] = []
    failures: list[InputError] = []
    for number, (path, known) in enumerate(traces, start=1):
        try:
            trace = known.read(path)
        except InputError as error:
            failures.append(error)
        else:
            if trace.rank < 0:
                unranked.append((path, known))
            else:
                _take(trace, path, known, folder, found)
        progress(number, len(traces))
    for path, known in unranked:
        rank = next(rank for rank in range(len(traces)) if rank not in found.files)
        _take(known.read(path, rank=rank), path, known, folder, found)
        found.warnings.append(
            f"{path.name}: nothing tells its rank; taken as rank {rank}, in order of the names"
        )
    if not found.files:
        raise failures[0]
    found.warnings.extend(f"left out: {error}" for error in failures)
    return found


def _take(trace: RankTrace, path: Path, known: Format, folder: Path, found: _Found) -> None:
    """Write one rank's tables and note what the run as a whole should know of it."""
    other = found.files.setdefault(trace.rank, path)
    if other is not path:
        raise InputError(f"{other} and {path}: both are rank {trace.rank}; import one of them")
    for name, frame in trace.frames.items():
        if write_part(folder, TABLES[name], f"rank{trace.rank:05d}", frame):
            found.sources[name] = known.name
    found.world_sizes.append(trace.world_size)
    found.hosts.append(trace.host)
    found.gpus.extend(trace.gpus)
    found.versions.update(trace.versions)
    found.skipped.append(trace.skipped)
    found.warnings.extend(trace.warnings)


def _manifest(found: _Found) -> Manifest:
    ranks = sorted(found.files)
    manifest = Manifest(
        world_size=max([*found.world_sizes, ranks[-1] + 1]),
        ranks=ranks,
        created_by=f"dpro {__version__} import",
        hosts=sorted({host for host in found.hosts if host}),
        gpus=sorted(set(found.gpus)),
        versions=dict(sorted(found.versions.items())),
        sources=dict(sorted(found.sources.items())),
        warnings=found.warnings,
        skipped=merge_counts(found.skipped),
    )
    missing = manifest.missing_ranks
    if missing:
        named = ", ".join(map(str, missing[:_MOST_RANKS_NAMED])) + (
            " …" if len(missing) > _MOST_RANKS_NAMED else ""
        )
        manifest.warnings.append(f"{len(missing)} of {manifest.world_size} ranks are missing: {named}")
    return manifest
