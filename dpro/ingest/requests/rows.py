"""The rows of a log of requests, whatever it is written in.

In: a file of JSON lines, one JSON value, or CSV. Out: rows with the number of their line, each flat: names in
lower case with underscores, those of inner objects after those of outer ones. Spans of OpenTelemetry are
rows of their own, with their attributes; a benchmark's object of lists is a row for each place in the lists.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from dpro.errors import InputError

Row: TypeAlias = dict[str, Any]
BAD = "not a JSON object"
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_VALUES = ("string_value", "int_value", "double_value", "bool_value")  # of attributes of OpenTelemetry
_LISTS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "start_times",
    "itls",
    "errors",
)  # of vLLM's and SGLang's benchmarks


def read_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Yield the number of each line, or of each entry, with its row, or with what is wrong with it.

    Raises:
        InputError: the file cannot be read as text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file; give JSON lines, JSON or CSV") from error
    yield from rows_of(text)


def rows_of(text: str) -> Iterator[tuple[int, Row | str]]:
    """The same of the content of a file."""
    if not text.lstrip().startswith(("{", "[")):
        yield from _csv_rows(text)
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from _json_lines(text)
        return
    for number, entry in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield from _entries(number, entry)


def _csv_rows(text: str) -> Iterator[tuple[int, Row | str]]:
    reader = csv.DictReader(io.StringIO(text))
    try:
        for row in reader:
            values = {snake(name): value for name, value in row.items() if name and value not in (None, "")}
            yield reader.line_num, values if None not in row else "more values than columns"
    except csv.Error as error:
        yield reader.line_num + 1, f"not CSV ({error})"


def _json_lines(text: str) -> Iterator[tuple[int, Row | str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            yield number, BAD
            continue
        yield from _entries(number, entry)


def _entries(number: int, entry: Any) -> Iterator[tuple[int, Row | str]]:
    """The rows of one JSON value."""
    if not isinstance(entry, dict):
        yield number, BAD
    elif "resourceSpans" in entry or "resource_spans" in entry:
        for span in _spans(entry):
            yield number, span
    elif isinstance(entry.get("input_lens"), list):
        yield from enumerate(_listed(entry), 1)
    else:
        yield number, flat(entry)


def _spans(entry: Any) -> Iterator[Row]:
    """The spans of an export of OpenTelemetry, however deep they lie."""
    if isinstance(entry, dict):
        if "startTimeUnixNano" in entry or "start_time_unix_nano" in entry:
            yield flat(entry)
            return
        entry = list(entry.values())
    if isinstance(entry, list):
        for each in entry:
            yield from _spans(each)


def _listed(entry: Mapping[str, Any]) -> Iterator[Row]:
    lists = {name: entry[name] for name in _LISTS if isinstance(entry.get(name), list)}
    for place in range(max(map(len, lists.values()))):
        row = {name: values[place] for name, values in lists.items() if place < len(values)}
        itls = row.pop("itls", None)
        if isinstance(itls, list) and isinstance(row.get("ttfts"), int | float):
            row["latency"] = row["ttfts"] + sum(each for each in itls if isinstance(each, int | float))
        yield {_SINGULAR.get(name, name): value for name, value in row.items()}


_SINGULAR = {
    "input_lens": "input_len", "output_lens": "output_len", "ttfts": "ttft", "start_times": "start_time",
    "errors": "error",
}  # fmt: skip


def flat(entry: Mapping[str, Any]) -> Row:
    """One level of names; attributes of OpenTelemetry, lists of keys and values, are names as well."""
    found: Row = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            found |= {f"{snake(name)}_{inner}": each for inner, each in flat(value).items()}
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(each, dict) and "key" in each for each in value)
        ):
            found |= {snake(str(each["key"])): _attribute(each.get("value")) for each in value}
        else:
            found[snake(name)] = value
    return found


def _attribute(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return next((each for name, each in value.items() if snake(name) in _VALUES), None)


def snake(name: str) -> str:
    """A name in lower case with underscores between its words."""
    return "_".join(word for word in _WORDS.split(name.strip()) if word).lower()
