"""Which spans belong to the forward pass, the backward pass and the optimizer.

In: spans of a rank in rows. Out: a phase each. A CPU span's phase is that of its name, or else of the span
around it; GPU work has the phase of the call that launched it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints

PHASES = ("unknown", "forward", "backward", "optimizer")
UNKNOWN, FORWARD, BACKWARD, OPTIMIZER = range(4)
_OPTIMIZER = r"(?i)^Optimizer\.|optimizer[._ ]?step|clip_grad|zero_grad|adam|lamb"
_BACKWARD = r"(?i)backward|autograd::engine|wgrad|dgrad"
_FORWARD = r"(?i)forward"


def phases_of(
    spans: pl.DataFrame, place: NDArray[Any], depth: NDArray[Any], start: Ints, names: Sequence[str]
) -> NDArray[np.uint8]:
    """The phase of each span.

    Args:
        spans: `name_code`, `kind`, `correlation`, `forward_thread`, by lane and start.
        place: [N] lane of each.
        depth: [N] of nesting.
        start: [N] ns.
    """
    phase: NDArray[np.uint8] = _of_names(names)[spans["name_code"].to_numpy()]
    phase[(phase == UNKNOWN) & (spans["forward_thread"].to_numpy() > 0)] = BACKWARD
    kind = spans["kind"].cast(pl.String)
    _inherit(phase, place, depth, start)
    host = kind.is_in(["cpu_op", "runtime"]).to_numpy()
    phase[host & (phase == UNKNOWN)] = FORWARD
    _inherit(phase, place, depth, start)  # ranges within operators
    _launched(phase, spans, kind)
    return phase


def _of_names(names: Sequence[str]) -> NDArray[np.uint8]:
    texts = pl.Series(names, dtype=pl.String)
    found = np.zeros(texts.len(), np.uint8)
    for pattern, phase in ((_FORWARD, FORWARD), (_BACKWARD, BACKWARD), (_OPTIMIZER, OPTIMIZER)):
        found[texts.str.contains(pattern).to_numpy()] = phase
    return found


def _inherit(phase: NDArray[np.uint8], place: NDArray[Any], depth: NDArray[Any], start: Ints) -> None:
    """Give each span that has no phase that of the span around it, from the outside inwards."""
    order = np.lexsort((start, depth, place))
    edges = np.flatnonzero(np.r_[True, (np.diff(place[order]) != 0) | (np.diff(depth[order]) != 0), True])
    outer: Ints = order[:0]
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist()):
        row = order[low:high]
        if depth[row[0]] > 0 and outer.size and place[outer[0]] == place[row[0]]:
            around = outer[np.maximum(np.searchsorted(start[outer], start[row], "right") - 1, 0)]
            phase[row] = np.where(phase[row] == UNKNOWN, phase[around], phase[row])
        outer = row


def _launched(phase: NDArray[np.uint8], spans: pl.DataFrame, kind: pl.Series) -> None:
    """GPU work has the phase of its launch."""
    on_gpu = kind.is_in(["kernel", "memcpy", "memset"]).to_numpy()
    correlation = spans["correlation"].to_numpy()
    calls = np.flatnonzero((kind == "runtime").to_numpy() & (correlation >= 0))
    work = np.flatnonzero(on_gpu & (correlation >= 0) & (phase != OPTIMIZER))
    if not calls.size or not work.size:
        return
    calls = calls[np.argsort(correlation[calls], kind="stable")]
    near = np.minimum(np.searchsorted(correlation[calls], correlation[work]), calls.size - 1)
    known = correlation[calls[near]] == correlation[work]
    phase[work[known]] = phase[calls[near[known]]]
