"""Importers of AMD's profilers, and telemetry of its GPUs; the core reads traces of torch.profiler."""

from dpro.plugins import Extension

EXTENSION = Extension(
    importers={
        "rocmProfileData": "dpro.extensions.rocm.importers:RPD",
        "rocprof": "dpro.extensions.rocm.importers:ROCPROF",
        "rocprofv3": "dpro.extensions.rocm.importers:ROCPROFV3",
    },
    telemetry={"AMD SMI": "dpro.extensions.rocm.telemetry:AMD_SMI"},
    needs=("nsys",),
)
