"""Where dpro keeps what it can make again: imports, graphs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache: `$DPRO_CACHE`, else `~/.cache/dpro`."""
    chosen = os.environ.get("DPRO_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "dpro"
