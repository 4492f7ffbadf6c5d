"""Which span of a Kineto trace is which operator of an execution trace of the same process.

In: the CPU spans of both. Out: pairs of span ids that agree in name. Newer PyTorch gives both the same
numbers; older traces are laid side by side thread by thread, since both hold a thread's operators in the
order in which they began. Where the profiler saw more steps than the observer, the operators are looked for
as a stretch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

CPU_KINDS = ("cpu_op", "annotation")
_TRUSTED = 0.9  # share of the operators found by number that must agree in name for numbers to count
_FITTING = 0.5  # share of a thread's operators that must agree in name for a stretch to be theirs
_COMPARISONS = 10_000_000  # pairs of places compared per thread; common names are left out beyond that
_SKIP = 8  # this many operators may be missing on either side before the next that agree
_AGREE = 4  # and this many must agree then

Codes = npt.NDArray[np.int64]
Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class TwinLinks:
    """Which span is which operator.

    Attributes:
        pairs: columns `et` and `span_id`, each id at most once.
        fits: how many stretches of the trace fit the thread with the most operators equally well; 1 where
            numbers decided.
    """

    pairs: pl.DataFrame
    fits: int


def link(operators: pl.DataFrame, spans: pl.DataFrame) -> TwinLinks:
    """Find the span of each operator.

    Args:
        operators: spans of an execution trace, with `span_id` in order of beginning, `external_id`, `name`
            and `tid`, which is the observer's own.
    """
    cpu = spans.filter(pl.col("kind").is_in(CPU_KINDS))
    mine = operators.filter(pl.col("kind").is_in(CPU_KINDS))
    numbered = _by_number(mine, cpu)
    return TwinLinks(numbered, 1) if numbered is not None else _by_order(mine, cpu)


def _by_number(operators: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame | None:
    """Pairs of the same number and name; None where numbers lead to other names."""
    named = operators.filter(pl.col("external_id") > 0).select("external_id", "name", et="span_id")
    found = named.join(spans.select("external_id", "span_id", span_name="name"), on="external_id")
    agreed = found.filter(pl.col("name") == pl.col("span_name"))
    if not agreed.height or agreed.height < _TRUSTED * found.height:
        return None
    pairs = agreed.select("et", "span_id").sort("et", "span_id")
    return pairs.unique("et", keep="first", maintain_order=True).unique(
        "span_id", keep="first", maintain_order=True
    )


def _by_order(operators: pl.DataFrame, spans: pl.DataFrame) -> TwinLinks:
    # An observer does not see the profiler's own marks. Numbers settle the order within a microsecond.
    seen = spans.filter(~pl.col("name").str.starts_with("ProfilerStep#")).sort(
        "tid", "start_ns", "external_id", "span_id"
    )
    names = pl.concat([operators["name"], seen["name"]]).rank("dense").cast(pl.Int64).to_numpy()
    mine = operators.select("span_id", "tid", code=pl.Series(names[: operators.height]))
    theirs = seen.select("span_id", "tid", "start_ns", code=pl.Series(names[operators.height :]))
    threads = {key[0]: part for key, part in theirs.partition_by("tid", as_dict=True).items()}
    pairs: Pairs = []
    starts: dict[int, int] = {}  # of the linked spans, by operator
    fits, most = 1, 0
    for part in mine.sort("span_id").partition_by("tid", maintain_order=True):
        first = int(part["span_id"][0])
        earlier = max((starts[known] for known in starts if known < first), default=-1)
        thread, offset, equal = _best_stretch(part["code"].to_numpy(), threads, earlier)
        if thread is None:
            continue
        steps = _follow(part["code"].to_numpy(), threads[thread]["code"].to_numpy(), offset)
        if len(steps) < _FITTING * part.height:
            continue
        found = threads.pop(thread)
        ids, times, own = found["span_id"].to_list(), found["start_ns"].to_list(), part["span_id"].to_list()
        pairs += [(own[i], ids[k]) for i, k in steps]
        starts |= {own[i]: times[k] for i, k in steps}
        if len(steps) > most:
            fits, most = equal, len(steps)
    frame = pl.DataFrame(pairs, schema={"et": pl.Int64, "span_id": pl.Int64}, orient="row")
    return TwinLinks(frame.sort("et"), fits)


def _best_stretch(mine: Codes, threads: dict[int, pl.DataFrame], earlier: int) -> tuple[int | None, int, int]:
    """Thread, offset of the first operator, and number of equal fits.

    Of equal fits the first is taken that does not begin before `earlier`, when operators of threads already
    linked had begun that this thread's first operator followed.
    """
    best: tuple[int | None, int, int] = (None, 0, 0)
    most = 0
    for thread in sorted(threads):
        codes = threads[thread]["code"].to_numpy()
        votes = _votes(mine, codes)
        if votes.max(initial=0) <= most:
            continue
        most = int(votes.max())
        offsets = np.flatnonzero(votes == most) - (mine.size - 1)
        firsts = threads[thread]["start_ns"].to_numpy()[np.maximum(offsets, 0)]
        later = offsets[firsts >= earlier]
        best = (thread, int(later[0] if later.size else offsets[-1]), offsets.size)
    return best


def _votes(mine: Codes, theirs: Codes) -> Codes:
    """How many operators agree in name at each offset, from `1 - len(mine)` on; rare names count first."""
    votes = np.zeros(mine.size + theirs.size, dtype=np.int64)
    order_mine, order_theirs = np.argsort(mine, kind="stable"), np.argsort(theirs, kind="stable")
    codes = np.intersect1d(mine, theirs)
    bounds_mine = _bounds(mine[order_mine], codes)
    bounds_theirs = _bounds(theirs[order_theirs], codes)
    sizes = np.diff(bounds_mine, axis=0)[0] * np.diff(bounds_theirs, axis=0)[0]
    compared = 0
    for code in np.argsort(sizes, kind="stable"):
        compared += int(sizes[code])
        if compared > _COMPARISONS and compared > sizes[code]:
            break
        here = order_mine[bounds_mine[0, code] : bounds_mine[1, code]]
        there = order_theirs[bounds_theirs[0, code] : bounds_theirs[1, code]]
        places = (there[:, None] - here[None, :] + mine.size - 1).ravel()
        votes += np.bincount(places, minlength=votes.size)
    return votes


def _bounds(ordered: Codes, codes: Codes) -> npt.NDArray[np.int64]:
    """Where each code begins and ends in an ordered sequence: two rows."""
    return np.stack([np.searchsorted(ordered, codes, side) for side in ("left", "right")])


def _follow(mine: Codes, theirs: Codes, offset: int) -> Pairs:
    """Places that agree, side by side from an offset on, past operators that only one side has."""
    pairs: Pairs = []
    here, there = 0, offset
    while here < mine.size and there < theirs.size:
        if there >= 0 and mine[here] == theirs[there]:
            pairs.append((here, there))
            here, there = here + 1, there + 1
            continue
        here, there = _resume(mine, theirs, here, there)
    return pairs


def _resume(mine: Codes, theirs: Codes, here: int, there: int) -> tuple[int, int]:
    """The nearest places from which some names in a row agree; else one further on both sides."""
    for skip in range(1, _SKIP + 1):
        for i, k in ((here, there + skip), (here + skip, there)):
            ahead = min(_AGREE, mine.size - i)
            if (
                ahead > 0
                and 0 <= k <= theirs.size - ahead
                and (mine[i : i + ahead] == theirs[k : k + ahead]).all()
            ):
                return i, k
    return here + 1, there + 1
