"""The loop: a change is predicted, made to the real job, measured, and remembered."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "try": Command(
            "dpro.extensions.trial.command:try_",
            "Make a change to a job, and measure what was predicted.",
            "Change",
        ),
        "ledger": Command(
            "dpro.extensions.trial.command:ledger",
            "What was predicted and measured so far.",
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
    },
)
