"""Importer of traces in Perfetto's own format."""

from dpro.plugins import Extension

EXTENSION = Extension(importers={"Perfetto": "dpro.extensions.perfetto.importers:PERFETTO"})
