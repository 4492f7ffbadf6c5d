"""What a job runs on, and how its framework does things: data sheet, links, host, and how sure of each.

In: the name of a GPU. Out: `Machine` and `Software`, physical constants each of which can be moved by a
factor. `SPREADS` says by how much each is usually off, as a standard deviation of its logarithm: calibration
moves constants in proportion to these, and intervals follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from dpro.errors import Unanswerable, UsageError
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
# Time of matmuls and attention in training over what loops of one kernel take by `dpro.replay.cost.kernels`:
# clocks fall under load, shapes vary. Set with docs/reality.md's tables in sight, one number per generation
# of GPUs.
IN_TRAINING: Mapping[str, float] = {"H": 1.35, "GH": 1.35, "B": 1.6, "GB": 1.6}


@dataclass(frozen=True)
class Machine:
    """GPUs, their links, and the host that feeds them.

    Attributes:
        gpu: a key of the data sheets.
        per_host: GPUs that share fast links.
        memory_gb: of a GPU, 1e9 bytes.
        inside_gbps: what a large collective within a host reaches per GPU (bus bandwidth), 1e9 bytes/s.
        outside_gbps: what all GPUs of a host together send to other hosts.
        inside_us: what a collective within a host takes beside its bytes, per doubling of its ranks.
        outside_us: what a step from rank to rank of a collective across hosts takes.
        message_us: what a message from stage to stage takes beside its bytes.
        crossed_us: what a host waits for a tensor-parallel collective, per rank of its group, while messages
            of the pipeline cross hosts; 0 on most clusters.
        compute: factor on the time of matmuls and attention, of what the table or the sheet says.
        memory: the same of what memory bounds.
        host_us: what the host needs for a kernel that it launches.
        fixed_ms: of each step, beside all else.
        growth: by how much a step takes longer with each doubling of hosts.
        sheets: data sheets, and what is known of operations.
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
        """Its data sheet.

        Raises:
            Unanswerable: there is none.
        """
        known = self.sheets.sheets if self.sheets else GPUS
        if self.gpu not in known:
            raise Unanswerable(f"no data sheet of {self.gpu!r}: there are {', '.join(known)}")
        return known[self.gpu]


@dataclass(frozen=True)
class Software:
    """How a framework does what every framework does.

    Attributes:
        flash: whether attention is fused (Dao et al., arXiv 2205.14135); else its scores lie in memory.
        sequence_parallel: whether tensor parallelism cuts norms, too (Korthikanti et al., 2205.05198).
        gradient_bytes: of an element that data parallelism reduces.
        overlap: share of the data-parallel communication that computing can hide.
        tensor_overlap: the same of tensor-parallel collectives.
        context_overlap: the same of what context parallelism passes on.
        accumulation_bytes: read and written per parameter when a micro-batch's gradients are added.
        loss_bytes: read and written per logit, of the loss, forward and backward together.
        whole_messages: whether each GPU of a tensor-parallel group sends all of a message to the next stage,
            not its share (Narayanan et al., SC 2021, call the latter scatter/gather).
        balanced: whether stages are cut by their weights, with the output layer, instead of by layers.
        kernels: that the host launches per layer and pass, forward.
        collective_kernels: launches that a tensor-parallel collective costs the host.
        head_kernels: launched for embedding, output layer and loss, per pass and micro-batch.
        dtype: of matmuls.
        dropout: whether there is dropout.
        optimizer_bytes: that a step of the optimizer moves per parameter.
        logit_bytes: that a logit takes at once: in 16 bits, in fp32, and its gradient.
        activations: kept of a layer, over what fused norms, rotation and activation functions keep.
        main_gradient_bytes, state_bytes: kept per parameter, beside two of the parameter itself.
    """

    flash: bool = True
    sequence_parallel: bool = True
    gradient_bytes: int = 4
    overlap: float = 0.0
    tensor_overlap: float = 0.0
    context_overlap: float = 0.8
    accumulation_bytes: float = 8.0
    loss_bytes: float = 40.0
    whole_messages: bool = False
    balanced: bool = False
    kernels: float = 30.0
    collective_kernels: float = 4.0
    head_kernels: float = 60.0
    dtype: str = "bf16"
    dropout: bool = False
    optimizer_bytes: float = 34.0
    main_gradient_bytes: float = 4.0
    activations: float = 1.0
    logit_bytes: float = 10.0
    state_bytes: float = 12.0


# Constants that calibration moves: how far each is usually off, as a standard deviation of its logarithm.
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
    """A machine by the name of its GPU, with what such machines usually reach.

    Args:
        per_host: GPUs that share fast links.
        memory_gb: of a GPU; else by its sheet.

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
        compute=IN_TRAINING.get("".join(takewhile(str.isalpha, gpu)), 1.0),
    )
    machine.sheet  # noqa: B018 - raises where there is none
    return machine


def moved(machine: Machine, logs: Mapping[str, float]) -> Machine:
    """The machine with constants multiplied by exp(log).

    Args:
        logs: natural logarithms of factors, by the names of `SPREADS`.
    """
    from math import exp

    return replace(machine, **{name: getattr(machine, name) * exp(log) for name, log in logs.items()})


# How frameworks that are in wide use train: what each does unlike the others.

FRAMEWORKS: Mapping[str, Software] = {
    # Megatron-core with Transformer Engine: fused attention, norms and losses; reductions overlap backward.
    "megatron": Software(overlap=0.5),
    # Megatron-DeepSpeed as of 2022: scores in memory, dropout, no sequence parallelism, unfused loss.
    "megatron-deepspeed": Software(
        flash=False,
        sequence_parallel=False,
        gradient_bytes=2,
        accumulation_bytes=14.0,
        loss_bytes=90.0,
        kernels=76.0,
        dropout=True,
        logit_bytes=16.0,
    ),
    # nanotron as of 2024: stages balanced with the output layer, few fused kernels.
    "nanotron": Software(
        balanced=True,
        loss_bytes=60.0,
        kernels=140.0,
        activations=1.5,
        logit_bytes=16.0,
    ),
}


def framework_named(name: str) -> Software:
    """What a framework does.

    Raises:
        UsageError: it is not known.
    """
    if name not in FRAMEWORKS:
        raise UsageError(f"no framework {name!r}: there are {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
