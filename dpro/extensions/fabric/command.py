"""The command `dpro topology`: creates, imports, checks and attaches `topology.toml`, the fabric of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.options import NumberRange
from dpro.cli.output import console, json_option, print_json, warn, write_text
from dpro.errors import Unanswerable, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpro.extensions.fabric.answer import TopologyDocument, TrafficDocument
    from dpro.topology.file import HostEntry, TopologyFile

_SOURCES = ("file", "fat_tree", "rail_optimised", "slurm", "ibnetdiscover")
_OF_RUNS = ("paths", "plan", "rules", "avoid", "probes", "nccl_log")
_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
_COUNT = click.IntRange(1, 1_000_000)
_RATE = NumberRange(0, 1e6, min_open=True)
_WRITTEN = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", metavar="[FILE|RUN]", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--fat-tree", type=_COUNT, metavar="HOSTS", help="Generate a fat tree for this many hosts.")
@click.option(
    "--rail-optimised",
    type=_COUNT,
    metavar="HOSTS",
    help="Generate a rail-optimised fabric: each leaf connects the ports of one number.",
)
@click.option(
    "--slurm", type=_EXISTING, metavar="CONF", help="Read switches and hosts from Slurm's topology.conf."
)
@click.option("--ibnetdiscover", type=_EXISTING, metavar="TEXT", help="Read the output of `ibnetdiscover`.")
@click.option(
    "--inside", type=_EXISTING, metavar="XML",
    help="Topology inside each host, as NCCL writes it to NCCL_TOPO_DUMP_FILE.",
)  # fmt: skip
@click.option("--gpus", type=click.IntRange(0, 1024), default=8, show_default=True, help="GPUs per host.")
@click.option(
    "--nics", type=click.IntRange(1, 1024), default=8, show_default=True, help="Network ports per host."
)
@click.option(
    "--gpu-gbps", type=_RATE, default=450.0, show_default=True,
    help="Bandwidth from a GPU to others on its host, in 1e9 bytes/s.",
)  # fmt: skip
@click.option("--gbit", type=_RATE, help="Bandwidth of a cable, in 1e9 bits/s.  [default: 400]")
@click.option(
    "--switch-ports", type=click.IntRange(2, 65_536), default=64, show_default=True, help="Ports per switch."
)
@click.option(
    "--oversubscription", type=_RATE, default=1.0, show_default=True,
    help="Oversubscription of leaf switches: downlink bandwidth over uplink bandwidth.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write topology.toml to FILE."
)
@click.option(
    "--attach", "run", type=click.Path(file_okay=False, path_type=Path), metavar="RUN",
    help="Store the fabric in this run, as `dpro record --topology` does while recording.",
)  # fmt: skip
@click.option(
    "--hosts", "host_map", type=_EXISTING, metavar="CSV",
    help="Also store the host of each rank in RUN, if it was not recorded: rank,host[,local_rank].",
)  # fmt: skip
@click.option(
    "--paths", type=_EXISTING, metavar="JSON",
    help="Store in RUN the paths of its connections, in the format of --plan.",
)  # fmt: skip
@click.option(
    "--plan", type=_WRITTEN, metavar="JSON", help="For RUN, write a path for each connection, ready to load."
)
@click.option(
    "--rules", type=_WRITTEN, metavar="FILE",
    help="With --plan, write what each switch does with packets between two ports.",
)  # fmt: skip
@click.option(
    "--avoid", multiple=True, metavar="PART",
    help="For --plan, a cable, link or switch as findings name it; or PART=0.5: half of it is left.",
)  # fmt: skip
@click.option(
    "--probes", type=_EXISTING, metavar="JSON",
    help="For --plan, observed paths of source ports, in the format of --plan.",
)  # fmt: skip
@click.option(
    "--nccl-log", type=click.Path(exists=True, path_type=Path), multiple=True, metavar="LOG",
    help="Store in RUN the rings and trees from NCCL's log (NCCL_DEBUG=INFO): a file or folder.",
)  # fmt: skip
@json_option
def topology(
    output: Path | None, run: Path | None, host_map: Path | None, as_json: bool, **given: Any
) -> None:
    """Describe the fabric of a job: hosts, ports, switches, cables.

    \b
    dpro topology topology.toml              check a file and summarise it
    dpro topology --fat-tree 128 --oversubscription 2 -o topology.toml
    dpro topology --rail-optimised 128 --switch-ports 64 -o topology.toml
    dpro topology --slurm topology.conf --gbit 400 -o topology.toml
    dpro topology --ibnetdiscover fabric.txt -o topology.toml
    dpro topology topology.toml --attach RUN
    dpro topology topology.toml --attach RUN --hosts hosts.csv    imported traces
    dpro topology RUN                        link loads and the cost of collisions
    dpro topology RUN --plan plan.json       a path for each connection
    dpro topology RUN --plan plan.json --rules rules --avoid 'leaf0 - spine1'
    dpro topology RUN --nccl-log job.log     NCCL's rings and trees

    An error in a file is reported with the name of the entry. Lists of names use the notation of Slurm:
    node[001-128].
    """
    from dpro.extensions.fabric.answer import topology_document
    from dpro.topology.file import FILE, as_toml, check, write

    fabric = _topology_from_options(given)
    check(fabric)
    of_run = given["file"] if given["file"] is not None and given["file"].is_dir() else None
    if of_run is None and any(given[option] for option in _OF_RUNS):
        raise UsageError(
            "--paths, --plan, --rules, --avoid, --probes and --nccl-log need a run: dpro topology RUN --plan "
            "plan.json"
        )
    if (given["rules"] or given["avoid"]) and not given["plan"]:
        raise UsageError("--rules and --avoid need --plan: dpro topology RUN --plan plan.json --rules rules")
    if host_map is not None and run is None:
        raise UsageError("--hosts needs a run: dpro topology FILE --attach RUN --hosts hosts.csv")
    hosts: list[str] = []
    if run is not None:
        from dpro.extensions.fabric.host_map import put_hosts, read_host_map
        from dpro.store import open_run

        opened = open_run(run)
        if host_map is not None:
            opened = put_hosts(opened, read_host_map(host_map))
        hosts = opened.manifest.hosts
        write(fabric, run / FILE)
    if output is not None:
        write_text(output, as_toml(fabric))
    document = topology_document(fabric, hosts)
    if of_run is not None:
        document = _with_traffic(document, of_run, given)
    if as_json:
        print_json(document)
    else:
        _print(document)


def _with_traffic(document: TopologyDocument, run: Path, given: dict[str, Any]) -> TopologyDocument:
    """Add the traffic of a run; store given paths and channels, and write a plan, if requested."""
    from msgspec.structs import replace as changed

    from dpro.cli.analysis import analyse
    from dpro.collectors.launch.recording import launches
    from dpro.collectors.liveness import is_running
    from dpro.extensions.fabric.answer import traffic_document
    from dpro.extensions.fabric.planned import as_text, plan_of
    from dpro.topology.kept import PATHS, PathsFile, as_json, read_paths, write_paths

    if given["paths"]:
        write_paths(read_paths(given["paths"]), run / PATHS)
        others = any(given[option] for option in _OF_RUNS if option != "paths")
        if not others and any(map(is_running, launches(run.resolve()))):
            return document  # its traffic can be read when the job has ended
    if given["nccl_log"]:
        _keep_channels(run, given["nccl_log"])
    analysis = analyse(str(run))
    if given["plan"]:
        probes = read_paths(given["probes"]) if given["probes"] else []
        rules = given["rules"]
        plan = plan_of(analysis.outline.predictive, probes, given["avoid"], with_rules=bool(rules))
        write_text(given["plan"], as_json(PathsFile(paths=plan.entries)))
        if rules:
            write_text(rules, as_text(plan.rules))
    return changed(document, traffic=traffic_document(analysis))


def _keep_channels(run: Path, logs: Sequence[Path]) -> None:
    """Store the rings and trees that NCCL logged with a run.

    Raises:
        Unanswerable: none of them belongs to known ranks of the run.
    """
    from dpro.replay.cost.fabric.placement import groups_of_log
    from dpro.store import open_run
    from dpro.topology.kept import CHANNELS, write_channels
    from dpro.topology.nccl_log import read_nccl_logs

    channels = groups_of_log(open_run(run), read_nccl_logs(logs))
    reasons = {
        "have ranks that the run does not know (another job's log, or one of few ranks)": channels.unknown,
        "lack the lines of some members": channels.incomplete,
        "share their ranks with a communicator of other rings": channels.differing,
    }
    left = "; ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    if not channels.groups:
        raise Unanswerable(f"no communicator of the log matches the run with all its rings: {left}")
    if left:
        warn(f"communicators of NCCL's log that were left out: {left}")
    write_channels(channels.groups, run / CHANNELS)


def _topology_from_options(given: dict[str, Any]) -> TopologyFile:
    """Return the topology that the options name.

    Raises:
        UsageError: none or several are named.
        Unanswerable: a run is named that has none.
    """
    from dpro.extensions.fabric.fabrics import FabricSize, fat_tree, rail_optimised
    from dpro.extensions.fabric.importers import read_ibnetdiscover, read_slurm
    from dpro.topology.file import FILE, read

    named = [name for name in _SOURCES if given[name] is not None]
    if len(named) != 1:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in _SOURCES[1:])
        raise UsageError(f"give one of a FILE, {options}")
    (source,) = named
    gbit = given["gbit"] or 400.0
    if source == "file":
        file = given["file"]
        if file.is_dir() and not (file / FILE).exists():
            raise Unanswerable(f"{file} has no topology: add one with `dpro topology FILE --attach {file}`")
        fabric = read(file / FILE if file.is_dir() else file)
        return _with_inside(fabric, given["inside"]) if given["inside"] else fabric
    host = _host(given, gbit)
    if not host.nics and source != "ibnetdiscover":
        raise UsageError(f"{given['inside']}: has no network port (<net>), so nothing joins the hosts")
    if source == "slurm":
        if given["gbit"] is None:
            raise UsageError("Slurm's topology.conf has no speeds: give --gbit")
        return read_slurm(given["slurm"], gbit, host)
    if source == "ibnetdiscover":
        return read_ibnetdiscover(given["ibnetdiscover"], host, given["gbit"])
    hosts, ports = given[source], given["switch_ports"]
    size = FabricSize(hosts, host.gpus, host.nics, ports, gbit, host.gpu_gbps, given["oversubscription"])
    made = fat_tree(size) if source == "fat_tree" else rail_optimised(size)
    return _with_inside(made, given["inside"]) if given["inside"] else made


def _host(given: dict[str, Any], gbit: float) -> HostEntry:
    from dpro.extensions.fabric.importers import read_inside
    from dpro.topology.file import HostEntry

    if given["inside"]:
        return read_inside(given["inside"], "host")
    return HostEntry("host", given["gpus"], given["gpu_gbps"], given["nics"], gbit)


def _with_inside(fabric: TopologyFile, xml: Path) -> TopologyFile:
    """Add the inside of hosts to a topology; ports stay as they are cabled."""
    from msgspec.structs import replace as changed

    from dpro.extensions.fabric.importers import read_inside

    inside = read_inside(xml, "host")
    hosts = [
        changed(
            entry,
            gpus=inside.gpus,
            gpu_gbps=inside.gpu_gbps,
            near=inside.near if inside.nics == entry.nics else [],
        )
        for entry in fabric.hosts
    ]
    return changed(fabric, hosts=hosts)


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
        lines.append(f"paths     {count} equally short paths from leaf to leaf")
    if document.unreachable:
        lines.append(f"apart     {document.unreachable}: no path to all other leaves")
    if document.unlinked:
        lines.append(f"no cable  {document.unlinked}")
    if document.missing_hosts:
        lines.append(f"missing   hosts of the run: {', '.join(document.missing_hosts)}")
    if document.traffic is not None:
        lines += _traffic_lines(document.traffic)
    console().print("\n".join(lines))


def _rings(traffic: TrafficDocument) -> str:
    """Describe where the rings and trees of groups come from."""
    assumed = "one ring for each port, or two trees of hosts, are assumed"
    if not traffic.channels_from:
        return f"of {traffic.groups:,} groups of ranks: {assumed}"
    recorded = (
        f"of {traffic.groups_recorded:,} of {traffic.groups:,} groups of ranks from {traffic.channels_from}"
    )
    return recorded if traffic.groups_recorded == traffic.groups else f"{recorded}; of the others {assumed}"


def _traffic_lines(traffic: TrafficDocument) -> list[str]:
    from dpro.units import format_bytes

    leave = f"{traffic.connections:,} connections leave their hosts"
    with_paths = traffic.connections - traffic.unknown
    lines = [f"traffic   {leave}, the paths of {with_paths:,} are known", f"rings     {_rings(traffic)}"]
    for cable in traffic.busiest[:3]:
        share = f"{cable.load:.0%} of its capacity, {cable.load_while_busy:.0%} while anything crosses it"
        lines.append(f"busiest   {cable.link}: {format_bytes(int(cable.bytes_per_step))} a step, {share}")
    for collision in traffic.collisions:
        ends = ", ".join(f"{one.source} to {one.target}" for one in collision.connections[:4])
        more = f" and {len(collision.connections) - 4} more" if len(collision.connections) > 4 else ""
        time = f"{collision.together_ms:,.1f} ms a step, which cost {collision.cost_ms:,.1f} ms by themselves"
        lines.append(f"collide   on {collision.link}: {ends}{more}, for {time}")
    saved = f"{traffic.saved_ms:,.1f} ms ({traffic.saved_low_ms:,.1f} to {traffic.saved_high_ms:,.1f})"
    lines.append(f"planned   paths would save {saved} of {traffic.step_ms:,.1f} ms a step")
    return lines
