"""Measurements and reports of NCCL: logs of its Inspector, recorded or imported, and reports of its RAS."""

from dpro.plugins import Extension

EXTENSION = Extension(
    options={"record": "dpro.extensions.nccl.plugin:OPTIONS"},
    importers={
        "NCCL Inspector": "dpro.extensions.nccl.importers:INSPECTOR",
        "NCCL RAS": "dpro.extensions.nccl.importers:RAS",
    },
    hooks={
        "record": "dpro.extensions.nccl.plugin:load_inspector",
        "recorded": "dpro.extensions.nccl.recorded:convert_inspector_logs",
    },
)
