"""Checking hosts outside of a job: what each computes, copies and exchanges, against its peers."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "check": Command(
            "dpro.extensions.check.command:check",
            "Test hosts without a job: is a suspect really slow?",
            "Operate",
        ),
    },
)
