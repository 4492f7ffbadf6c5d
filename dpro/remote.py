"""Runs and traces that lie elsewhere, as any URL that fsspec understands: copied into the cache, once.

In: a URL. Out: a path in the cache. It is copied again when size, time or tag of any of its files changes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from dpro.cache import cache_folder, mark_used, remove_unused
from dpro.errors import DproError, InputError, UsageError, first_line, needs_extra
from dpro.folders import made_whole

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_CHANGES = ("etag", "ETag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something elsewhere, or here as `file://`."""
    return isinstance(path, str) and _URL.match(path) is not None


def local_copy(url: str) -> Path:
    """Where the files of a URL are here; those of `file://` are where they were.

    Args:
        url: of a folder or a file, such as `s3://bucket/runs/today`.

    Raises:
        MissingExtra: fsspec is not installed.
        UsageError: it does not know such URLs.
        InputError: there is nothing, or it cannot be read.
        DproError: there is no cache to copy it to.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url}: is no URL ({error})") from error
    if parts.scheme.lower() == "file":
        return Path(unquote(parts.path))
    files, root, store = _listed(url)
    copies = cache_folder("remote")
    copy = copies / _fingerprint(url, files) / (PurePosixPath(root).name or "root")
    mark_used(copy.parent)
    if copy.exists():
        return copy
    remove_unused(copies)
    try:
        with made_whole(copy.parent) as place:
            _copy(store, files, place / copy.name)
    except DproError:
        raise
    except Exception as error:  # whatever the store's library raises
        if not copy.exists():  # else another command has just copied the same files
            raise InputError(f"{url}: cannot be copied to {copy.parent} ({first_line(error)})") from error
    return copy


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL, as fsspec has them, and the path in it.

    Raises:
        MissingExtra: fsspec is not installed.
        UsageError: it does not know such URLs.
        InputError: what it needs for them is not installed, or the store cannot be opened.
    """
    with needs_extra("remote"):
        import fsspec
    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:  # fsspec is there; what it needs for this sort of store is not
        raise InputError(f"{url}: {first_line(error)} with pip") from error
    except ValueError as error:
        raise UsageError(f"{url}: {first_line(error)}; see fsspec for those there are") from error
    except Exception as error:  # whatever the store's library raises
        raise InputError(f"{url}: {first_line(error)}") from error


def _listed(url: str) -> tuple[Mapping[str, Mapping[str, Any]], str, Any]:
    """The files of a URL: place below it -> what its store says of it; its root; the store."""
    store, root = open_store(url)
    try:
        files = store.find(root, detail=True)
    except Exception as error:  # whatever the store's library raises
        raise InputError(f"{url}: cannot be listed ({first_line(error)})") from error
    if not files:
        raise InputError(f"{url}: no such file or folder")
    return {_below(name, root, url): facts for name, facts in files.items()}, root, store


def _below(name: str, root: str, url: str) -> str:
    """The place of a file below the root; the root itself, if it is one file, is ''."""
    place = PurePosixPath(name.strip("/")).relative_to(PurePosixPath(root.strip("/")))
    if ".." in place.parts:
        raise InputError(f"{url}: {name} leads out of it; copy what is needed by hand")
    return "" if place == PurePosixPath(".") else str(place)


def _fingerprint(url: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Changes with the URL, and with any file's place, size, and what its store says of its last change."""
    digest = hashlib.sha256(os.fsencode(url))
    for place, facts in sorted(files.items()):
        versions = [str(facts[key]) for key in ("size", *_CHANGES) if key in facts]
        digest.update(os.fsencode("\0".join(["", place, *versions])))
    return digest.hexdigest()[:32]


def _copy(store: Any, files: Mapping[str, Mapping[str, Any]], to: Path) -> None:
    here = [to / place if place else to for place in files]
    for folder in {path.parent for path in here}:
        folder.mkdir(parents=True, exist_ok=True)
    store.get([facts["name"] for facts in files.values()], list(map(str, here)))
