"""URLs of runs and traces in place of paths; an extension copies what is at them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from dpro.errors import UsageError
from dpro.plugins import hooks_of

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, `file://` included."""
    return isinstance(path, str) and _URL.match(path) is not None


def local_copy(url: str) -> Path:
    """Return the local path of a URL's content, copying it first; `file://` is not copied.

    Args:
        url: URL of a folder or a file, such as `s3://bucket/runs/today`.

    Raises:
        UsageError: it is not a URL, or not of a kind that can be read.
        InputError: nothing is at the URL, or it cannot be read.
        DproError: there is no room for the copy.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url}: is no URL ({error})") from error
    if parts.scheme.lower() == "file":
        return Path(unquote(parts.path))
    for copy_of in hooks_of("copied"):
        return cast(Path, copy_of(url))
    raise UsageError(f"{url}: {NEEDED}")


NEEDED = "URLs need dpro's extension `remote`, which is not installed; copy the files to this machine"
