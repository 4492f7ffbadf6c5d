"""Archives: records of arrays, frames, text and numbers stored in one file for the next command.

Takes such records and the classes they may be instances of; writes an `.npz` file with each array in its
narrowest integer type, and one JSON outline of their structure; reads the records back. It unpickles nothing,
instantiates only the named classes, and treats a damaged or incomplete file as absent.
"""

from __future__ import annotations

import dataclasses
import io
import json
import threading
import tokenize
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.folders import written_whole
from dpro.store import Run

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


def _field_names(record: Any) -> Sequence[str]:
    """Return the field names of a named tuple, a msgspec record or a dataclass."""
    names = getattr(record, "_fields", None) or getattr(record, "__struct_fields__", None)
    return names or [field.name for field in dataclasses.fields(record)]


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
            names = _field_names(value)
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
                made[content] = _array(stored, outline) if kind == "array" else _frame(stored)
            return made[content]
        if kind == "mapping":
            return dict(map(built, content))
        if kind == "run":
            return run
        raise ValueError(f"a file of a graph names {kind}")

    return built(outline)


def _array(stored: Array, outline: Mapping[str, str]) -> Array:
    return _read_only(stored.astype(outline["dtype"], copy=False))


def _read_only(array: Array) -> Array:
    array.setflags(write=False)
    return array


def _frame(content: Array) -> pl.DataFrame:
    return pl.read_ipc(io.BytesIO(content.tobytes()))
