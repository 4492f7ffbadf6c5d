"""Runs a script as ranks of a simulated larger job, one after the other, on this machine.

The code that simulates the other ranks runs inside the job, beside the rest of the recorder
(`dpro/collectors/inside/pretend`). The core analyses a run of such ranks like any other run.
"""

from dpro.plugins import Extension

EXTENSION = Extension(
    options={
        "record": "dpro.extensions.pretend.options:OF_RECORD",
        "attach": "dpro.extensions.pretend.options:OF_ATTACH",
        "try": "dpro.extensions.pretend.options:OF_TRY",
    },
    hooks={"record": "dpro.extensions.pretend.options:pretend_ranks"},
)
