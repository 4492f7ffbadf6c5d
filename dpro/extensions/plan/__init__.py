"""Layouts: step time and memory of a model in any of them (`dpro plan`), and edits of a recorded job's."""

from dpro.plugins import Command, Extension

_EDITS = "dpro.extensions.plan.edits"
EXTENSION = Extension(
    commands={
        "plan": Command(
            "dpro.extensions.plan.command:plan",
            "Rank the parallel layouts of a model on N GPUs.",
            "Change",
            paged=True,
        ),
    },
    edits={
        "Parallelism": {
            "data-parallel": f"{_EDITS}.data_parallel:DataParallelSize",
            "stages": f"{_EDITS}.stages:StageLayers",
            "pipeline": f"{_EDITS}.pipeline:Pipeline",
            "skip": f"{_EDITS}.stages:Skip",
            "fill": f"{_EDITS}.pipeline:Fill",
            "split": f"{_EDITS}.split:Split",
            "moe-pipeline": f"{_EDITS}.split:MoePipeline",
        },
    },
    views={"plan": "dpro.extensions.plan.view:VIEW"},
)
