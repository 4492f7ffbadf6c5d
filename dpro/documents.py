"""Documents for programs: typed answers, their JSON, and their JSON schema.

Takes a document of `DocumentPart`s, which are declared beside the code they describe; returns one line of
JSON, or a schema with descriptions from the docstrings. All JSON answers are encoded here.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

SCHEMA_VERSION = 2  # of all documents; new keys do not change it
_ATTRIBUTE = re.compile(r"(?ms)^ {4}((?:\w+(?:, )?)+): (.*?)(?=^ {4}\w|\Z)")


class DocumentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a document: its keys are its fields, in their order."""


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer of one command, as one JSON object.

    Attributes:
        schema_version: version of all documents; new keys do not change it.
    """

    schema_version: int = SCHEMA_VERSION


def plain(document: Any) -> Any:
    """Return the document as dictionaries, lists, numbers and strings; NumPy numbers become Python's."""
    return msgspec.to_builtins(document, str_keys=True, enc_hook=_python_number)


def finite(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def encode(document: msgspec.Struct) -> str:
    """Return a document as JSON: ASCII on one line, `schema_version` first.

    Raises:
        ValueError: the document contains a NaN or an infinity, which JSON cannot express.
    """
    keys = {"schema_version": SCHEMA_VERSION, **plain(document)}
    text = json.dumps(keys, allow_nan=False)
    return text.replace("\x7f", r"\u007f")  # the one control character that `json` does not escape


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a document or a part, with the descriptions of keys from docstrings."""
    (reference,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    declared_as: dict[str, type[Any]] = {kind.__name__: kind for kind in _subclasses(msgspec.Struct)}
    for title, part in parts.items():
        text = part.pop("description", "")
        meanings = _inherited_docs(declared_as.get(title, object)) | _attribute_docs(text)
        part["description"] = _joined(text.partition("Attributes:")[0])
        for name, declared in part.get("properties", {}).items():
            if name in meanings:
                declared["description"] = meanings[name]
    whole: dict[str, Any] = parts.pop(reference["$ref"].rpartition("/")[2])
    return whole | ({"$defs": parts} if parts else {})


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all classes derived from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _subclasses(derived)


def _inherited_docs(kind: type) -> dict[str, str]:
    """Return the descriptions of a class's attributes by name, including those of its bases."""
    return {
        name: text for base in reversed(kind.__mro__) for name, text in _attribute_docs(base.__doc__).items()
    }


def _attribute_docs(docstring: str | None) -> dict[str, str]:
    """Return the descriptions in the `Attributes` section of a docstring, by name."""
    attributes = inspect.cleandoc(docstring or "").partition("Attributes:\n")[2]
    return {
        name: _joined(meaning)
        for names, meaning in _ATTRIBUTE.findall(attributes)
        for name in names.split(", ")
    }


def _joined(text: str) -> str:
    return " ".join(text.split())


def _python_number(value: Any) -> Any:
    """Return a NumPy number as a Python one.

    Raises:
        NotImplementedError: the value is not a NumPy number.
    """
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"no JSON for {type(value).__name__}")
