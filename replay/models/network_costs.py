"""What a collective of some group and size takes by a measured table, with an interval, or why it cannot say.

In: a `NetworkTable`, a group and payloads. Out: an `Estimate`. Where the table has no curve of the group, the
nearest that it has stands in, in this order: another version of the library; another GPU whose curves equal
this one's wherever both were measured; the other half of an all-reduce (an all-gather for a reduce-scatter);
another number of ranks, times the ratio that other operations or GPUs show between the two numbers. How wrong
each kind of stand-in is, is measured on the table itself: groups that it has are predicted from the others.

Stand-ins are for groups within a host whose GPUs a switch joins. Behind PCIe, pairs of GPUs differ in their
paths and the rule does not hold: refused. On more hosts than were measured only an interval is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from dpro.arrays import Floats
from dpro.errors import Unanswerable
from dpro.replay.models.curves import FAR, growth, left_out, scale
from dpro.replay.models.link_costs import LinkCost
from dpro.replay.models.network_tables import NVLINK, CurveGroup, NetworkTable
from dpro.words import whole_number

SISTERS_DIFFER = 0.1  # of two devices whose link is taken for one, median over what both were measured at
HALVES = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
SHARE = 0.8  # of measurements that an interval is to hold
LOOSE = 0.2  # a kind of stand-in that misses by more, in logarithm, is none
UNTRIED = 0.5  # a stand-in of a kind that the table itself cannot try is off by so much, in logarithm
MIN_GROWTH = 2.0  # times the time, for twice the hosts: at least this is thought possible


@dataclass(frozen=True)
class Estimate:
    """What collectives take.

    Attributes:
        time_ns: [T] ns; None where only the interval is known.
        low_ns, high_ns: [T] interval that 80% of measurements should be in.
        how: from what it was predicted.
    """

    time_ns: Floats | None
    low_ns: Floats
    high_ns: Floats
    how: str


def estimate(table: NetworkTable, group: CurveGroup, num_bytes: Floats) -> Estimate:
    """What collectives of a group take.

    Args:
        num_bytes: [T] payloads.

    Raises:
        Unanswerable: the table does not show it; the message says what is missing.
    """
    if group in table.curves:
        return _estimated(table, table.curves[group], num_bytes, "measured")
    if group.hosts > 1:
        return _on_more_hosts(table, group, num_bytes)
    if table.links.get(group.device) != NVLINK:
        raise Unanswerable(
            f"{group.op} of {group.num_ranks} ranks on {group.device or 'this device'} was not measured, and "
            "no switch is known to join its GPUs: measure it"
        )
    for kind, stand_in in STAND_INS.items():
        curve = stand_in(table, group)
        if curve is not None:
            spread = _spread(table, kind, group.library)
            if spread > LOOSE:
                continue
            predicted = _estimated(table, curve, num_bytes, kind)
            time_ns = curve.time_ns(num_bytes)
            off = np.exp(np.hypot(np.log(predicted.high_ns / time_ns), spread))
            return Estimate(time_ns, time_ns / off, time_ns * off, kind)
    raise Unanswerable(
        f"nothing like {group.op} of {group.num_ranks} ranks on {group.device or 'this device'} was measured"
    )


def _estimated(table: NetworkTable, curve: LinkCost, num_bytes: Floats, how: str) -> Estimate:
    """Times by a curve, refused far beyond its sizes."""
    sizes, times = curve.knots
    if num_bytes.size and (num_bytes.max() > FAR * sizes[-1] or num_bytes.min() < sizes[0] / FAR):
        raise Unanswerable(
            f"only {sizes[0]:.0f} to {sizes[-1]:.0f} bytes were measured, and {num_bytes.min():.0f} to "
            f"{num_bytes.max():.0f} are asked for"
        )
    predicted = curve.time_ns(num_bytes)
    rate = growth(sizes, left_out(sizes, times, curve.line_ns(sizes)))
    off = np.exp(table.times_scale * scale(sizes, np.nan_to_num(rate, nan=UNTRIED), num_bytes))
    return Estimate(predicted, predicted / off, predicted * off, how)


# Stand-ins.


def _other_version(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """The same group with the nearest version of the library."""
    return _nearest_version(table, group._replace(version=""), group.version, {group})


def _sister(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """The same group on a device whose link is the same."""
    for device in _sisters(table, group):
        found = _nearest_version(table, group._replace(device=device), group.version)
        if found is not None:
            return found
    return None


def _other_half(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """The other half of an all-reduce on the same ranks."""
    if group.op not in HALVES:
        return None
    return _nearest_version(table, group._replace(op=HALVES[group.op]), group.version)


def _other_size(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """A group of another number of ranks, times the median ratio that others show between the two."""
    near = sorted(
        {
            each.num_ranks
            for each in table.curves
            if each._replace(num_ranks=0, version="") == group._replace(num_ranks=0, version="")
        }
        - {group.num_ranks},
        key=lambda ranks: (abs(np.log(ranks / group.num_ranks)), -ranks),
    )
    for ranks in near:
        here = _nearest_version(table, group._replace(num_ranks=ranks), group.version)
        if here is None:
            continue
        sizes, _ = here.knots
        ratios = list(_ratios(table, group, ranks, sizes))
        if ratios:
            return _moved(here, np.median(ratios, axis=0))
    return None


def _ratios(table: NetworkTable, group: CurveGroup, ranks: int, at: Floats) -> Iterator[Floats]:
    """How much longer groups take with this one's ranks than with others', in logarithm.

    By the other half of an all-reduce on the same device, else by the same operation on other devices.
    """
    same = (group.library, 1)
    others = [each for each in table.curves if (each.library, each.hosts) == same and each.num_ranks == ranks]
    nearby = [each for each in others if each.op == group.op and each.device != group.device]
    nearby = [each for each in nearby if table.links.get(each.device) == NVLINK]
    half = [each for each in others if each.device == group.device and each.op == HALVES.get(group.op)]
    for each in half or nearby:
        target = each._replace(num_ranks=group.num_ranks)
        if target in table.curves and target != group:
            yield np.log(table.curves[target].time_ns(at) / table.curves[each].time_ns(at))


def _moved(curve: LinkCost, by: Floats) -> LinkCost:
    """A curve with each of its times longer by a factor, given in logarithm [K]."""
    from dpro.replay.models.link_costs import fit_curve

    sizes, times = curve.knots
    return fit_curve(sizes, times * np.exp(by))


def _nearest_version(
    table: NetworkTable, group: CurveGroup, version: str, but: set[CurveGroup] | None = None
) -> LinkCost | None:
    """The curve of a group with the version that is nearest to one; None where there is none."""
    found = [
        each
        for each in table.curves
        if each._replace(version="") == group._replace(version="") and each not in (but or ())
    ]
    if not found:
        return None
    return table.curves[min(found, key=lambda each: (_apart(each.version, version), each.version))]


def _apart(one: str, other: str) -> tuple[float, ...]:
    """How far two versions are apart, part by part."""
    numbers = [map(whole_number, text.split(".")) for text in (one, other)]
    parts = [[number for number in each if number >= 0] for each in numbers]
    longest = max(map(len, parts))
    first, second = (each + [0] * (longest - len(each)) for each in parts)
    return tuple(float(abs(a - b)) for a, b in zip(first, second))


def _sisters(table: NetworkTable, group: CurveGroup) -> list[str]:
    """Devices whose curves equal this one's, the nearest first; the group's own curves do not count."""
    own = [
        mine
        for mine in table.curves
        if (mine.device, mine.hosts) == (group.device, 1)
        and mine._replace(version="") != group._replace(version="")
    ]
    near = {}
    for device, link in table.links.items():
        if device != group.device and link == NVLINK:
            apart = [each for mine in own if (each := _difference(table, mine, device)) is not None]
            if apart and np.median(apart) <= SISTERS_DIFFER:
                near[device] = float(np.median(apart))
    return sorted(near, key=lambda device: near[device])


@cache
def _difference(table: NetworkTable, mine: CurveGroup, device: str) -> float | None:
    """How far the curve of a group is from that on another device, in logarithm; None without one."""
    theirs = _nearest_version(table, mine._replace(device=device), mine.version)
    if theirs is None:
        return None
    sizes, times = table.curves[mine].knots
    return float(np.median(np.abs(np.log(theirs.time_ns(sizes) / times))))


STAND_INS: dict[str, Callable[[NetworkTable, CurveGroup], LinkCost | None]] = {
    "another version of the library": _other_version,
    "a GPU with the same link": _sister,
    "the other half of an all-reduce": _other_half,
    "another number of ranks": _other_size,
}


@cache
def _spread(table: NetworkTable, kind: str, library: str) -> float:
    """By how much a kind of stand-in misses groups that the table has, in logarithm.

    The 80% quantile, and a little more where few groups show it, as for a further group that is like them
    (Vovk et al., Algorithmic Learning in a Random World (2005)).
    """
    missed = []
    for group, curve in table.curves.items():
        if group.hosts > 1 or group.library != library or table.links.get(group.device) != NVLINK:
            continue
        predicted = STAND_INS[kind](table, group)
        if predicted is not None:
            sizes, times = curve.knots
            missed.append(np.abs(np.log(predicted.time_ns(sizes) / times)))
    if not missed:
        return UNTRIED
    return float(np.quantile(np.concatenate(missed), min(SHARE * (1 + 1 / len(missed)), 1.0)))


# More hosts.


def _on_more_hosts(table: NetworkTable, group: CurveGroup, num_bytes: Floats) -> Estimate:
    """An interval for more hosts than were measured.

    At the least they take what the most hosts measured take; at the most, for each doubling, the largest
    growth that any doubling measured shows, and no less than `MIN_GROWTH`.
    """
    per_host = group.num_ranks / group.hosts
    fewer = sorted(
        (each.hosts, each)
        for each in table.curves
        if each._replace(num_ranks=0, hosts=0) == group._replace(num_ranks=0, hosts=0)
        and each.num_ranks / each.hosts == per_host
        and 1 < each.hosts < group.hosts
    )
    if not fewer:
        raise Unanswerable(f"{group.op} between hosts was not measured")
    most = fewer[-1][1]
    predicted = _estimated(table, table.curves[most], num_bytes, "")
    doublings = np.log2(group.hosts / most.hosts)
    grew = [MIN_GROWTH]
    for (hosts, one), (more, other) in pairwise(fewer):
        ratio = table.curves[other].time_ns(num_bytes) / table.curves[one].time_ns(num_bytes)
        grew.append(float(ratio.max()) ** (1 / np.log2(more / hosts)))
    how = f"from {most.hosts} hosts: no less, and at most x{max(grew):.1f} for each doubling"
    return Estimate(None, predicted.low_ns, predicted.high_ns * max(grew) ** doublings, how)
