"""A rank between what it waits for and what others wait for: its part with only the nodes that matter.

In: a `Part`. Out: its skeleton, a part of far fewer nodes. However long its transfers last, and whenever they
begin, every node of it starts exactly when it does in the whole part: a rank is a linear map in max-plus
algebra from the starts of its transfers to those of its arrivals (Baccelli et al., Synchronization and
Linearity, 1992). It holds for these durations and lags only: under others the part is condensed anew.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.condense.kernels import REACH, sweep
from dpro.replay.condense.parts import Part

# Rounds after the first, each of which leaves out nodes at which paths merge where that needs no more edges.
ROUNDS = 3


def skeleton_of(part: Part, reach: int = REACH) -> Part:
    """Leave out the nodes whose starts are not asked for outside the rank.

    Nodes at which paths merge and part again stay: without them an edge would lead from each node before to
    each behind.

    Args:
        part: of a rank.
        reach: over how many kept nodes back edges are compared.
    """
    nothing = np.zeros(part.keep.size, np.bool_)
    skeleton = _swept(part, part.keep, _branches(part) & ~part.keep, reach)
    for _ in range(ROUNDS):
        entering, leaving = np.diff(skeleton.indptr), _leaving(skeleton)
        pays = skeleton.keep | (entering * leaving > entering + leaving)
        if pays.all():
            break
        skeleton = _swept(skeleton, pays, nothing[: pays.size], reach)
    return skeleton


def _swept(part: Part, keep: Bools, hub: Bools, reach: int) -> Part:
    kept, earliest, indptr, source, lag = sweep(
        (part.duration, part.earliest), (part.indptr, part.source, part.lag), (keep, part.free, hub), reach
    )
    columns = {name: getattr(part, name)[kept] for name in ("node", "duration", "keep", "free")}
    return dataclasses.replace(part, **columns, earliest=earliest, indptr=indptr, source=source, lag=lag)


def _leaving(part: Part) -> Ints:
    """[N] how many edges leave each node."""
    return np.bincount(part.source, minlength=part.keep.size)


def _branches(part: Part) -> Bools:
    """[N] nodes that several edges leave."""
    return _leaving(part) >= 2
