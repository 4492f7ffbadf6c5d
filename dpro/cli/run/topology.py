"""`dpro topology`: describe the fabric of a job: make, bring in, check and attach `topology.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, json_option, print_json
from dpro.errors import UsageError

if TYPE_CHECKING:
    from dpro.analysis.answers.topology import TopologyDocument
    from dpro.topology.file import HostEntry, TopologyFile

_SOURCES = ("file", "fat_tree", "rail_optimised", "slurm", "ibnetdiscover")
_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", metavar="[FILE]", required=False, type=_EXISTING)
@click.option("--fat-tree", type=click.IntRange(min=1), metavar="HOSTS", help="Make one for this many hosts.")
@click.option(
    "--rail-optimised",
    type=click.IntRange(min=1),
    metavar="HOSTS",
    help="Make one whose leaves each join ports of one number.",
)
@click.option("--slurm", type=_EXISTING, metavar="CONF", help="Switches and hosts of Slurm's topology.conf.")
@click.option("--ibnetdiscover", type=_EXISTING, metavar="TEXT", help="What `ibnetdiscover` printed.")
@click.option(
    "--inside", type=_EXISTING, metavar="XML",
    help="The inside of each host, as NCCL writes it where NCCL_TOPO_DUMP_FILE names a file.",
)  # fmt: skip
@click.option("--gpus", type=click.IntRange(0, 1024), default=8, show_default=True, help="Of each host.")
@click.option(
    "--nics", type=click.IntRange(1, 1024), default=8, show_default=True, help="Ports of each host."
)
@click.option(
    "--gpu-gbps", type=click.FloatRange(min=0, min_open=True), default=450.0, show_default=True,
    help="What a GPU sends to others of its host, 1e9 bytes/s.",
)  # fmt: skip
@click.option(
    "--gbit", type=click.FloatRange(min=0, min_open=True), help="Of a cable, 1e9 bits/s.  [default: 400]"
)
@click.option(
    "--switch-ports", type=click.IntRange(min=2), default=64, show_default=True, help="Ports of a switch."
)
@click.option(
    "--oversubscription", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
    help="Of leaves: what they take from hosts over what they pass on.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write topology.toml here."
)
@click.option(
    "--attach", "run", type=click.Path(file_okay=False, path_type=Path), metavar="RUN",
    help="Put it into this run; `dpro record --topology` does so at once.",
)  # fmt: skip
@json_option
def topology(output: Path | None, run: Path | None, as_json: bool, **given: Any) -> None:
    """Describe the fabric of a job: hosts, ports, switches, cables.

    \b
    dpro topology topology.toml                                       check a file, and say what it has
    dpro topology --fat-tree 128 --oversubscription 2 -o topology.toml
    dpro topology --rail-optimised 128 --switch-ports 64 -o topology.toml
    dpro topology --slurm topology.conf --gbit 400 --inside nccl.xml -o topology.toml
    dpro topology --ibnetdiscover fabric.txt -o topology.toml
    dpro topology topology.toml --attach RUN

    A file that is wrong is refused with a line that names the entry. Lists of names are written as clusters
    write them: node[001-128].
    """
    from dpro.analysis.answers.topology import topology_document
    from dpro.topology.file import FILE, check, write

    found = _described(given)
    check(found)
    hosts: list[str] = []
    if run is not None:
        from dpro.store import open_run

        hosts = open_run(run).manifest.hosts
        write(found, run / FILE)
    if output is not None:
        write(found, output)
    document = topology_document(found, hosts)
    if as_json:
        print_json(document)
    else:
        _print(document)


def _described(given: dict[str, Any]) -> TopologyFile:
    """The topology that the options name.

    Raises:
        UsageError: none or several are named.
    """
    from dpro.topology.fabrics import FabricSize, fat_tree, rail_optimised
    from dpro.topology.file import read
    from dpro.topology.infiniband import read_ibnetdiscover
    from dpro.topology.slurm import read_slurm

    named = [name for name in _SOURCES if given[name] is not None]
    if len(named) != 1:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in _SOURCES[1:])
        raise UsageError(f"give one of a FILE, {options}")
    (source,) = named
    gbit = given["gbit"] or 400.0
    if source == "file":
        found = read(given["file"])
        return _with_inside(found, given["inside"]) if given["inside"] else found
    host = _host(given, gbit)
    if source == "slurm":
        if given["gbit"] is None:
            raise UsageError("Slurm's topology.conf has no speeds: give --gbit")
        return read_slurm(given["slurm"], gbit, host)
    if source == "ibnetdiscover":
        return read_ibnetdiscover(given["ibnetdiscover"], host)
    hosts, ports = given[source], given["switch_ports"]
    size = FabricSize(hosts, host.gpus, host.nics, ports, gbit, host.gpu_gbps, given["oversubscription"])
    made = fat_tree(size) if source == "fat_tree" else rail_optimised(size)
    return _with_inside(made, given["inside"]) if given["inside"] else made


def _host(given: dict[str, Any], gbit: float) -> HostEntry:
    from dpro.topology.file import HostEntry
    from dpro.topology.inside import read_inside

    if given["inside"]:
        return read_inside(given["inside"], "host")
    return HostEntry("host", given["gpus"], given["gpu_gbps"], given["nics"], gbit)


def _with_inside(found: TopologyFile, xml: Path) -> TopologyFile:
    """The topology with the inside of its hosts, whose ports stay as they are cabled."""
    from msgspec.structs import replace as changed

    from dpro.topology.inside import read_inside

    inside = read_inside(xml, "host")
    hosts = [
        changed(
            entry,
            gpus=inside.gpus,
            gpu_gbps=inside.gpu_gbps,
            near=inside.near if inside.nics == entry.nics else [],
        )
        for entry in found.hosts
    ]
    return changed(found, hosts=hosts)


def _print(document: TopologyDocument) -> None:
    lines = [f"hosts     {document.hosts:,} with {document.gpus:,} GPUs and {document.ports:,} ports"]
    for tier in document.tiers:
        ratio = f", {tier.oversubscription:.3g} : 1" if tier.oversubscription is not None else ""
        up = f", up {tier.cables_up:,} cables with {tier.gbit_up / 1e3:,.4g} Tbit/s" if tier.cables_up else ""
        down = f"down {tier.cables_down:,} cables with {tier.gbit_down / 1e3:,.4g} Tbit/s"
        lines.append(f"{tier.tier:<9} {tier.switches:,}: {down}{up}{ratio}")
    if document.paths_max is not None:
        least, most = document.paths_min, document.paths_max
        count = f"{most}" if least == most else f"{least} to {most}"
        lines.append(f"paths     {count} equally short ones from leaf to leaf")
    if document.unreachable:
        lines.append(f"apart     {document.unreachable}: no path to all other leaves")
    if document.unlinked:
        lines.append(f"no cable  {document.unlinked}")
    if document.missing_hosts:
        lines.append(f"missing   hosts of the run: {', '.join(document.missing_hosts)}")
    console().print("\n".join(lines))
