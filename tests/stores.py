"""An object store in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def empty_store(patch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Return the store behind `memory://`, empty, with a cache for what is copied from it.

    Args:
        patch: sets where the cache is.
        folder: of the test.
    """
    fsspec = pytest.importorskip("fsspec")
    patch.setenv("DPRO_CACHE", str(folder / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return memory
