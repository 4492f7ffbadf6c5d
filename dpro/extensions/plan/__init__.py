"""Predicts the step time and memory of a model in any parallel layout of its GPUs: `dpro plan`."""

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
