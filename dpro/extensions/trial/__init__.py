"""Trials: predict a change, apply it to the real job, measure it, and keep the result in a ledger."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "try": Command(
            "dpro.extensions.trial.command:try_",
            "Apply a change to a real job and check its prediction.",
            "Change",
        ),
        "ledger": Command(
            "dpro.extensions.trial.command:ledger",
            "Compare past predictions with measurements.",
            "Change",
            paged=True,
        ),
    },
    options={"record": "dpro.extensions.trial.recorded:OPTIONS"},
    hooks={
        "record": "dpro.extensions.trial.recorded:change_job",
        "predicted": "dpro.extensions.trial.calibrate:as_tried",
        "view whatif": "dpro.extensions.trial.panel:add_tries",
        "tried": "dpro.extensions.trial.changes:how_to_try",
        "measured": "dpro.extensions.trial.panel:measured_in_words",
    },
    needs=("tensors",),
)
