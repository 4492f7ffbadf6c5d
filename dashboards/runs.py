"""The runs that the page offers, and those of them that are open.

In: the opened run, and functions that list and open others. Out: what the names in a link stand for. A name
is only ever looked up in the list: no link opens another path. Besides the opened run a few stay open.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.errors import DproError, Unanswerable, UsageError
from dpro.remote import is_url
from dpro.selection import quoted
from dpro.store import is_run

KEPT = 2  # runs that stay open besides the first: one that is shown, and one to compare it with
PATIENCE_S = 2.0  # how long a request waits for a run to open; the page asks again


class StillOpening(Unanswerable):
    """A run takes long to open, which goes on."""


class OfferedRun(NamedTuple):
    """A run that the page offers.

    Attributes:
        name: in links; each run has another.
        path: of the run, or of traces.
        why: it cannot be opened, in one line; empty where it can.
    """

    name: str
    path: str
    why: str = ""
    lives: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is a run that can be read: no traces, and not one that is still being recorded."""
        return not self.why and not self.lives and not is_url(self.path) and is_run(self.path)


class Runs:
    """The opened run, and the others that a link can name.

    Attributes:
        opened: the run that a link without a name shows.
        name: its name among the offers.
        against: name of the run that the first link compares it with; empty for none.
    """

    def __init__(
        self,
        opened: ShownRun,
        name: str = "",
        offers: Callable[[], Sequence[OfferedRun]] = list,
        show: Callable[[OfferedRun], ShownRun] | None = None,
        against: str = "",
    ) -> None:
        """Offer runs.

        Args:
            show: opens one; None where there are no others.
        """
        self.opened, self.name, self.against = opened, name, against
        self._offers, self._show = offers, show
        self._open: OrderedDict[str, Future[ShownRun]] = OrderedDict()
        self._lock = threading.Lock()
        opened.loaded.others, opened.loaded.offers = self.loaded, self._offers

    @property
    def change(self) -> bool:
        """Whether what a link shows may change by itself: a run is being recorded, or can be chosen."""
        return self.opened.lives or self._show is not None

    def offers(self) -> Sequence[OfferedRun]:
        """All runs that a link can name."""
        return self._offers()

    def loaded(self, name: str) -> Loaded:
        """The latest state of a run.

        Raises:
            DproError: as `shown`.
        """
        return self.shown(name).loaded

    def shown(self, name: str) -> ShownRun:
        """A run by its name; it is opened where it is not open, and the one used longest ago is closed.

        Args:
            name: as in a link; empty for the opened run.

        Raises:
            UsageError: no such run is offered, or it cannot be opened.
            StillOpening: opening it takes long.
            DproError: opening it failed.
        """
        if name in ("", self.name):
            return self.opened
        with self._lock:
            future = self._open.pop(name, None) or self._begin(name)
            self._open[name] = future  # the last is the one used most recently
            while len(self._open) > KEPT:
                _, closed = self._open.popitem(last=False)
                closed.add_done_callback(_leave)
        try:
            return future.result(PATIENCE_S)
        except TimeoutError as error:
            raise StillOpening(f"{name} is still being opened: this page shows it when it is") from error
        except Exception:
            with self._lock:
                if self._open.get(name) is future:  # it is tried again when it is chosen again
                    del self._open[name]
            raise

    def _begin(self, name: str) -> Future[ShownRun]:
        """Open a run in a thread."""
        offer = next((offered for offered in self._offers() if offered.name == name), None)
        if offer is None or self._show is None:
            raise UsageError(f"no run {quoted(name)} is offered here: choose one of the list above")
        if offer.why:
            raise UsageError(f"{name}: {offer.why}")
        future: Future[ShownRun] = Future()
        threading.Thread(target=self._follow, args=(self._show, offer, future), daemon=True).start()
        return future

    def _follow(
        self, show: Callable[[OfferedRun], ShownRun], offer: OfferedRun, future: Future[ShownRun]
    ) -> None:
        gc.collect()  # what was closed has cycles
        try:
            shown = show(offer)
            shown.loaded.others, shown.loaded.offers = self.loaded, self._offers
        except BaseException as error:
            future.set_exception(error)
            return
        future.set_result(shown)
        shown.follow()


def runs_of(run: Loaded | ShownRun | Runs) -> Runs:
    """A run alone, where it is not given among others."""
    if isinstance(run, Runs):
        return run
    return Runs(run if isinstance(run, ShownRun) else ShownRun(run))


def first_link(runs: Runs) -> str:
    """The query of the page when it is opened; empty where nothing is compared."""
    return Link(against=runs.against).query() if runs.against else ""


def _leave(closed: Future[ShownRun]) -> None:
    if closed.exception() is None:
        closed.result().leave()


# The run that the browser is shown; while it is being recorded, the latest copy of it.

log = logging.getLogger(__name__)


class WindowOfJob(Protocol):
    """A deep window that a running job may be asked for."""

    def ask(self) -> None:
        """Ask for one, unless one is waited for."""

    def follow(self) -> tuple[bool, str]:
        """Whether one is waited for, and what became of the latest, in words."""


class ShownRun:
    """A run in its latest state.

    Attributes:
        version: how many states came before it.
        lives: whether later states may follow.
        window: the deep window that its job may be asked for; None where it takes none.
    """

    def __init__(
        self, loaded: Loaded, later: Iterator[Loaded] | None = None, window: WindowOfJob | None = None
    ) -> None:
        """Show a run.

        Args:
            later: yields its later states as they become available; None where there are none.
        """
        self.window = window
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
                state.earlier, state.others = self.loaded.findings_so_far(), self.loaded.others
                state.offers = self.loaded.offers
                self.loaded = state
                self.version += 1
        except DproError as error:
            log.error("dpro dashboard: no later copy of the run can be shown: %s", error)
        finally:
            self.lives = False
