"""`dpro check` from names of hosts to its answer.

Takes names of hosts, and the tests to run; returns a `CheckDocument`: a verdict for each host, with its
evidence.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpro.documents import Document, DocumentPart
from dpro.errors import DproError, Unanswerable
from dpro.extensions.check.search import (
    MIN_SLOW,
    MIN_SLOW_OF_TWO,
    Fault,
    NetworkChecked,
    Pair,
    PeerFigures,
    Reduced,
    peers_of,
    search_network,
)
from dpro.extensions.check.workers import CPU, WORK_S, HostToCheck, HostWorkers, Say, Unit, take_turns

PASS, SLOW, FAIL = "PASS", "SLOW", "FAIL"
UNITS = {
    "matmul": "Tflop/s", "memory": "GB/s", "to device": "GB/s", "from device": "GB/s",
    "disk write": "GB/s", "disk read": "GB/s",
}  # fmt: skip
# Least factor of a slow result: file systems are shared, and so are processors.
MIN_SLOW_OF = {"disk write": 2.0, "disk read": 2.0}
MIN_SLOW_OF_CPUS = 1.5


class MeasuredDocument(DocumentPart, frozen=True):
    """A figure of a device of a host.

    Attributes:
        what: `matmul`, `memory`, `to device`, `from device`, `disk write`, `disk read`, or `network`: the
            median of the host's exchanges, one way.
        device: number of the GPU; 0 where the processors are the device.
        value: more is better.
        unit: of the value: Tflop/s are 1e12 operations per second, GB/s 1e9 bytes per second.
        peers: the median of the others; null where there are none.
        times: how many times as fast the others are, where that is clearly slow; else null.
    """

    what: str
    device: int
    value: float
    unit: str
    peers: float | None
    times: float | None


class HostVerdict(DocumentPart, frozen=True):
    """Verdict on a host.

    Attributes:
        host: its name.
        verdict: `PASS`; `SLOW`, clearly slower than its peers; or `FAIL`: does not answer, or does not work.
        suspect: whether the check was to confirm that it is at fault.
        evidence: why it is not `PASS`, one line each.
        measured: its figures.
    """

    host: str
    verdict: str
    suspect: bool
    evidence: list[str]
    measured: list[MeasuredDocument]


class LinkVerdict(DocumentPart, frozen=True):
    """A link between two hosts that is at fault although neither host is.

    Attributes:
        hosts: its ends.
        verdict: `SLOW` or `FAIL`.
        evidence: why, one line each.
    """

    hosts: list[str]
    verdict: str
    evidence: list[str]


class AllReduceDocument(DocumentPart, frozen=True):
    """The all-reduce over the most hosts.

    Attributes:
        hosts: number of hosts.
        bytes: of its payload.
        busbw_gbps: bus bandwidth as in the NCCL tests, 1e9 bytes per second, of the slowest device.
        run_busbw_gbps: from the curve of the run; null without a run.
        verdict: `SLOW` where it is clearly slower than the run's, and the run's is certain enough and had the
            same hosts, as many devices, and no more bytes; else `PASS`.
        evidence: why it is `SLOW`, one line each.
    """

    hosts: int
    bytes: int
    busbw_gbps: float
    run_busbw_gbps: float | None
    verdict: str
    evidence: list[str]


class CheckDocument(Document, frozen=True, kw_only=True):
    """Hosts that were checked without a job.

    Attributes:
        passed: whether all hosts and links are `PASS`, and the all-reduce over the most hosts.
        confirmed: whether some suspect is not `PASS`; null without suspects.
        hosts: in the order in which they were given.
        links: links that are at fault although their ends are not.
        all_reduce: over the most hosts; null where there was none.
        notes: other observations, one line each.
        rounds: number of rounds of exchanges.
        seconds: duration of the check.
    """

    passed: bool
    confirmed: bool | None
    hosts: list[HostVerdict]
    links: list[LinkVerdict]
    all_reduce: AllReduceDocument | None
    notes: list[str]
    rounds: int
    seconds: float


@dataclass
class CheckState:
    """Everything that a check has found.

    Attributes:
        names: of all hosts, in order.
        suspects: names of the hosts to confirm as faulty.
        hosts: hosts that answered.
        failed: why a host does not answer or does not work.
        figures: figures of each device, by test.
        network: results of the exchanges; None if there were none.
        of_run: an all-reduce of a run; None without one.
        notes: other observations.
    """

    names: Sequence[str]
    suspects: frozenset[str] = frozenset()
    hosts: Mapping[int, HostToCheck] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    figures: dict[str, dict[Unit, float]] = field(default_factory=dict)
    network: NetworkChecked | None = None
    of_run: RunBandwidth | None = None
    notes: list[str] = field(default_factory=list)


def check_document(seen: CheckState, seconds: float) -> CheckDocument:
    """Return the answer of the check."""
    network = seen.network or NetworkChecked()
    measured = _measured(seen)
    hosts = [_host(seen, network, number, measured.get(number, [])) for number in range(len(seen.names))]
    links = [_link(seen, network, pair, fault) for pair, fault in network.links.items()]
    passing = (f"{_ends(seen, pair)}: slow once, and not when tried again" for pair in network.passing)
    reduce, notes = _all_reduce(seen, network)
    slow = reduce is not None and reduce.verdict == SLOW
    return CheckDocument(
        passed=all(host.verdict == PASS for host in hosts) and not links and not slow,
        confirmed=any(host.verdict != PASS for host in hosts if host.suspect) if seen.suspects else None,
        hosts=hosts,
        links=links,
        all_reduce=reduce,
        notes=[*seen.notes, *passing, *_of_groups(seen, network), *notes],
        rounds=network.num_rounds,
        seconds=round(seconds, 1),
    )


def _measured(seen: CheckState) -> dict[int, list[MeasuredDocument]]:
    """Return the figures of each host beside those of its peers: devices of the same model."""
    measured: dict[int, list[MeasuredDocument]] = {}
    for what, figures in seen.figures.items():
        for unit, value in figures.items():
            peers = _peers(seen, what, unit)
            times = (peers.times(value) if peers else 0.0) or None
            row = MeasuredDocument(
                what, unit.device, _rounded(value), UNITS[what], _rounded(peers.median) if peers else None,
                _rounded(times) if times else None,
            )  # fmt: skip
            measured.setdefault(unit.host, []).append(row)
    if seen.network is not None:
        moved = seen.network.moved()
        for number in sorted({host for pair in moved for host in pair}):
            measured.setdefault(number, []).append(_of_network(seen.network, moved, number))
    return measured


def _peers(seen: CheckState, what: str, unit: Unit) -> PeerFigures | None:
    """Return the figures of other devices of the same model; None if there are none."""
    model = seen.hosts[unit.host].model
    figures = seen.figures[what].items()
    others = [figure for other, figure in figures if other != unit and seen.hosts[other.host].model == model]
    least = MIN_SLOW_OF.get(what, MIN_SLOW_OF_CPUS if model == CPU else MIN_SLOW)
    return peers_of(others, least) if others else None


def slow_units(seen: CheckState, names: Collection[str]) -> list[Unit]:
    """Return the devices with a slow figure among the named ones."""
    return sorted(
        {
            unit
            for what in names
            for unit, value in seen.figures[what].items()
            if (peers := _peers(seen, what, unit)) and peers.times(value)
        }
    )


def _of_network(network: NetworkChecked, moved: Mapping[Pair, float], number: int) -> MeasuredDocument:
    of_host = [figure for pair, figure in moved.items() if number in pair]
    others = [figure for pair, figure in moved.items() if number not in pair]
    fault = network.hosts.get(number, Fault())
    return MeasuredDocument(
        "network", 0, _rounded(peers_of(of_host).median), "GB/s",
        _rounded(peers_of(others).median) if others else None, _rounded(fault.times) if fault.times else None,
    )  # fmt: skip


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _host(
    seen: CheckState, network: NetworkChecked, number: int, measured: list[MeasuredDocument]
) -> HostVerdict:
    slow = [
        f"{figure.what}{_device(seen, number, figure)}: {figure.value:.3g} {figure.unit}, "
        f"elsewhere {figure.peers:.3g}: others are {figure.times:.2f} times as fast"
        for figure in measured
        if figure.times
    ]
    failed = [seen.failed[number]] if number in seen.failed else []
    if number in network.hosts and (error := network.hosts[number].error) and not failed:
        failed.append(f"network: exchanges with others fail: {error}")
    verdict = FAIL if failed else SLOW if slow else PASS
    name = seen.names[number]
    return HostVerdict(name, verdict, name in seen.suspects, [*failed, *slow], measured)


def _device(seen: CheckState, number: int, figure: MeasuredDocument) -> str:
    return f" of GPU {figure.device}" if seen.hosts[number].model != CPU and figure.what != "network" else ""


def _link(seen: CheckState, network: NetworkChecked, pair: Pair, fault: Fault) -> LinkVerdict:
    ends = [seen.names[host] for host in pair]
    if fault.error:
        evidence = [f"an exchange between them fails, and each works with others: {fault.error}"]
        if pair in network.unsure:
            evidence = [
                f"an exchange between them fails: {fault.error}",
                "either host may be at fault instead: there are no other hosts to test them with; check "
                "more hosts",
            ]
        return LinkVerdict(ends, FAIL, evidence)
    gbps = network.exchanged[pair].gbps
    evidence = [
        f"{gbps:.3g} GB/s between them, and no more on a second try; other pairs are {fault.times:.2f} "
        "times as fast, including those of either host with others"
    ]
    return LinkVerdict(ends, SLOW, evidence)


def _ends(seen: CheckState, pair: Pair) -> str:
    return " - ".join(seen.names[host] for host in pair)


def _all_reduce(seen: CheckState, network: NetworkChecked) -> tuple[AllReduceDocument | None, list[str]]:
    """Return the all-reduce over the most hosts beside the run's, and notes about the two."""
    good = [reduced for reduced in network.reduced if not reduced.error]
    if not good:
        return None, []
    largest = max(good, key=lambda reduced: len(reduced.hosts))
    slower, notes = _against_run(seen, largest)
    document = AllReduceDocument(
        hosts=len(largest.hosts),
        bytes=largest.num_bytes,
        busbw_gbps=_rounded(largest.gbps),
        run_busbw_gbps=_rounded(seen.of_run.gbps) if seen.of_run else None,
        verdict=SLOW if slower else PASS,
        evidence=slower,
    )
    return document, notes


def _of_groups(seen: CheckState, network: NetworkChecked) -> Iterable[str]:
    """Yield notes on all-reduces that fail, or are slower than equally large ones without a known fault."""
    for reduced in network.reduced:
        hosts = reduced.hosts
        others = [
            other.gbps
            for other in network.reduced
            if other is not reduced and len(other.hosts) == len(hosts) and not other.error
        ]
        members = f"{len(hosts)} hosts from {seen.names[hosts[0]]} to {seen.names[hosts[-1]]}"
        blamed = {*hosts} & {*network.hosts} or any({*pair} <= {*hosts} for pair in network.links)
        if reduced.error:
            yield f"an all-reduce of {members} fails: {reduced.error}"
        elif others and not blamed and (times := peers_of(others).times(reduced.gbps)):
            yield f"an all-reduce of {members} is slow: others as large are {times:.2f} times as fast"


def _against_run(seen: CheckState, reduced: Reduced) -> tuple[list[str], list[str]]:
    """Return evidence that an all-reduce is slower than the run's, and notes where that proves nothing."""
    run = seen.of_run
    if run is None or not run.gbps:
        return [], []
    ratio = reduced.gbps / run.gbps
    compared = f"{reduced.gbps:.3g} GB/s bus bandwidth here, {run.gbps:.3g} in the run"
    if ratio >= MIN_SLOW_OF_TWO:
        return [], [f"an all-reduce over all hosts is faster than the run's: {compared}"]
    if ratio > 1 / MIN_SLOW_OF_TWO:
        return [], []
    hosts = [seen.names[host] for host in reduced.hosts]
    devices = sum(seen.hosts[host].devices for host in reduced.hosts)
    slower = f"an all-reduce over all hosts is slower than the run's: {compared}"
    why = run.why_incomparable(hosts, devices, reduced.num_bytes)
    return ([], [f"{slower}; {why}"]) if why else ([slower], [])


# The all-reduce between hosts that a run's communication curve predicts. A run recorded while a host was slow
# has a slow curve: it shows what the job had, not what the hosts can do.

MIN_SAMPLES = 20  # all-reduces behind a curve that may count against hosts
MAX_MISFIT = 0.1  # median distance of these from the curve, as a share


class RunBandwidth(NamedTuple):
    """An all-reduce of a run.

    Attributes:
        gbps: bus bandwidth as in the NCCL tests, 1e9 bytes/s.
        num_bytes: of the largest that was recorded.
        num_ranks: of its group.
        hosts: of its group.
        num_samples: all-reduces behind the curve.
        misfit: median distance of these from the curve, as a share of their time.
    """

    gbps: float
    num_bytes: int
    num_ranks: int
    hosts: frozenset[str] = frozenset()
    num_samples: int = 0
    misfit: float = 1.0

    def why_incomparable(self, hosts: Collection[str], num_devices: int, num_bytes: int) -> str:
        """Return why an all-reduce slower than this proves nothing; empty if it does."""
        if {host.partition(".")[0] for host in hosts} != {host.partition(".")[0] for host in self.hosts}:
            return "the run's all-reduce was between other hosts"
        if num_devices != self.num_ranks:
            return f"the run's was of {self.num_ranks} ranks, this one of {num_devices} devices"
        if num_bytes < self.num_bytes:
            return "the run's all-reduce moved more bytes"
        if self.num_samples < MIN_SAMPLES or self.misfit > MAX_MISFIT:
            return (
                f"the run's curve is uncertain: {self.num_samples} all-reduces, which are {self.misfit:.0%} "
                "off it"
            )
        return ""


def run_bandwidth(run: Path) -> RunBandwidth:
    """Return the bus bandwidth of the largest all-reduces between hosts, by the curve of their group.

    Raises:
        Unanswerable: the run has none, or no deep windows.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.opening import open_path
    from dpro.replay.cost.transfers import fit_costs, messages_by_kind

    analysis = Analysis(open_path(run))
    host = dict(analysis.workers.select("rank", "host").iter_rows())
    try:
        graph = analysis.built.graph
    except DproError as error:
        raise Unanswerable(f"{run}: no communication to compare with: {error}") from error
    bandwidths = []
    nodes, costs = graph.nodes, fit_costs(graph)
    for kind, numbers in messages_by_kind(graph).items():
        of_kind = np.isin(nodes.message, numbers)
        num_bytes, num_ranks = int(nodes.bytes[of_kind].max(initial=0)), graph.messages[numbers[0]].num_ranks
        hosts = {host.get(int(rank), "") for rank in np.unique(nodes.rank[of_kind])}
        if kind[0] == "all_reduce" and kind in costs and num_bytes > 0 and len(hosts) > 1:
            ns = float(costs[kind].time_ns(num_bytes))
            gbps, cost = 2 * (num_ranks - 1) / num_ranks * num_bytes / ns, costs[kind]
            samples, misfit = cost.num_samples, float(cost.misfit)
            bandwidths.append(RunBandwidth(gbps, num_bytes, num_ranks, frozenset(hosts), samples, misfit))
    if not bandwidths:
        raise Unanswerable(f"{run}: no all-reduce between hosts was recorded to compare with")
    return max(bandwidths, key=lambda bandwidth: (bandwidth.num_ranks, bandwidth.num_bytes))


# The whole check: each host alone, then the network between hosts. Hosts that do not answer are `FAIL`, and
# left out of later tests. Slow results are measured again, and the better figure counts.

TESTS = ("compute", "disk", "network")


@dataclass(frozen=True)
class CheckOptions:
    """What to check.

    Attributes:
        names: of the hosts.
        suspects: names of the hosts to confirm as faulty.
        launcher: as `dpro.extensions.check.workers.HostWorkers` takes it.
        python: Python with torch on the hosts.
        interface: of the network; empty for that of the default route.
        timeout_s: of an exchange.
        disk: a folder that each host writes to; empty for no test of disks.
        tests: some of `TESTS`.
        of_run: an all-reduce of a run; None without one.
    """

    names: Sequence[str]
    suspects: frozenset[str]
    launcher: str
    python: str
    interface: str
    timeout_s: float
    disk: str
    tests: Sequence[str]
    of_run: RunBandwidth | None


def check_hosts(options: CheckOptions, say: Say) -> CheckDocument:
    """Check hosts."""
    begin_s = time.monotonic()
    say(f"starting workers on {len(options.names)} hosts")
    workers = HostWorkers(
        options.names, options.launcher, options.python, options.interface, options.timeout_s, say
    )
    seen = CheckState(options.names, options.suspects, of_run=options.of_run)
    try:
        seen.hosts = dict(workers.hosts)
        if "compute" in options.tests:
            _test_devices(workers, seen, {"do": "compute"}, say)
        if options.disk:
            _test_devices(workers, seen, {"do": "disk", "folder": options.disk}, say)
        if "network" in options.tests and len(workers.hosts) > 1:
            seen.network = search_network(workers, sorted(workers.hosts))
        seen.failed |= workers.failed
    finally:
        workers.close()
    return check_document(seen, time.monotonic() - begin_s)


def _test_devices(workers: HostWorkers, seen: CheckState, command: dict[str, Any], say: Say) -> None:
    """Test each device by itself, and slow ones once more.

    Hosts that share a machine take turns; a disk is tested by one device of each host.
    """
    units = [unit for unit in workers.units() if unit.device == 0 or command["do"] != "disk"]
    names = _measure(workers, seen, command, units, say)
    if again := slow_units(seen, names):
        _measure(workers, seen, command, again, say)


def _measure(
    workers: HostWorkers, seen: CheckState, command: dict[str, Any], units: Sequence[Unit], say: Say
) -> set[str]:
    """Measure some devices, keeping the better figure of each; return the names of the figures."""
    names: set[str] = set()
    turns = list(take_turns({unit.host: workers.hosts[unit.host] for unit in units}))
    for number, hosts in enumerate(turns):
        turn = f" ({number + 1} of {len(turns)}: hosts share machines)" if len(turns) > 1 else ""
        say(f"{command['do']}{turn}")
        now = [unit for unit in units if unit.host in hosts and unit.host not in workers.failed]
        for unit, answer in workers.ask(dict.fromkeys(now, command), WORK_S).items():
            if "error" in answer:
                seen.failed.setdefault(unit.host, f"{command['do']}: {answer['error']}")
            for what in answer.keys() - {"number", "error"}:
                figures = seen.figures.setdefault(what, {})
                figures[unit] = max(float(answer[what]), figures.get(unit, 0.0))
                names.add(what)
    return names
