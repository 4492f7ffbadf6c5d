"""Names of kernels that a person can read: without types, namespaces and arguments.

In: a demangled name. Out: what distinguishes it in a few characters.
"""

from __future__ import annotations

import re

from dpro.words import shortened

LONGEST = 32


def short_kernel(name: str) -> str:
    """The function's own name, and the functor of a pointwise kernel."""
    functor = re.search(r"(\w+)(Functor|_kernel_cuda|_kernel_impl)\b", name)
    plain = re.sub(r"\(anonymous namespace\)|<unnamed>", "", name)
    head = re.split(r"[<(]", re.sub(r"^(void|static|auto) ", "", plain.strip()), maxsplit=1)[0]
    own = head.rsplit("::", 1)[-1].strip() or head
    if "elementwise" in own and functor:
        own = f"{functor[1]} ({own})"
    return shortened(own, LONGEST)
