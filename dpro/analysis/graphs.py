"""Graphs that an earlier command built, kept in the user's cache so that the next one starts from them.

In: an opened run. Out: its graph, or its ranks condensed one by one where it is large, and the judgement of
it: read from the cache or made and put there. A file is found by what the run's tables hold and by the
version of the code that made it, so a run that is moved or copied finds its graph, and one that changes does
not. A cache that cannot be used is done without.
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
# A smaller graph is built in less time than it takes to be sure that one was saved.
WORTH_SAVING = 20_000
KEPT = 16  # of the graphs used last; a graph of a million spans takes some tens of megabytes
# A run of more spans is built rank by rank (docs/performance.md, "Many ranks").
LARGE = 4_000_000
FEW_TASKS = 2  # ranks
# Chunks of tasks: what the tasks of one have in common, which grows with the number of ranks, is sent once.
CHUNKS = 64
BYTES_PER_SPAN = 1_000  # at the peak of building a graph as a whole; likewise
# What `ranks_built_once` ends, and processes and folders by the path of the run.
_SHARED: ContextVar[tuple[ExitStack, dict[Path, Opened]] | None] = ContextVar("shared", default=None)


def is_large(run: Run) -> bool:
    """Whether the graph of a run is built rank by rank: it has many spans, of several ranks."""
    from dpro.schema import SPANS

    several = len(run.manifest.ranks) > 1 and not run.manifest.is_pretended
    return several and run.num_rows(SPANS) > LARGE and not _of_operations(run)


def _of_operations(run: Run) -> bool:
    """Whether spans are whole operations: their graph is small, and they have one clock."""
    from dpro.replay.pipeline.operations import consists_of_operations
    from dpro.schema import SPANS

    parts = run.part_by_part(SPANS, ["rank", "kind", "correlation", "name"])
    return consists_of_operations(next(iter(parts)))


def graph_of(run: Run, report: Progress = ignore) -> tuple[Built, Trust]:
    """The graph of a run as a whole, and how far to believe its replay.

    Args:
        report: called with how much of the graph is built, where it has to be.

    Raises:
        Unanswerable: the run holds no spans, or its graph does not fit into memory.
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
    """Why the graph of a run cannot be built as a whole; empty where it fits into memory."""
    from dpro.schema import SPANS

    spans, left = run.num_rows(SPANS), memory_left()
    if spans <= LARGE or spans * BYTES_PER_SPAN <= left:
        return ""
    return (
        f"the graph of all {spans:,} spans at once takes some {format_bytes(spans * BYTES_PER_SPAN)} of "
        f"memory, and {format_bytes(left)} are left; `dpro replay`, `dpro diagnose` and edits of the "
        "network or of the work of ranks (`dpro whatif --edit`) do without it"
    )


def condensed_of(run: Run, report: Progress = ignore) -> CondensedRun:
    """The ranks of a run, each built and condensed by itself in processes.

    Args:
        report: called with how much is done, where it has to be.

    Raises:
        Unanswerable: the run holds no spans.
        DproError: a process was killed.
    """
    from dpro.replay.fidelity.by_rank import condense_run
    from dpro.replay.fidelity.saved import load_condensed, save_condensed

    run = replace(run, path=run.path.absolute())  # workers elsewhere have another working directory
    file = _file(run, "-ranks")
    saved = None if file is None else load_condensed(file, run)
    if saved is not None:
        return saved
    with ranks_at_hand(run) as (executor, folder):
        condensed = condense_run(run, folder, executor, report)
    _keep(file, lambda path: save_condensed(path, condensed))
    return condensed


@contextmanager
def rank_processes(run: Run) -> Iterator[tuple[Executor, Path]]:
    """Processes that work on ranks of a run, and a folder that they share, which is removed in the end.

    Raises:
        DproError: there is no place for the folder, or workers that the user named cannot do the work.
        OSError: it cannot be made there.
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
def _said_of(run: Run) -> Iterator[None]:
    """What may go wrong while ranks of a run are built inside, as one line."""
    # Loaded here: commands that find what was kept need no processes.
    from concurrent.futures import BrokenExecutor

    try:
        yield
    except BrokenExecutor as error:
        raise DproError(
            f"{run.label}: a process that built ranks was killed, perhaps for want of memory"
        ) from error
    except OSError as error:
        raise DproError(
            f"{run.label}: its ranks cannot be kept in the cache while it is looked at "
            f"({error.strerror or error}): name a folder with more room with DPRO_CACHE"
        ) from error


@contextmanager
def ranks_built_once() -> Iterator[None]:
    """Inside, all that is asked of a large run shares its processes and the ranks that they have built."""
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
def ranks_at_hand(run: Run) -> Iterator[tuple[Executor, Path]]:
    """`rank_processes`; those that are there already inside `ranks_built_once`.

    Raises:
        DproError: a process was killed, or there is no room for the folder.
    """
    shared = _SHARED.get()
    with _said_of(run):
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
    """A job by its condensed ranks, with the processes that work on them.

    Raises:
        DproError: a process was killed, or there is no room for the ranks.
    """
    from dpro.replay.whatif.condensed import CondensedJob

    run = replace(run, path=run.path.absolute())
    with ranks_at_hand(run) as (executor, folder):
        yield CondensedJob(
            graph=condensed.joined.graph, node=condensed.joined.node, run=run, condensed=condensed,
            folder=folder, map_tasks=mapped_over(executor),
        )  # fmt: skip


@contextmanager
def context_by_rank(
    run: Run, condensed: CondensedRun, operations: tuple[Graph, OperationsAnalysis] | None = None
) -> Iterator[Context]:
    """A run whose ranks are condensed, as its detectors see it.

    A rank is built again when its inside is asked for the first time.

    Args:
        operations: as of `Context`.

    Raises:
        DproError: a process was killed, or there is no room for the ranks.
    """
    from dpro.detect.baseline import Baseline
    from dpro.detect.context import Context

    if not condensed.trust.answerable:
        yield Context(run, None, operations)
        return
    with condensed_job(run, condensed) as job:
        yield Context(run, Baseline(job), operations, breakdown=lambda: _breakdown_by_rank(run, condensed))


def _breakdown_by_rank(run: Run, condensed: CondensedRun) -> pl.DataFrame:
    """`step_breakdown` of a run, of which the spans of one rank are in memory at a time.

    How much of exposed communication was waiting is not known so, and missing.
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
    """A `map` over processes; what is little is done here, in less time than a process takes to begin."""

    def map_tasks(work: Callable[..., T], tasks: Iterable[Any]) -> Iterable[T]:
        listed = list(tasks)
        if len(listed) <= FEW_TASKS:
            return map(work, listed)
        return executor.map(work, listed, chunksize=-(-len(listed) // CHUNKS))

    return map_tasks


def _file(run: Run, suffix: str) -> Path | None:
    """Where the graph of a run is kept; an older one is marked as used just now. None without a cache."""
    try:
        file = cache_folder("graphs") / f"{fingerprint(run)}{suffix}.npz"
    except DproError:  # the graph can be had without
        return None
    mark_used(file)
    return file


def _keep(file: Path | None, save: Callable[[Path], None]) -> None:
    from dpro.replay.kept import remove_facts_without_graph

    if file is None:
        return
    with suppress(OSError):  # no home, a full disk: the graph is there all the same
        save(file)
        keep_latest(file.parent, "*.npz", KEPT)
        remove_facts_without_graph(file.parent)


def make_graph(run: Run, report: Progress = ignore) -> tuple[Built, Trust]:
    """The same without the cache.

    Args:
        report: called with how much is done, and how much there is.

    Raises:
        Unanswerable: the run holds no spans.
    """
    from dpro.replay.construction.graph_builder import build_graph, without_rendezvous
    from dpro.replay.construction.recording_cost import find_recording_cost, profiler_of
    from dpro.replay.fidelity.accuracy import assess
    from dpro.replay.steps import steps_of
    from dpro.replay.timeline import replay

    judged = built = build_graph(run, report)
    with stage("Replaying the graph"):
        if run.manifest.is_pretended:
            judged = without_rendezvous(built)
        elif not built.of_operations:
            cost = find_recording_cost(built.graph, steps_of(run), profiler_of(run))
            judged = built = replace(built, recording=cost)
        return built, assess(judged, replay(judged.graph), run.manifest)


def fingerprint(run: Run) -> str:
    """Changes with all that a run's files hold, a stated layout, and the code that makes a graph of them."""
    import dpro.replay
    from dpro.schema import TABLES
    from dpro.store import MANIFEST, part_files

    digest = hashlib.blake2b(__version__.encode(), digest_size=16)
    top, replay = (Path(package.__file__ or "").parent for package in (dpro, dpro.replay))
    for module in sorted([*top.glob("*.py"), *replay.rglob("*.py")]):
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
