"""A graph, or condensed ranks, and the judgement of its replay as one file, for the next command.

In: records of arrays, frames, texts and numbers. Out: an `.npz` file of the arrays, each as narrow as its
values allow, and one JSON text for what holds them together; and the same records from it. Nothing is
unpickled, no class but those listed here is made, and a file that is not whole is no file. Which run a file
belongs to is not known here.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.folders import written_whole
from dpro.replay.alignment.align import Alignment, Clock
from dpro.replay.alignment.clocks import ClockLine
from dpro.replay.alignment.match import Matching
from dpro.replay.construction.graph_builder import Built
from dpro.replay.construction.lags import Lags
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.evidence import StartEvidence
from dpro.replay.fidelity.grade import Criterion
from dpro.replay.fidelity.missing_ranks import RendezvousRegistry
from dpro.replay.fidelity.overlap import Contention
from dpro.replay.graph import Edges, Graph, MeshPosition, Message, Nodes
from dpro.replay.sharded.agreed import Agreed, parts_of
from dpro.replay.sharded.joined import Joined
from dpro.replay.sharded.pooled import Pooled
from dpro.store import Run

Array = NDArray[Any]

RECORDS: Mapping[str, Any] = {  # dataclasses and named tuples
    kind.__name__: kind
    for kind in (
        Agreed, Alignment, Built, Clock, ClockLine, CondensedRun, Contention, Criterion, Edges, Graph, Joined,
        Lags, Matching, MeshPosition, Message, Nodes, Pooled, RendezvousRegistry, StartEvidence, Trust,
    )
}  # fmt: skip
OUTLINE = "outline"
DAMAGED = (
    OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, zipfile.BadZipFile,
    pl.exceptions.PolarsError,
)  # fmt: skip
NARROW = (np.int8, np.int16, np.int32)


def save(file: Path, built: Built, trust: Trust) -> None:
    """Write both, whole or not at all.

    Args:
        file: where; an older one is replaced.
        built: the graph, its matching and clocks.
        trust: how well its replay fits.

    Raises:
        OSError: the file cannot be written.
    """
    _write(file, (built, trust))


def save_condensed(file: Path, condensed: CondensedRun) -> None:
    """Write condensed ranks, whole or not at all.

    Args:
        file: where; an older one is replaced.
        condensed: the ranks.

    Raises:
        OSError: the file cannot be written.
    """
    agreed = dataclasses.replace(condensed.agreed, parts={})  # which files there are is the run's to say
    _write(file, dataclasses.replace(condensed, agreed=agreed))


def _write(file: Path, value: Any) -> None:
    arrays = _Arrays()
    outline = json.dumps(_taken_apart(value, arrays))
    arrays[OUTLINE] = np.frombuffer(outline.encode(), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file.parent.resolve(), file.name) as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def load(file: Path, run: Run) -> tuple[Built, Trust] | None:
    """Read both; None where there is no such file, or not a whole one.

    Args:
        file: what `save` has written.
        run: what the graph was made from.
    """
    match _read(file, run):
        case (Built() as built, Trust() as trust):
            return built, trust
    return None


def load_condensed(file: Path, run: Run) -> CondensedRun | None:
    """Read condensed ranks; None where there is no such file, or not a whole one.

    Args:
        file: what `save_condensed` has written.
        run: what they are of.
    """
    found = _read(file, run)
    if not isinstance(found, CondensedRun):
        return None
    agreed = dataclasses.replace(found.agreed, parts=parts_of(run, found.agreed.windows))
    return dataclasses.replace(found, agreed=agreed)


def _read(file: Path, run: Run) -> Any:
    try:
        with np.load(file, allow_pickle=False) as arrays:  # its zip container checks what is read
            return built_from(json.loads(arrays[OUTLINE].tobytes()), arrays, run, {})
    except DAMAGED:
        return None


class _Arrays(dict[str, Array]):
    """What is written, by name, and the name of each array and frame: one that is shared is written once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}


def _taken_apart(value: Any, arrays: _Arrays) -> Any:
    """The value as JSON, in which arrays and frames stand as names of `arrays`."""
    kind = type(value)
    if RECORDS.get(kind.__name__) is kind:
        names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
        return {kind.__name__: {name: _taken_apart(getattr(value, name), arrays) for name in names}}
    if isinstance(value, np.ndarray):
        return {"array": _named(value, arrays, _narrow), "dtype": value.dtype.str}
    if isinstance(value, pl.DataFrame):
        return {"frame": _named(value, arrays, _as_bytes)}
    if isinstance(value, Mapping):
        return {"mapping": [[_taken_apart(each, arrays) for each in item] for item in value.items()]}
    if isinstance(value, (tuple, list)):
        return {"tuple": [_taken_apart(each, arrays) for each in value]}
    if isinstance(value, Run):
        return {"run": None}
    return value


def _named(value: Any, arrays: _Arrays, as_array: Callable[[Any], Array]) -> str:
    """The name by which an array or frame is written, the first time that it is met.

    Args:
        value: which; it lives as long as `arrays`, so that no other has its identity.
        arrays: what is written.
        as_array: what is written of it.
    """
    name = arrays.names.setdefault(id(value), str(len(arrays)))
    if name not in arrays:
        arrays[name] = as_array(value)
    return name


def _as_bytes(frame: pl.DataFrame) -> Array:
    stream = io.BytesIO()
    frame.write_ipc(stream)
    return np.frombuffer(stream.getvalue(), np.uint8)


def _narrow(array: Array) -> Array:
    """Integers in the smallest type that holds them all: a graph is then a quarter as large."""
    if array.dtype != np.int64 or array.size == 0:
        return array
    low, high = array.min(), array.max()
    fitting = (t for t in NARROW if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    return array.astype(next(fitting, np.int64))


def built_from(outline: Any, arrays: Mapping[str, Array], run: Run, made: dict[str, Any]) -> Any:
    """Return what an outline describes; what several parts of it share is one array or frame again.

    What is kept of a graph (`graph.once`) counts only as long as its columns are those very arrays.

    Args:
        outline: of records, arrays and plain values, as `save` writes it.
        arrays: by name.
        run: that the graph is of.
        made: arrays and frames so far, by name; it is added to.
    """
    if not isinstance(outline, dict):
        return outline
    (kind, content), *_ = outline.items()
    if kind in RECORDS:
        return RECORDS[kind](**{each: built_from(content[each], arrays, run, made) for each in content})
    if kind in ("array", "frame"):
        if content not in made:
            made[content] = _array(arrays[content], outline) if kind == "array" else _frame(arrays[content])
        return made[content]
    if kind == "mapping":
        return dict(tuple(built_from(each, arrays, run, made) for each in pair) for pair in content)
    if kind == "tuple":
        return tuple(built_from(each, arrays, run, made) for each in content)
    if kind == "run":
        return run
    raise ValueError(f"a file of a graph names {kind}")


def _array(narrow: Array, outline: Mapping[str, str]) -> Array:
    whole = narrow.astype(outline["dtype"], copy=False)
    whole.setflags(write=False)
    return whole


def _frame(content: Array) -> pl.DataFrame:
    return pl.read_ipc(io.BytesIO(content.tobytes()))
