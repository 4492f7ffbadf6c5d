"""Importer of profiles of programs compiled by XLA: JAX, TensorFlow, PyTorch/XLA."""

from dpro.plugins import Extension

EXTENSION = Extension(
    importers={"XPlane": "dpro.extensions.xplane.importers:XPLANE"},
    needs=("nsys",),
)
