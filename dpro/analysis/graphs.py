"""Graphs that an earlier command built, kept in the user's cache so that the next one starts from them.

In: an opened run. Out: its graph and the judgement of it, read from the cache or made and put there. A file
is found by what the run's tables hold and by the version of the code that made it, so a run that is moved or
copied finds its graph, and one that changes does not. A cache that cannot be used is done without.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dpro._version import __version__
from dpro.cache import cache_folder
from dpro.errors import DproError
from dpro.replay.construction.progress import Progress, ignore

if TYPE_CHECKING:
    from dpro.replay.construction.graph_builder import Built
    from dpro.replay.fidelity.accuracy import Trust
    from dpro.store import Run

# A smaller graph is built in less time than it takes to be sure that one was saved.
WORTH_SAVING = 20_000
KEPT = 16  # of the graphs used last; a graph of a million spans takes some tens of megabytes


def graph_of(run: Run, report: Progress = ignore) -> tuple[Built, Trust]:
    """The graph of a run, and how far to believe its replay.

    Args:
        run: the run.
        report: called with how much of the graph is built, where it has to be.

    Raises:
        Unanswerable: the run holds no spans.
    """
    from dpro.replay.fidelity.saved import load, save

    try:
        file = cache_folder("graphs") / f"{fingerprint(run)}.npz"
    except DproError:  # the graph can be had without
        return make_graph(run, report)
    known = load(file, run)
    if known is not None:
        with suppress(OSError):
            file.touch()  # used just now
        return known
    built, trust = make_graph(run, report)
    if built.graph.num_nodes >= WORTH_SAVING:
        with suppress(OSError):  # no home, a full disk: the graph is there all the same
            save(file, built, trust)
            _forget_all_but_latest(file.parent)
    return built, trust


def make_graph(run: Run, report: Progress = ignore) -> tuple[Built, Trust]:
    """The same without the cache.

    Args:
        run: the run.
        report: called with how much is done, and how much there is.

    Raises:
        Unanswerable: the run holds no spans.
    """
    from dpro.replay.construction.graph_builder import build_graph, each_by_itself
    from dpro.replay.fidelity.accuracy import assess
    from dpro.replay.timeline import replay

    built = build_graph(run, lambda done, total: report(done, total + 1))  # the last part is the replay
    judged = each_by_itself(built) if run.manifest.is_pretended else built
    return built, assess(judged, replay(judged.graph), run.manifest)


def fingerprint(run: Run) -> str:
    """Changes with anything a run's files hold, and with the code that makes a graph of them."""
    import dpro.replay
    from dpro.schema import TABLES
    from dpro.store import MANIFEST

    digest = hashlib.blake2b(__version__.encode(), digest_size=16)
    own, replay = (Path(package.__file__ or "").parent for package in (dpro, dpro.replay))
    for module in sorted([*own.glob("*.py"), *replay.rglob("*.py")]):
        status = module.stat()
        digest.update(f"\0{module.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    for name in sorted(TABLES):
        for part in sorted((run.path / name).glob("*.parquet")):
            digest.update(f"\0{name}\0{part.name}\0{part.stat().st_size}\0".encode())
            digest.update(part.read_bytes())
    digest.update((run.path / MANIFEST).read_bytes())
    return digest.hexdigest()


def _forget_all_but_latest(folder: Path) -> None:
    by_age = sorted(folder.glob("*.npz"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in by_age[KEPT:]:
        file.unlink(missing_ok=True)
