"""Element types by the names that profilers give them.

In: `BFloat16`, `c10::BFloat16`, `float`, `signed char`. Out: torch's name and the size in bytes.
"""

from __future__ import annotations

from functools import cache

_TYPES = {
    "float64": (8, ("double",)),
    "float32": (4, ("float",)),
    "float16": (2, ("half",)),
    "bfloat16": (2, ()),
    "float8_e4m3fn": (1, ()),
    "float8_e5m2": (1, ()),
    "float8_e4m3fnuz": (1, ()),
    "float8_e5m2fnuz": (1, ()),
    "int64": (8, ("long", "long int", "long long")),
    "int32": (4, ("int",)),
    "int16": (2, ("short", "short int")),
    "int8": (1, ("char", "signed char")),
    "uint8": (1, ("byte", "unsigned char")),
    "uint16": (2, ()),
    "uint32": (4, ("unsigned int",)),
    "uint64": (8, ("unsigned long",)),
    "bool": (1, ()),
    "complex64": (8, ("complexfloat", "c10::complex<float>")),
    "complex128": (16, ("complexdouble", "c10::complex<double>")),
}
_NAMES = {alias: name for name, (_, aliases) in _TYPES.items() for alias in (name, *aliases)}


@cache
def dtype_name(recorded: str) -> str:
    """Torch's name of an element type, empty where the recorded one is not known."""
    lower = recorded.strip().lower()
    return _NAMES.get(lower) or _NAMES.get(lower.rsplit("::", 1)[-1], "")


def dtype_bytes(recorded: str) -> int:
    """Size of an element in bytes, -1 where the type is not known."""
    name = dtype_name(recorded)
    return _TYPES[name][0] if name else -1
