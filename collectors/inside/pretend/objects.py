"""Collectives of objects: what a pretended rank gets to see of what others would have sent.

In: calls of `torch.distributed` with Python objects. Out: of what every rank gives, this rank's own; of what
one rank gives, what that rank left when it was pretended itself. A rank that is not pretended left nothing:
refused.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..torch_internals import group_ranks
from .mailbox import Mailbox
from .refusal import PretendedRefusal


class Objects:
    """Objects that one process sends and gets."""

    def __init__(self, mailbox: Mailbox, refusal: PretendedRefusal) -> None:
        """Put our functions in the place of torch's.

        Args:
            refusal: for what has no answer.
        """
        self._mailbox, self._refusal = mailbox, refusal
        self._counts: Counter[str] = Counter()
        self.gathered = False
        ours: dict[str, Callable[..., Any]] = {
            "all_gather_object": self._all_gather,
            "gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
            "scatter_object_list": self._scatter,
            "send_object_list": self._send,
            "recv_object_list": self._recv,
        }
        for name, function in ours.items():
            _replace(name, function)

    def _all_gather(self, object_list: Any, obj: Any, group: Any = None, **_: Any) -> None:
        self.gathered = True
        for at in range(dist.get_world_size(group)):
            object_list[at] = _copy(obj)

    def _gather(
        self, obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None,
        group_dst: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        self.gathered = True
        if object_gather_list is not None and dist.get_rank() == _global(dst, group_dst, group):
            for at in range(dist.get_world_size(group)):
                object_gather_list[at] = _copy(obj)

    def _broadcast(
        self, object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None,
        **_: Any,
    ) -> None:  # fmt: skip
        root = _global(src, group_src, group)
        key = self._key("broadcast", group, root)
        if dist.get_rank() == root:
            self._mailbox.leave(key, list(object_list))
        else:
            object_list[:] = self._fetch(f"broadcast_object_list from rank {root}", key, root)

    def _scatter(
        self,
        output: Any,
        given: Any = None,
        src: Any = None,
        group: Any = None,
        group_src: Any = None,
        **_: Any,
    ) -> None:
        root = _global(src, group_src, group)
        key = self._key("scatter", group, root)
        if dist.get_rank() == root:
            self._mailbox.leave(key, list(given))
            output[0] = _copy(given[dist.get_rank(group)])
        else:
            sent = self._fetch(f"scatter_object_list from rank {root}", key, root)
            output[0] = sent[dist.get_rank(group)]

    def _send(
        self, object_list: Any, dst: Any = None, group: Any = None, device: Any = None, group_dst: Any = None,
        **_: Any,
    ) -> None:  # fmt: skip
        to = _global(dst, group_dst, group)
        self._mailbox.leave(self._key("message", group, dist.get_rank(), to), list(object_list))

    def _recv(
        self, object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None,
        **_: Any,
    ) -> int:  # fmt: skip
        if src is None and group_src is None:
            self._refusal.refuse("recv_object_list from any rank", "which rank would send first is unknown")
        sender = _global(src, group_src, group)
        key = self._key("message", group, sender, dist.get_rank())
        object_list[:] = self._fetch(f"recv_object_list from rank {sender}", key, sender)
        return sender

    def _key(self, what: str, group: Any, *ends: int) -> str:
        """What both ends call the next object between them."""
        name = (group or dist.group.WORLD).group_name
        key = " ".join([what, name, *map(str, ends)])
        self._counts[key] += 1
        return f"{key} {self._counts[key]}"

    def _fetch(self, call: str, key: str, sender: int) -> Any:
        if sender not in self._mailbox.ranks:
            why = f"what rank {sender} sends is unknown: pretend it as well (--pretend-ranks {sender},…)"
            self._refusal.refuse(call, why)
        return self._mailbox.fetch(key, sender)


def _global(rank: Any, in_group: Any, group: Any) -> int:
    """A rank of the job, given as such or by its place in a group; rank 0 where neither is."""
    if in_group is None:
        return int(rank or 0)
    places = group_ranks(group or dist.group.WORLD)
    return next(each for each, place in places.items() if place == in_group)


def _copy(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def _replace(name: str, function: Callable[..., Any]) -> None:
    from torch.distributed import distributed_c10d

    original = getattr(distributed_c10d, name, None)
    if original is not None:
        for module in (distributed_c10d, dist):
            setattr(
                module, name, functools.wraps(original)(lambda *args, **kwargs: function(*args, **kwargs))
            )
