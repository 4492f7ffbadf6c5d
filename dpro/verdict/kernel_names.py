"""Names of kernels that a person can read: without types, namespaces and arguments.

In: a demangled name. Out: what distinguishes it in a few characters.
"""

from __future__ import annotations

import re

from dpro.words import shortened

LONGEST = 32


_WRAPPERS = re.compile(r"(AUnary|BUnary|Binary|Unary)Functor$")


def short_kernel(name: str) -> str:
    """The function's own name; of a pointwise kernel what it computes of each element."""
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", name).strip()
    head = re.split(r"[<(]", re.sub(r"^(void|static|auto) ", "", plain), maxsplit=1)[0]
    function = head.rsplit("::", 1)[-1].strip() or head
    if "elementwise" in function:
        computed = re.findall(r"\w*Functor\w*|\w+?(?=_kernel_cuda|_kernel_impl)", plain)
        function = next((part for part in reversed(computed) if not _WRAPPERS.match(part)), function)
    return shortened(function, LONGEST)
