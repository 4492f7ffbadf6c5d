"""`dpro check`: test, without a job, whether a host or a link is slow or broken."""

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

# Exit codes; 1 and 2 are those of errors.
NOT_PASSED = 3  # a host or a link is not PASS; if there are suspects, one of these
OTHERS_NOT_PASSED = 4  # there are suspects, and all are PASS
SHOWN = 16  # most hosts with PASS to print one per line; more are only counted


@click.command()
@click.option("--hosts", metavar="LIST", default="", help="Hosts: a,b,c or node[01-64].")
@click.option(
    "--hostfile",
    type=click.File(),
    metavar="FILE",
    help="File with one host per line; text after a blank is ignored.",
)
@click.option(
    "--run", type=click.Path(exists=True, path_type=Path), metavar="RUN",
    help="Hosts of a run; the results are compared with its own communication, if deep windows show it.",
)  # fmt: skip
@click.option(
    "--finding", type=click.File(), metavar="FILE",
    help="Hosts of a finding, as `dpro watch --on-finding` passes it to its command; - for stdin.",
)  # fmt: skip
@click.option("--suspect", metavar="LIST", default="", help="Hosts to confirm as faulty; they are marked.")
@click.option(
    "--launcher", default="ssh", show_default=True, metavar="ssh|srun|local|COMMAND",
    help="How to run a command on a host: `ssh -p 2222 {host}`, `kubectl exec -i {host} --`.",
)  # fmt: skip
@click.option(
    "--python",
    default=sys.executable,
    metavar="PYTHON",
    help="Python on the hosts; needs torch.  [default: dpro's own]",
)
@click.option(
    "--interface",
    default="",
    metavar="NAME",
    help="Network interface.  [default: the one of the default route]",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["compute", "disk", "network"]),
    help="Run only this test; can be repeated.",
)
@click.option(
    "--disk",
    default="",
    metavar="FOLDER",
    help="Also test writing to and reading from a folder on each host; nothing is left there.",
)
@click.option(
    "--timeout", "timeout_s", type=NumberRange(1, 3600), default=10.0, show_default=True,
    metavar="SECONDS", help="Timeout of an exchange between two hosts.",
)  # fmt: skip
@json_option
def check(as_json: bool, **given: Any) -> None:
    """Test hosts without a job: is a suspect really slow?

    \b
    dpro check --hosts node[01-64]                       over ssh
    dpro check --hosts node[01-64] --launcher srun       in a Slurm allocation
    dpro check --run RUN --suspect node07                the hosts of a run
    dpro check --hosts a,b,c --only network --interface ib0
    dpro check --hosts a,b,c --disk /local/scratch

    Each device multiplies matrices and copies memory, and GPUs copy to and from their host. Then each pair of
    hosts exchanges data once, and hosts reduce in groups of doubling size: log2(N) rounds. A result clearly
    slower than its peers is measured again. The verdict for each host is one of

    \b
    PASS  as fast as the others
    SLOW  clearly slower than the others: in which test, and by how much
    FAIL  no answer, wrong results, or unreachable from the others

    If nearly all exchanges of a host are slow, the host is at fault; if a single pair is slow, the link
    between the two is. The test needs idle devices: a running job would distort the results. The hosts need
    Python with torch, not dpro. Nothing is changed on them. 64 hosts take less than two minutes.

    The exit code is 0 if every host passes, and 3 otherwise; 4 if there are suspects and only other hosts
    do not pass.
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
    """Return what to check.

    Raises:
        UsageError: the hosts are not named exactly once, or a suspect is not among them.
        InputError: the run or the finding names no host.
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
        raise UsageError("no host to check: the list of hosts is empty")
    if isnan(given["timeout_s"]):
        raise UsageError("--timeout must be a number of seconds")
    if strange := [host for host in suspects if host not in names]:
        raise UsageError(f"--suspect {', '.join(strange)}: not among the hosts to check")
    tests = given["only"] or tuple(test for test in TESTS if test != "disk" or given["disk"])
    if "disk" in tests and not given["disk"]:
        raise UsageError("--only disk: name a folder with --disk")
    return CheckOptions(
        names, frozenset(suspects), given["launcher"], given["python"], given["interface"],
        given["timeout_s"], given["disk"] if "disk" in tests else "", tests,
        _bandwidth_of_run(given["run"], tests),
    )  # fmt: skip


def _of_hostfile(file: TextIO) -> list[str]:
    from dpro.topology.hostlist import expand

    try:
        lines = [line for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{file.name}: is not text: a hostfile has one host per line") from error
    return [name for line in lines for name in expand(line.split()[0])]


def _of_run(run: Path) -> list[str]:
    from dpro.cli.analysis import open_or_import

    names = open_or_import(run).manifest.hosts
    if not names:
        raise InputError(f"{run}: does not say on which hosts it was recorded; name them with --hosts")
    return sorted(names)


def _of_finding(file: TextIO) -> tuple[list[str], list[str]]:
    """Return the hosts of the job, and the host that the finding names, if any."""
    try:
        finding = json.load(file)
        names, host = [str(name) for name in finding["hosts"]], str(finding["host"] or "")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file.name}: no finding as `dpro watch --on-finding` gives it") from error
    return names, [host] if host else []


def _bandwidth_of_run(run: Path | None, tests: tuple[str, ...]) -> RunBandwidth | None:
    """Return the all-reduce of the run; None, with a warning, if the run has none."""
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
