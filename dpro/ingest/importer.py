"""Import of other tools' files into a run directory.

Takes files and folders; makes a run in a folder beside its place and moves it there when complete, so that a
failed import leaves nothing behind. Files are read in parallel, one rank at a time in each process. Readers
interpret the bytes of a file; `assemble` makes the run once all files are read.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import stat
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from dpro import stages
from dpro.cache import folder_in_use
from dpro.classify import table_version
from dpro.errors import DproError, InputError, UsageError, first_line
from dpro.folders import MARKERS, refuse_undecodable
from dpro.ingest.assembly import LEFT_OUT, Spread, assemble
from dpro.ingest.formats import PARQUET, registry, why_passed_over
from dpro.ingest.reading.files import Source, goes_forward_only, heads, unpack
from dpro.ingest.staging import ImportTask, give_up, make_staging, stage
from dpro.processes import named_workers, num_cores, process_pool
from dpro.schema import TABLES
from dpro.store import Manifest, is_run
from dpro.words import counted, first_few

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes read, total bytes), both as on disk."""

STAGING_SUFFIX = ".importing"
LINKS = "links to folders, which are not followed"
MAX_RUNS_NAMED = 12  # runs of a folder listed in an error or a warning
_WORTH_PROCESSES_BYTES = 8 << 20  # reading less is faster than starting processes


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        jobs: files read at a time, each in its own process; None for the number of cores.
        executor: reads the files instead; its workers see the sources, and the folder that the run is in,
            under the same paths. It is not shut down.
        progress: called after each file.
    """

    jobs: int | None = None
    executor: Executor | None = None
    progress: Progress | None = None

    @contextmanager
    def by_workers(self, paths: Sequence[Path]) -> Iterator[Reading]:
        """Yield how files are read by the workers that the user named, unless an executor is given.

        Args:
            paths: paths that the workers must see.

        Raises:
            DproError: the workers are missing, or cannot do the work.
        """
        if self.executor is not None:
            yield self
            return
        with named_workers(paths) as executor:
            yield replace(self, executor=executor)

    def spread_over(self, tasks: Sequence[ImportTask]) -> Spread:
        """Return how to run the tasks; in this process where there is little to do."""
        jobs = self.jobs
        if jobs is None:
            little = sum(task.bytes for task in tasks) < _WORTH_PROCESSES_BYTES
            jobs = 1 if little else num_cores()
        return partial(run_tasks, jobs=jobs, executor=self.executor)


@dataclass(frozen=True)
class Traces:
    """Content of the sources: files of known formats in order of their names, and other files.

    Attributes:
        files: each file with the name of its format.
        passed_over: number of other files, by reason.
        warnings: one line each, about importers that cannot be used and files that cannot be opened.
    """

    files: list[tuple[Source, str]]
    passed_over: Counter[str]
    warnings: list[str]

    def tasks(self, staging: Path) -> list[ImportTask]:
        """Return one task per file; the members of an archive share its size."""
        members = Counter(source.path for source, _ in self.files)
        return [
            ImportTask(number, source, name, source.path.stat().st_size // members[source.path], staging)
            for number, (source, name) in enumerate(self.files)
        ]


def import_sources(
    sources: Sequence[Path],
    run: Path,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Import files and folders as one run.

    Args:
        jobs, executor, progress: see `Reading`.

    Returns:
        The manifest of the run: the same bytes, tables included, whichever process reads the files.

    Raises:
        UsageError: the run directory exists and is not empty.
        InputError: a source does not exist, has no trace or cannot be read, two files describe the same of
            one rank, or the run cannot be written.
    """
    refuse_existing(run)
    traces = find_traces(sources)
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        with (
            folder_in_use(run.parent, f".{run.name}.", STAGING_SUFFIX) as staging,
            Reading(jobs, executor).by_workers([*sources, staging]) as reading,
        ):
            make_staging(staging)
            tasks = traces.tasks(staging)
            spread = reading.spread_over(tasks)
            stage_all(tasks, spread, progress)
            with stages.stage("Writing the run"):
                return assemble(
                    staging, run, tasks, spread, skipped=traces.passed_over, warnings=traces.warnings
                )
    except OSError as error:
        raise unwritable(run, error) from error


def refuse_existing(run: Path) -> None:
    """Raise if a run directory is not empty, or has a path that readers would not accept.

    Raises:
        UsageError: it exists and is not empty.
        InputError: its path is not UTF-8.
    """
    refuse_undecodable(run)
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UsageError(f"{run}: exists already; choose another output or remove it")


def unwritable(run: Path, error: OSError) -> InputError:
    """Return the error of a run that could not be written."""
    return InputError(f"{run}: cannot be written ({error.strerror or error})")


def find_traces(sources: Sequence[Path]) -> Traces:
    """Find files of known formats.

    Raises:
        InputError: a source does not exist, there is no such file, or the user's kernel classes are wrong.
        MissingExtra: the only files need a library that is not installed.
    """
    table_version()  # raises on a wrong table of kernel classes before anything is read
    formats = registry()
    traces = Traces([], Counter[str](), list(formats.warnings))
    unopened: list[DproError] = []
    runs: set[Path] = set()
    advised: dict[str, None] = {}
    files = (file for source in sources for file in _files(source, traces.passed_over, runs, unopened))
    for path in sorted(set(files)):
        # Parts of a run are Parquet files, and so may be traces of other tools.
        if path.suffix == ".parquet" and path.parent.name in TABLES and is_run(path.parent.parent):
            traces.passed_over["tables of dpro runs"] += 1
            runs.add(path.parent.parent)
            continue
        try:
            for source, head in heads(path):
                importer, place = formats.find(head), Path(source.member) if source.member else path
                if importer and not (head.startswith(PARQUET) and why_passed_over(place, head).advice):
                    traces.files.append((source, importer.name))
                    continue
                reason, advice = why_passed_over(place, head)
                traces.passed_over[reason] += 1
                advised |= {advice: None} if advice else {}
        except DproError as error:
            unopened.append(error)
    traces.files.sort(key=lambda file_and_format: (file_and_format[0].path, file_and_format[0].member))
    if not traces.files:
        if unopened:
            raise unopened[0]
        names = ", ".join(str(source) for source in sources)
        held = "; ".join(
            f"{count} {_in_singular(reason) if count == 1 else reason}"
            for reason, count in sorted(traces.passed_over.items())
        )
        given = "; ".join(advised)
        if not given:
            others = len(formats.importers) - 1
            given = f"dpro reads PyTorch profiler traces and {others} other formats (docs/formats.md)"
        if runs:
            listed = first_few(sorted(map(str, runs)), MAX_RUNS_NAMED)
            raise InputError(f"{names}: {counted(len(runs), 'run')} here; choose one: {listed}")
        raise InputError(f"{names}: no trace found ({held or 'no files'}); {given}")
    if runs:
        # Without their folders, since the import is kept, and may be opened by another path.
        listed = first_few(sorted(run.name for run in runs), MAX_RUNS_NAMED)
        traces.warnings.append(
            f"only traces are read, not {counted(len(runs), 'run')} in the same place: {listed}"
        )
    traces.warnings.extend(f"{LEFT_OUT}{error}" for error in unopened)
    return traces


def _in_singular(reason: str) -> str:
    """Put a reason in the singular: `JSON file that is not a trace` of `JSON files that are not traces`."""
    noun = re.sub(r"\b(file|timeline|database|log|snapshot|report|link|table)s\b", r"\1", reason, count=1)
    return noun.replace("that are not traces", "that is not a trace").replace("which are", "which is")


def _files(
    source: Path, passed_over: Counter[str], runs: set[Path], unopened: list[DproError]
) -> Iterator[Path]:
    """Yield the files of a source; record links to folders, unfinished runs, and folders not readable."""
    try:
        kind = source.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        what = "a broken link" if source.is_symlink() else "no such file or folder"
        raise InputError(f"{source}: {what}") from error
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror or error})") from error
    if stat.S_ISREG(kind):
        yield source
        return
    if not stat.S_ISDIR(kind):
        raise InputError(f"{source}: a device, pipe or socket; give a file or a folder")

    def unreadable(error: OSError) -> None:
        unopened.append(InputError(f"{error.filename}: cannot be read ({error.strerror})"))

    for name, folders, files in os.walk(source, onerror=unreadable):
        folder = Path(name)
        if MARKERS in folders:  # its raw files are traces, too
            runs.add(folder)
            folders.clear()
            continue
        # The staging folder of an import in progress may be among its own sources.
        folders[:] = [inner for inner in folders if not inner.endswith(STAGING_SUFFIX)]
        # The target of a link may be among the sources already, or contain the link.
        if links := sum((folder / inner).is_symlink() for inner in folders):
            passed_over[LINKS] += links
        yield from (path for file in files if os.path.isfile(path := folder / file))


def stage_all(tasks: Sequence[ImportTask], spread: Spread, progress: Progress | None) -> None:
    """Read every file into the staging folder.

    Raises:
        OSError: the staging folder cannot be written.
    """
    # Unpack compressed tars once: otherwise each task would read its tar from the beginning.
    places: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    for task in tasks:
        if task.source.member:
            places[task.source.path][task.source.member] = task.unpacked
    for archive, members in places.items():
        if goes_forward_only(archive):
            unpack(archive, members)
    by_number = {task.number: task for task in tasks}
    total = sum(task.bytes for task in tasks)
    done = 0
    if progress:
        progress(done, total)
    for note in spread(stage, tasks, give_up):
        done += by_number[note.number].bytes
        if progress:
            progress(done, total)


# Tasks run in processes or on any executor, so that memory does not grow with their number.

Task = TypeVar("Task")
Result = TypeVar("Result")

DIED = "the process that read it died, perhaps for lack of memory; try fewer --jobs"


def run_tasks(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    lost: Callable[[Task, str], Result],
    *,
    jobs: int = 1,
    executor: Executor | None = None,
) -> Iterator[Result]:
    """Run all tasks and yield their results, in no order.

    Args:
        work: the function of a task; picklable, unless this process runs all tasks.
        lost: returns the result of a task whose process died, from the task and the reason.
        jobs: processes of this machine, one task in each at a time; 1 is this process.
        executor: runs the tasks instead; it is not shut down.

    Raises:
        OSError: a task could not read or write; the others are dropped.
    """
    if executor is not None:
        return _in_executor(work, tasks, lost, executor)
    if jobs <= 1 or len(tasks) <= 1:
        return map(work, tasks)
    return _in_processes(work, tasks, lost, min(jobs, len(tasks)))


def _in_executor(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    lost: Callable[[Task, str], Result],
    executor: Executor,
) -> Iterator[Result]:
    futures = {executor.submit(work, task): task for task in tasks}
    try:
        for future in as_completed(futures):
            yield _outcome(future, futures[future], lost)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # running tasks write into a folder that is about to be removed


def _outcome(future: Future[Result], task: Task, lost: Callable[[Task, str], Result]) -> Result:
    try:
        return future.result()
    except OSError:
        raise
    except Exception as error:  # executors raise their own errors for a lost worker
        return lost(task, f"{type(error).__name__}: {first_line(error)}")


def _in_processes(
    work: Callable[[Task], Result], tasks: Sequence[Task], lost: Callable[[Task, str], Result], jobs: int
) -> Iterator[Result]:
    """Run tasks in processes, one submitted per process: if one dies, few tasks can be the cause."""
    waiting = deque(tasks)
    while waiting:
        suspects: list[Task] = []
        yield from _until_a_process_dies(work, waiting, jobs, suspects)
        for task in suspects:
            again: list[Task] = []
            yield from _until_a_process_dies(work, deque([task]), 1, again)
            if again:
                yield lost(task, DIED)


def _until_a_process_dies(
    work: Callable[[Task], Result], waiting: deque[Task], jobs: int, suspects: list[Task]
) -> Iterator[Result]:
    """Run the waiting tasks; those running when a process dies become suspects."""
    before = set(multiprocessing.active_children())
    pool = process_pool(jobs)
    running: dict[Future[Result], Task] = {}
    try:
        while (waiting and not suspects) or running:
            while waiting and len(running) < jobs and not suspects:
                task = waiting.popleft()
                running[_submit(pool, work, task)] = task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    suspects.append(task)
                else:
                    yield future.result()
    finally:
        # Also reached by Ctrl-C: end running processes at once, since they must not write any more.
        if running:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[Task], Result], task: Task) -> Future[Result]:
    """Submit a task; if the pool has just broken, return a future as if the task had been running."""
    try:
        return pool.submit(work, task)
    except BrokenProcessPool as error:
        refused: Future[Result] = Future()
        refused.set_exception(error)
        return refused
