"""Options of `dpro record` that pretend ranks, which other commands refuse.

Takes the size of the job and the ranks to pretend; changes the request to the recorder, so that it runs the
command once per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dpro.errors import UsageError
from dpro.limits import MAX_RANKS

if TYPE_CHECKING:
    from dpro.collectors.launch.start import Request

EVERY = 10  # steps from one deep window of pretended ranks to the next

OF_RECORD = (
    click.Option(
        ["--pretend-world"], type=click.IntRange(1, MAX_RANKS), metavar="N",
        help="Run the command only on this machine, as ranks of a simulated job of N ranks: "
        "collectives return at once, and `dpro replay RUN --network-table FILE` fills in their durations.",
    ),
    click.Option(
        ["--pretend-ranks"], default="", metavar="RANKS",
        help="Ranks to run, one after the other: 0,8 or 0-3.  [default: 0]",
    ),
    click.Option(
        ["--pretend-per-host"], type=click.IntRange(1, MAX_RANKS), metavar="K",
        help="Ranks per host in the simulated job.  [default: 8, or N if smaller]",
    ),
)  # fmt: skip


def pretend_ranks(request: Request, given: Mapping[str, Any]) -> None:
    """Change the request so that the command runs as ranks of another job, if an option requests it.

    Raises:
        UsageError: the options contradict each other, or the command starts ranks itself.
    """
    from dpro.extensions.pretend.ranks import PER_HOST, Pretended, parse_ranks, refuse_launchers, run_ranks

    request.extra["pretend"] = None
    world, ranks, per_host = (given[f"pretend_{name}"] for name in ("world", "ranks", "per_host"))
    if world is None:
        if ranks or per_host is not None:
            raise UsageError(
                "--pretend-ranks and --pretend-per-host need --pretend-world N: ranks of the job"
            )
        return
    refuse_launchers(request.command)
    chosen = Pretended(world, parse_ranks(ranks or "0", world), min(per_host or PER_HOST, world))
    request.extra["pretend"] = asdict(chosen)
    request.probes = {"pretend": "dpro.extensions.pretend.inside", **request.probes}
    request.run_instead = partial(run_ranks, command=request.command, pretended=chosen)
    # Ranks that do not run at the same time cannot agree on windows, so all record them at fixed distances.
    options = request.options
    request.options = replace(options, every=options.every or max(EVERY, options.window_steps))


def _refused(why: str) -> list[click.Option]:
    """Return hidden options that raise `UsageError` with the reason why a command cannot pretend ranks."""

    def refuse(_: click.Context, option: click.Parameter, given: str | None) -> None:
        if given is not None:
            raise UsageError(f"{option.opts[0]} is an option of dpro record: {why}")

    return [
        click.Option(option.opts, hidden=True, expose_value=False, callback=refuse) for option in OF_RECORD
    ]


OF_ATTACH = _refused("a running job already has its ranks; pretend them from the start")
OF_TRY = _refused("a try measures waits, which pretended ranks do not have; use dpro whatif")
