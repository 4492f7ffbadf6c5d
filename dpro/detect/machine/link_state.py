"""The state of links while transfers were slow or stood still: of GPUs (NVLink, PCI), and of ports of hosts.

In: findings, and the tables `steps`, `counters` and `workers`. Out: findings of the network, and of jobs that
hang, with what GPUs of their ranks (by uuid) and ports of their hosts counted and their peers did not. A link
that is bad on all of them explains no difference. No finding is added or removed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import polars as pl

from dpro.detect.findings import NETWORK, Finding
from dpro.detect.machine.gpu_state import AROUND_NS, HANGS
from dpro.detect.machine.telemetry import (
    LINKS_OF_GPUS,
    LINKS_OF_PORTS,
    RULES,
    TimeRange,
    gpus_of_ranks,
    levels_in,
    sampled_gpus,
)

MAX_LINES = 4  # per finding


@dataclass(frozen=True)
class LinkSign:
    """Something that a device counts and its peers do not.

    Attributes:
        ranks: whose GPU it is, or which are on the host.
        times: how many times the least change that counts.
    """

    what: str
    line: str
    ranks: frozenset[int]
    times: float


def with_links(
    findings: Sequence[Finding], steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Add to findings of the network what links of their GPUs and ports of their hosts counted.

    It is the cause where one device alone stands out, and nothing else explains the finding.

    Args:
        steps, counters, workers: the tables; times of each host on its own clock.
    """
    if not any(finding.class_ in NETWORK for finding in findings):
        return list(findings)
    signs = list(LinkLevels(counters, workers).signs(_extents(steps, workers)))
    return [_explained(finding, signs) if finding.class_ in NETWORK else finding for finding in findings]


def with_broken_links(
    findings: Sequence[Finding], steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Add to findings of jobs that hang what links counted since their last steps: a port that is down, say.

    Args:
        steps, counters, workers: the tables; times of each host on its own clock.
    """
    if not any(finding.class_ in HANGS for finding in findings):
        return list(findings)
    latest = counters["time_ns"].max()  # values hold until the next row of their counter
    since = _extents(steps, workers).select(
        "host",
        begin_ns=pl.col("end_ns") - AROUND_NS,
        end_ns=pl.max_horizontal("end_ns", pl.lit(latest, pl.Int64)),
    )
    signs = list(LinkLevels(counters, workers).signs(since))
    return [
        replace(finding, evidence=(*finding.evidence, *(sign.line for sign in signs[:MAX_LINES])))
        if finding.class_ in HANGS
        else finding
        for finding in findings
    ]


def _extents(steps: pl.DataFrame, workers: pl.DataFrame) -> pl.DataFrame:
    """`host`, `begin_ns`, `end_ns` of the steps of the ranks of each host."""
    hosts = workers.select("rank", "host").unique("rank")
    ends = pl.col("start_ns") + pl.col("duration_ns")
    return (
        steps.join(hosts, on="rank")
        .group_by("host")
        .agg(begin_ns=pl.col("start_ns").min(), end_ns=ends.max())
        .sort("host")
    )


def _explained(finding: Finding, signs: Sequence[LinkSign]) -> Finding:
    signs_of_ranks = [sign for sign in signs if sign.ranks & {*finding.ranks}]
    if not signs_of_ranks:
        return finding
    alone = len({sign.ranks for sign in signs}) == 1 and not finding.cause
    cause = signs_of_ranks[0].what if alone else finding.cause
    lines = [sign.line for sign in signs_of_ranks[:MAX_LINES]]
    return replace(finding, cause=cause, evidence=(*finding.evidence, *lines))


@dataclass(frozen=True)
class LinkLevels:
    """What links of a job's GPUs and hosts count."""

    counters: pl.DataFrame
    workers: pl.DataFrame

    @cached_property
    def _rows(self) -> pl.DataFrame:
        """Rows of `counters`, with the `ranks` that the device belongs to."""
        samples = self.counters.filter(
            (pl.col("rank") < 0)
            & (pl.col("device") != "")
            & pl.col("counter").is_in([*LINKS_OF_GPUS, *LINKS_OF_PORTS])
        )
        gpus = gpus_of_ranks(self.counters, self.workers).group_by("host", "device").agg(ranks=pl.col("rank"))
        hosts = self.workers.filter(pl.col("rank") >= 0).group_by("host").agg(ranks=pl.col("rank").unique())
        sampled = sampled_gpus(self.counters).select("host", "device")
        on_gpus = samples.join(gpus, on=["host", "device"])
        on_ports = samples.filter(pl.col("counter").is_in(list(LINKS_OF_PORTS))).join(
            sampled, on=["host", "device"], how="anti"
        )
        return pl.concat([on_gpus, on_ports.join(hosts, on="host")])

    def signs(self, stretches: pl.DataFrame) -> Iterator[LinkSign]:
        """Yield what stands out, the most first.

        Args:
            stretches: `host`, `begin_ns`, `end_ns`.
        """
        rows = self._rows
        parts = [
            levels_in(rows.filter(host=host).drop("ranks"), TimeRange(begin, end))
            for host, begin, end in stretches.select("host", "begin_ns", "end_ns").iter_rows()
            if end > begin
        ]
        if not parts:
            return
        owned = rows.select("host", "device", "ranks").unique(["host", "device"])
        levels = pl.concat(parts).drop("rank").join(owned, on=["host", "device"])
        # GPUs are compared with each other, ports with those of the same name on other hosts.
        gpus = pl.col("counter").is_in(list(LINKS_OF_GPUS))
        levels = levels.with_columns(like=pl.when(gpus).then(pl.lit("")).otherwise("device"))
        signs = [
            sign
            for _, same in levels.group_by("counter", "like", maintain_order=True)
            for sign in _standing_out(same.sort("host", "device"))
        ]
        yield from sorted(signs, key=lambda sign: (-sign.times, sign.line))


def _standing_out(same: pl.DataFrame) -> Iterator[LinkSign]:
    """Devices that count clearly more, or less, than the others."""
    rule = RULES[same["counter"][0]]
    values = same["growth" if rule.per_second else "mean"].to_list()
    for row, (host, device, ranks) in enumerate(same.select("host", "device", "ranks").iter_rows()):
        others = sorted(values[:row] + values[row + 1 :])
        if not others:
            return
        usual = others[len(others) // 2]
        times = rule.worse * (values[row] - usual) / rule.min_change
        if times >= 1:
            of = frozenset(ranks)
            unit = f" {rule.unit}" if rule.unit else ""
            whose = f"{device} on {host}"
            line = f"{whose} ({_in_words(of)}): {rule.what} {values[row]:.3g}{unit}, the others' {usual:.3g}"
            yield LinkSign(f"{rule.what} of {whose}", line, of, times)


def _in_words(ranks: frozenset[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
