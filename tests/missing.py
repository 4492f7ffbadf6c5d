"""A library that is not installed, as long as a test runs; modules of dpro are imported again without it."""

from __future__ import annotations

import sys

import pytest


def take_away(patch: pytest.MonkeyPatch, library: str, package: str) -> None:
    """Make a library fail to import, and forget a package that uses it.

    A package has its modules as attributes, too: a new import would replace them there for good.
    """
    forgotten = [name for name in sys.modules if f"{name}.".startswith((f"{library}.", f"{package}."))]
    for name in forgotten:
        parent, _, child = name.rpartition(".")
        if parent and child in vars(sys.modules[parent]):
            patch.delattr(sys.modules[parent], child)
    for name in forgotten:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, library, None)
