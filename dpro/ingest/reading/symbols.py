"""Names of C++ functions as a person writes them, where a profiler gives those of the linker."""

from __future__ import annotations

MANGLED = "_Z"
OF_ROCM = ".kd"  # a kernel's descriptor, which has its name


def demangled(name: str) -> str:
    """The function that a linker's name stands for; what is no such name, or cannot be read, as it is."""
    if not name.startswith(MANGLED):
        return name
    from itanium_demangler import parse  # loaded here: few traces have such names

    try:
        function = parse(name.removesuffix(OF_ROCM))
    except (NotImplementedError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return name  # functions within functions, expressions, or no name at all
    return name if function is None else str(function)
