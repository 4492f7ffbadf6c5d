"""The run that the browser is shown; while it is being recorded, the latest copy of it.

In: a run, and its later states, if any. Out: the latest state, with a version number that grows. A request
during a change gets the old state or the new one, never a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from dpro.dashboards.loaded import Loaded
from dpro.dashboards.withdrawn import shown_by
from dpro.errors import DproError

log = logging.getLogger(__name__)


class ShownRun:
    """A run in its latest state.

    Attributes:
        loaded: the state.
        version: how many states came before it.
        lives: whether later states may follow.
    """

    def __init__(self, loaded: Loaded, later: Iterator[Loaded] | None = None) -> None:
        """Show a run.

        Args:
            later: yields its later states as they become available; None where there are none.
        """
        self.loaded, self.version, self.lives = loaded, 0, later is not None
        self._later = iter(()) if later is None else later
        self._left = False

    def leave(self) -> None:
        """Follow later states no longer."""
        self._left = True

    def follow(self) -> None:
        """Wait for later states and show each, until the last one, or until one cannot be read."""
        try:
            for state in self._later:
                if self._left:
                    return
                state.earlier, state.others = shown_by(self.loaded), self.loaded.others
                state.offered = self.loaded.offered
                self.loaded = state
                self.version += 1
        except DproError as error:
            log.error("dpro dashboard: no later copy of the run can be shown: %s", error)
        finally:
            self.lives = False
