"""Have our own code called around a function of somebody else's.

In: a function, and what to call before and after it. It gets the same arguments, and its exceptions pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def patch(
    owner: Any,
    name: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> None:
    """Have `before` and `after` called around a function; they get its first argument, if there is one.

    Args:
        owner: the module or class that has the function.
        name: its name there.
        before: must not raise.
        after: must not raise; not called where the function raised.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        before(*args[:1])
        result = original(*args, **kwargs)
        after(*args[:1])
        return result

    setattr(owner, name, patched)
