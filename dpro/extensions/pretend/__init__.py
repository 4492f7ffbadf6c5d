"""Runs a script as ranks of a simulated larger job, one after the other, on this machine.

The code in `inside/` simulates the other ranks; the recorder loads it in the job. The core analyses a run of
such ranks like any other run.
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
