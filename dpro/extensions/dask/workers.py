"""Offers the workers of a Dask cluster as an executor.

Takes the URL of a scheduler, from `--executor` or `DPRO_EXECUTOR`, and the paths that the work reads and
writes; returns an executor. Checks first that each worker has the same version of dpro and sees those paths:
otherwise a part of a run would fail an hour later, or be read from another folder.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click

from dpro._version import __version__
from dpro.errors import DproError, UsageError, first_line, needs_extra
from dpro.words import first_few

SCHEME = "dask://"
VARIABLE = "DPRO_EXECUTOR"
PATIENCE_S = 10  # until the scheduler answers, and has a worker
CHUNKS = 8  # of tasks per worker thread, so that all threads end at about the same time
_URL: ContextVar[str] = ContextVar("dpro_executor", default="")
Result = TypeVar("Result")


def _read_url(context: click.Context, _option: click.Parameter, url: str | None) -> None:
    """Set the URL given by `--executor` until the command ends."""
    if url is not None:
        context.with_resource(_url_set(_checked(url)))


OPTIONS = [
    click.Option(
        ["--executor"],
        metavar="URL",
        expose_value=False,
        callback=_read_url,
        help="Divide the work on a large run among the workers of a Dask cluster, such as "
        f"dask://scheduler:8786.  [env: {VARIABLE}]",
    )
]


@contextmanager
def _url_set(url: str) -> Iterator[None]:
    token = _URL.set(url)
    try:
        yield
    finally:
        _URL.reset(token)


def _checked(url: str) -> str:
    """Return the URL of a scheduler, unchanged.

    Raises:
        UsageError: it is not one.
    """
    host, _, port = url.removeprefix(SCHEME).rpartition(":")
    if not url.startswith(SCHEME) or not host or not port.isdigit():
        raise UsageError(
            f"{url} is not an executor: give the scheduler of a Dask cluster as {SCHEME}HOST:PORT"
        )
    return url


def workers_of_cluster(paths: Sequence[Path]) -> AbstractContextManager[Executor] | None:
    """Return the workers that the user chose, not yet connected; None where none are chosen.

    Args:
        paths: paths that all workers must see.

    Raises:
        UsageError: the chosen URL is not a Dask scheduler.
    """
    url = _URL.get() or os.environ.get(VARIABLE, "")
    return _connected(_checked(url), paths) if url else None


@contextmanager
def _connected(url: str, paths: Sequence[Path]) -> Iterator[Executor]:
    """Connect to a cluster, and disconnect at the end.

    Raises:
        MissingExtra: Dask is not installed.
        DproError: no scheduler answers, it has no workers, or one of them cannot do the work.
    """
    with needs_extra("dask"):
        from distributed import Client

    try:
        client = Client("tcp://" + url.removeprefix(SCHEME), timeout=PATIENCE_S, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise DproError(f"{url}: no Dask scheduler answers there ({first_line(error)})") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=PATIENCE_S)
        except TimeoutError as error:
            raise DproError(f"{url}: the cluster has no workers: start some with `dask worker`") from error
        _check_workers(client, url, [str(path.absolute()) for path in paths])
        yield _Workers(client, url)


def _check_workers(client: Any, url: str, paths: Sequence[str]) -> None:
    """Check that the scheduler, which reads the tasks, and each worker can do the work.

    Raises:
        DproError: one has no dpro or another version, or a worker does not see all paths.
    """
    try:
        answers = {"the scheduler": client.run_on_scheduler(_version_and_missing, [])}
    except Exception as error:  # Dask raises here any exception of the scheduler
        answers = {"the scheduler": error}
    of_workers = client.run(_version_and_missing, list(paths), on_error="return")
    answers |= {f"worker {name}": of_workers[name] for name in sorted(of_workers)}
    for who, answer in answers.items():
        if isinstance(answer, BaseException):
            raise DproError(
                f"{url}: {who} cannot run dpro ({first_line(answer)}): install dpro {__version__} there"
            )
        version, missing = answer
        if version != __version__:
            raise DproError(f"{url}: {who} has dpro {version}, but this is {__version__}")
        if missing:
            raise DproError(
                f"{url}: {who} does not see {first_few(missing, 2)}: it must be in a folder that all workers "
                "share; DPRO_CACHE sets such a folder for dpro's cache"
            )


def _version_and_missing(paths: list[str]) -> tuple[str, list[str]]:
    """Return the version of dpro here, and the paths that are missing here."""
    return __version__, [path for path in paths if not os.path.exists(path)]


class _Workers(Executor):
    """Dask's executor that sends tasks in chunks, and reports a lost worker as `BrokenExecutor`."""

    def __init__(self, client: Any, url: str) -> None:
        self._client, self._url = client, url
        # Not pure: the run at a path may be replaced, so that equal tasks give another result.
        self._one_by_one = client.get_executor(pure=False)

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Send one task to the workers, and return its future."""
        return self._one_by_one.submit(work, *args, **kwargs)

    def map(
        self,
        fn: Callable[..., Result],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[Result]:
        """Send tasks in chunks, at most `CHUNKS` per thread; return the results in order of the tasks."""
        chunks = self.chunks_of(list(zip(*iterables)), chunksize)
        with warnings.catch_warnings():  # tasks of large runs are large
            warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
            futures = self._client.map(_run_chunk, [fn] * len(chunks), chunks, pure=False)
        return chain.from_iterable(map(self._result, futures))

    def chunks_of(self, tasks: Sequence[Any], least: int = 1) -> list[Sequence[Any]]:
        """Divide tasks, in order, into chunks, so that data shared within a chunk is sent once."""
        threads = max(sum(self._client.nthreads().values()), 1)
        size = max(least, -(-len(tasks) // (CHUNKS * threads)))
        return [tasks[begin : begin + size] for begin in range(0, len(tasks), size)]

    def _result(self, future: Any) -> Any:
        from distributed import KilledWorker

        try:
            return future.result()
        except KilledWorker as error:
            raise BrokenExecutor(f"{self._url}: {first_line(error)}") from error


def _run_chunk(work: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]) -> list[Result]:
    return [work(*task) for task in tasks]
