"""Which edits there are, by family, and an edit from its text.

In: what the user typed. Out: an edit, or one line that names the nearest thing that exists.

Each edit declares its keys, help and documentation itself. A new edit is a class in the file of its family
and its name in the list here: the parser, the command's help and `docs/reference/edits.md` follow. The list
names modules and classes as text, and an edit is imported when it is asked for: importing all of them takes
as long as to predict one.
"""

from __future__ import annotations

from importlib import import_module

from dpro.errors import UsageError
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.grammar import keys_of, make, nearest, split_edit, values_of

FAMILIES: dict[str, dict[str, str]] = {
    "Selected work": {
        "scale": "selected_work:Scale",
        "remove": "selected_work:Remove",
        "replace": "selected_work:Replace",
    },
    "Ranks": {
        "heal": "heal:Heal",
        "slow": "selected_work:Slow",
        "drop": "selected_work:Drop",
    },
    "Host": {
        "no-launch": "host:NoLaunch",
        "free-host": "host:FreeHost",
        "cuda-graph": "cuda_graph:CudaGraph",
        "cpu": "host:Cpu",
        "no-sync": "host:NoSync",
        "hide-input": "training_loop:HideInput",
        "workers": "training_loop:Workers",
        "gc": "training_loop:Garbage",
    },
    "Fusion": {
        "optimizer": "kernels:Optimizer",
        "compile": "kernels:Compile",
    },
    "Precision": {"precision": "kernels:Precision"},
    "Devices": {"device": "device:Device"},
    "Memory for time": {
        "accumulate": "scaling:Accumulate",
        "recompute": "scaling:Recompute",
        "batch": "scaling:Batch",
    },
    "Parallelism": {
        "data-parallel": "scaling:DataParallelSize",
        "balance": "pipeline:Balance",
        "stages": "stages:StageLayers",
        "pipeline": "pipeline:Pipeline",
        "skip": "stages:Skip",
        "fill": "pipeline:Fill",
        "split": "split:Split",
        "moe-pipeline": "split:MoePipeline",
    },
    "Communication": {
        "network": "communication:Network",
        "delay": "communication:Delay",
        "no-comm": "communication:NoCommunication",
        "algorithm": "communication:Algorithm",
        "prefetch": "synchronisation:Prefetch",
    },
    "Fabric": {
        "paths": "fabric:PlannedPaths",
        "spray": "fabric:SprayedPaths",
        "place": "fabric:PlacedRanks",
        "ecmp": "fabric:HashedPaths",
        "fail": "fabric:FailedCable",
        "oversubscription": "fabric:Oversubscription",
        "beside": "fabric:OtherJobs",
    },
    "Gradients": {
        "bucket": "gradients:Bucket",
        "priority": "gradients:Priority",
        "compress": "gradients:Compress",
        "local-updates": "synchronisation:LocalUpdates",
        "overlap": "synchronisation:Overlap",
    },
}
EDITS = {name: place for family in FAMILIES.values() for name, place in family.items()}


def kind_named(name: str) -> type[Edit]:
    """The class of an edit, imported when it is first asked for.

    Raises:
        KeyError: there is no edit of that name.
    """
    module, _, attribute = EDITS[name].partition(":")
    kind: type[Edit] = getattr(import_module(f"dpro.replay.whatif.edits.{module}"), attribute)
    return kind


def all_kinds() -> list[type[Edit]]:
    """The classes of all edits, in the order of the families."""
    return list(map(kind_named, EDITS))


def parse_edit(text: str) -> Edit:
    """Make an edit from its text.

    Raises:
        UsageError: no such edit or key (with the nearest one), or a value that is not what it should be.
    """
    name, rest = split_edit(text)
    if name == "layout":
        raise UsageError("layouts are ranked by `dpro plan RUN --gpus N --keep tp=4`, not by an edit")
    if name not in EDITS:
        raise UsageError(f"no edit {name!r}{nearest(name, EDITS)}; there are {', '.join(EDITS)}")
    kind = kind_named(name)
    edit = make(kind, values_of(name, rest, keys_of(kind), kind.example), name)
    assert isinstance(edit, Edit)
    return edit
