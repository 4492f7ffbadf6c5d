"""Whether a server keeps up: the requests that arrive, against the most that it can serve.

In: a fitted server and changes. Out: arrivals per second, what the changed server can serve without an end,
and a sentence where it may not keep up. Below that, requests wait for a moment; near it, some percent of the
cost decide between a moment and minutes; above it, each waits longer than the one before, for as long as the
load lasts: then the time to first token is one of the log's length, and throughput one of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.extensions.serving.changes import NOTHING_GIVEN, GivenFacts, Server, changed_by_all
from dpro.extensions.serving.fit import NO_LIMIT, FittedCost, most_at_once
from dpro.extensions.serving.latency import number
from dpro.extensions.serving.predict import FEW_DRAWS, INSIDE, answered, likely_servers
from dpro.units import NS_PER_S


class OfferedLoad(DocumentPart, frozen=True):
    """What arrives at a changed server, and what it can serve.

    Attributes:
        arrivals_per_s: requests.
        low_per_s, high_per_s: the most requests like these that it can end per second: an interval that is
            meant to hold 90%.
        most_recorded: the most requests that ran at once in the recording, where more do with the changes,
            and the engine's own limit is not known; else null.
    """

    arrivals_per_s: float
    low_per_s: float
    high_per_s: float
    most_recorded: int | None

    @property
    def sentences(self) -> list[str]:
        """What a reader has to know of it; empty where the server surely keeps up."""
        arrive = f"{number(self.arrivals_per_s)} requests/s arrive, and it can serve "
        arrive += f"{number(self.low_per_s)} to {number(self.high_per_s)}: "
        said = []
        if self.high_per_s < self.arrivals_per_s:
            said.append(
                arrive + "each waits longer than the one before, so times to first token and latencies are "
                "those of a log of this length"
            )
        elif self.low_per_s < self.arrivals_per_s:
            said.append(arrive + "whether they queue up is not known")
        if self.most_recorded is not None:
            said.append(
                f"more requests run at once than the {self.most_recorded:,} that were recorded; what the "
                "engine's limit is, is not known: give --max-requests"
            )
        return said


def load_of(
    requests: pl.DataFrame, fitted: FittedCost, changes: Sequence[str], given: GivenFacts = NOTHING_GIVEN
) -> OfferedLoad | None:
    """The load of a changed server; None where clients wait for answers, or all requests arrive at once.

    Args:
        requests: as recorded.

    Raises:
        UsageError: there is no such change.
        Unanswerable: a request never fits, or a change needs what is not known.
    """
    before = Server(requests, fitted.engine, fitted.cost, given=given)
    after = changed_by_all(before, changes)
    span_ns = int(np.ptp(after.requests["arrival_ns"].to_numpy()))
    if not span_ns or after.engine.clients:
        return None
    served = [served_per_s(server) for _, server, _ in likely_servers(before, fitted, changes, FEW_DRAWS)]
    low, high = np.quantile(served, INSIDE)
    seen = most_at_once(requests)
    is_unknown = 0 < seen < most_at_once(answered(after, fitted.delay_s)) / after.engine.replicas
    return OfferedLoad(
        (after.requests.height - 1) * NS_PER_S / span_ns,
        float(low),
        float(high),
        seen if is_unknown and after.engine.max_requests >= NO_LIMIT else None,
    )


def served_per_s(server: Server) -> float:
    """Requests like these that a server can end per second: as many again, over what they add.

    All are there at once; the time in which batches fill and drain cancels out.

    Raises:
        Unanswerable: a request never fits.
    """
    at_once = server.requests.with_columns(arrival_ns=pl.lit(0, pl.Int64))
    ends = [
        int(answered(replace(server, requests=pl.concat([at_once] * times)), 0.0)["end_ns"].to_numpy().max())
        for times in (1, 2)
    ]
    if ends[1] <= ends[0]:
        raise Unanswerable("requests take no time that could be distinguished")
    return server.requests.height * NS_PER_S / (ends[1] - ends[0])
