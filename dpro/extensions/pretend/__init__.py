"""Ranks of a job that is not there: a script runs as some of them, one after the other, on this machine.

What stands for the other ranks runs inside the job, beside the rest of the recorder
(`dpro/collectors/inside/pretend`). What a run of such ranks says of a step is the core's, as of any run.
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
