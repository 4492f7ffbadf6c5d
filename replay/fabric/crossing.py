"""Which links a flow may cross, and how likely: what is known of paths when the hash of routers is not.

In: flows and next hops. Out: a probability for each flow and link: 1 on the way that all its paths share, one
over their number where routers choose among equally short ones. Where paths between two ports are known,
only these count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.replay.fabric.flows import Flows, sprayed
from dpro.replay.fabric.routes import Routes
from dpro.topology.paths import PathEntry

if TYPE_CHECKING:  # else every command that knows the edits would load scipy
    from scipy.sparse import csr_matrix


def crossings(flows: Flows, routes: Routes, known: Sequence[PathEntry] = ()) -> csr_matrix:
    """[F, L] probability that a flow crosses a link.

    Args:
        known: paths of connections; of several between two ports each is as likely.

    Raises:
        Unanswerable: no path leads from a port to another, or a known one names a link that is not there.
    """
    from scipy.sparse import csr_matrix, diags

    count = flows.begin.size
    each = replace(flows, of=np.arange(count), share=np.ones(count), count=count)
    spread = sprayed(each, routes)
    shape = (count, routes.network.source.size)
    found = csr_matrix((spread.share, spread.links, spread.indptr), shape=shape)
    names = routes.network.names
    of_ports: dict[tuple[str, str], list[PathEntry]] = {}
    for entry in known:
        of_ports.setdefault((entry.begin, entry.end), []).append(entry)
    ends = list(zip(flows.begin.tolist(), flows.end.tolist()))
    rows = [
        (at, _along(entry, routes, *pair), 1.0 / len(entries))
        for at, pair in enumerate(ends)
        for entries in [of_ports.get((names[pair[0]], names[pair[1]]), [])]
        for entry in entries
    ]
    if not rows:
        return found
    row = np.concatenate([np.full(len(links), at) for at, links, _ in rows])
    link = np.concatenate([np.array(links, np.int64) for _, links, _ in rows])
    share = np.concatenate([np.full(len(links), share) for _, links, share in rows])
    kept = np.ones(count)
    kept[[at for at, *_ in rows]] = 0.0
    return csr_matrix(diags(kept) @ found + csr_matrix((share, (row, link)), shape=shape))


def _along(entry: PathEntry, routes: Routes, begin: int, end: int) -> list[int]:
    """The links of a known path from port to port."""
    between = []
    for name in entry.links:
        link = routes.network.link_named(name)
        if link is None:
            raise Unanswerable(f"path of {entry.begin} to {entry.end}: the topology has no link {name!r}")
        between.append(link)
    return [int(routes.out[begin]), *between, int(routes.into[end])]


def hops_of(crossing: csr_matrix) -> Ints:
    """[F] the number of links that each flow crosses, from port to port."""
    hops: Ints = np.rint(np.asarray(crossing.sum(axis=1)).ravel()).astype(np.int64)
    return hops
