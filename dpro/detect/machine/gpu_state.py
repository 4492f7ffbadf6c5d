"""State of GPUs and links while ranks were slow or hung: clocks held down, errors, bad links.

Takes findings, and tables `steps`, `counters` and `workers`. Returns the findings, with observations of the
GPUs of their ranks and what to do about them. A GPU is compared with those of its peers:
what holds down all clocks equally does not explain a straggler. Findings of the network, and of jobs that
hang, get errors that links of GPUs (NVLink, PCI) and ports of hosts counted but their peers did not. Does not
add or remove findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import polars as pl

from dpro.detect.findings import NETWORK, Finding
from dpro.detect.machine.telemetry import (
    HEARTBEAT,
    LINKS_OF_GPUS,
    LINKS_OF_PORTS,
    PCI,
    RULES,
    TimeRange,
    gpus_of_ranks,
    levels_in,
    sampled_gpus,
)
from dpro.detect.observations import Observation, Value, observe
from dpro.detect.stragglers.from_calls import HOST_OR_GPU, HOST_OR_GPU_SURE
from dpro.units import NS_PER_S

# Meanings of errors that GPUs report: XIDs of NVIDIA's driver, events of AMD's, GPUs that are lost.


class GpuError(NamedTuple):
    """An error that a GPU reports.

    Attributes:
        of: what is usually at fault: `PROGRAM`, `HARDWARE`, `EITHER`, or `AFTER` another error.
    """

    means: str
    of: str


PROGRAM, HARDWARE, EITHER, AFTER = "the program", "the hardware", "either", "another error"
REMEDIES = {
    PROGRAM: "look for an illegal access in the job's kernels (`compute-sanitizer`)",
    HARDWARE: "drain the host, reset the GPU, and replace it if the error comes again",
    EITHER: "reset the GPU, run DCGM's diagnostics (`dcgmi diag -r 3`), and see whether the error follows "
    "the job or the GPU",
    AFTER: "look for the error before it",
}
_MEMORY = "reset the GPU between jobs; several of them on one GPU are reason to replace it"

XIDS = {
    13: GpuError("exception in the graphics or compute engine, as by an access out of bounds", EITHER),
    31: GpuError("GPU memory page fault: a kernel used an illegal address", PROGRAM),
    32: GpuError("invalid or corrupted stream of commands to the GPU", EITHER),
    43: GpuError("the GPU stopped processing the program's work after a fault of the program", PROGRAM),
    44: GpuError("the graphics engine failed at a switch of contexts", EITHER),
    45: GpuError("channels were torn down after an earlier error, or because the process was ended", AFTER),
    46: GpuError("the GPU stopped processing", EITHER),
    48: GpuError("uncorrectable (double-bit) ECC error in the GPU's memory", HARDWARE),
    61: GpuError("the GPU's micro-controller stopped at a breakpoint", HARDWARE),
    62: GpuError("the GPU's micro-controller halted", HARDWARE),
    63: GpuError("a row of memory was set aside after errors, to be remapped at the next reset", HARDWARE),
    64: GpuError("a failing row of memory could not be set aside", HARDWARE),
    69: GpuError("the graphics engine met an illegal class or method", EITHER),
    74: GpuError("NVLink error: a link of the GPU, or what is at its other end", HARDWARE),
    79: GpuError("the GPU has fallen off the bus", HARDWARE),
    92: GpuError("a high rate of corrected (single-bit) ECC errors", HARDWARE),
    93: GpuError("the GPU's configuration memory was written too often", HARDWARE),
    94: GpuError(
        "uncorrectable ECC error, contained: only the program that used the memory is lost", HARDWARE
    ),
    95: GpuError("uncorrectable ECC error, not contained: all programs on the GPU are affected", HARDWARE),
    109: GpuError("a switch of contexts took too long", EITHER),
    110: GpuError("security fault of the GPU", HARDWARE),
    119: GpuError("the GPU's system processor (GSP) did not answer the driver in time", HARDWARE),
    120: GpuError("error in the GPU's system processor (GSP)", HARDWARE),
    121: GpuError("corrected error of the link between CPU and GPU (NVLink-C2C)", HARDWARE),
    122: GpuError("the GPU's firmware memory could not be read", HARDWARE),
    123: GpuError("the GPU's firmware memory could not be written", HARDWARE),
    124: GpuError("the GPU's firmware memory could not be erased", HARDWARE),
    125: GpuError("the file system of the GPU's configuration memory is damaged", HARDWARE),
    136: GpuError("a link could not be trained", HARDWARE),
    137: GpuError("illegal access to a peer's memory over NVLink", PROGRAM),
    140: GpuError("ECC error from which the driver did not recover", HARDWARE),
    143: GpuError("the GPU could not be initialised", HARDWARE),
    **dict.fromkeys(range(144, 151), GpuError("NVLink error, of the fifth generation", HARDWARE)),
    154: GpuError("the driver changed what it takes to recover the GPU (reset or reboot)", AFTER),
    155: GpuError("NVLink error that the driver's software defines", EITHER),
    156: GpuError("a resource of the GPU was retired", HARDWARE),
    157: GpuError("a resource of the GPU could not be retired", HARDWARE),
    158: GpuError("fatal timeout of the GPU", HARDWARE),
}
LOST = GpuError("the driver lost the GPU", HARDWARE)
# Events of AMD's driver, by their counters.
EVENTS = {
    "event_vm_fault": GpuError("GPU memory page fault: a kernel used an illegal address", PROGRAM),
    "event_gpu_reset": GpuError("the driver reset the GPU", EITHER),
    "event_thermal_throttle": GpuError("the GPU was throttled for heat", HARDWARE),
}
_UNKNOWN = GpuError("not in the table here: see NVIDIA's Xid catalog", EITHER)
_OF_MEMORY = (63, 92)


def error_of(counter: str, number: int) -> GpuError:
    """Return the meaning of an event.

    Args:
        counter: of the event: `xid`, `lost`, or one of `EVENTS`.
        number: of an XID.
    """
    if counter == "xid":
        return XIDS.get(number, _UNKNOWN)
    return EVENTS.get(counter, LOST)


def name_of(counter: str, number: int) -> str:
    """Return an event's name: `XID 79`, `lost`, `vm fault`."""
    return f"XID {number}" if counter == "xid" else counter.removeprefix("event_").replace("_", " ")


def remedy_of(counter: str, number: int) -> str:
    """Return what to do about an event."""
    return _MEMORY if counter == "xid" and number in _OF_MEMORY else REMEDIES[error_of(counter, number).of]


HANGS = ("hang.host", "hang.device", "hang.rank", "hang.comm", "dead.rank")
SLOW = ("slow.compute", "slow.host")
AROUND_NS = 60 * NS_PER_S  # an error may be reported this long before or after the steps that it affects
MAX_LINES = 4  # per finding
MIN_SLOWER = 0.01  # share by which a clock must be below the peers' to have an effect
MIN_SLOWER_UNEXPLAINED = 0.03  # share by which it must be below them where no reason was reported
MIN_MORE_IDLE = 0.1  # of the time: a GPU that idles this much more has lower clocks for lack of work
MIN_STEPS = 8  # in a part of the latest steps
_PARTS = 4  # compared in turn, as the cause may be recent: all steps, the latest half, quarter, eighth
_CLOCK, _IDLE, _HEAT, _LIMIT = "sm_clock_mhz", "clocks_gpu_idle", "temperature_c", "power_limit_w"
_EVENTS = ("xid", "lost", *EVENTS)


class ClockHold(NamedTuple):
    """A cause that holds clocks down.

    Attributes:
        counters: those that show it: shares of time, or seconds that grow.
        min_share: least share of the time, beyond that of the peers, that counts.
    """

    cause: str
    counters: tuple[str, ...]
    min_share: float
    do: str


_POWER_DO = "raise its power limit (`nvidia-smi -pl`, or what caps the node) to that of its peers"
HOLDS = (
    ClockHold(
        "heat",
        (
            "throttled_thermal_s",
            "throttled_memory_thermal_s",
            "throttled_regulator_thermal_s",
            "clocks_sw_thermal_slowdown",
            "clocks_hw_thermal_slowdown",
        ),
        0.05,
        "check its cooling: fans, air flow, the liquid loop, the temperature of the inlet",
    ),
    ClockHold(
        "the power brake",
        ("clocks_hw_power_brake",),
        0.05,
        "check the node's power supplies, their cabling, and what the rack may draw",
    ),
    ClockHold("the power cap", ("throttled_power_s", "clocks_sw_power_cap"), 0.2, _POWER_DO),
    ClockHold(
        "a limit of the board", ("throttled_board_limit_s",), 0.05, "check the board's power and cooling"
    ),
    ClockHold(
        "the hardware",
        ("throttled_hardware_s", "clocks_hw_slowdown"),
        0.05,
        "check its power supply and its cooling; the driver does not say which of them",
    ),
    ClockHold(
        "sync boost",
        ("throttled_sync_boost_s", "clocks_sync_boost"),
        0.05,
        "GPUs of one group take the clock of the slowest of them: find that one",
    ),
    ClockHold(
        "clocks that were set",
        ("clocks_application_setting",),
        0.2,
        "set them back (`nvidia-smi -rgc` and `-rac`)",
    ),
)
_KEPT = {_CLOCK, _IDLE, _HEAT, _LIMIT, *(name for hold in HOLDS for name in hold.counters)}
_REMEDIES = {RULES[name].what: hold.do for hold in HOLDS for name in hold.counters if name in RULES}
_COMPARE_CLOCKS = "compare the clocks that are set (`nvidia-smi -q -d CLOCK,PERFORMANCE`)"
_CLOCKS = "SM clock {clock_mhz:.0f} MHz, theirs {peers_clock_mhz:.0f}"
_ERROR = "gpu-error"


class HeldClocks(NamedTuple):
    """The cause that holds down the clocks of a GPU.

    Attributes:
        by: the cause of a `ClockHold`; empty if unknown.
    """

    by: str
    observation: Observation
    remedy: str


@dataclass(frozen=True)
class JobGpus:
    """The GPUs of a job's ranks.

    Attributes:
        owned: `rank`, `host`, `device`: whole GPUs, no instances.
        rows: of `counters`, for these GPUs.
        parted: `host`, `device` of GPUs whose instances were sampled (MIG).
        steps: `rank`, `step`, `start_ns`, `end_ns`, `host`.
        models: name of the GPU, by rank.
    """

    owned: pl.DataFrame
    rows: pl.DataFrame
    parted: pl.DataFrame
    steps: pl.DataFrame
    models: dict[int, str]


def gpus_of(steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame) -> JobGpus:
    """Return the GPUs of a run's ranks."""
    is_part = pl.col("device").str.contains("/", literal=True)
    owned = gpus_of_ranks(counters, workers).filter(~is_part)
    parts = counters.filter((pl.col("rank") < 0) & (pl.col("counter") == HEARTBEAT) & is_part)
    samples = counters.filter((pl.col("rank") < 0) & pl.col("counter").is_in([*_KEPT, *_EVENTS]))
    hosts = workers.select("rank", "host").unique("rank")
    timed = steps.select("rank", "step", "start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    return JobGpus(
        owned.select("rank", "host", "device"),
        samples.join(owned.select("host", "device").unique(), on=["host", "device"], how="semi"),
        parts.select("host", pl.col("device").str.split("/").list.first()).unique(),
        timed.join(hosts, on="rank"),
        dict(workers.select("rank", "gpu_name").iter_rows()),
    )


def needed_for_errors(part: pl.DataFrame) -> pl.DataFrame:
    """Return the few rows of `counters` in which errors of GPUs and links are found."""
    events = part.filter(pl.col("counter").is_in([*_EVENTS, PCI, *LINKS_OF_GPUS, *LINKS_OF_PORTS]))
    beats = part.filter(counter=HEARTBEAT).unique(["host", "device"], keep="first")
    return pl.concat([events, beats])


def with_gpus(
    findings: Sequence[Finding], steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Add to findings of slow ranks what held the clocks of their GPUs down, and errors of these GPUs.

    Findings of the network get hardware errors, such as those of an NVLink.

    Args:
        steps, counters, workers: the tables; times are on each host's own clock.
    """
    if not any(_is_slow_rank(finding) or finding.class_ in NETWORK for finding in findings):
        return list(findings)
    gpus = gpus_of(steps, counters, workers)
    if gpus.owned.is_empty():
        return list(findings)
    states = _States(gpus)
    explained = []
    for finding in findings:
        if _is_slow_rank(finding):
            finding = _add_gpu_state(finding, gpus, states)
        elif finding.class_ in NETWORK:
            errors = [*_errors(gpus, finding.ranks, of_hardware=True)][:MAX_LINES]
            finding = replace(finding.observing(*errors), remedy=finding.remedy or remedy_of_errors(errors))
        explained.append(finding)
    return explained


def with_errors(
    findings: Sequence[Finding], steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Add to findings of ranks that hang or are gone the errors that GPUs reported since the last steps.

    A hardware error of another rank's GPU is evidence, too: the calls may not show that rank as the cause.

    Args:
        steps, counters, workers: the tables; times are on each host's own clock.
    """
    if not any(finding.class_ in HANGS for finding in findings):
        return list(findings)
    gpus = gpus_of(steps, counters, workers)
    explained = []
    for finding in findings:
        if finding.class_ in HANGS:
            errors = [*_errors(gpus, finding.ranks, at_end=True)]
            others = sorted({*gpus.owned["rank"]} - {*finding.ranks})
            errors += _errors(gpus, others, at_end=True, of_hardware=True, elsewhere=True)
            observed = finding.observing(*errors[:MAX_LINES])
            finding = replace(observed, remedy=finding.remedy or remedy_of_errors(errors))
        explained.append(finding)
    return explained


def errors_since(
    steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame, since: int
) -> Iterator[Observation]:
    """Yield errors that GPUs of the job reported from a step on but not before."""
    gpus = gpus_of(steps.filter(pl.col("step") >= since), counters, workers)
    begins = gpus.steps.group_by("host").agg(begin_ns=pl.col("start_ns").min() - AROUND_NS)
    kind = ["host", "device", "counter", "value"]
    earlier = gpus.rows.join(begins, on="host").filter(pl.col("time_ns") < pl.col("begin_ns"))
    new = gpus.rows.join(earlier, on=kind, how="anti")
    yield from _errors(replace(gpus, rows=new), gpus.owned["rank"].unique())


def errors_in(
    steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame, ranks: Sequence[int]
) -> Iterator[Observation]:
    """Yield errors that the GPUs of ranks reported around some steps, the rows of `steps`."""
    yield from _errors(gpus_of(steps, counters, workers), ranks)


def remedy_of_hold(what: str) -> str:
    """Return what to do where clocks are held down, by the `what` of a rule; empty for other rules."""
    return _REMEDIES.get(what, "")


def remedy_of_errors(observations: Iterable[Observation]) -> str:
    """Return what to do about the first GPU error that follows from no other; empty if there is none."""
    remedies = (str(one.values["remedy"]) for one in observations if one.kind == _ERROR)
    return next((remedy for remedy in remedies if remedy != REMEDIES[AFTER]), "")


def _is_slow_rank(finding: Finding) -> bool:
    return finding.class_ in SLOW and finding.component_kind in ("rank", "ranks")


def _add_gpu_state(finding: Finding, gpus: JobGpus, states: _States) -> Finding:
    observations, cause, confidence = finding.observations, finding.cause, finding.confidence
    held = [clocks for rank in finding.ranks[:MAX_LINES] if (clocks := _held_down(gpus, rank, states))]
    first = next((clocks for clocks in held if clocks.by), held[0] if held else None)
    errors = [*_errors(gpus, finding.ranks)]
    if first and first.by and finding.class_ == "slow.compute" and cause in ("", "kernels"):
        cause = f"GPU clocks held down by {first.by}"
        if HOST_OR_GPU in observations:  # no longer in doubt: the clocks show that it is the GPU
            observations = tuple(one for one in observations if one != HOST_OR_GPU)
            confidence = round(min(confidence / HOST_OR_GPU_SURE, 1.0), 3)
    more = [*(clocks.observation for clocks in held), *errors][:MAX_LINES]
    remedy = first.remedy if first else remedy_of_errors(errors)
    return replace(
        finding, observations=(*observations, *more), cause=cause, confidence=confidence,
        remedy=finding.remedy or remedy,
    )  # fmt: skip


def _held_down(gpus: JobGpus, rank: int, states: _States) -> HeldClocks | None:
    """Compare a rank's GPU with those of its peers, in all steps and in the latest parts.

    Returns:
        What held its clocks down; None if nothing did.
    """
    peers = [
        peer
        for peer in gpus.owned["rank"].unique().sort()
        if peer != rank and gpus.models.get(peer) == gpus.models.get(rank)
    ]
    numbers = gpus.steps.filter(rank=rank)["step"].unique().sort()
    sizes = [numbers.len() >> part for part in range(_PARTS)]
    unexplained = None
    for size in sizes if peers else []:
        if size < (MIN_STEPS if size < numbers.len() else 1):
            break
        latest = size if size < numbers.len() else 0
        held = _compare_stretch(states.since(int(numbers[-size])), rank, peers, latest)
        if held is not None and held.by:
            return held
        unexplained = unexplained or held
    return unexplained


class _States:
    """The state of GPUs from a step on, computed once for all ranks."""

    def __init__(self, gpus: JobGpus) -> None:
        self._gpus = gpus
        kept = gpus.rows.filter(pl.col("counter").is_in(_KEPT))
        self._rows = {host: rows for (host,), rows in kept.group_by("host")}
        self._known: dict[int, pl.DataFrame] = {}

    def since(self, step: int) -> pl.DataFrame:
        """Return the state of all GPUs from a step on, as from `_state`."""
        if step not in self._known:
            self._known[step] = _state(self._gpus, self._rows, step)
        return self._known[step]


def _state(gpus: JobGpus, rows: Mapping[object, pl.DataFrame], since: int) -> pl.DataFrame:
    """Return `rank`, `device`, `host`, `counter`, `value` from a step on: a share of the time, or a mean."""
    extents = (
        gpus.steps.filter(pl.col("step") >= since)
        .group_by("host")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    )
    parts = [
        levels_in(rows[host], TimeRange(begin, end))
        for host, begin, end in extents.sort("host").iter_rows()
        if end > begin and host in rows
    ]
    if not parts:
        return pl.DataFrame(schema={"rank": pl.Int32, "counter": pl.String, "value": pl.Float64})
    grows = pl.col("counter").str.starts_with("throttled_")
    value = pl.when(grows).then("growth").otherwise("mean")
    levels = pl.concat(parts).select("host", "device", "counter", value=value)
    return levels.join(gpus.owned, on=["host", "device"])


def _compare_stretch(state: pl.DataFrame, rank: int, peers: Sequence[int], latest: int) -> HeldClocks | None:
    """Return what `_held_down` does, for one stretch of steps.

    Args:
        latest: number of the latest steps that the state covers; 0 for all.
    """
    levels = dict(state.filter(rank=rank).select("counter", "value").iter_rows())
    theirs = dict(
        state.filter(pl.col("rank").is_in(list(peers)))
        .group_by("counter")
        .agg(pl.col("value").median())
        .iter_rows()
    )
    if not levels:
        return None
    clock, usual = levels.get(_CLOCK), theirs.get(_CLOCK)
    compared = clock is not None and usual is not None and usual > 0
    lower = 1 - clock / usual if compared else 0.0  # type: ignore[operator]
    if compared and lower < MIN_SLOWER:
        return None
    of_gpu: dict[str, Value] = state.filter(rank=rank).select("device", "host", "rank").row(0, named=True)
    of_gpu |= {"steps": latest} if latest else {}
    when = "in the latest {steps} steps " if latest else ""
    its_gpu = "its GPU ({device} on {host}, rank {rank})"
    clocks: dict[str, Any] = {"clock_mhz": clock, "peers_clock_mhz": usual} if compared else {}
    holds = [(*shares, hold) for hold in HOLDS if (shares := _shares(hold, levels, theirs))]
    if holds:
        share, usual_share, hold = holds[0]
        held = observe(
            "clock-held",
            f"{when}the clocks of {its_gpu} were held down by {{held_by}} {{held_share}} of the time, those "
            "of its peers {peers_share}",
            **of_gpu, held_by=" and ".join(other.cause for *_, other in holds[:2]),
            held_share=share, peers_share=usual_share,
        )  # fmt: skip
        held = held.then(f"; {_CLOCKS}", **clocks) if compared else held
        return HeldClocks(hold.cause, _with_details(held, hold, levels, theirs), hold.do)
    idles = levels.get(_IDLE, 0.0) - theirs.get(_IDLE, 0.0) >= MIN_MORE_IDLE
    if not compared or lower < MIN_SLOWER_UNEXPLAINED or idles:
        return None
    ran = f"{when}{its_gpu} ran at lower clocks: {_CLOCKS}; no reason was reported"
    return HeldClocks("", observe("lower-clock", ran, **of_gpu, **clocks), _COMPARE_CLOCKS)


def _shares(
    hold: ClockHold, levels: dict[str, float], theirs: dict[str, float]
) -> tuple[float, float] | None:
    """Return the shares of time in which a GPU and its peers were held down; None if they hardly differ."""
    shares = [(levels[name], theirs.get(name, 0.0)) for name in hold.counters if name in levels]
    share, usual = max(shares, key=lambda pair: pair[0] - pair[1], default=(0.0, 0.0))
    return (min(share, 1.0), usual) if share - usual >= hold.min_share else None


def _with_details(
    held: Observation, hold: ClockHold, levels: dict[str, float], theirs: dict[str, float]
) -> Observation:
    """Add temperatures or power limits, where the cause is one of these."""
    if hold.cause == "heat" and _HEAT in levels and _HEAT in theirs:
        heat = "; {temperature_c:.0f} °C, theirs {peers_temperature_c:.0f}"
        return held.then(heat, temperature_c=levels[_HEAT], peers_temperature_c=theirs[_HEAT])
    if hold.cause == "the power cap" and levels.get(_LIMIT, 0.0) < theirs.get(_LIMIT, 0.0):
        limit = "; its power limit is {limit_w:.0f} W, theirs {peers_limit_w:.0f} W"
        return held.then(limit, limit_w=levels[_LIMIT], peers_limit_w=theirs[_LIMIT])
    return held


def _errors(
    gpus: JobGpus,
    ranks: Iterable[int],
    *,
    at_end: bool = False,
    of_hardware: bool = False,
    elsewhere: bool = False,
) -> Iterator[Observation]:
    """Yield errors that the GPUs of ranks reported while the steps ran, or since the last ones.

    Value `remedy` of each says what to do about it.

    Args:
        at_end: only errors from the last step of the host on.
        of_hardware: only errors of hardware.
        elsewhere: whether the finding is about other ranks.
    """
    extents = gpus.steps.group_by("host").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    begin = pl.col("end_ns") if at_end else pl.col("start_ns")
    named = gpus.owned.filter(pl.col("rank").is_in(list(ranks)))
    owners = named.group_by("host", "device").agg(pl.col("rank").min())
    events = (
        gpus.rows.filter(pl.col("counter").is_in(_EVENTS))
        .join(owners, on=["host", "device"], suffix="_of")
        .join(extents, on="host", how="left")
        .filter(pl.col("time_ns") >= begin.fill_null(0) - AROUND_NS)
    )
    if not at_end:
        events = events.filter(pl.col("time_ns") <= pl.col("end_ns") + AROUND_NS)
    kinds = events.group_by("rank_of", "host", "device", "counter", "value").agg(
        pl.len(), pl.col("time_ns").min()
    )
    for rank, host, device, counter, value, count, time_ns in kinds.sort("time_ns", "rank_of").iter_rows():
        error = error_of(counter, int(value))
        if not of_hardware or error.of == HARDWARE:
            times = "" if count == 1 else " {count} times, first"
            parted = not gpus.parted.filter(host=host, device=device).is_empty()
            whose = " (the GPU is partitioned: it may be of another instance)" if parted else ""
            sentence = (
                f"the GPU of rank {{rank}} ({{device}} on {{host}}): {{error}}{times} at {{first_at_ns}}"
                f"{whose}: {{means}}"
            )
            if elsewhere:
                sentence = f"possibly the cause, though not named as such: {sentence}; do: {{remedy}}"
            yield observe(
                f"{_ERROR}-elsewhere" if elsewhere else _ERROR, sentence,
                rank=rank, device=device, host=host, error=name_of(counter, int(value)), count=count,
                first_at_ns=time_ns, means=error.means, remedy=remedy_of(counter, int(value)),
            )  # fmt: skip


@dataclass(frozen=True)
class LinkSign:
    """A count of a device that differs from those of its peers.

    Attributes:
        device: with its host.
        ranks: ranks whose GPU it is, or ranks on the host.
        times: the difference as a multiple of the least change that counts.
    """

    what: str
    device: str
    observation: Observation
    ranks: frozenset[int]
    times: float


def with_links(
    findings: Sequence[Finding], steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Add to findings of the network what links of their GPUs and ports of their hosts counted.

    A count is the cause if only one device stands out and the finding has no other cause.

    Args:
        steps, counters, workers: the tables; times are on each host's own clock.
    """
    if not any(finding.class_ in NETWORK for finding in findings):
        return list(findings)
    signs = list(LinkLevels(counters, workers).signs(_extents(steps, workers)))
    return [
        _links_explained(finding, signs) if finding.class_ in NETWORK else finding for finding in findings
    ]


def with_broken_links(
    findings: Sequence[Finding], steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Add to findings of jobs that hang what links counted since the last steps, such as a port that is down.

    Args:
        steps, counters, workers: the tables; times are on each host's own clock.
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
    shown = [sign.observation for sign in signs[:MAX_LINES]]
    return [finding.observing(*shown) if finding.class_ in HANGS else finding for finding in findings]


def _extents(steps: pl.DataFrame, workers: pl.DataFrame) -> pl.DataFrame:
    """Return `host`, `begin_ns`, `end_ns` of the steps of each host's ranks."""
    hosts = workers.select("rank", "host").unique("rank")
    ends = pl.col("start_ns") + pl.col("duration_ns")
    return (
        steps.join(hosts, on="rank")
        .group_by("host")
        .agg(begin_ns=pl.col("start_ns").min(), end_ns=ends.max())
        .sort("host")
    )


def _links_explained(finding: Finding, signs: Sequence[LinkSign]) -> Finding:
    signs_of_ranks = [sign for sign in signs if sign.ranks & {*finding.ranks}]
    if not signs_of_ranks:
        return finding
    alone = len({sign.ranks for sign in signs}) == 1 and not finding.cause
    cause = signs_of_ranks[0].what if alone else finding.cause
    shown = [sign.observation for sign in signs_of_ranks[:MAX_LINES]]
    return replace(finding.observing(*shown), cause=cause)


@dataclass(frozen=True)
class LinkLevels:
    """Counts of the links of a job's GPUs and hosts."""

    counters: pl.DataFrame
    workers: pl.DataFrame

    @cached_property
    def _rows(self) -> pl.DataFrame:
        """Rows of `counters`, with the `ranks` of each device."""
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
        """Yield counts that stand out, most first.

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
            for sign in _outlying_devices(same.sort("host", "device"))
        ]
        yield from sorted(signs, key=lambda sign: (-sign.times, sign.device, sign.what))


def _outlying_devices(same: pl.DataFrame) -> Iterator[LinkSign]:
    """Yield devices that count clearly more, or less, than the others."""
    counter = str(same["counter"][0])
    rule = RULES[counter]
    values = same["growth" if rule.per_second else "mean"].to_list()
    for row, (host, device, ranks) in enumerate(same.select("host", "device", "ranks").iter_rows()):
        others = sorted(values[:row] + values[row + 1 :])
        if not others:
            return
        usual = others[len(others) // 2]
        times = rule.worse * (values[row] - usual) / rule.min_change
        if times >= 1:
            of = frozenset(ranks)
            unit = " {unit}" if rule.unit else ""
            named = f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, sorted(of)))}"
            observation = observe(
                "link-stands-out",
                f"{{device}} on {{host}} ({named}): {{what}} {{value:.3g}}{unit}, the others' "
                "{peers_value:.3g}",
                device=device, host=host, ranks=sorted(of), counter=counter, what=rule.what,
                value=values[row], peers_value=usual, unit=rule.unit,
            )  # fmt: skip
            where = f"{device} on {host}"
            yield LinkSign(f"{rule.what} of {where}", where, observation, of, times)
