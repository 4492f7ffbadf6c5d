"""What would help a run is searched for once, however many of its commands and views are tested.

What was found is kept in a folder that all workers of a run of the tests share.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from dpro.folders import written_whole
from dpro.replay.graph import Graph
from dpro.replay.whatif.job import job_of
from dpro.replay.whatif.search import SearchResult

_found: dict[bytes, SearchResult] = {}


def search_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make all who search share what was found; only the first reports progress.

    Args:
        patch: undoes it.
        folder: of what was found.
    """
    from dpro.analysis.answers import whatif
    from dpro.replay.whatif import search

    explore = _kept(search.explore, folder)
    patch.setattr(search, "explore", explore)
    patch.setattr(whatif, "explore", explore)


def _kept(explore: Callable[..., SearchResult], folder: Path) -> Callable[..., SearchResult]:
    signature = inspect.signature(explore)

    @wraps(explore)
    def search(*given: Any, **named: Any) -> SearchResult:
        asked = signature.bind(*given, **named)
        asked.apply_defaults()
        question = {name: value for name, value in asked.arguments.items() if name not in ("job", "report")}
        job = job_of(asked.arguments["job"])
        if job.by_rank:
            return explore(*given, **named)
        question["suspects"] = sorted(question["suspects"])
        key = _contents(job.graph) + pickle.dumps(question)
        if key not in _found:
            _found[key] = _on_disk(folder, hashlib.blake2b(key, digest_size=16).hexdigest(), asked, explore)
        found = _found[key]
        return replace(found, **{each.name: list(getattr(found, each.name)) for each in fields(found)})

    return search


def _on_disk(
    folder: Path, name: str, asked: inspect.BoundArguments, explore: Callable[..., SearchResult]
) -> SearchResult:
    """What a worker found and left there; else what is found now."""
    if (folder / name).exists():
        return pickle.loads((folder / name).read_bytes())
    found = explore(*asked.args, **asked.kwargs)
    folder.mkdir(exist_ok=True)
    with written_whole(folder, name) as file:
        pickle.dump(found, file)
    return found


def _contents(graph: Graph) -> bytes:
    """Differs where anything does that a prediction can depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for columns in (graph.nodes, graph.edges):
        for each in fields(columns):
            digest.update(getattr(columns, each.name))
    run = graph.run and (graph.run.path.resolve(), (graph.run.path / "manifest.json").read_bytes())
    digest.update(pickle.dumps((graph.names, graph.lanes, graph.messages, graph.places, run, graph.network)))
    return digest.digest()
