"""Profiles of programs that XLA compiles: JAX, TensorFlow, PyTorch/XLA."""

from dpro.plugins import Extension

EXTENSION = Extension(importers={"XPlane": "dpro.extensions.xplane.importers:XPLANE"})
