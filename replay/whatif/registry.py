"""Which edits there are, by family; each declares its keys, help and documentation itself.

A new edit is a class in the file of its family and its name in the list here: the parser, the command's help
and `docs/whatif.md` follow.
"""

from __future__ import annotations

from dpro.replay.whatif.algorithm import Algorithm
from dpro.replay.whatif.batch import Batch
from dpro.replay.whatif.bucket import Bucket
from dpro.replay.whatif.capture import CudaGraph
from dpro.replay.whatif.comm import Delay, Network, NoCommunication
from dpro.replay.whatif.compress import Compress
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.fusion import Compile, Optimizer
from dpro.replay.whatif.garbage import Garbage
from dpro.replay.whatif.heal import Heal
from dpro.replay.whatif.host import Cpu, FreeHost, NoLaunch, NoSync
from dpro.replay.whatif.input import HideInput, Workers
from dpro.replay.whatif.memory import Accumulate, Recompute
from dpro.replay.whatif.parallel import Balance, Pipeline
from dpro.replay.whatif.precision import Precision
from dpro.replay.whatif.prefetch import Prefetch
from dpro.replay.whatif.priority import Priority
from dpro.replay.whatif.ranks import Drop, Hurt
from dpro.replay.whatif.rhythm import LocalUpdates, Overlap
from dpro.replay.whatif.scale import Remove, Replace, Scale
from dpro.replay.whatif.width import Width

FAMILIES: dict[str, tuple[type[Edit], ...]] = {
    "Selected work": (Scale, Remove, Replace),
    "Ranks": (Heal, Hurt, Drop),
    "Host": (NoLaunch, FreeHost, CudaGraph, Cpu, NoSync, HideInput, Workers, Garbage),
    "Fusion": (Optimizer, Compile),
    "Precision": (Precision,),
    "Memory for time": (Accumulate, Recompute, Batch),
    "Parallelism": (Width, Balance, Pipeline),
    "Communication": (Network, Delay, NoCommunication, Algorithm, Prefetch),
    "Gradients": (Bucket, Priority, Compress, LocalUpdates, Overlap),
}
EDITS: dict[str, type[Edit]] = {edit.name: edit for family in FAMILIES.values() for edit in family}
