"""`dpro check`: confirm, outside of a job, that a host or a link is slow or broken."""

from __future__ import annotations

import json
import sys
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from dpro.cli.options import NumberRange
from dpro.cli.output import console, json_option, print_json, stderr_console
from dpro.errors import InputError, UsageError

if TYPE_CHECKING:
    from dpro.extensions.check.answer import CheckDocument, HostVerdict, RunBandwidth

# Exit codes: 1 and 2 are of errors.
NOT_PASSED = 3  # a host or a link is not PASS; where there are suspects, one of them
OTHERS_NOT_PASSED = 4  # there are suspects, and they are PASS
SHOWN = 16  # hosts that are PASS and printed one a line; of more, how many


@click.command()
@click.option("--hosts", metavar="LIST", default="", help="Hosts, as a,b,c or node[01-64].")
@click.option(
    "--hostfile",
    type=click.File(),
    metavar="FILE",
    help="The same, one a line; what follows a blank is left out.",
)
@click.option(
    "--run", type=click.Path(exists=True, path_type=Path), metavar="RUN",
    help="The hosts of a run; its own communication is compared with, where deep windows show it.",
)  # fmt: skip
@click.option(
    "--finding", type=click.File(), metavar="FILE",
    help="The hosts of a finding, as `dpro watch --on-finding` gives it to its command; - for stdin.",
)  # fmt: skip
@click.option(
    "--suspect", metavar="LIST", default="", help="Hosts that are to be confirmed; they are marked."
)
@click.option(
    "--launcher", default="ssh", show_default=True, metavar="ssh|srun|local|COMMAND",
    help="What runs a command on a host: `ssh -p 2222 {host}`, `kubectl exec -i {host} --`.",
)  # fmt: skip
@click.option(
    "--python",
    default=sys.executable,
    metavar="PYTHON",
    help="On the hosts, with torch.  [default: dpro's own]",
)
@click.option(
    "--interface", default="", metavar="NAME", help="Of the network.  [default: of the default route]"
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["compute", "disk", "network"]),
    help="Only this; may be repeated.",
)
@click.option(
    "--disk",
    default="",
    metavar="FOLDER",
    help="Write to a folder on each host, too, and read; nothing stays there.",
)
@click.option(
    "--timeout", "timeout_s", type=NumberRange(1, 3600), default=10.0, show_default=True,
    metavar="SECONDS", help="For an exchange between two hosts that does not end.",
)  # fmt: skip
@json_option
def check(as_json: bool, **given: Any) -> None:
    """Check hosts outside of a job: is the suspect really slow?

    \b
    dpro check --hosts node[01-64]                       over ssh
    dpro check --hosts node[01-64] --launcher srun       in an allocation of Slurm
    dpro check --run RUN --suspect node07                the hosts of a run
    dpro check --hosts a,b,c --only network --interface ib0
    dpro check --hosts a,b,c --disk /local/scratch

    Each device multiplies matrices, copies memory and, on GPUs, to and from its host. Then hosts exchange
    data in pairs, each pair once, and reduce in ever larger groups: log2(N) rounds. What is clearly slower
    than the same of its peers is tried again. Each host is

    \b
    PASS  as fast as the others
    SLOW  clearly slower than the others, with what and by how much
    FAIL  does not answer, computes wrongly, or cannot be reached by the others

    A host whose exchanges are nearly all slow is at fault; where one pair alone is, the link between the two.
    A check takes the devices for itself: run it when no job does, or the job is what it measures. The hosts
    need Python with torch, not dpro. Nothing is changed on them. 64 hosts take less than two minutes.

    The exit code is 0 where all is PASS, else 3; or 4 where there are suspects, and only others are not PASS.
    """
    from dpro.extensions.check.answer import check_hosts

    options = _options(given)
    with stderr_console().status("") as status:

        def say(what: str) -> None:
            status.update(f"{what} …")
            if not sys.stderr.isatty():
                click.echo(f"dpro: {what}", err=True)

        answer = check_hosts(options, say)
    if as_json:
        print_json(answer)
    else:
        _print(answer)
    if not answer.passed:
        raise SystemExit(OTHERS_NOT_PASSED if answer.confirmed is False else NOT_PASSED)


def _options(given: dict[str, Any]) -> Any:
    """What is to be checked.

    Raises:
        UsageError: the hosts are not named once, or not all suspects are among them.
        InputError: the run or the finding names none.
    """
    from dpro.extensions.check.answer import TESTS, CheckOptions
    from dpro.topology.hostlist import expand

    named = [name for name in ("hosts", "hostfile", "run", "finding") if given[name]]
    if [name for name in named if name != "run"][1:] or not named:
        raise UsageError("name hosts by one of --hosts, --hostfile, --finding, or by --run")
    suspects = expand(given["suspect"])
    if given["hosts"]:
        names = expand(given["hosts"])
    elif given["hostfile"]:
        names = _of_hostfile(given["hostfile"])
    elif given["finding"]:
        names, more = _of_finding(given["finding"])
        suspects += more
    else:
        names = _of_run(given["run"])
    names = list(dict.fromkeys(names))
    if not names:
        raise UsageError("there is no host to check")
    if isnan(given["timeout_s"]):
        raise UsageError("--timeout is a number of seconds")
    if strange := [host for host in suspects if host not in names]:
        raise UsageError(f"--suspect {', '.join(strange)}: not among the hosts that are checked")
    tests = given["only"] or tuple(test for test in TESTS if test != "disk" or given["disk"])
    if "disk" in tests and not given["disk"]:
        raise UsageError("--only disk: name a folder with --disk")
    return CheckOptions(
        names, frozenset(suspects), given["launcher"], given["python"], given["interface"],
        given["timeout_s"], given["disk"] if "disk" in tests else "", tests, _expected(given["run"], tests),
    )  # fmt: skip


def _of_hostfile(file: TextIO) -> list[str]:
    from dpro.topology.hostlist import expand

    try:
        lines = [line for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{file.name}: this is no text: a hostfile has a host in each line") from error
    return [name for line in lines for name in expand(line.split()[0])]


def _of_run(run: Path) -> list[str]:
    from dpro.cli.analysis import open_or_import

    names = open_or_import(run).manifest.hosts
    if not names:
        raise InputError(f"{run}: does not say on which hosts it was recorded; name them with --hosts")
    return sorted(names)


def _of_finding(file: TextIO) -> tuple[list[str], list[str]]:
    """The hosts of the job, and the one that is named."""
    try:
        finding = json.load(file)
        names, host = [str(name) for name in finding["hosts"]], str(finding["host"] or "")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file.name}: no finding as `dpro watch --on-finding` gives it") from error
    return names, [host] if host else []


def _expected(run: Path | None, tests: tuple[str, ...]) -> RunBandwidth | None:
    """What the run says of an all-reduce; None where it does not, which is said."""
    from dpro.cli.output import warn
    from dpro.errors import DproError

    if run is None or "network" not in tests:
        return None
    try:
        from dpro.extensions.check.answer import run_bandwidth

        return run_bandwidth(run)
    except DproError as error:
        warn(str(error))
        return None


def _print(answer: CheckDocument) -> None:
    out = console()
    passed = [host for host in answer.hosts if host.verdict == "PASS" and not host.suspect]
    for host in answer.hosts:
        if host not in passed or len(passed) <= SHOWN:
            out.print(_line(host))
            for line in host.evidence:
                out.print(f"  - {line}")
    if len(passed) > SHOWN:
        out.print(f"PASS  {len(passed)} others")
    for link in answer.links:
        out.print(f"{link.verdict}  the link {' - '.join(link.hosts)}")
        for line in link.evidence:
            out.print(f"  - {line}")
    if answer.all_reduce is not None:
        reduce = answer.all_reduce
        begins = f"{reduce.verdict}  " if reduce.evidence else ""
        out.print(f"{begins}all-reduce over {reduce.hosts} hosts: {reduce.busbw_gbps:.3g} GB/s bus bandwidth")
        for line in reduce.evidence:
            out.print(f"  - {line}")
    for note in answer.notes:
        out.print(f"note: {note}")
    out.print(f"{len(answer.hosts)} hosts in {answer.seconds:.0f} s, {answer.rounds} rounds of exchanges")


def _line(host: HostVerdict) -> str:
    best: dict[str, str] = {}
    for figure in host.measured:
        best.setdefault(figure.what, f"{figure.what} {figure.value:.3g} {figure.unit}")
    suspect = " (suspect)" if host.suspect else ""
    return f"{host.verdict}  {host.host}{suspect}  {', '.join(best.values())}".rstrip()
