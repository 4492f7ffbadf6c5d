"""Remote runs and traces, at any URL that fsspec supports, copied into the cache once.

Takes a URL; returns a path in the cache. Copies again when the size, time or tag of any file changes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dpro.cache import cache_folder, mark_used, remove_unused
from dpro.errors import DproError, InputError, UsageError, first_line, needs_extra
from dpro.folders import made_whole

_CHANGE_KEYS = ("etag", "ETag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")


def copy_once(url: str) -> Path:
    """Return the local path of a URL's content, copying it into the cache first.

    Args:
        url: URL of a folder or a file, such as `s3://bucket/runs/today`.

    Raises:
        MissingExtra: fsspec is not installed.
        UsageError: fsspec does not support the URL.
        InputError: nothing is at the URL, or it cannot be read.
        DproError: there is no cache to copy to.
    """
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
    except Exception as error:  # the store's library may raise anything
        if not copy.exists():  # otherwise another command has just copied the same files
            raise InputError(f"{url}: cannot be copied to {copy.parent} ({first_line(error)})") from error
    return copy


def open_store(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path within it.

    Raises:
        MissingExtra: fsspec is not installed.
        UsageError: fsspec does not support the URL.
        InputError: the library for this store is not installed, or the store cannot be opened.
    """
    with needs_extra("remote"):
        import fsspec
    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:  # fsspec is installed, but not its library for this store
        raise InputError(f"{url}: {first_line(error)} with pip") from error
    except ValueError as error:
        raise UsageError(f"{url}: {first_line(error)}; see fsspec for the supported ones") from error
    except Exception as error:  # the store's library may raise anything
        raise InputError(f"{url}: {first_line(error)}") from error


def _listed(url: str) -> tuple[Mapping[str, Mapping[str, Any]], str, Any]:
    """Return the files of a URL (relative path to the store's facts), their root, and the store."""
    store, root = open_store(url)
    try:
        files = store.find(root, detail=True)
    except Exception as error:  # the store's library may raise anything
        raise InputError(f"{url}: cannot be listed ({first_line(error)})") from error
    if not files:
        raise InputError(f"{url}: no such file or folder")
    return {_relative_path(name, root, url): facts for name, facts in files.items()}, root, store


def _relative_path(name: str, root: str, url: str) -> str:
    """Return the path of a file relative to the root; empty for a root that is itself the file.

    Raises:
        InputError: the path leads out of the root.
    """
    place = PurePosixPath(name.strip("/")).relative_to(PurePosixPath(root.strip("/")))
    if ".." in place.parts:
        raise InputError(f"{url}: {name} leads out of it; copy what is needed by hand")
    return "" if place == PurePosixPath(".") else str(place)


def _fingerprint(url: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a hash of the URL and of each file's relative path, size, and tags and times of modification."""
    digest = hashlib.sha256(os.fsencode(url))
    for place, facts in sorted(files.items()):
        versions = [str(facts[key]) for key in ("size", *_CHANGE_KEYS) if key in facts]
        digest.update(os.fsencode("\0".join(["", place, *versions])))
    return digest.hexdigest()[:32]


def _copy(store: Any, files: Mapping[str, Mapping[str, Any]], to: Path) -> None:
    here = [to / place if place else to for place in files]
    for folder in {path.parent for path in here}:
        folder.mkdir(parents=True, exist_ok=True)
    store.get([facts["name"] for facts in files.values()], list(map(str, here)))
