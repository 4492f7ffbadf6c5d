"""Diagnosis while a job runs.

Besides the commands, only this package combines recording, importing and detecting: it reads new records from
the recorder's files, and the detectors see small tables of them.

Each watch has its state as a small record, and a function from a state and an observation to the next state.
"""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "watch": Command(
            "dpro.extensions.watch.command:watch",
            "Report hangs and slowdowns while a job runs.",
            "Operate",
        ),
        "recipe": Command(
            "dpro.extensions.watch.command:recipe",
            "Print scripts that connect dpro watch to other systems.",
            "Operate",
            paged=True,
        ),
    },
    options={"record": "dpro.extensions.watch.command:OPTIONS_OF_RECORD"},
    hooks={"record": "dpro.extensions.watch.command:watch_recording"},
    needs=("goodput", "history"),
)
