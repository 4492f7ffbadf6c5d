"""Timelines for other tools: what to draw, and one file per format."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "export": Command(
            "dpro.extensions.export.command:export",
            "Export timelines for Perfetto and other viewers.",
            "Share",
        ),
    },
)
