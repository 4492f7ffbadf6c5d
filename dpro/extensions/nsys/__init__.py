"""Importer of exports of Nsight Systems."""

from dpro.plugins import Extension

EXTENSION = Extension(
    importers={"nsys": "dpro.extensions.nsys.importers:NSYS"},
    hooks={"passed_over": "dpro.extensions.nsys.importers:name_report"},
)
