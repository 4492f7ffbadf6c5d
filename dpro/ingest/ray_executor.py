"""Tasks on a Ray cluster, as an executor like any other.

In: a function and its arguments. Out: a future. A task whose node dies is repeated on another node: tasks of
an import can be, since each leaves its folder whole or not at all. The workers see the same files under the
same paths, and have dpro installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, cast

from dpro.errors import DproError, MissingExtra, first_line

_ATTEMPTS = 5  # survives the death of one node fewer


class RayExecutor(Executor):
    """Submits tasks to the connected cluster; shutting it down leaves the cluster running."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn(*args, **kwargs)` on one core of some node."""
        import ray

        remote = ray.remote(num_cpus=1, max_retries=_ATTEMPTS - 1)(fn)
        return cast("Future[Any]", remote.remote(*args, **kwargs).future())


@contextmanager
def ray_executor() -> Iterator[RayExecutor]:
    """Connect to the cluster that `RAY_ADDRESS` names, else start one on this machine for as long.

    Raises:
        MissingExtra: Ray is not installed.
        DproError: it cannot be imported.
    """
    # A worker is one core; set here, it reaches those that a cluster of this machine starts.
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    except Exception as error:  # Ray asks the libraries of all accelerators, which may be there and not work
        what = f"{type(error).__name__}: {first_line(error)}"
        raise DproError(
            f"Ray is installed and cannot be imported ({what}); try `python -c 'import ray'`"
        ) from error
    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield RayExecutor()
    finally:
        if ours:
            ray.shutdown()
