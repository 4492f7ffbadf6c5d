"""How much work a batch is, as far as its tensors show without reading them: their elements.

Padded batches differ in shape where their sequences differ in length, and graphs where they differ in size.
In: a batch. Out: a number. Sizes are all that is asked for, nothing is copied or moved.
"""

from __future__ import annotations

from typing import Any

import torch

MAX_PARTS = 256  # of a batch; what has more is not counted: that would take long
_PLAIN = (str, bytes, int, float)


def count_elements(batch: Any) -> int:
    """How many elements the tensors of a batch have; 0 where it has none, or too many parts to look at."""
    try:
        return sum(int(tensor.numel()) for tensor in tensors_in(batch))
    except Exception:  # whatever a class of the job's makes of being asked
        return 0


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors that a batch consists of, in order; none where it has too many parts to look at.

    Lists, tuples, dicts and the attributes of objects (batches of tokenizers and of graphs) are looked into.

    Raises:
        Exception: whatever a class of the job's makes of being asked.
    """
    found: list[torch.Tensor] = []
    parts, met = [batch], {id(None)}
    while parts:
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif id(part) not in met:
            met.add(id(part))
            held = _held(part)
            if len(met) + len(parts) + len(held) > MAX_PARTS:
                return []
            parts.extend(reversed([*held]))
    return found


def _held(part: Any) -> Any:
    """What a part consists of."""
    if isinstance(part, dict):
        return part.values()
    if isinstance(part, (list, tuple)):
        return () if part and isinstance(part[0], _PLAIN) else part
    return () if isinstance(part, (type, *_PLAIN)) else getattr(part, "__dict__", {}).values()
