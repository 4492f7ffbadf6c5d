"""Export of timelines to other viewers: the content, and one writer per format."""

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
