"""Profiles of programs that XLA compiles: JAX, TensorFlow, PyTorch/XLA."""

from dpro.plugins import Extension

EXTENSION = Extension(
    importers={"xplane": "dpro.extensions.xplane.importers:XPLANE"},
    classes={"xplane": "dpro.extensions.xplane.importers:CLASSES"},
)
