"""Graphs of runs, cached on disk for later commands.

Takes an opened run; returns its graph, or the condensed ranks of a large run, with the trust in the replay:
read from the cache, or built and put there. The key of a file covers the content of the run's tables and the
code that builds graphs, so a run that is moved or copied finds its graph, and a changed one does not. Works
without a usable cache, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dpro._version import __version__
from dpro.cache import cache_folder, folder_in_use, keep_latest, mark_used
from dpro.errors import DproError, Unanswerable
from dpro.freed_memory import keep_freed_memory
from dpro.limits import memory_left
from dpro.stages import Progress, ignore, stage
from dpro.units import format_bytes

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import polars as pl

    from dpro.detect.context import Context
    from dpro.detect.pipeline_slowdown import OperationsAnalysis
    from dpro.replay.construction.graph_builder import Built
    from dpro.replay.fidelity.accuracy import Trust
    from dpro.replay.fidelity.by_rank import CondensedRun
    from dpro.replay.graph import Graph
    from dpro.replay.whatif.condensed import CondensedJob
    from dpro.store import Run

    Opened = tuple[Executor, Path]

T = TypeVar("T")
# Nodes. A smaller graph is built faster than the key of a saved one is computed.
WORTH_SAVING = 20_000
KEPT = 16  # last-used graphs; a graph of a million spans takes some tens of megabytes
# Spans. The graph of a run with more is built rank by rank (docs/performance.md, "Many ranks").
MIN_LARGE_SPANS = 4_000_000
MAX_LOCAL_TASKS = 2  # up to this many tasks run in this process
# Chunks of tasks: data shared by the tasks of a chunk, which grow with the number of ranks, are sent once.
CHUNKS = 64
BYTES_PER_SPAN = 1_000  # peak memory while a whole graph is built (docs/performance.md, "Many ranks")
# Set by `ranks_built_once`: the stack that it closes, and processes and folder by path of the run.
_SHARED: ContextVar[tuple[ExitStack, dict[Path, Opened]] | None] = ContextVar("shared", default=None)


def is_large(run: Run) -> bool:
    """Return whether the graph of a run is built rank by rank: it has many spans, of several ranks."""
    from dpro.schema import SPANS

    several = len(run.manifest.ranks) > 1 and not run.manifest.is_pretended
    return several and run.num_rows(SPANS) > MIN_LARGE_SPANS and not _of_operations(run)


def _of_operations(run: Run) -> bool:
    """Return whether spans are whole operations, whose graph is small and built from one clock."""
    from dpro.replay.pipeline.operations import consists_of_operations
    from dpro.schema import SPANS

    parts = run.part_by_part(SPANS, ["rank", "kind", "correlation", "name"])
    return consists_of_operations(next(iter(parts)))


def graph_of(run: Run, report: Progress = ignore) -> tuple[Built, Trust]:
    """Return the whole graph of a run, and the trust in its replay.

    Args:
        report: called with the progress if the graph has to be built.

    Raises:
        Unanswerable: the run has no spans, or its graph does not fit into memory.
    """
    from dpro.replay.fidelity.saved import load, save
    from dpro.replay.kept import with_kept_facts

    too_large = why_too_large(run)
    if too_large:
        raise Unanswerable(f"{run.label}: {too_large}")
    keep_freed_memory()
    file = _file(run, "")
    saved = None if file is None else load(file, run)
    built, trust = saved or make_graph(run, report)
    if file is None or built.graph.num_nodes < WORTH_SAVING:
        return built, trust
    if saved is None:
        _keep(file, lambda path: save(path, built, trust))
    duration = None if built.recording is None else built.recording.duration
    return replace(built, graph=with_kept_facts(built.graph, file, duration)), trust


def why_too_large(run: Run) -> str:
    """Return why the whole graph of a run cannot be built; empty if it fits into memory."""
    from dpro.schema import SPANS

    spans, left = run.num_rows(SPANS), memory_left()
    if spans <= MIN_LARGE_SPANS or spans * BYTES_PER_SPAN <= left:
        return ""
    return (
        f"the graph of all {spans:,} spans at once takes some {format_bytes(spans * BYTES_PER_SPAN)} of "
        f"memory, and {format_bytes(left)} are left; `dpro replay`, `dpro diagnose` and edits of the "
        "network or of the work of ranks (`dpro whatif --edit`) do without it"
    )


def condensed_of(run: Run, report: Progress = ignore) -> CondensedRun:
    """Return the condensed ranks of a run, each built and condensed by itself in worker processes.

    Args:
        report: called with the progress if ranks have to be built.

    Raises:
        Unanswerable: the run has no spans.
        DproError: a process was killed, or there is no room for the ranks.
    """
    from dpro.replay.fidelity.by_rank import condense_run
    from dpro.replay.fidelity.saved import load_condensed, save_condensed

    run = replace(run, path=run.path.absolute())  # remote workers have another working directory
    file = _file(run, "-ranks")
    saved = None if file is None else load_condensed(file, run)
    if saved is not None:
        return saved
    with open_rank_processes(run) as (executor, folder):
        condensed = condense_run(run, folder, executor, report)
    _keep(file, lambda path: save_condensed(path, condensed))
    return condensed


@contextmanager
def rank_processes(run: Run) -> Iterator[tuple[Executor, Path]]:
    """Yield worker processes for the ranks of a run, and a temporary folder that they share.

    Raises:
        DproError: there is no cache for the folder, or workers that the user named cannot do the work.
        OSError: the folder cannot be created.
    """
    from dpro.processes import named_workers, num_cores, process_pool

    jobs = min(num_cores(), len(run.manifest.ranks))
    with (
        folder_in_use(cache_folder("graphs"), "shares-") as folder,
        named_workers([run.path, folder]) as named,
        nullcontext(named) if named is not None else process_pool(jobs) as executor,
    ):
        yield executor, folder


@contextmanager
def _errors_of_ranks(run: Run) -> Iterator[None]:
    """Turn errors of processes and disks inside into a `DproError` about the ranks of a run."""
    # Imported here, since commands that find a cached graph need no processes.
    from concurrent.futures import BrokenExecutor

    try:
        yield
    except BrokenExecutor as error:
        raise DproError(
            f"{run.label}: a process that built ranks was killed, perhaps because memory ran out"
        ) from error
    except OSError as error:
        raise DproError(
            f"{run.label}: its ranks cannot be cached during the analysis "
            f"({error.strerror or error}): name a folder with more room with DPRO_CACHE"
        ) from error


@contextmanager
def ranks_built_once() -> Iterator[None]:
    """Share the worker processes of each large run, and the ranks that they have built, inside the block."""
    if _SHARED.get() is not None:
        yield
        return
    with ExitStack() as stack:
        token = _SHARED.set((stack, {}))
        try:
            yield
        finally:
            _SHARED.reset(token)


@contextmanager
def open_rank_processes(run: Run) -> Iterator[tuple[Executor, Path]]:
    """Yield `rank_processes` of a run; inside `ranks_built_once`, those already started.

    Raises:
        DproError: a process was killed, or there is no room for the folder.
    """
    shared = _SHARED.get()
    with _errors_of_ranks(run):
        if shared is None:
            with rank_processes(run) as opened:
                yield opened
            return
        stack, by_run = shared
        if run.path not in by_run:
            by_run[run.path] = stack.enter_context(rank_processes(run))
        yield by_run[run.path]


@contextmanager
def condensed_job(run: Run, condensed: CondensedRun) -> Iterator[CondensedJob]:
    """Yield a job of condensed ranks, with the worker processes for them.

    Raises:
        DproError: a process was killed, or there is no room for the ranks.
    """
    from dpro.replay.whatif.condensed import CondensedJob

    run = replace(run, path=run.path.absolute())
    with open_rank_processes(run) as (executor, folder):
        yield CondensedJob(
            graph=condensed.joined.graph, node=condensed.joined.node, run=run, condensed=condensed,
            folder=folder, map_tasks=mapped_over(executor),
        )  # fmt: skip


@contextmanager
def context_by_rank(
    run: Run, condensed: CondensedRun, operations: tuple[Graph, OperationsAnalysis] | None = None
) -> Iterator[Context]:
    """Yield the detectors' context of a large run, from its condensed ranks.

    A rank is built again when its inside is first needed.

    Args:
        operations: graph of whole operations and their slowdown; None without operations.

    Raises:
        DproError: a process was killed, or there is no room for the ranks.
    """
    from dpro.detect.baseline import Baseline
    from dpro.detect.context import Context

    if not condensed.trust.answerable:
        measured = condensed.joined.graph if condensed.trust.comparable else None
        yield Context(run, operations=operations, measured=measured)
        return
    with condensed_job(run, condensed) as job:
        yield Context(run, Baseline(job), operations, breakdown=lambda: _breakdown_by_rank(run, condensed))


def _breakdown_by_rank(run: Run, condensed: CondensedRun) -> pl.DataFrame:
    """Return `step_breakdown` of a run, with the spans of one rank in memory at a time.

    Columns `exposed_wait_ns` and `exposed_transfer_ns` are missing, since the split needs all ranks.
    """
    import polars as pl

    from dpro.replay.steps import step_breakdown
    from dpro.schema import COLLECTIVES, SPANS, STEPS

    parts = []
    for rank in condensed.matched.ranks:
        files, of_rank = condensed.matched.parts[rank], pl.col("rank") == rank
        tables = (
            run.read(kind, files[kind.name], list(kind.columns)) for kind in (SPANS, COLLECTIVES, STEPS)
        )
        parts.append(step_breakdown(*(table.filter(of_rank) for table in tables)))
    return pl.concat(parts).drop("exposed_wait_ns", "exposed_transfer_ns").sort("step", "rank", "duration_ns")


def mapped_over(executor: Executor) -> Callable[[Callable[..., T], Iterable[Any]], Iterable[T]]:
    """Return a `map` over processes; up to `MAX_LOCAL_TASKS` run in this one, which is faster."""

    def map_tasks(work: Callable[..., T], tasks: Iterable[Any]) -> Iterable[T]:
        listed = list(tasks)
        if len(listed) <= MAX_LOCAL_TASKS:
            return map(work, listed)
        return executor.map(work, listed, chunksize=-(-len(listed) // CHUNKS))

    return map_tasks


def _file(run: Run, suffix: str) -> Path | None:
    """Return the cache file of a run's graph, marked as used if it exists; None without a cache."""
    try:
        file = cache_folder("graphs") / f"{fingerprint(run)}{suffix}.npz"
    except DproError:  # the graph can be built without a cache
        return None
    mark_used(file)
    return file


def _keep(file: Path | None, save: Callable[[Path], None]) -> None:
    from dpro.replay.kept import remove_facts_without_graph

    if file is None:
        return
    with suppress(OSError):  # a full disk: the graph is in memory all the same
        save(file)
        keep_latest(file.parent, "*.npz", KEPT)
        remove_facts_without_graph(file.parent)


def make_graph(run: Run, report: Progress = ignore) -> tuple[Built, Trust]:
    """Build the whole graph of a run and judge its replay, without the cache.

    Args:
        report: called with the parts done and in total.

    Raises:
        Unanswerable: the run has no spans.
    """
    from dpro.replay.construction.graph_builder import build_graph, without_rendezvous
    from dpro.replay.construction.recording_cost import find_pace, find_recording_cost, profiler_of
    from dpro.replay.fidelity.accuracy import assess
    from dpro.replay.steps import steps_of
    from dpro.replay.timeline import replay

    judged = built = build_graph(run, report)
    with stage("Replaying the graph"):
        if run.manifest.is_pretended:
            judged = without_rendezvous(built)
        elif not built.of_operations:
            steps = steps_of(run)
            cost = find_recording_cost(built.graph, steps, profiler_of(run))
            judged = built = replace(built, recording=cost)
            pace = find_pace(built.predictive, steps)
            if pace != 1:  # else its graph as it runs is made already
                judged = built = replace(built, pace=pace)
        return built, assess(judged, replay(judged.graph), run.manifest)


def fingerprint(run: Run) -> str:
    """Return a hash of the run's files, a stated layout, and the code that builds and changes the graph."""
    import dpro.replay
    from dpro.plugins import code_of
    from dpro.schema import TABLES
    from dpro.store import MANIFEST, part_files

    digest = hashlib.blake2b(__version__.encode(), digest_size=16)
    top, replay = (Path(package.__file__ or "").parent for package in (dpro, dpro.replay))
    for module in sorted([*top.glob("*.py"), *replay.rglob("*.py"), *code_of("edits")]):
        status = module.stat()
        digest.update(f"\0{module.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    for name in sorted(TABLES):
        for part in part_files(run.path, TABLES[name]):
            digest.update(f"\0{name}\0{part.name}\0{part.stat().st_size}\0".encode(errors="surrogateescape"))
            with part.open("rb") as content:
                hashlib.file_digest(content, lambda: digest)
    digest.update((run.path / MANIFEST).read_bytes())
    digest.update(repr(sorted(run.layout.items())).encode())
    return digest.hexdigest()
