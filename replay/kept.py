"""Facts about a saved graph, stored in files beside it for the next command; and the format of such files.

Takes a graph and an expensive function that computes a fact; returns the fact, from its file if an earlier
command has written one. The file names the columns that the fact was computed from: for a graph of which an
edit has changed one of them, the fact is computed again and not written. Without a saved graph, `kept` is the
same as `once`. Graphs and condensed ranks are stored in the same format.
"""

from __future__ import annotations

import dataclasses
import io
import json
import threading
import tokenize
import zipfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.folders import written_whole
from dpro.replay.graph import Fact, Graph, observe, once, recall, unwatched
from dpro.store import Run

Value = TypeVar("Value")

KEPT_FACTS = "kept facts"  # key in `Graph.facts`
SUFFIX = ".fact"
RUN = "run"  # the column of a graph that has other objects for the same content
NO_RECORDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class KeptFacts:
    """The place where facts about a saved graph are stored.

    Attributes:
        graph_file: the saved graph; names of fact files begin with its name.
        graph: the saved graph without facts, with the durations that facts are computed for.
        tables: `tables_written` of its run.
    """

    graph_file: Path
    graph: Graph
    tables: tuple[tuple[str, int], ...]

    def has(self, graph: Graph, columns: Collection[str]) -> bool:
        """Return whether these columns of a graph are those of the saved one; of its run, the tables."""
        same = all(attrgetter(name)(graph) is attrgetter(name)(self.graph) for name in columns if name != RUN)
        return same and (RUN not in columns or _tables_of(graph.run) == self.tables)

    def file_of(self, name: str) -> Path:
        """Return the file of a fact."""
        return self.graph_file.with_suffix(f".{name}{SUFFIX}")

    def read(self, run: Run | None, name: str, records: Mapping[str, Any]) -> Fact | None:
        """Return a stored fact with the columns of the saved graph; None without a complete one.

        Args:
            run: the run as the graph that asks has it; a fact that follows from it needs the saved tables.
        """
        fact = read_archive(self.file_of(name), {**records, "Fact": Fact}, run)
        if not isinstance(fact, Fact) or (RUN in fact.columns and _tables_of(run) != self.tables):
            return None
        with suppress(AttributeError):  # written by another version, whose graphs had other columns
            return fact.of(replace(self.graph, run=run))
        return None


def tables_written(run: Run) -> tuple[tuple[str, int], ...]:
    """Return each table's folder with the time it last changed: complete parts are renamed into their folder.

    A layout stated by the user counts as a table.
    """
    stated = tuple(run.layout.items())
    try:
        folders = sorted((str(folder), folder.stat().st_mtime_ns) for folder in run.path.iterdir())
        return (*stated, *folders)
    except OSError:  # the error is reported where tables are read
        return ()


def _tables_of(run: Run | None) -> tuple[tuple[str, int], ...]:
    return () if run is None else tables_written(run)


def with_kept_facts(graph: Graph, graph_file: Path, duration: Ints | None = None) -> Graph:
    """Return the graph with its facts stored beside its file.

    Args:
        duration: [N] durations of the graph that facts are computed for, in ns, where they differ from those
            of `graph`: each fact has only one file.
    """
    nodes = graph.nodes if duration is None else replace(graph.nodes, duration=duration)
    saved = replace(graph, nodes=nodes, facts={})
    place = Fact({}, (), KeptFacts(graph_file, saved, _tables_of(graph.run)))
    return replace(graph, facts={**graph.facts, KEPT_FACTS: place})


def kept(
    graph: Graph, name: str, compute: Callable[[Graph], Value], records: Mapping[str, Any] = NO_RECORDS
) -> Value:
    """Return a fact as `once` does, and store it in a file for the next command.

    Args:
        name: name of the fact, used in its file name.
        records: classes that the fact consists of, by name.
    """
    place, fact = graph.facts.get(KEPT_FACTS), recall(graph, name)
    if place is None:
        return once(graph, name, compute)
    saved, plain = place.value, unwatched(graph)
    cached = plain.facts.get(name)
    if fact is None and (cached is None or saved.has(plain, cached.columns)):
        stored = saved.read(plain.run, name, records)
        if stored is not None:  # which does not hold for a changed graph, and says so without its file
            plain.facts[name] = stored
        fact = recall(graph, name)
    if fact is None:
        fact = observe(graph, compute)
        if not saved.has(plain, fact.columns):
            plain.facts.setdefault(name, fact)
        else:
            plain.facts[name] = fact
            with suppress(OSError):  # a full disk: the computed fact is still returned
                write_archive(saved.file_of(name), fact.of(None), {**records, "Fact": Fact})
    value: Value = fact.value
    return value


def kept_as(
    name: str, records: Mapping[str, Any] = NO_RECORDS
) -> Callable[[Callable[[Graph], Value]], Callable[[Graph], Value]]:
    """Make a function of a graph return its value by `kept`."""

    def keep(compute: Callable[[Graph], Value]) -> Callable[[Graph], Value]:
        @wraps(compute)
        def recalled(graph: Graph) -> Value:
            return kept(graph, name, compute, records)

        return recalled

    return keep


def remove_facts_without_graph(folder: Path) -> None:
    """Remove stored facts whose graph is no longer saved."""
    for file in folder.glob(f"*{SUFFIX}"):
        if not file.with_name(f"{file.name.partition('.')[0]}.npz").exists():
            file.unlink(missing_ok=True)


# The format of the files: an `.npz` file with each array in its narrowest integer type, and one JSON outline
# of the structure. Reading unpickles nothing, instantiates only the named classes, and treats a damaged or
# incomplete file as absent.

Array = NDArray[Any]
Records = Mapping[str, Any]  # by class name: dataclasses, msgspec records and named tuples

OUTLINE, SMALL = "outline", "small"
MAX_SMALL = 4096  # values: smaller arrays are stored concatenated, since each stored array costs a header
DAMAGED = (
    OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, zipfile.BadZipFile,
    pl.exceptions.PolarsError,
    tokenize.TokenError,  # numpy parses array headers with Python's tokenizer
    SystemError,  # from Python's parser, see `_READING`
)  # fmt: skip
NARROW = (np.int8, np.int16, np.int32)
# Held while reading: numpy parses array headers with Python's parser, which in Python 3.11 sometimes fails
# when several threads use it ("AST constructor recursion depth mismatch").
_READING = threading.Lock()


def write_archive(file: Path, value: Any, records: Records) -> None:
    """Write a value atomically: the complete file or none.

    Raises:
        OSError: the file cannot be written.
    """
    arrays = _Arrays(records)
    outline = json.dumps(arrays.taken_apart(value))
    arrays.by_name[OUTLINE] = np.frombuffer(outline.encode(), np.uint8)
    arrays.by_name[SMALL] = narrow(np.concatenate([np.empty(0, np.int64), *arrays.small]))
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file.parent.resolve(), file.name) as stream:
        np.savez(stream, **arrays.by_name)  # type: ignore[arg-type]


def read_archive(file: Path, records: Records, run: Run | None) -> Any:
    """Return the value in an archive; None where the file is missing, incomplete or damaged.

    Args:
        file: an archive of `write_archive`.
    """
    try:
        with _READING, np.load(file, allow_pickle=False) as arrays:  # zip checksums detect damage
            return built_from(json.loads(arrays[OUTLINE].tobytes()), arrays, records, run)
    except DAMAGED:
        return None


class _Arrays:
    """The arrays of one archive; an array or frame shared by several parts of a value is written once.

    Attributes:
        records: the classes that the value may contain.
        small: small arrays, stored concatenated.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.by_name: dict[str, Array] = {}
        self.small: list[Array] = []
        self._places: dict[int, Any] = {}  # by id of an array or frame; the value keeps them alive
        self._size = 0

    def taken_apart(self, value: Any) -> Any:
        """Return the value as JSON, with references in place of arrays and frames."""
        kind = type(value)
        if self.records.get(kind.__name__) is kind:
            names = getattr(value, "_fields", None) or getattr(value, "__struct_fields__", None)
            names = names or [field.name for field in dataclasses.fields(value)]
            return {kind.__name__: {name: self.taken_apart(getattr(value, name)) for name in names}}
        if isinstance(value, np.ndarray):
            if value.dtype == np.int64 and value.ndim == 1 and value.size <= MAX_SMALL:
                # Begin and end of the array among the concatenated small ones.
                if id(value) not in self._places:
                    self._places[id(value)] = (self._size, self._size + value.size)
                    self._size += value.size
                    self.small.append(value)
                return {"small": self._places[id(value)]}
            return {"array": self._named(value, narrow), "dtype": value.dtype.str}
        if isinstance(value, pl.DataFrame):
            return {"frame": self._named(value, _as_bytes)}
        if isinstance(value, Mapping):
            return {"mapping": [[self.taken_apart(part) for part in item] for item in value.items()]}
        if isinstance(value, (tuple, list)):
            if hasattr(value, "_fields"):
                raise TypeError(f"{kind.__name__} would be read as a plain tuple: name it among the records")
            return [self.taken_apart(part) for part in value]
        if isinstance(value, Run):
            return {"run": None}
        if isinstance(value, np.generic):
            return value.item()
        return value

    def _named(self, value: Any, as_array: Callable[[Any], Array]) -> str:
        """Return the archive name of an array or frame, adding its array on first use."""
        name: str = self._places.setdefault(id(value), str(len(self.by_name)))
        if name not in self.by_name:
            self.by_name[name] = as_array(value)
        return name


def _as_bytes(frame: pl.DataFrame) -> Array:
    stream = io.BytesIO()
    frame.write_ipc(stream)
    return np.frombuffer(stream.getvalue(), np.uint8)


def narrow(array: Array) -> Array:
    """Return integers in the smallest type that fits them all: a graph is then a quarter as large."""
    if array.dtype != np.int64 or array.size == 0:
        return array
    low, high = array.min(), array.max()
    fitting = (t for t in NARROW if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    return array.astype(next(fitting, np.int64))


def built_from(outline: Any, arrays: Mapping[str, Array], records: Records, run: Run | None) -> Any:
    """Return the value that an outline describes; parts that share an array or frame share it again.

    Args:
        outline: records, arrays and plain values, as `write_archive` writes them.
    """
    small = _read_only(arrays[SMALL].astype(np.int64)) if SMALL in arrays else np.empty(0, np.int64)
    made: dict[Any, Any] = {}  # arrays and frames so far

    def built(outline: Any) -> Any:
        if isinstance(outline, list):
            return tuple(map(built, outline))
        if not isinstance(outline, dict):
            return outline
        (kind, content), *_ = outline.items()
        if kind in records:
            return records[kind](**{name: built(part) for name, part in content.items()})
        if kind == "small":
            first, end = place = tuple(content)
            return made.setdefault(place, small[first:end])
        if kind in ("array", "frame"):
            if content not in made:
                stored = arrays[content]
                if kind == "array":
                    made[content] = _read_only(stored.astype(outline["dtype"], copy=False))
                else:
                    made[content] = pl.read_ipc(io.BytesIO(stored.tobytes()))
            return made[content]
        if kind == "mapping":
            return dict(map(built, content))
        if kind == "run":
            return run
        raise ValueError(f"a file of a graph names {kind}")

    return built(outline)


def _read_only(array: Array) -> Array:
    array.setflags(write=False)
    return array
