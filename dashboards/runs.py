"""Runs that the page offers, and those of them that are open.

Takes the opened run, and functions that list and open others; resolves the names in links. A name is only
looked up in the list, so no link opens another path. A few runs stay open besides the first.
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

KEPT = 2  # runs that stay open besides the first: one shown, and one to compare it with
PATIENCE_S = 2.0  # how long a request waits for a run to open; the page asks again


class StillOpening(Unanswerable):
    """A run is not open yet; opening it goes on."""


class OfferedRun(NamedTuple):
    """A run that the page offers.

    Attributes:
        name: in links; unique.
        path: of the run, or of traces.
        why: why it cannot be opened, in one line; empty if it can.
        lives: whether it is being recorded.
    """

    name: str
    path: str
    why: str = ""
    lives: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is a complete run: neither traces, nor a run that is still being recorded."""
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
            show: opens one; None if there are no others.
        """
        self.opened, self.name, self.against = opened, name, against
        self._offers, self._show = offers, show
        self._open: OrderedDict[str, Future[ShownRun]] = OrderedDict()
        self._lock = threading.Lock()
        opened.loaded.others, opened.loaded.offers = self.loaded, self._offers

    @property
    def change(self) -> bool:
        """Whether the content of a link may change: a run is being recorded, or can be chosen."""
        return self.opened.lives or self._show is not None

    def offers(self) -> Sequence[OfferedRun]:
        """Return all runs that a link can name."""
        return self._offers()

    def loaded(self, name: str) -> Loaded:
        """Return the latest state of a run.

        Raises:
            DproError: as from `shown`.
        """
        return self.shown(name).loaded

    def shown(self, name: str) -> ShownRun:
        """Return a run by its name, opening it if necessary; close the least recently used one.

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
            self._open[name] = future  # the last one is the most recently used
            while len(self._open) > KEPT:
                _, closed = self._open.popitem(last=False)
                closed.add_done_callback(_leave)
        try:
            return future.result(PATIENCE_S)
        except TimeoutError as error:
            raise StillOpening(f"{name} is still being opened; this page will show it") from error
        except Exception:
            with self._lock:
                if self._open.get(name) is future:  # choosing it again tries again
                    del self._open[name]
            raise

    def _begin(self, name: str) -> Future[ShownRun]:
        """Open a run in a thread."""
        offer = next((offered for offered in self._offers() if offered.name == name), None)
        if offer is None or self._show is None:
            raise UsageError(f"no run {quoted(name)} is offered here: choose one from the list above")
        if offer.why:
            raise UsageError(f"{name}: {offer.why}")
        future: Future[ShownRun] = Future()
        threading.Thread(target=self._follow, args=(self._show, offer, future), daemon=True).start()
        return future

    def _follow(
        self, show: Callable[[OfferedRun], ShownRun], offer: OfferedRun, future: Future[ShownRun]
    ) -> None:
        gc.collect()  # closed runs have reference cycles
        try:
            shown = show(offer)
            shown.loaded.others, shown.loaded.offers = self.loaded, self._offers
        except BaseException as error:
            future.set_exception(error)
            return
        future.set_result(shown)
        shown.follow()


def runs_of(run: Loaded | ShownRun | Runs) -> Runs:
    """Wrap a single run; return `Runs` as they are."""
    if isinstance(run, Runs):
        return run
    return Runs(run if isinstance(run, ShownRun) else ShownRun(run))


def first_link(runs: Runs) -> str:
    """Return the query of the page when it opens; empty if nothing is compared."""
    return Link(against=runs.against).query() if runs.against else ""


def _leave(closed: Future[ShownRun]) -> None:
    if closed.exception() is None:
        closed.result().leave()


# The run shown in the browser; while it is being recorded, its latest copy.

log = logging.getLogger(__name__)


class WindowOfJob(Protocol):
    """A deep window that can be requested from a running job."""

    def ask(self) -> None:
        """Request a window, unless a request is pending."""

    def follow(self) -> tuple[bool, str]:
        """Return whether a request is pending, and the outcome of the latest one in words."""


class ShownRun:
    """A run in its latest state.

    Attributes:
        version: number of earlier states.
        lives: whether later states may follow.
        window: the deep window that can be requested from its job; None if the job takes none.
    """

    def __init__(
        self, loaded: Loaded, later: Iterator[Loaded] | None = None, window: WindowOfJob | None = None
    ) -> None:
        """Show a run.

        Args:
            later: yields its later states as they become available; None if there are none.
        """
        self.window = window
        self.loaded, self.version, self.lives = loaded, 0, later is not None
        self._later = iter(()) if later is None else later
        self._left = False

    def leave(self) -> None:
        """Stop following later states."""
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
