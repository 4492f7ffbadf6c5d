"""The measured lanes of a run, read rank by rank: ranks that are read are shown while others are being read.

In: a run. Out: `MeasuredLanes`, which a background thread fills. It keeps some 40 bytes per span; other
columns of a span stay in its file until they are needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import polars as pl

from dpro.analysis.cached import Cached, cached
from dpro.dashboards.timeline.clock import Clocked, arrivals, clocked
from dpro.dashboards.timeline.lanes import RankLanes, SpanNames, make_lanes
from dpro.dashboards.timeline.search import Search
from dpro.errors import DproError
from dpro.schema import SPANS
from dpro.store import Run

log = logging.getLogger(__name__)
MAX_UNASKED = 1_500_000  # spans of a run whose graph is built before a view asks for it
COLUMNS = (
    "span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "tid", "device", "stream",
    "correlation", "forward_thread", "micro_batch",
)  # fmt: skip


class MeasuredLanes(Cached):
    """The lanes that have been read so far.

    Attributes:
        run: what is read.
        names: of all spans.
        search: cached searches in them.
        ranks: rank -> its lanes; grows until `complete`.
        failed: the reason why reading ended early; empty where it did not.
    """

    def __init__(self, run: Run) -> None:
        """Nothing is read yet."""
        super().__init__()
        self.run, self.names = run, SpanNames()
        self.search = Search(self.names)
        self.ranks: dict[int, RankLanes] = {}
        self.failed = ""
        self._complete = threading.Event()
        self._started = False

    @cached
    def clocks(self) -> Clocked:
        """The clock of each rank, steps, collectives."""
        return clocked(self.run)

    @property
    def complete(self) -> bool:
        """Whether all ranks have been read, or never will be."""
        return self._complete.is_set()

    def start(self, first: Iterable[int] = ()) -> None:
        """Begin to read in a thread, unless that has begun."""
        with self.lock_of("start"):
            if self._started:
                return
            self._started = True
        threading.Thread(target=self._read, args=(list(first),), daemon=True).start()

    def all(self) -> dict[int, RankLanes]:
        """All ranks, once they are there."""
        self.start()
        self._complete.wait()
        return self.ranks

    def _read(self, first: list[int]) -> None:
        try:
            of = self.clocks
            for rank in sorted(of.parts, key=lambda rank: (rank not in first, rank)):
                self.ranks[rank] = self._lanes(of, rank)
        except DproError as error:
            self.failed = str(error)
        except Exception:
            log.exception("dpro dashboard: timeline")
            self.failed = "dpro has a defect here; the terminal that it runs in says more"
        finally:
            self._complete.set()

    def _lanes(self, of: Clocked, rank: int) -> RankLanes:
        spans = self.run.read(SPANS, of.parts[rank], COLUMNS).filter(pl.col("rank") == rank)
        spans = of.alignment.aligned(spans)
        spans = spans.join(arrivals(of, rank), on="span_id", how="left", maintain_order="left")
        return make_lanes(spans, self.names, of.window_ns, of.origin_ns)
