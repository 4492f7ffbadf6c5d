"""Which edits there are, by family, and an edit from its text.

In: what the user typed. Out: an edit, or one line that names the nearest thing that exists.

Each edit declares its keys, help and documentation itself. A new edit is a class in the file of its family
and its name in the list here: the parser, the command's help and `docs/whatif.md` follow.
"""

from __future__ import annotations

from dpro.errors import UsageError
from dpro.replay.whatif.edit import Edit, keys_of, make
from dpro.replay.whatif.edits.communication import Algorithm, Delay, Network, NoCommunication
from dpro.replay.whatif.edits.fabric.neighbours import OtherJobs, PlacedRanks
from dpro.replay.whatif.edits.fabric.paths import (
    FailedCable,
    HashedPaths,
    Oversubscription,
    PlannedPaths,
    SprayedPaths,
)
from dpro.replay.whatif.edits.gpu.cuda_graph import CudaGraph
from dpro.replay.whatif.edits.gpu.device import Device
from dpro.replay.whatif.edits.gpu.kernels import Compile, Optimizer, Precision
from dpro.replay.whatif.edits.gradients import Bucket, Compress, Priority
from dpro.replay.whatif.edits.heal import Heal
from dpro.replay.whatif.edits.host import Cpu, FreeHost, NoLaunch, NoSync
from dpro.replay.whatif.edits.parallelism.chunked.moe_pipeline import MoePipeline
from dpro.replay.whatif.edits.parallelism.chunked.split import Split
from dpro.replay.whatif.edits.parallelism.fill import Fill
from dpro.replay.whatif.edits.parallelism.layout import ParallelLayout
from dpro.replay.whatif.edits.parallelism.pipeline import Balance, Pipeline
from dpro.replay.whatif.edits.parallelism.skip import Skip
from dpro.replay.whatif.edits.parallelism.stages import StageLayers
from dpro.replay.whatif.edits.replicas import DataParallelSize
from dpro.replay.whatif.edits.scaling import Accumulate, Batch, Recompute
from dpro.replay.whatif.edits.selected_work import Drop, Remove, Replace, Scale, Slow
from dpro.replay.whatif.edits.synchronisation import LocalUpdates, Overlap, Prefetch
from dpro.replay.whatif.edits.training_loop import Garbage, HideInput, Workers
from dpro.replay.whatif.grammar import nearest, split_edit, values_of

FAMILIES: dict[str, tuple[type[Edit], ...]] = {
    "Selected work": (Scale, Remove, Replace),
    "Ranks": (Heal, Slow, Drop),
    "Host": (NoLaunch, FreeHost, CudaGraph, Cpu, NoSync, HideInput, Workers, Garbage),
    "Fusion": (Optimizer, Compile),
    "Precision": (Precision,),
    "Devices": (Device,),
    "Memory for time": (Accumulate, Recompute, Batch),
    "Parallelism": (
        DataParallelSize,
        ParallelLayout,
        Balance,
        StageLayers,
        Pipeline,
        Skip,
        Fill,
        Split,
        MoePipeline,
    ),
    "Communication": (Network, Delay, NoCommunication, Algorithm, Prefetch),
    "Fabric": (
        PlannedPaths,
        SprayedPaths,
        PlacedRanks,
        HashedPaths,
        FailedCable,
        Oversubscription,
        OtherJobs,
    ),
    "Gradients": (Bucket, Priority, Compress, LocalUpdates, Overlap),
}
EDITS: dict[str, type[Edit]] = {edit.name: edit for family in FAMILIES.values() for edit in family}


def parse_edit(text: str) -> Edit:
    """Make an edit from its text.

    Raises:
        UsageError: no such edit or key (with the nearest one), or a value that is not what it should be.
    """
    name, rest = split_edit(text)
    if name not in EDITS:
        raise UsageError(f"no edit {name!r}{nearest(name, EDITS)}; there are {', '.join(EDITS)}")
    cls = EDITS[name]
    edit = make(cls, values_of(name, rest, keys_of(cls), cls.example), name)
    assert isinstance(edit, Edit)
    return edit
