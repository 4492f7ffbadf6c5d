"""Readable names of C++ functions, where a profiler records the linker's."""

from __future__ import annotations

MANGLED = "_Z"
OF_ROCM = ".kd"  # suffix of a kernel's descriptor


def demangled(name: str) -> str:
    """Demangle a linker's name; other names, and those that cannot be parsed, are returned unchanged."""
    if not name.startswith(MANGLED):
        return name
    from itanium_demangler import parse  # imported here, since few traces have such names

    try:
        function = parse(name.removesuffix(OF_ROCM))
    except (NotImplementedError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return name  # nested functions, expressions, or not a mangled name
    return name if function is None else str(function)
