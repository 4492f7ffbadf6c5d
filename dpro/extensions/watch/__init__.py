"""Diagnosis while a job runs.

The one part where recording, importing and detecting meet outside the commands: what is new is read from the
recorder's own files, and the detectors see small tables of it.

A watch has a state, a small record, and a function from a state and what is known to the next state.
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
