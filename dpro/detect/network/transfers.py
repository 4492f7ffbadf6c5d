"""Detector of links, network ports and hosts that move data slower than comparable ones.

Takes a job's traffic; returns findings. Transfers of equal operation, size and kind of group are compared
between groups, without waiting for late ranks. What all slow groups have in common, and no fast one has, is
at fault; if several things fit equally well, the finding names them all. If the run has a topology, cables,
ports and switches on the paths of slow groups come first (`wires`), then blocks: parts of the network between
which all transfers are slow. A job in which one group does everything allows no comparison.

The delay matrix compares pairs of ranks with other pairs that do the same: the time of their transfers, the
time if they were like the others, and the sender's, the receiver's and the link's own shares of the
difference. It leaves out groups of more than two ranks, which do not show single pairs.
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

MIN_GROUPS = 3  # per kind: of two that differ, either may be wrong
MAX_UNSURE = 0.5  # confidence in the slower of two: they may differ by design
MIN_SLOW = 1.15  # least factor over the transfers of the other groups
MIN_BROKEN = 1.5  # least factor for a finding that the step does not wait for
DEVIATIONS = 5.0  # least distance from the median of the other groups, in their robust deviations
MIN_DEVIATION = 0.02  # of logarithms: a lower spread of groups is raised to this
LENGTH_TO_DEVIATION = 0.7413  # a normal distribution's middle half is 2 x 0.6745 deviations long
MIN_SLOW_SHARE = 0.9  # least share of a suspect's groups that are slow
FAINT = 0.25  # of the largest excess: groups below it have another cause
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
        thing: what is ultimately at fault: rank 3, in whichever role.
        kind: rank, nic (a rank's way out of its host), sender, receiver, host, link, hosts (the connection of
            two) or group; in a topology, cable, link, port or switch.
        ranks: the ranks that make up the suspect.
    """

    thing: str
    kind: str
    id: str
    ranks: tuple[int, ...] = ()

    @property
    def class_(self) -> str:
        """Class of a finding that blames the suspect."""
        if self.kind in CLASSES:
            return CLASSES[self.kind]
        return "slow.link" if self.kind in ("link", "hosts", "group") else "slow.nic"


def find_slow_network(traffic: Traffic) -> list[Finding]:
    """Find the links and ports whose transfers take clearly longer than comparable ones."""
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
        # A link between hosts may be slow because of other flows on its path.
        links = any(suspect.kind in ("link", "hosts", "group") for suspect in suspects)
        if links and (explained_slow["num_hosts"] > 1).any():
            shared.append(doubt)
        finding = _describe(traffic, suspects, explained_slow, shared, 1.0)
        findings += [finding] if finding else []
    return costliest_first(findings)


def _crowded_groups(
    traffic: Traffic, transfers: pl.DataFrame, wires: Wires | None
) -> tuple[pl.DataFrame, Observation]:
    """Return groups (`KEYS`) that are slow only because connections of the job share links on their paths.

    The observation is the doubt that remains about the other groups.
    """
    slow = _slow_groups(transfers, wires).select(KEYS)
    apart = traffic.apart() if slow.height else None
    if apart is None:
        return slow.clear(), CROWDED
    still = _slow_groups(apart.filter("whole"), wires)
    return slow.join(still, on=KEYS, how="anti"), CROWDED_BY_OTHERS


def _slow_groups(transfers: pl.DataFrame, wires: Wires | None) -> pl.DataFrame:
    """Return groups that are slow among all of their kind, or among those with paths of equal length."""
    compared = [compare_groups(transfers)]
    compared += [] if wires is None else [_compare_on_wires(transfers, wires)]
    return pl.concat([groups.filter("slow").select(KEYS) for groups in compared]).unique()


def _compare_on_wires(transfers: pl.DataFrame, wires: Wires) -> pl.DataFrame:
    """Return what `compare_groups` does, for groups whose paths are known.

    In any fabric, transfers below one leaf switch are faster: a group must be slow among those with paths of
    equal length; or, if these are too few to show their spread, among all, and far slower than those.
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
    """Return findings about cables, ports and switches, and the groups (`members`) that they explain.

    Groups that are slow by far less than others have another cause, so they vote after these are explained.
    """
    if wires is None:
        return [], set()
    groups = _compare_on_wires(transfers, wires)
    longer = pl.col("excess").exp() - 1
    faint = groups.filter("slow").filter(longer < FAINT * longer.max())
    findings: list[Finding] = []
    explained: set[str] = set()
    rounds = [groups] if faint.is_empty() else [groups.join(faint, on=KEYS, how="anti"), groups]
    for voting in rounds:
        voters = voting.filter(~pl.col("members").is_in(sorted(explained)))
        slow = voters.filter("slow")
        for blamed, members in blame_wires(voters, wires):
            suspects = [Suspect(part.words, part.kind, part.name) for part in blamed.suspects]
            explained_slow = slow.filter(pl.col("members").is_in(sorted(members)))
            shared = [*blamed.observations("groups", "are slow"), doubt]
            finding = _describe(traffic, suspects, explained_slow, shared, blamed.verdict.confidence)
            findings += [finding] if finding else []
            explained |= members if finding else set()
    return findings, explained


def compare_groups(transfers: pl.DataFrame) -> pl.DataFrame:
    """Compare each group with the others that do the same.

    The excess is the logarithm of a group's typical transfer over the others' (leave one out). It is compared
    with the spread of the others, with a floor: a port that is in half of them is found, too.

    Args:
        transfers: as from `transfers_of`.

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
    """Return middle and spread of the half of the values that are closest together.

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
    """Return whether a group is beyond half of its excess in nearly every step in which it was seen."""
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
    """Yield what could slow down a group of ranks."""
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
    """Return the links of a group's ring, which is assumed to go through its ranks in order."""
    ends = [sorted(pair) for pair in zip(ranks, [*ranks[1:], ranks[0]])]
    return [Suspect(f"link {one} - {other}", "link", f"{one} - {other}", (one, other)) for one, other in ends]


def _without_cleared(equal: Sequence[Suspect]) -> list[Suspect]:
    """Replace all links of a ring by its group, or a group by those of its links that no fast ring has."""
    kept = list(equal)
    for group in (suspect for suspect in equal if suspect.kind == "group"):
        links = ring_links(group.ranks)
        left = [link for link in links if link in kept]
        drop = left if len(left) == len(links) else [group] if left else []
        kept = [suspect for suspect in kept if suspect not in drop]
    return kept


def blame(groups: pl.DataFrame, hosts: Mapping[int, str]) -> Iterator[tuple[list[Suspect], set[str]]]:
    """Yield what explains most slow groups, then what explains most of the remaining ones.

    Args:
        groups: `op`, `members` and `slow`.

    Yields:
        Suspects that explain one set of slow groups, and that set (`members`).
    """
    of: dict[Suspect, set[str]] = {}
    for members, op in groups.select("members", "op").unique().sort("members", "op").iter_rows():
        for suspect in suspects_of(members, op, hosts):
            of.setdefault(suspect, set()).add(members)
    slow = set(groups.filter("slow")["members"])
    fitting = {
        suspect: cases for suspect, cases in of.items() if len(cases & slow) >= MIN_SLOW_SHARE * len(cases)
    }
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
    """Return the finding, with the savings of healing; None where neither step nor transfers show much.

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
    """Return whether transfers that the step does not wait for are slow enough for a finding.

    Messages of CPU tensors do not count: each lasts in a trace until the program checks whether it is over,
    so a message that no rank waits for seems to last.

    Args:
        base: [T] step times, in ns.
    """
    if traffic.run is not None and not traffic.run.manifest.gpus:
        slow = slow.filter(pl.col("op") != MESSAGE)
    more = (slow["count"] * (slow["transfer_ns"] - slow["typical_ns"])).to_numpy().sum()
    return bool(more >= MIN_SHARE * base.sum())


def _describe_block(traffic: Traffic, block: FabricBlock) -> Finding | None:
    """Return the finding about parts of the network; None if steps do not wait for transfers between them."""
    saved, base = _healed(traffic, block.slow)
    if not clear_gain(saved, base):
        return None
    cost, step = float(saved.mean()), float(base.mean())
    ranks = sorted({int(rank) for members in block.slow["members"] for rank in members.split(",")})
    parts = " and ".join(f"hosts {', '.join(part)}" for part in block.parts)
    between = observe(
        "slow-between-parts",
        "all transfers between {parts} are slow, and none within them: their connection is broken or "
        "congested, or slower by design",
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
    """Return the name of a suspect in a sentence."""
    words = {
        "nic": f"{suspect.id}'s way out of its host",
        "sender": f"{suspect.id} as a sender",
        "receiver": f"{suspect.id} as a receiver",
        "hosts": f"the connection between hosts {suspect.id}",
    }
    return words.get(suspect.kind, f"{suspect.kind} {suspect.id}")


def _slowest(slow: pl.DataFrame) -> list[Observation]:
    """Return observations of the slow groups, worst first."""
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
    """Return [T] savings with the slow groups' transfers as fast as others', and [T] step times, in ns."""
    times = (-pl.col("excess")).exp()
    factors = traffic.transfers.join(slow.select(*KEYS, "excess"), on=KEYS).select("instance", times=times)
    _, saved, base = traffic.healed(factors)
    return saved, base


# Groups of hosts between which all transfers are slow, because of a switch or a connection between two parts
# of the network. Most pairs of hosts are slow then, so that a comparison with the typical pair shows nothing;
# two levels, and the hosts on each, do. The transfers of one run do not show whether that is a fault or a
# design.

MIN_RATIO = 1.5  # of the slow level's time over the fast level's
MAX_SPREAD = 0.5  # range of a level, as a share of the distance between the levels, in logarithms
MIN_HOSTS = 2  # in each part: a host that is a part alone is itself at fault


class FabricBlock(NamedTuple):
    """Parts of the network, and the groups that are slow between them.

    Attributes:
        parts: hosts of each part.
        slow: groups between parts: `KEYS` columns, `transfer_ns`, `count`, `typical_ns` (of the fast level)
            and `excess` (logarithm over that).
    """

    parts: tuple[tuple[str, ...], ...]
    slow: pl.DataFrame

    @property
    def name(self) -> str:
        """The parts in words."""
        return " | ".join(", ".join(part) for part in self.parts)


def find_blocks(transfers: pl.DataFrame, hosts: Mapping[int, str]) -> list[FabricBlock]:
    """Return parts of the network between which all transfers are slow; none if a group contradicts that.

    Args:
        transfers: as from `dpro.detect.network.traffic.transfers_of`.
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
    """Return groups, split at the widest gap of their times into fast and `slow`; None without two levels."""
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
    """Return parts joined by fast groups, if all slow groups are between them; else None."""
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
    """Yield hosts that groups connect, directly or not."""
    parts: list[set[str]] = [{host} for host in sorted(every)]
    for group in groups:
        touched = [part for part in parts if part & group]
        parts = [part for part in parts if not part & group] + [set().union(*touched)]
    yield from (tuple(sorted(part)) for part in parts)


MIN_PAIRS = 3  # per rank: with fewer, its effect cannot be separated from those of the others and the pair
MAX_ROUNDS = 30
SETTLED = 1e-9  # of a logarithm: effects that change less have converged

SCHEMA = {
    "source": pl.Int64,  # rank that sends; the lower one of a group of two
    "target": pl.Int64,  # rank that receives
    "directed": pl.Boolean,  # messages are; a group of two ranks moves data both ways
    "source_host": pl.String,  # empty where unknown
    "target_host": pl.String,
    "count": pl.Int64,  # transfers
    "bytes": pl.Int64,  # of all transfers; -1 where not known
    "transfer_ns": pl.Float64,  # typical time, without waiting; mean over sizes
    "expected_ns": pl.Float64,  # typical time of a pair like the others; null: fewer than three of a kind
    "ratio": pl.Float64,  # transfer_ns over expected_ns, over sizes that have both; null without any
    "sender": pl.Float64,  # factor that the source adds to all its pairs; null: too few of them
    "receiver": pl.Float64,  # factor that the target adds to all its pairs; null: too few of them
    "link": pl.Float64,  # factor that remains for the pair itself; null where the ratio is
}
_EFFECTS = ("sender", "receiver")


def delay_matrix(transfers: pl.DataFrame, hosts: Mapping[int, str]) -> pl.DataFrame:
    """Return the transfer time of each pair of ranks, and what it would be if the pair were like the others.

    Pairs are comparable if they do the same operation with as many bytes, and are both on one host or both on
    two. The expected time is the typical one, without what slow ranks add to their own.

    Args:
        transfers: as from `dpro.detect.network.traffic.transfers_of`.
        hosts: host of each rank, where known (`dpro.detect.network.traffic.host_of`).

    Returns:
        Columns of `SCHEMA`, one row for each pair and, of messages, direction, sorted by source and target.
        ratio = sender x receiver x link, where a null factor counts as 1.
    """
    # The typical time of each pair, by kind of transfer.
    ends = pl.col("members").str.split(",").cast(pl.List(pl.Int64))
    kinds = _with_expected(
        transfers.filter(pl.col("num_ranks") == 2)
        .group_by(KEYS)
        .agg(pl.col("transfer_ns").median(), count=pl.len().cast(pl.Int64))
        .with_columns(source=ends.list.get(0), target=ends.list.get(1), directed=pl.col("op") == MESSAGE)
        .sort(KEYS)
    )
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
    """Return the delay matrix between hosts: the median over the pairs of ranks of each two hosts.

    Args:
        matrix: as from `delay_matrix`.

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
    """Return the matrix with pairs without a direction in both directions, to be drawn as a square.

    Args:
        matrix: as from `delay_matrix`.
    """
    swapped = {"source": "target", "source_host": "target_host", "sender": "receiver"}
    swapped |= {other: one for one, other in swapped.items()}
    back = matrix.filter(~pl.col("directed")).select(
        pl.col(swapped.get(name, name)).alias(name) for name in matrix.columns
    )
    return pl.concat([matrix, back]).sort("source", "target", "directed")


def _with_expected(kinds: pl.DataFrame) -> pl.DataFrame:
    """Add `expected_ns` and the effects of both ends, fitted separately within hosts and between them."""
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
    # Effects of the ends that some kinds show hold for all kinds, which become one row per pair.
    effects = (pl.col(name).drop_nulls().first().over("source", "target", "directed") for name in _EFFECTS)
    return pl.concat([*parts, rest], how="diagonal").with_columns(effects)


def _fitted(comparable: pl.DataFrame) -> pl.DataFrame:
    """Add the expected time of each kind, and what the ends of each pair add."""
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
    """Return the time of each kind of transfer, and what each sender and receiver adds to all of its own.

    Median polish (Tukey, "Exploratory Data Analysis", 1977, chapter 11) with gaps: medians of kinds, of rows
    and of columns are subtracted in turn, so that slow cells move none, up to half of a row or a column. The
    typical rank adds nothing. Medians of an even number are the lower ones: if half are slow, these stand
    out.

    Args:
        kind: [C] numbers, not negative.
        source: [C] ranks, not negative.
        target: [C] ranks.
        log_time: [C] logarithms.

    Returns:
        [S] of kinds, [R] of senders, [R] of receivers, as logarithms; NaN for a rank with fewer than
        `MIN_PAIRS` others in that direction.
    """
    num_ranks = int(max(source.max(), target.max())) + 1
    directions = (source, target), (target, source)
    enough = [_partners(ends, others, num_ranks) >= MIN_PAIRS for ends, others in directions]
    middle = np.zeros(int(kind.max()) + 1)
    effects = np.zeros((2, num_ranks))
    left = log_time.copy()
    for _ in range(MAX_ROUNDS):
        moved = _subtract_medians(left, kind, middle, np.ones(middle.size, np.bool_))
        for effect, is_known, ends in zip(effects, enough, (source, target)):
            moved = max(moved, _subtract_medians(left, ends, effect, is_known))
            typical = float(np.quantile(effect[is_known], 0.5, method="lower")) if is_known.any() else 0.0
            effect[is_known] -= typical
            left += typical * is_known[ends]
        if moved < SETTLED:
            break
    sender, receiver = (np.where(is_known, effect, np.nan) for is_known, effect in zip(enough, effects))
    return middle, sender, receiver


def _partners(ends: Ints, others: Ints, num_ranks: int) -> Ints:
    """Return [R] numbers of other ranks that each rank has transfers with."""
    pairs = np.unique(ends * num_ranks + others)
    return np.bincount(pairs // num_ranks, minlength=num_ranks)


def _subtract_medians(left: Floats, labels: Ints, effect: Floats, is_known: NDArray[np.bool_]) -> float:
    """Move the median of the values left of each label into its effect; return the largest move."""
    median = pl.col("left").quantile(0.5, "lower")
    medians = pl.DataFrame({"label": labels, "left": left}).group_by("label").agg(median)
    step = np.zeros(effect.size)
    step[medians["label"].to_numpy()] = medians["left"].to_numpy()
    step *= is_known
    effect += step
    left -= step[labels]
    return float(np.abs(step).max())
