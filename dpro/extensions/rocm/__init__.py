"""Recordings of AMD's profilers. The traces that torch.profiler writes on AMD are the core's."""

from dpro.plugins import Extension

EXTENSION = Extension(
    importers={
        "rocmProfileData": "dpro.extensions.rocm.importers:RPD",
        "rocprofv3": "dpro.extensions.rocm.importers:ROCPROFV3",
    }
)
