"""The inside of a host, from the XML that NCCL writes where `NCCL_TOPO_DUMP_FILE` names a file.

In: the file. Out: how many GPUs and network ports there are, how fast, and which port each GPU is nearest
to: the one with which it shares the most of the PCI tree (NCCL's own rule, `graph/paths.cc`). Links between
GPUs count where the file has them; what passes through a host's processors is not modelled.
"""

from __future__ import annotations

import re
from math import isfinite, nan
from pathlib import Path
from xml.etree import ElementTree

from dpro.errors import InputError
from dpro.limits import MAX_NESTING, read_small
from dpro.topology.file import HostEntry

# 1e9 bytes/s of one NVLink, each way, by compute capability (NVIDIA's data sheets; NCCL's `graph/topo.h` has
# what remains of them for payload).
NVLINK_GBPS = {60: 20.0, 70: 25.0, 80: 25.0, 86: 14.0, 90: 25.0, 100: 50.0, 103: 50.0, 120: 50.0}
# The same of one link between AMD's GPUs, by the number of their architecture (AMD's data sheets).
XGMI_GBPS = {906: 46.0, 908: 46.0, 910: 50.0, 942: 64.0, 950: 76.8}
PCIE_LANE_GBPS = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.97, 32.0: 3.94, 64.0: 7.56}
MAX_BYTES = 4 << 20  # of the file; that of a host of 16 GPUs has 20,000
MAX_DEVICES = 1024
USUAL_GBPS = 25.0  # of a PCI link that the file says nothing of
_Place = tuple[int, ...]  # of an element: the number of its ancestors among their siblings


def read_inside(path: Path, names: str) -> HostEntry:
    """Hosts as the file describes one.

    Raises:
        InputError: it is no topology of NCCL's, or has no GPU.
    """
    try:
        root = ElementTree.fromstring(read_small(path, MAX_BYTES))
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # no XML, or in no encoding there is
        raise InputError(f"{path}: no XML: {error}") from error
    if root.tag != "system":
        raise InputError(f"{path}: begins with <{root.tag}>, and a topology of NCCL's with <system>")
    _keep_one_host(root)
    gpus: list[tuple[_Place, ElementTree.Element, ElementTree.Element | None]] = []
    ports: list[tuple[_Place, ElementTree.Element]] = []
    for place, element, parent in _walk(path, root):
        if element.tag == "gpu":
            gpus.append((place, element, parent))
        elif element.tag == "net":
            ports.append((place, element))
    if not gpus:
        raise InputError(f"{path}: names no GPU")
    if max(len(gpus), len(ports)) > MAX_DEVICES:
        raise InputError(f"{path}: has more than {MAX_DEVICES:,} GPUs or ports, as no host has")
    gpus.sort(key=lambda gpu: _number(path, gpu[1], "dev", 0))
    ports.sort(key=lambda port: _number(path, port[1], "dev", 0))
    gbit = min((_number(path, port, "speed", 0) / 1e3 for _, port in ports), default=0.0)
    return HostEntry(
        names,
        len(gpus),
        min(_gpu_gbps(path, gpu, parent) for _, gpu, parent in gpus),
        len(ports),
        gbit or HostEntry("").nic_gbit,
        _near([place for place, *_ in gpus], [place for place, _ in ports]),
    )


def _keep_one_host(root: ElementTree.Element) -> None:
    """Drop all processors but those of the first host: NVLinks may join several in one file."""
    hosts = [cpu.get("host_hash") for cpu in root.findall("cpu")]
    for cpu, host in zip(root.findall("cpu"), hosts):
        if host != hosts[0]:
            root.remove(cpu)


def _walk(
    path: Path, root: ElementTree.Element
) -> list[tuple[_Place, ElementTree.Element, ElementTree.Element | None]]:
    """All elements with their places and parents.

    Raises:
        InputError: they are nested deeper than a host's devices are.
    """
    elements = []
    left: list[tuple[_Place, ElementTree.Element, ElementTree.Element | None]] = [((), root, None)]
    while left:
        place, element, parent = left.pop()
        if len(place) > MAX_NESTING:
            raise InputError(f"{path}: is nested more than {MAX_NESTING} deep, and no host's devices are")
        elements.append((place, element, parent))
        left += [((*place, number), child, element) for number, child in enumerate(element)]
    return elements


def _number(path: Path, element: ElementTree.Element, name: str, usual: float) -> float:
    text = element.get(name)
    try:
        value = usual if text is None else float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise InputError(f"{path}: <{element.tag} {name}={text!r}>: no number")
    return value


def _gpu_gbps(path: Path, gpu: ElementTree.Element, pci: ElementTree.Element | None) -> float:
    """What a GPU sends to others: over its NVLinks or AMD's links, or over PCI where it has none."""
    between = sum(_number(path, link, "count", 1) for link in gpu.iter("xgmi") if link.get("target"))
    if between:
        model = (gpu.get("gcn") or "").removeprefix("gfx").partition(":")[0]
        number = int(model) if re.fullmatch(r"[0-9]{1,9}", model) else max(XGMI_GBPS)
        return between * XGMI_GBPS[max((version for version in XGMI_GBPS if version <= number), default=906)]
    links = sum(_number(path, link, "count", 1) for link in gpu.iter("nvlink"))
    capability = int(_number(path, gpu, "sm", 90))
    if links:
        at_most = max((version for version in NVLINK_GBPS if version <= capability), default=70)
        return links * NVLINK_GBPS[at_most]
    if pci is None:
        return USUAL_GBPS
    speed = (pci.get("link_speed") or "").split(" ")[0]
    width = _number(path, pci, "link_width", 16)
    lane = PCIE_LANE_GBPS.get(float(speed)) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", speed) else None
    return lane * width if lane and width else USUAL_GBPS


def _near(gpus: list[_Place], ports: list[_Place]) -> list[int]:
    """By GPU, the nearest port; of equally near ones the one that fewest GPUs have, the first of those."""
    if not ports:
        return []
    taken = [0] * len(ports)
    nearest = []
    for gpu in gpus:
        shared = [_shared(gpu, port) for port in ports]
        best = min(range(len(ports)), key=lambda port: (-shared[port], taken[port], port))
        taken[best] += 1
        nearest.append(best)
    return nearest


def _shared(one: _Place, other: _Place) -> int:
    """How many ancestors two places have in common."""
    return next(
        (depth for depth, (ancestor, its) in enumerate(zip(one, other)) if ancestor != its),
        min(len(one), len(other)),
    )
