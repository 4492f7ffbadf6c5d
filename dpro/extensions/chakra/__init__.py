"""Execution traces, as PyTorch's observer writes them or in Chakra's schema: recorded, and imported."""

from dpro.plugins import Extension

EXTENSION = Extension(
    options={"record": "dpro.extensions.chakra.recorded:OPTIONS"},
    importers={"execution trace": "dpro.extensions.chakra.importers:EXECUTION_TRACE"},
    hooks={"window": "dpro.extensions.chakra.recorded:add_dependencies"},
)
