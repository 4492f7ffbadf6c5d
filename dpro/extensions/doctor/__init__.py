"""Checks whether a machine is ready to record and to explain."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "doctor": Command(
            "dpro.extensions.doctor.command:doctor",
            "Check whether this machine is ready to record.",
            "Set up",
        ),
    },
)
