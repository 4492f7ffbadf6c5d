"""Tests of hosts without a job: each host's computing, copies and exchanges, compared with its peers."""

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
