"""Anonymised copies of runs, to share."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "scrub": Command(
            "dpro.extensions.scrub.command:scrub",
            "Copy a run without names of hosts, paths and modules.",
            "Share",
        ),
    },
)
