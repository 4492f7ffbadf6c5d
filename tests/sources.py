"""The Python modules of the repository, for tests of how they are written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules(*folders: str) -> list[Path]:
    """Return the modules below folders, relative to the root, and no links."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [Path(line) for line in listed.stdout.splitlines() if line.endswith(".py")]
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]
