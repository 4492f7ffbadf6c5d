"""Importers of AMD's profilers; the core reads the traces that torch.profiler writes on AMD GPUs."""

from dpro.plugins import Extension

EXTENSION = Extension(
    importers={
        "rocmProfileData": "dpro.extensions.rocm.importers:RPD",
        "rocprofv3": "dpro.extensions.rocm.importers:ROCPROFV3",
    },
    needs=("nsys",),
)
