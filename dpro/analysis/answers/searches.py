"""What an earlier search found, kept beside the graphs, so that asking again of an unchanged run is free.

In: an `Analysis`, and the search. Out: what it found, read from the cache or made and put there. A file is
found by all that the search depends on: what the run's tables hold, its topology and paths, the code and its
coefficients, tables that were given, the steps that count, the budget, and the ranks that findings name. A
file that is damaged, or whose edits do not read back as they were, is done without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpro.analysis import graphs
from dpro.analysis.analysis import Analysis
from dpro.analysis.graphs import fingerprint
from dpro.cache import cache_folder, keep_latest
from dpro.errors import DproError
from dpro.folders import written_whole
from dpro.replay.devices.coefficients import FILE as COEFFICIENTS
from dpro.replay.graph import Graph
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.predict import Prediction, Refusal
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import Interaction, SearchResult, SmallGain
from dpro.selection import Selection
from dpro.topology.file import FILE as TOPOLOGY
from dpro.topology.paths import FILE as PATHS

KEPT = 64  # of the searches used last; one takes some ten kilobytes


def searched(
    analysis: Analysis, selection: Selection, budget: int, search: Callable[[], SearchResult]
) -> SearchResult:
    """What a search finds, or has found before.

    Args:
        budget: how many replays it may make.

    Raises:
        Unanswerable: as of the search.
    """
    graph, _ = _searched(analysis)
    if graph.num_nodes < graphs.WORTH_SAVING:
        return search()
    try:
        folder = cache_folder("searches")
    except DproError:
        return search()
    file = folder / f"{_name(analysis, selection, budget)}.json"
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, DproError):
        found = _read(json.loads(file.read_text(encoding="utf-8")))
        file.touch()  # used just now
        return found
    found = search()
    with suppress(OSError, TypeError, DproError):  # a full disk, say: the answer is there all the same
        text = json.dumps(_written(found))
        if _read(json.loads(text)) == found:
            _keep(file, text.encode())
    return found


def _searched(analysis: Analysis) -> tuple[Graph, bool]:
    """The graph that is searched, and whether it is the condensed one: the whole may be too large."""
    by_rank = analysis.condensed is not None and bool(graphs.why_too_large(analysis.run))
    return (analysis.outline if by_rank else analysis.built).predictive, by_rank


def _name(analysis: Analysis, selection: Selection, budget: int) -> str:
    """Changes with anything that a search depends on."""
    digest = hashlib.blake2b(fingerprint(analysis.run).encode(), digest_size=16)
    digest.update(COEFFICIENTS.read_bytes())
    for name in (TOPOLOGY, PATHS):  # may come to the run later
        kept = analysis.run.path / name
        digest.update(kept.read_bytes() if kept.is_file() else b"\0")
    graph, by_rank = _searched(analysis)
    digest.update(repr((selection, budget, sorted(analysis.suspects), by_rank)).encode())
    for table in (graph.network, graph.products):
        digest.update(b"\0" if table is None else table.write_csv().encode())
    return digest.hexdigest()


def _keep(file: Path, content: bytes) -> None:
    with written_whole(file.parent.resolve(), file.name) as stream:
        stream.write(content)
    keep_latest(file.parent, "*.json", KEPT)


def _written(found: SearchResult) -> dict[str, Any]:
    """As JSON holds it, edits as `--edit` takes them."""
    return {
        "predictions": [
            {name: getattr(each, name) for name in Prediction.__dataclass_fields__}
            | {"edits": list(map(str, each.edits))}
            for each in found.predictions
        ],
        "refused": list(map(asdict, found.refused)),
        "interactions": [
            {"edits": list(map(str, each.edits)), "ns": [each.together_ns, each.apart_ns]}
            for each in found.interactions
        ],
        "untried": list(map(str, found.untried)),
        "little": [[str(each.edit), each.at_most_ns] for each in found.little],
    }


def _read(kept: Mapping[str, Any]) -> SearchResult:
    """What `_written` has written."""

    def edits(texts: list[str]) -> tuple[Edit, ...]:
        return tuple(map(parse_edit, texts))

    return SearchResult(
        [
            Prediction(**{**each, "edits": edits(each["edits"]), "notes": tuple(each["notes"])})
            for each in kept["predictions"]
        ],
        [Refusal(**each) for each in kept["refused"]],
        [
            Interaction((one, other), *each["ns"])
            for each in kept["interactions"]
            for one, other in [edits(each["edits"])]
        ],
        list(edits(kept["untried"])),
        [SmallGain(parse_edit(text), at_most_ns) for text, at_most_ns in kept["little"]],
    )
