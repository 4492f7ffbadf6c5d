"""Links, network ports and hosts that move data slower than their like.

In: a job's traffic. Out: findings. Transfers of the same operation, size and kind of group are compared
between groups; waiting for a late rank is no part of them. What all the slow groups have in common, and no
fast one has, is at fault; where several things fit equally well, that is said. Where the run has a topology,
cables, ports and switches on the paths of slow groups come first (`wires`). Then come blocks: parts of the
network between which all is slow. A job in which one group does all there is gives nothing to compare with.

Pairs of ranks are compared with other pairs that do the same: what the transfers of each take, what they
would take if it were like the others, and how much of the difference is the sender's, the receiver's and the
link's own. Groups of more than two ranks show no single pair and are left out there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Floats, Ints
from dpro.detect.findings import Finding, costliest_first
from dpro.detect.network.traffic import KEYS, LIKE, MESSAGE, Traffic, with_axis
from dpro.detect.network.wires import CLASSES, Wires, blame_wires, wires_of, with_hops
from dpro.detect.observations import Observation, observe
from dpro.detect.significance import MIN_SHARE, MIN_STEPS, PERSISTENT, clear_gain, confidence
from dpro.members import members_of
from dpro.replay.cost.fabric.flows import PAIRWISE

MIN_GROUPS = 3  # of a kind: of two that differ it is not known which is wrong
MAX_UNSURE = 0.5  # confidence in the slower of two: they may have been built so
MIN_SLOW = 1.15  # times the transfer of the other groups
MIN_BROKEN = 1.5  # from here on worth a finding even if the step does not wait for it
DEVIATIONS = 5.0  # of the other groups, robust, from their median
MIN_DEVIATION = 0.02  # of a logarithm: a lower spread of groups is raised to this
LENGTH_TO_DEVIATION = 0.7413  # a normal distribution's middle half is 2 x 0.6745 deviations long
FITS = 0.9  # share of its groups that are slow, of a thing that is at fault
MAX_LINES = 3  # of evidence
CROWDED = observe("may-be-crowded", "broken or congested: flows that meet there look the same")
CROWDED_BY_OTHERS = observe(
    "may-be-crowded-by-others",
    "broken, or congested by other jobs: this job's own flows that meet there do not explain it",
)
_NONE_WITHOUT_OTHERS = observe(
    "none-without-the-others", "no recorded group has one of these without the others"
)
_HIDDEN = observe("hidden-by-other-work", "the step hardly waits for it: other work hides it")
_TWO_GROUPS = observe(
    "two-groups", "two groups of a kind do not show whether the slower one is broken, or is slower by design"
)


class Suspect(NamedTuple):
    """Something that groups of ranks have in common.

    Attributes:
        thing: what is at fault in the end: rank 3, whatever it does.
        kind: rank, nic (a rank's way out of its host), sender, receiver, host, link, hosts (what lies between
            two) or group; of a topology cable, link, port or switch.
        ranks: that it is itself.
    """

    thing: str
    kind: str
    id: str
    ranks: tuple[int, ...] = ()

    @property
    def class_(self) -> str:
        """The class of a finding that blames it."""
        if self.kind in CLASSES:
            return CLASSES[self.kind]
        return "slow.link" if self.kind in ("link", "hosts", "group") else "slow.nic"


def find_slow_network(traffic: Traffic) -> list[Finding]:
    """Name the links and ports whose transfers take clearly longer than comparable ones."""
    transfers, hosts = traffic.transfers.filter("whole"), traffic.hosts
    wires = wires_of(traffic.run)
    crowded, doubt = _crowded_groups(traffic, transfers, wires)
    transfers = transfers.join(crowded, on=KEYS, how="anti")
    findings, explained = _on_wires(traffic, transfers, wires, doubt)
    transfers = transfers.filter(~pl.col("members").is_in(sorted(explained)))
    blocked: set[str] = set()
    for block in find_blocks(transfers, hosts):
        finding = _describe_block(traffic, block)
        findings += [finding] if finding else []
        blocked.update(block.slow["members"])
    groups = compare_groups(transfers).filter(~pl.col("members").is_in(sorted(blocked)))
    slow = groups.filter("slow")
    for suspects, members in blame(groups, hosts):
        explained_slow = slow.filter(pl.col("members").is_in(sorted(members)))
        names = ", ".join(map(words_of, suspects))
        who = "one of these ({suspects})" if len(suspects) > 1 else "{suspects}"
        sentence = f"all of them have {who} in common, and no other group of their kind has"
        shared = [observe("in-common", sentence, suspects=names)]
        if len(suspects) > 1:
            shared.append(_NONE_WITHOUT_OTHERS)
        # A link between hosts may be slow since other flows are on its path.
        links = any(suspect.kind in ("link", "hosts", "group") for suspect in suspects)
        if links and (explained_slow["num_hosts"] > 1).any():
            shared.append(doubt)
        finding = _describe(traffic, suspects, explained_slow, shared, 1.0)
        findings += [finding] if finding else []
    return costliest_first(findings)


def _crowded_groups(
    traffic: Traffic, transfers: pl.DataFrame, wires: Wires | None
) -> tuple[pl.DataFrame, Observation]:
    """Groups (`KEYS`) that are slow only since connections of the job meet on their paths.

    And what is left to doubt of the others.
    """
    slow = _slow_groups(transfers, wires).select(KEYS)
    apart = traffic.apart() if slow.height else None
    if apart is None:
        return slow.clear(), CROWDED
    still = _slow_groups(apart.filter("whole"), wires)
    return slow.join(still, on=KEYS, how="anti"), CROWDED_BY_OTHERS


def _slow_groups(transfers: pl.DataFrame, wires: Wires | None) -> pl.DataFrame:
    """Groups that are slow among all of their kind, or among those whose paths are as long."""
    compared = [compare_groups(transfers)]
    compared += [] if wires is None else [_compare_on_wires(transfers, wires)]
    return pl.concat([groups.filter("slow").select(KEYS) for groups in compared]).unique()


def _compare_on_wires(transfers: pl.DataFrame, wires: Wires) -> pl.DataFrame:
    """As `compare_groups`, of groups whose paths are known.

    Below a leaf all is faster, in any fabric: a group has to be slow among those whose paths are as long; or
    among all, and far slower than those, where too few of them show how they vary.
    """
    by_length = with_hops(transfers, wires).partition_by("hops")
    if not by_length:
        return compare_groups(transfers.clear())
    groups = pl.concat([compare_groups(part) for part in by_length])
    among_all = compare_groups(pl.concat(by_length)).filter("slow").select(*KEYS, also=True)
    far = pl.col("also").fill_null(False) & (pl.col("excess") >= np.log(MIN_BROKEN))
    joined = groups.join(among_all, on=KEYS, how="left")
    return joined.with_columns(slow=pl.col("slow") | far)


def _on_wires(
    traffic: Traffic, transfers: pl.DataFrame, wires: Wires | None, doubt: Observation
) -> tuple[list[Finding], set[str]]:
    """Findings about cables, ports and switches, and the groups (`members`) that these explain."""
    if wires is None:
        return [], set()
    groups = _compare_on_wires(transfers, wires)
    slow = groups.filter("slow")
    findings: list[Finding] = []
    explained: set[str] = set()
    for blamed, members in blame_wires(groups, wires):
        suspects = [Suspect(part.words, part.kind, part.name) for part in blamed.suspects]
        explained_slow = slow.filter(pl.col("members").is_in(sorted(members)))
        shared = [*blamed.observations("groups", "are slow"), doubt]
        finding = _describe(traffic, suspects, explained_slow, shared, blamed.verdict.confidence)
        findings += [finding] if finding else []
        explained |= members if finding else set()
    return findings, explained


def compare_groups(transfers: pl.DataFrame) -> pl.DataFrame:
    """Each group against the others that do the same.

    The excess is the logarithm of a group's typical transfer against the others' (leave one out), and is held
    against how those differ among themselves, with a floor: a port that is in half of them is found, too.

    Args:
        transfers: as `transfers_of` gives them.

    Returns:
        `KEYS` columns, `excess`, `typical_ns` (of the others), `transfer_ns`, `count`,
        `num_same_kind` (groups), and whether it is `slow`; of groups that have others of their kind.
    """
    per_group = transfers.group_by(KEYS).agg(pl.col("transfer_ns").median(), count=pl.len())
    compared = []
    for _, same_kind in per_group.sort(KEYS).group_by(LIKE, maintain_order=True):
        if same_kind.height < 2:
            continue
        least = MIN_SLOW if same_kind.height >= MIN_GROUPS else MIN_BROKEN
        times = np.log(same_kind["transfer_ns"].to_numpy())
        others = [shortest_half(np.delete(times, group)) for group in range(times.size)]
        middle, spread = np.array(others).T
        excess = times - middle
        far = excess >= DEVIATIONS * np.maximum(spread, MIN_DEVIATION)
        compared.append(
            same_kind.with_columns(
                excess=excess,
                typical_ns=np.exp(middle),
                num_same_kind=pl.len(),
                slow=far & (excess >= np.log(least)),
            )
        )
    if not compared:
        return per_group.head(0).with_columns(
            excess=pl.lit(0.0), typical_ns=pl.lit(0.0), num_same_kind=pl.lit(0), slow=pl.lit(False)
        )
    groups = pl.concat(compared)
    return groups.with_columns(slow=pl.col("slow") & _persistent(transfers, groups))


def shortest_half(values: Floats) -> tuple[float, float]:
    """Middle and spread of the half of the values that lie closest together.

    Up to half of the values may be anything (Rousseeuw and Leroy, "Robust Regression and Outlier Detection",
    1987, section 4.3). The spread is that of a normal distribution whose middle half is as long.

    Args:
        values: [N], N > 0.
    """
    ordered = np.sort(values)
    half = values.size // 2 + 1
    lengths = ordered[half - 1 :] - ordered[: values.size - half + 1]
    begin = int(np.argmin(lengths))
    return float(np.median(ordered[begin : begin + half])), float(lengths[begin]) * LENGTH_TO_DEVIATION


def _persistent(transfers: pl.DataFrame, groups: pl.DataFrame) -> pl.Series:
    """Whether a group is beyond half of its excess in nearly every step that it was seen in."""
    over = pl.col("transfer_ns").median().log() - pl.col("typical_ns").first().log()
    beyond = (
        transfers.join(groups.select(*KEYS, "excess", "typical_ns"), on=KEYS)
        .group_by(*KEYS, "step")
        .agg(over=over > pl.col("excess").first() / 2)
        .group_by(KEYS)
        .agg(share=pl.col("over").mean(), seen=pl.len())
    )
    joined = groups.join(beyond, on=KEYS, how="left", maintain_order="left")
    return (joined["share"] >= PERSISTENT) & (joined["seen"] >= MIN_STEPS)


def suspects_of(members: str, op: str, hosts: Mapping[int, str]) -> Iterator[Suspect]:
    """What could slow down a group of ranks."""
    ranks = [int(rank) for rank in members.split(",")]
    names = sorted({hosts.get(rank, "") for rank in ranks})
    for rank in ranks:
        yield Suspect(f"rank {rank}", "rank", str(rank), (rank,))
        if len(names) > 1:
            yield Suspect(f"rank {rank}", "nic", f"rank {rank}", (rank,))
    if op == MESSAGE:
        sender, receiver = ranks
        yield Suspect(f"rank {sender}", "sender", f"rank {sender}", (sender,))
        yield Suspect(f"rank {receiver}", "receiver", f"rank {receiver}", (receiver,))
        link = f"link {min(ranks)} - {max(ranks)}"
        yield Suspect(link, "link", f"{sender} -> {receiver}", (sender, receiver))
    if len(ranks) == 2:
        pair = f"{min(ranks)} - {max(ranks)}"
        yield Suspect(f"link {pair}", "link", pair, (min(ranks), max(ranks)))
    else:
        yield Suspect(f"group {members}", "group", members, tuple(ranks))
        if op not in PAIRWISE:
            yield from ring_links(ranks)
    crowded = [name for name in names if sum(host == name for host in hosts.values()) > 1]
    if len(names) > 1:  # a host with one rank is not distinguished from the rank
        yield from (Suspect(f"host {name}", "host", name) for name in crowded)
    if len(names) == 2 and crowded:
        yield Suspect(f"hosts {' - '.join(names)}", "hosts", " - ".join(names))


def ring_links(ranks: Sequence[int]) -> list[Suspect]:
    """Links of the ring of a group, which is taken to go through its ranks in order."""
    ends = [sorted(pair) for pair in zip(ranks, [*ranks[1:], ranks[0]])]
    return [Suspect(f"link {one} - {other}", "link", f"{one} - {other}", (one, other)) for one, other in ends]


def _without_cleared(equal: Sequence[Suspect]) -> list[Suspect]:
    """Suspects in which a group stands for all links of its ring, or those that no fast ring has for it."""
    kept = list(equal)
    for group in (suspect for suspect in equal if suspect.kind == "group"):
        links = ring_links(group.ranks)
        left = [link for link in links if link in kept]
        drop = left if len(left) == len(links) else [group] if left else []
        kept = [suspect for suspect in kept if suspect not in drop]
    return kept


def blame(groups: pl.DataFrame, hosts: Mapping[int, str]) -> Iterator[tuple[list[Suspect], set[str]]]:
    """What explains most slow groups, then what explains most of the rest.

    Args:
        groups: `op`, `members` and `slow`.

    Yields:
        Things that explain the same slow groups, and which groups (`members`) these are.
    """
    of: dict[Suspect, set[str]] = {}
    for members, op in groups.select("members", "op").unique().sort("members", "op").iter_rows():
        for suspect in suspects_of(members, op, hosts):
            of.setdefault(suspect, set()).add(members)
    slow = set(groups.filter("slow")["members"])
    fitting = {suspect: cases for suspect, cases in of.items() if len(cases & slow) >= FITS * len(cases)}
    left = set(slow)
    while left:
        most = max((len(cases & left) for cases in fitting.values()), default=0)
        best = {suspect: cases & left for suspect, cases in fitting.items() if len(cases & left) == most}
        explained = next(iter(best.values()), set()) if most else set()
        if not explained:
            return
        equal = _without_cleared([suspect for suspect, cases in best.items() if cases == explained])
        yield list({suspect.thing: suspect for suspect in reversed(equal)}.values())[::-1], explained
        left -= explained


def _describe(
    traffic: Traffic,
    suspects: Sequence[Suspect],
    slow: pl.DataFrame,
    shared: Sequence[Observation],
    certainty: float,
) -> Finding | None:
    """The finding, with what healing would save; None where neither the step nor the transfer shows much.

    Args:
        certainty: 0 to 1, that it is one of the suspects.
    """
    saved, base = _healed(traffic, slow)
    sure_which = bool((slow["num_same_kind"] >= MIN_GROUPS).any())
    times = float(np.exp(slow["excess"].to_numpy().max()))
    gains = clear_gain(saved, base)
    if not gains and (times < MIN_BROKEN or not sure_which or not _is_known_slow(traffic, slow, base)):
        return None
    cost = max(float(saved.mean()), 0.0)
    ranks = sorted({int(rank) for members in slow["members"] for rank in members.split(",")})
    kind, name = suspects[0].kind, suspects[0].id
    if len(suspects) > 1:
        kind, name = "one of", ", ".join(words_of(suspect) for suspect in suspects)
    observations = [*_slowest(slow), *shared]
    step = float(base.mean())
    if cost >= MIN_SHARE * step:
        observations.append(traffic.gain("the others'", "the step takes", cost, step))
    else:
        observations.append(_HIDDEN)
    if not sure_which:
        observations.append(_TWO_GROUPS)
    sure = confidence(saved, base) if gains else 0.5
    sure = sure if sure_which else min(sure, MAX_UNSURE)
    finding = Finding(
        suspects[0].class_, kind, name, tuple(ranks), round(cost / step, 4),
        sure * certainty / len(suspects), cost, tuple(observations),
        part_ranks=suspects[0].ranks if len(suspects) == 1 else (),
    )  # fmt: skip
    return with_axis(finding, traffic, slow["members"])


def _is_known_slow(traffic: Traffic, slow: pl.DataFrame, base: Floats) -> bool:
    """Whether transfers that the step does not wait for are slow: what they take longer is worth a finding.

    Messages of CPU tensors are not among them: each lasts in a trace until someone asks whether it is over,
    so one that no rank waits for seems to last.

    Args:
        base: [T] ns, the steps.
    """
    if traffic.run is not None and not traffic.run.manifest.gpus:
        slow = slow.filter(pl.col("op") != MESSAGE)
    more = (slow["count"] * (slow["transfer_ns"] - slow["typical_ns"])).to_numpy().sum()
    return bool(more >= MIN_SHARE * base.sum())


def _describe_block(traffic: Traffic, block: FabricBlock) -> Finding | None:
    """The finding about parts of the network, None where the step does not wait for what is between them."""
    saved, base = _healed(traffic, block.slow)
    if not clear_gain(saved, base):
        return None
    cost, step = float(saved.mean()), float(base.mean())
    ranks = sorted({int(rank) for members in block.slow["members"] for rank in members.split(",")})
    parts = " and ".join(f"hosts {', '.join(part)}" for part in block.parts)
    between = observe(
        "slow-between-parts",
        "all that crosses between {parts} is slow, and nothing within them: what connects them is broken or "
        "crowded, or was built slower",
        parts=parts,
    )
    gain = traffic.gain("those within", "the step takes", cost, step)
    sure = confidence(saved, base) / 2  # one run does not distinguish a fault from a design
    finding = Finding(
        "slow.fabric", "hosts", block.name, tuple(ranks), round(cost / step, 4), sure, cost,
        (*_slowest(block.slow), between, gain),
    )  # fmt: skip
    return with_axis(finding, traffic, block.slow["members"])


def words_of(suspect: Suspect) -> str:
    """What it is called in a sentence."""
    words = {
        "nic": f"{suspect.id}'s way out of its host",
        "sender": f"{suspect.id} as a sender",
        "receiver": f"{suspect.id} as a receiver",
        "hosts": f"what lies between hosts {suspect.id}",
    }
    return words.get(suspect.kind, f"{suspect.kind} {suspect.id}")


def _slowest(slow: pl.DataFrame) -> list[Observation]:
    """The slow groups, the worst first."""
    worst = slow.sort(["excess", "members"], descending=[True, False])
    observed = [
        observe(
            "slow-transfer",
            "{operation} of {each_bytes} among ranks {members}: {transfer_ns} of transfer, {typical_ns} in "
            "groups of its kind ({count} times)",
            operation=op, each_bytes=size, members=members, ranks=[*members_of(members)],
            transfer_ns=transfer_ns, typical_ns=typical_ns, count=count,
        )
        for op, size, members, transfer_ns, typical_ns, count in worst.select(
            "op", "bytes", "members", "transfer_ns", "typical_ns", "count"
        )
        .head(MAX_LINES)
        .iter_rows()
    ]  # fmt: skip
    if rest := worst.height - len(observed):
        observed.append(observe("more-like-these", "and {rest} more like these", rest=rest))
    return observed


def _healed(traffic: Traffic, slow: pl.DataFrame) -> tuple[Floats, Floats]:
    """[T] ns that each step would save with the slow groups' transfers as fast as others'; [T] the steps."""
    times = (-pl.col("excess")).exp()
    factors = traffic.transfers.join(slow.select(*KEYS, "excess"), on=KEYS).select("instance", times=times)
    _, saved, base = traffic.healed(factors)
    return saved, base


# Groups of hosts between which all is slow: a switch, or what lies between two parts of the network. Most
# pairs of hosts are then slow, so that a comparison with the usual shows nothing; two levels do, and which
# hosts are on which. Whether the network is broken there or was built so, the transfers of one run do not
# show.

MIN_RATIO = 1.5  # of the slow level's time to the fast level's
MAX_SPREAD = 0.5  # of a level's values, of the distance between the levels, in logarithms
MIN_HOSTS = 2  # in each of two parts: one host alone is at fault itself


class FabricBlock(NamedTuple):
    """Parts of the network, and what is slow between them.

    Attributes:
        slow: of the groups between parts `KEYS` columns, `transfer_ns`, `count`, `typical_ns` (of
            the fast level) and `excess` (logarithm against that).
    """

    parts: tuple[tuple[str, ...], ...]
    slow: pl.DataFrame

    @property
    def name(self) -> str:
        """The parts in words."""
        return " | ".join(", ".join(part) for part in self.parts)


def find_blocks(transfers: pl.DataFrame, hosts: Mapping[int, str]) -> list[FabricBlock]:
    """Parts of the network between which all is slow; none unless that holds for every group there is.

    Args:
        transfers: as `dpro.detect.network.traffic.transfers_of` gives them.
    """
    typical = (
        transfers.filter(pl.col("num_hosts") > 1)
        .group_by(KEYS)
        .agg(pl.col("transfer_ns").median(), count=pl.len())
        .sort(KEYS)
    )
    blocks: dict[tuple[tuple[str, ...], ...], list[pl.DataFrame]] = {}
    for _, same_kind in typical.group_by(LIKE, maintain_order=True):
        levels = _two_levels(same_kind)
        parts = _parts(levels, hosts) if levels is not None else None
        if levels is not None and parts:
            blocks.setdefault(parts, []).append(levels.filter("slow").drop("slow"))
    return [FabricBlock(parts, pl.concat(slow)) for parts, slow in blocks.items()]


def _two_levels(same_kind: pl.DataFrame) -> pl.DataFrame | None:
    """Groups, fast and slow ones separated at the widest gap of their times; None if there is none."""
    ordered = same_kind.sort("transfer_ns", "members")
    times = np.log(ordered["transfer_ns"].to_numpy())
    if times.size < 2:
        return None
    cut = int(np.argmax(np.diff(times))) + 1
    fast, slow = times[:cut], times[cut:]
    distance = float(np.median(slow) - np.median(fast))
    widest = max(float(np.ptp(fast)), float(np.ptp(slow)))
    if distance < np.log(MIN_RATIO) or widest > MAX_SPREAD * distance:
        return None
    middle = float(np.median(fast))
    return ordered.with_columns(
        pl.Series("excess", times - middle),
        typical_ns=pl.lit(float(np.exp(middle))),
        slow=pl.int_range(pl.len()) >= cut,
    )


def _parts(levels: pl.DataFrame, hosts: Mapping[int, str]) -> tuple[tuple[str, ...], ...] | None:
    """Parts that fast groups join, if all slow groups are between them and no fast one is; None otherwise."""
    fast, slow = (
        [{hosts.get(int(rank), "") for rank in group.split(",")} for group in levels.filter(which)["members"]]
        for which in (~pl.col("slow"), pl.col("slow"))
    )
    parts = tuple(sorted(_joined(fast, set().union(*fast, *slow))))
    place = {host: number for number, part in enumerate(parts) for host in part}
    between = all(len({place[host] for host in group}) > 1 for group in slow)
    large = sum(len(part) >= MIN_HOSTS for part in parts)
    return parts if between and large >= 2 and large == len(parts) else None


def _joined(groups: Iterable[set[str]], every: set[str]) -> Iterator[tuple[str, ...]]:
    """Hosts that groups connect, be it through others."""
    parts: list[set[str]] = [{host} for host in sorted(every)]
    for group in groups:
        touched = [part for part in parts if part & group]
        parts = [part for part in parts if not part & group] + [set().union(*touched)]
    yield from (tuple(sorted(part)) for part in parts)


MIN_PAIRS = 3  # of a rank: with fewer, what it adds cannot be separated from the others and the pair
MAX_ROUNDS = 30
SETTLED = 1e-9  # of a logarithm: effects that change less have converged

SCHEMA = {
    "source": pl.Int64,  # rank that sends; of a group of two the lower one
    "target": pl.Int64,  # rank that receives
    "directed": pl.Boolean,  # messages are; a group of two ranks moves data both ways
    "source_host": pl.String,  # empty where unknown
    "target_host": pl.String,
    "count": pl.Int64,  # transfers
    "bytes": pl.Int64,  # of all of them; -1 where not known
    "transfer_ns": pl.Float64,  # what one typically takes, without waiting; of several sizes the mean
    "expected_ns": pl.Float64,  # the same if the pair were like the others; null: fewer than three of a kind
    "ratio": pl.Float64,  # transfer_ns over expected_ns, of sizes that have both; null like that
    "sender": pl.Float64,  # times that the source adds to all its pairs; null: too few of them to say
    "receiver": pl.Float64,  # times that the target adds to all its pairs; null: too few of them to say
    "link": pl.Float64,  # times that are left to the pair itself; null where the ratio is
}
_EFFECTS = ("sender", "receiver")


def delay_matrix(transfers: pl.DataFrame, hosts: Mapping[int, str]) -> pl.DataFrame:
    """What each pair of ranks takes to move data, and what it would take if it were like the others.

    Comparable are pairs that do the same operation with as many bytes, and are both on one host or both on
    two. What is expected is what most of them take, once what slow ranks add to theirs is taken off.

    Args:
        transfers: as `dpro.detect.network.traffic.transfers_of` gives them.
        hosts: which host each rank is on, as far as known (`dpro.detect.network.traffic.host_of`).

    Returns:
        Columns of `SCHEMA`, one row for each pair and, of messages, direction, sorted by source and target.
        ratio = sender x receiver x link, where a null factor counts as 1.
    """
    kinds = _with_expected(_kinds_of_pairs(transfers.filter(pl.col("num_ranks") == 2)))
    if kinds.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    compared = pl.col("expected_ns").is_not_null()
    total = pl.col("transfer_ns", "expected_ns") * pl.col("count")
    matrix = (
        kinds.with_columns(total.name.prefix("all_"))
        .group_by("source", "target", "directed", *_EFFECTS)
        .agg(
            pl.col("count").sum(),
            bytes=pl.when((pl.col("bytes") >= 0).all()).then((pl.col("bytes") * pl.col("count")).sum()),
            transfer_ns=pl.col("all_transfer_ns").sum() / pl.col("count").sum(),
            expected_ns=pl.col("all_expected_ns").sum() / pl.col("count").filter(compared).sum(),
            ratio=pl.col("all_transfer_ns").filter(compared).sum() / pl.col("all_expected_ns").sum(),
        )
        .with_columns(pl.col("bytes").fill_null(-1), pl.col("expected_ns", "ratio").fill_nan(None))
        .with_columns(
            source_host=_host(pl.col("source"), hosts),
            target_host=_host(pl.col("target"), hosts),
            link=pl.col("ratio") / pl.col("sender").fill_null(1.0) / pl.col("receiver").fill_null(1.0),
        )
        .sort("source", "target", "directed")
    )
    return matrix.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())


def _host(rank: pl.Expr, hosts: Mapping[int, str]) -> pl.Expr:
    return rank.replace_strict(hosts, default="", return_dtype=pl.String)


def host_matrix(matrix: pl.DataFrame) -> pl.DataFrame:
    """The same between hosts: the median over the pairs of ranks that two hosts have.

    Args:
        matrix: as `delay_matrix` gives it.

    Returns:
        `source_host`, `target_host`, `num_pairs`, `count`, and the medians of `transfer_ns`, `expected_ns`
        and `ratio`. Pairs without a direction count both ways; those on unknown hosts are left out.
    """
    medians = {name: pl.col(name).median() for name in ("transfer_ns", "expected_ns", "ratio")}
    return (
        both_ways(matrix)
        .filter((pl.col("source_host") != "") & (pl.col("target_host") != ""))
        .group_by("source_host", "target_host")
        .agg(pl.col("count").sum(), num_pairs=pl.len().cast(pl.Int64), **medians)
        .select("source_host", "target_host", "num_pairs", "count", *medians)
        .sort("source_host", "target_host")
    )


def both_ways(matrix: pl.DataFrame) -> pl.DataFrame:
    """The matrix with each pair that has no direction in both of them: what is drawn as a square.

    Args:
        matrix: as `delay_matrix` gives it.
    """
    swapped = {"source": "target", "source_host": "target_host", "sender": "receiver"}
    swapped |= {other: one for one, other in swapped.items()}
    back = matrix.filter(~pl.col("directed")).select(
        pl.col(swapped.get(name, name)).alias(name) for name in matrix.columns
    )
    return pl.concat([matrix, back]).sort("source", "target", "directed")


def _kinds_of_pairs(transfers: pl.DataFrame) -> pl.DataFrame:
    """What each pair typically takes for each kind of transfer: `LIKE`, both ends, `transfer_ns`, `count`."""
    ends = pl.col("members").str.split(",").cast(pl.List(pl.Int64))
    return (
        transfers.group_by(KEYS)
        .agg(pl.col("transfer_ns").median(), count=pl.len().cast(pl.Int64))
        .with_columns(source=ends.list.get(0), target=ends.list.get(1), directed=pl.col("op") == MESSAGE)
        .sort(KEYS)
    )


def _with_expected(kinds: pl.DataFrame) -> pl.DataFrame:
    """The same with `expected_ns`, and what the ends add: within hosts and between them each for itself."""
    comparable = kinds.with_columns(
        enough=pl.len().over(LIKE) >= MIN_GROUPS, kind=pl.struct(LIKE).rank("dense")
    )
    parts = [
        _fitted(part) for _, part in comparable.filter("enough").group_by("num_hosts", maintain_order=True)
    ]
    unknown = pl.lit(None, pl.Float64)
    rest = comparable.filter(~pl.col("enough")).with_columns(
        expected_ns=unknown, sender=unknown, receiver=unknown
    )
    # What is known of the ends from some kinds holds for all of them: a pair is one row in the end.
    effects = (pl.col(name).drop_nulls().first().over("source", "target", "directed") for name in _EFFECTS)
    return pl.concat([*parts, rest], how="diagonal").with_columns(effects)


def _fitted(comparable: pl.DataFrame) -> pl.DataFrame:
    """Pairs, with what is expected of each kind and what the ends of each pair add."""
    one_way = comparable.select("kind", "source", "target", log=pl.col("transfer_ns").log())
    other_way = one_way.filter(~comparable["directed"]).rename({"source": "target", "target": "source"})
    cells = pl.concat([one_way, other_way.select(one_way.columns)])
    kind, source, target = (cells[name].cast(pl.Int64).to_numpy() for name in ("kind", "source", "target"))
    middle, sender, receiver = additive_effects(kind, source, target, cells["log"].to_numpy())
    forward = slice(comparable.height)
    return comparable.with_columns(
        pl.Series("expected_ns", np.exp(middle[kind[forward]])),
        pl.Series("sender", np.exp(sender[source[forward]])).fill_nan(None),
        pl.Series("receiver", np.exp(receiver[target[forward]])).fill_nan(None),
    )


def additive_effects(
    kind: Ints, source: Ints, target: Ints, log_time: Floats
) -> tuple[Floats, Floats, Floats]:
    """What each kind of transfer takes, and what each sender and receiver adds to all of its own.

    Median polish (Tukey, "Exploratory Data Analysis", 1977, chapter 11) with gaps: medians of kinds, of rows
    and of columns are taken off in turn, so slow cells move none, up to half of a row or a column. The
    typical rank adds nothing. Of an even number the lower median is taken: where half are slow, they are.

    Args:
        kind: [C] numbers, none negative.
        source: [C] ranks, none negative.
        target: [C] ranks.
        log_time: [C] logarithms.

    Returns:
        [S] of kinds, [R] of senders, [R] of receivers, logarithms; NaN for a rank with fewer than
        `MIN_PAIRS` others that way.
    """
    num_ranks = int(max(source.max(), target.max())) + 1
    directions = (source, target), (target, source)
    enough = [_partners(ends, others, num_ranks) >= MIN_PAIRS for ends, others in directions]
    middle = np.zeros(int(kind.max()) + 1)
    effects = np.zeros((2, num_ranks))
    left = log_time.copy()
    for _ in range(MAX_ROUNDS):
        moved = _take_off(left, kind, middle, np.ones(middle.size, np.bool_))
        for effect, is_known, ends in zip(effects, enough, (source, target)):
            moved = max(moved, _take_off(left, ends, effect, is_known))
            typical = float(np.quantile(effect[is_known], 0.5, method="lower")) if is_known.any() else 0.0
            effect[is_known] -= typical
            left += typical * is_known[ends]
        if moved < SETTLED:
            break
    sender, receiver = (np.where(is_known, effect, np.nan) for is_known, effect in zip(enough, effects))
    return middle, sender, receiver


def _partners(ends: Ints, others: Ints, num_ranks: int) -> Ints:
    """[R] with how many others each rank has transfers."""
    pairs = np.unique(ends * num_ranks + others)
    return np.bincount(pairs // num_ranks, minlength=num_ranks)


def _take_off(left: Floats, labels: Ints, effect: Floats, is_known: NDArray[np.bool_]) -> float:
    """Move the median of what is left of each label into its effect; how far the farthest was."""
    median = pl.col("left").quantile(0.5, "lower")
    medians = pl.DataFrame({"label": labels, "left": left}).group_by("label").agg(median)
    step = np.zeros(effect.size)
    step[medians["label"].to_numpy()] = medians["left"].to_numpy()
    step *= is_known
    effect += step
    left -= step[labels]
    return float(np.abs(step).max())
