"""Importers of traces that have only the operations of pipeline stages."""

from dpro.plugins import Extension

EXTENSION = Extension(
    importers={
        "op-level parquet": "dpro.extensions.pipelines.importers:OPLEVEL",
        "pipeline timeline": "dpro.extensions.pipelines.importers:TIMELINE",
    }
)
