"""How long a training step takes in any layout of its GPUs, and whether it fits: behind `dpro plan`."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "plan": Command(
            "dpro.extensions.plan.command:plan",
            "Rank the parallel layouts of a model on N GPUs.",
            "Change",
            paged=True,
        ),
    },
    views={"plan": "dpro.extensions.plan.view:VIEW"},
)
