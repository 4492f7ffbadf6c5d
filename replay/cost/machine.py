"""Machine model from data sheets: GPUs, links, host, the error of each constant, and times of transfers.

Takes the name of a GPU; returns a `Machine` of physical constants, each of which a factor can move, and
microseconds of transfers on its links. `SPREADS` has the usual error of each constant, as a standard
deviation of its logarithm: calibration moves constants in proportion to it, and intervals follow from it.

Used for transfers over links that were never recorded. A ring over a group (Thakur, Rabenseifner and Gropp,
IJHPCA 19, 2005) moves (n-1)/n of its bytes per GPU; across hosts all rings of a host share its ports, and
each step waits for the slowest link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from dpro.arrays import Bools, Floats
from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.estimate import Sources
from dpro.replay.cost.kernels.roofline import GPUS, GpuModel

# GB/s that a GPU sends over links within its host, by data sheet, and GB of memory; sources: `roofline.py`.
NVLINK: Mapping[str, float] = {"V100": 150, "A100": 300, "A800": 200, "H100": 450, "H800": 200, "H200": 450}
NVLINK_LATER: Mapping[str, float] = {"B200": 900, "GB200": 900, "B300": 900, "GB300": 900, "GH200": 450}
MI = {"MI250": 150, "MI300": 448, "MI325": 448, "MI350": 538, "MI355": 538}
PCIE = 32.0
MEMORY_GB: Mapping[str, float] = {
    **{"V100": 32, "A100": 40, "A100-SXM-80GB": 80, "A100-SXM4-80GB": 80, "A800-SXM4-80GB": 80},
    **{"H100": 80, "H800": 80, "H200": 141, "B200": 180, "GB200": 186, "B300": 270, "GB300": 279},
    **{"MI300X": 192, "MI325X": 256, "MI350X": 288, "MI355X": 288},
}
REACHED_INSIDE = 0.75  # of a link within a host, by large collectives (measured curves of A100 and H100)
REACHED_OUTSIDE = 0.5  # of a host's network ports, when all its GPUs send
PORT_GBPS: Mapping[str, float] = {"V100": 12.5, "A100": 25, "A800": 25, "H100": 50, "H800": 50, "H200": 50}
PORT_LATER = 50.0
# Time of matmuls and attention in training over the time of one-kernel loops by `dpro.replay.cost.kernels`:
# clocks fall under load, and shapes vary. Set in view of the tables of docs/accuracy.md, one number per
# generation of GPUs.
TRAINING_FACTOR: Mapping[str, float] = {"H": 1.35, "GH": 1.35, "B": 1.6, "GB": 1.6}


@dataclass(frozen=True)
class Machine:
    """GPUs, their links, and the host that feeds them.

    Attributes:
        gpu: a key of the data sheets.
        per_host: GPUs that share fast links.
        memory_gb: of a GPU, 1e9 bytes.
        inside_gbps: reached by a large collective within a host, per GPU (bus bandwidth), 1e9 bytes/s.
        outside_gbps: sent by all GPUs of a host together to other hosts, 1e9 bytes/s.
        inside_us: latency of a collective within a host, per doubling of its ranks.
        outside_us: latency of a step from rank to rank of a collective across hosts.
        message_us: latency of a message from stage to stage.
        crossed_us: wait of a host for a tensor-parallel collective, per rank of its group, while messages of
            the pipeline cross hosts; 0 on most clusters.
        compute: factor on the time of matmuls and attention by the table or the sheet.
        memory: factor on the time of memory-bound work.
        host_us: host time per kernel launch.
        fixed_ms: of each step, in addition to everything else.
        growth: relative increase of the step time with each doubling of hosts.
        sheets: data sheets, and measurements of operations.
    """

    gpu: str
    per_host: int = 8
    memory_gb: float = 80.0
    inside_gbps: float = 230.0
    outside_gbps: float = 80.0
    inside_us: float = 40.0
    outside_us: float = 15.0
    message_us: float = 30.0
    crossed_us: float = 0.0
    compute: float = 1.0
    memory: float = 1.1
    host_us: float = 10.0
    fixed_ms: float = 2.0
    growth: float = 0.005
    sheets: Sources | None = None

    @property
    def sheet(self) -> GpuModel:
        """Data sheet of the GPU.

        Raises:
            Unanswerable: there is none.
        """
        sheets = self.sheets.sheets if self.sheets else GPUS
        if self.gpu not in sheets:
            raise Unanswerable(f"no data sheet of {self.gpu!r}: there are {', '.join(sheets)}")
        return sheets[self.gpu]


# Constants that calibration moves: their usual errors, as standard deviations of their logarithms.
SPREADS: Mapping[str, float] = {
    "compute": 0.12,
    "memory": 0.25,
    "inside_gbps": 0.3,
    "outside_gbps": 0.5,
    "inside_us": 0.5,
    "outside_us": 0.8,
    "message_us": 0.6,
    "crossed_us": 0.5,
    "host_us": 0.6,
    "fixed_ms": 0.7,
    "growth": 0.7,
}


def machine_of(gpu: str, per_host: int = 8, memory_gb: float | None = None) -> Machine:
    """Return the machine of a GPU, with what such machines usually reach.

    Args:
        per_host: GPUs that share fast links.
        memory_gb: of a GPU; by default from its sheet.

    Raises:
        Unanswerable: there is no data sheet of that GPU.
    """
    links = {**NVLINK, **NVLINK_LATER, **MI}
    inside = next((value for key, value in links.items() if gpu.startswith(key)), PCIE)
    if "PCI" in gpu:
        inside = PCIE
    port = next((value for key, value in PORT_GBPS.items() if gpu.startswith(key)), PORT_LATER)
    machine = Machine(
        gpu,
        per_host,
        memory_gb or MEMORY_GB.get(gpu, 80.0),
        REACHED_INSIDE * inside,
        REACHED_OUTSIDE * port * per_host,
        compute=TRAINING_FACTOR.get("".join(takewhile(str.isalpha, gpu)), 1.0),
    )
    machine.sheet  # noqa: B018 - raises where there is none
    return machine


def with_factors(machine: Machine, logs: Mapping[str, float]) -> Machine:
    """Return the machine with constants multiplied by exp(log).

    Args:
        logs: natural logarithms of factors, by the names of `SPREADS`.
    """
    from math import exp

    return replace(machine, **{name: getattr(machine, name) * exp(log) for name, log in logs.items()})


# Times of transfers.


def one_way_us(num_bytes: Floats, ranks: Floats, stride: Floats, machine: Machine) -> Floats:
    """Return [N] microseconds of an all-gather or a reduce-scatter; an all-reduce is one of each.

    Args:
        num_bytes: [N] of the whole buffer.
        ranks: [N] in the group.
        stride: [N] between neighbouring ranks of the group.
    """
    inside_most = np.clip(machine.per_host // np.maximum(stride, 1), 1, None)
    local = np.minimum(ranks, inside_most)  # members of the group on one host
    hosts = np.ceil(ranks / local)
    share = np.where(ranks > 1, (ranks - 1) / np.maximum(ranks, 1), 0.0)
    inside = share * num_bytes / (machine.inside_gbps * 1e3)
    sharing = machine.per_host / local  # groups whose members share a host's ports
    through = num_bytes * (hosts - 1) / np.maximum(hosts, 1) * sharing
    outside = np.where(hosts > 1, through / (machine.outside_gbps * 1e3), 0.0)
    latency = machine.inside_us * np.log2(np.maximum(local, 1)) + np.where(
        hosts > 1, machine.outside_us * (ranks - 1), 0.0
    )
    total: Floats = np.where(ranks > 1, np.maximum(inside, outside) + latency, 0.0)
    return total


def all_to_all_us(num_bytes: Floats, ranks: Floats, stride: Floats, machine: Machine) -> Floats:
    """Return [N] microseconds of an exchange in which each rank sends equal parts of its data to all others.

    Args:
        num_bytes: [N] of the data of a rank.
        ranks: [N] in the group.
        stride: [N] between neighbouring ranks of the group.
    """
    inside = np.minimum(ranks, np.clip(machine.per_host // np.maximum(stride, 1), 1, None))
    out_of_host = np.where(ranks > inside, (ranks - inside) / np.maximum(ranks, 1), 0.0)
    within = num_bytes * (inside - 1) / np.maximum(ranks, 1) / (machine.inside_gbps * 1e3)
    across = num_bytes * out_of_host / (machine.outside_gbps / machine.per_host * 1e3)
    latency = np.where(ranks > 1, machine.inside_us * np.log2(np.maximum(ranks, 1)), 0.0)
    us: Floats = within + across + latency
    return us


def message_us(num_bytes: Floats, within_host: Bools, machine: Machine) -> Floats:
    """Return [N] microseconds of a message; across hosts, all GPUs of the host share its ports."""
    outside = num_bytes * machine.per_host / (machine.outside_gbps * 1e3)
    inside = num_bytes / (machine.inside_gbps * 0.5e3)
    us: Floats = machine.message_us + np.where(within_host, inside, outside)
    return us
