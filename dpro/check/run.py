"""The whole check: each host by itself, then the network between them.

In: names of hosts and what is to be tried. Out: a `CheckDocument`. Hosts that do not answer are `FAIL`, and
left out of what follows. What is slow is tried again, and the better figure counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpro.check.answer import CheckDocument, Seen, check_document, slow_units
from dpro.check.expected import RunBandwidth
from dpro.check.search import search_network
from dpro.check.workers import WORK_S, HostWorkers, Say, Unit, take_turns

TESTS = ("compute", "disk", "network")


@dataclass(frozen=True)
class CheckOptions:
    """What is to be checked.

    Attributes:
        suspects: names of those that the check is to confirm.
        launcher: as `dpro.check.workers.HostWorkers` takes it.
        python: that has torch, on the hosts.
        interface: of the network; empty for that of the default route.
        timeout_s: for an exchange that does not end.
        disk: a folder that each host writes to; empty for no test of disks.
        tests: which of `TESTS`.
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
    seen = Seen(options.names, options.suspects, of_run=options.of_run)
    try:
        seen.hosts = dict(workers.hosts)
        if "compute" in options.tests:
            _alone(workers, seen, {"do": "compute"}, say)
        if options.disk:
            _alone(workers, seen, {"do": "disk", "folder": options.disk}, say)
        if "network" in options.tests and len(workers.hosts) > 1:
            seen.network = search_network(workers, sorted(workers.hosts))
        seen.failed |= workers.failed
    finally:
        workers.close()
    return check_document(seen, time.monotonic() - begin_s)


def _alone(workers: HostWorkers, seen: Seen, command: dict[str, Any], say: Say) -> None:
    """Have each device do something, and those that are slow once more.

    Hosts that share a machine take turns; a disk is tried by one device of each host.
    """
    units = [unit for unit in workers.units() if unit.device == 0 or command["do"] != "disk"]
    names = _take(workers, seen, command, units, say)
    if again := slow_units(seen, names):
        _take(workers, seen, command, again, say)


def _take(
    workers: HostWorkers, seen: Seen, command: dict[str, Any], units: Sequence[Unit], say: Say
) -> set[str]:
    """Take figures of some devices; return what they are of."""
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
