"""What each collective call of a pretended rank brings, and the work that its caller waits for.

In: calls of any process group, from Python, from DDP's reducer and from compiled code: the operators
`c10d::…` that all of them pass through get kernels of ours. Out: answers at once. Others' contributions are
taken to be this rank's own; what only others have is a constant.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .calls import Calls, Members
from .mailbox import Mailbox
from .received import SMALL, Received, unmark
from .refusal import PretendedRefusal, place

KEPT = 4096  # works that a caller may still ask; it has asked, or never will, those before them
FILL = 0.01  # of weights and activations that only others have: neither zero nor denormal


class Answered(dist.Work):  # type: ignore[misc] # of torch, untyped
    """The work of one call, which is over."""

    def __init__(self, call: dict[str, Any], tensors: Sequence[Any], source: int = -1) -> None:
        """It is over from the beginning.

        Args:
            call: as `Calls` keeps it.
            source: the group's rank that sent it, for a message.
        """
        super().__init__()
        self._call, self._tensors, self._source = call, tensors, source

    def wait(self, timeout: Any = None) -> bool:
        """Return at once, and note that the caller asked."""
        if self._call["asked_ns"] < 0:
            self._call["asked_ns"] = time.time_ns()
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return True

    def is_success(self) -> bool:
        """Whether it went well."""
        return True

    def exception(self) -> None:
        """What went wrong."""

    def result(self) -> Any:
        """What it brings."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """Who sent it."""
        return self._source

    def get_future(self) -> Any:
        """A future that is done; who takes it waits unseen."""
        self._call["future"] = True
        unmark(self._tensors)  # it is DDP that takes futures: gradients are no numbers to decide by
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class PretendedAnswers:
    """The kernels of one process."""

    def __init__(self, calls: Calls, received: Received, refusal: PretendedRefusal, mailbox: Mailbox) -> None:
        """Put our kernels in the place of torch's.

        Args:
            calls: where calls are noted.
            refusal: for what has no answer.
        """
        self._calls, self._received, self._refusal = calls, received, refusal
        self._mailbox, self._passings = mailbox, Counter[str]()
        self._works: deque[Any] = deque(maxlen=KEPT)  # torch does not keep what we made of a work alive
        self._library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name, kernel in self._kernels().items():
                if hasattr(torch.ops.c10d, name):
                    for key in ("CPU", "CUDA"):
                        self._library.impl(name, kernel, key)

    def _kernels(self) -> dict[str, Callable[..., Any]]:
        return {
            "allreduce_": lambda tensors, group, *_, **__: (
                tensors,
                self._same("all_reduce", group, tensors),
            ),
            "allreduce_coalesced_": lambda tensors, group, *_, **__: self._same("all_reduce", group, tensors),
            "broadcast_": self._broadcast,
            "reduce_": lambda tensors, group, *_, **__: self._same("reduce", group, tensors),
            "barrier": lambda tensor, group, *_, **__: self._same("barrier", group, []),
            "monitored_barrier_": lambda tensor, group, *_, **__: None,
            "allgather_": self._all_gather,
            "_allgather_base_": self._all_gather_base,
            "allgather_coalesced_": self._all_gather_coalesced,
            "allgather_into_tensor_coalesced_": self._all_gather_tensors,
            "reduce_scatter_": self._reduce_scatter,
            "_reduce_scatter_base_": self._reduce_scatter_base,
            "reduce_scatter_tensor_coalesced_": self._reduce_scatter_tensors,
            "gather_": self._gather,
            "scatter_": self._scatter,
            "alltoall_": self._all_to_all,
            "alltoall_base_": self._all_to_all_base,
            "send": self._send,
            "recv_": self._recv,
            "recv_any_source_": self._recv_any,
        }

    def _answer(
        self,
        op: str,
        boxed: Any,
        given: Sequence[Any],
        got: Sequence[Any],
        fill: Callable[[Members, int], bool | None] = lambda *_: None,
        peer: int = -1,
    ) -> Any:
        """Answer a call.

        Args:
            fill: fills what it gets; called with the group and this rank's place in it. Returns whether it
                knew what the others sent.
            peer: for a message, the other's place in the group.
        """
        group = dist.ProcessGroup.unbox(boxed)
        of, at = self._calls.members(group), group.rank()
        call = self._calls.begin(op, of, given, got, of.ranks[peer] if peer >= 0 else -1)
        with torch.no_grad():
            known = fill(of, at)
        if len(of.ranks) > 1 and op != "send" and not known:
            self._received.mark(got, f"{op} of {len(of.ranks)} ranks at {place()}" if _has_small(got) else "")
        work = Answered(call, got, peer)
        self._works.append(work)
        call["ended_ns"] = time.time_ns()
        return work.boxed()

    def _same(self, op: str, group: Any, tensors: Sequence[Any]) -> Any:
        return self._answer(op, group, tensors, tensors)

    def _broadcast(self, tensors: Any, group: Any, root: int, *_: Any, **__: Any) -> Any:
        def fill(of: Members, at: int) -> bool:
            return self._passed("broadcast", tensors, of, of.ranks[root], at == root)

        return tensors, self._answer("broadcast", group, tensors, tensors, fill)

    def _all_gather(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        flat = [each for slots in outputs for each in slots]
        return outputs, self._answer("all_gather", group, inputs, flat, lambda *_: _copies(outputs, inputs))

    def _all_gather_coalesced(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        flat = [each for slots in outputs for each in slots]
        return self._answer("all_gather", group, inputs, flat, lambda *_: _by_column(outputs, inputs))

    def _all_gather_base(self, output: Any, given: Any, group: Any, *_: Any, **__: Any) -> Any:
        fill = lambda of, _: _tiled(output, given, len(of.ranks))  # noqa: E731
        return output, self._answer("all_gather", group, [given], [output], fill)

    def _all_gather_tensors(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(of: Members, _: int) -> None:
            for output, given in zip(outputs, inputs):
                _tiled(output, given, len(of.ranks))

        return self._answer("all_gather", group, inputs, outputs, fill)

    def _reduce_scatter(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(_: Members, at: int) -> None:
            for output, parts in zip(outputs, inputs):
                output.copy_(parts[at])

        flat = [each for parts in inputs for each in parts]
        return outputs, self._answer("reduce_scatter", group, flat, outputs, fill)

    def _reduce_scatter_base(self, output: Any, given: Any, group: Any, *_: Any, **__: Any) -> Any:
        fill = lambda of, at: _own_part(output, given, at, len(of.ranks))  # noqa: E731
        return output, self._answer("reduce_scatter", group, [given], [output], fill)

    def _reduce_scatter_tensors(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(of: Members, at: int) -> None:
            for output, given in zip(outputs, inputs):
                _own_part(output, given, at, len(of.ranks))

        return self._answer("reduce_scatter", group, inputs, outputs, fill)

    def _gather(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        flat = [each for slots in outputs for each in slots]
        return self._answer("gather", group, inputs, flat, lambda *_: _copies(outputs, inputs))

    def _scatter(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(_: Members, at: int) -> None:
            for output, parts in zip(outputs, inputs):
                output.copy_(parts[at])
            if not inputs:
                _constant(outputs)

        flat = [each for parts in inputs for each in parts]
        return outputs, self._answer("scatter", group, flat, outputs, fill)

    def _all_to_all(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(*_: Any) -> None:
            for output, given in zip(outputs, inputs):
                _whatever_fits(output, given)

        return outputs, self._answer("all_to_all", group, inputs, outputs, fill)

    def _all_to_all_base(self, output: Any, given: Any, group: Any, *_: Any, **__: Any) -> Any:
        return self._answer("all_to_all", group, [given], [output], lambda *_: _whatever_fits(output, given))

    def _send(self, tensors: Any, group: Any, to: int, *_: Any, **__: Any) -> Any:
        def fill(of: Members, at: int) -> bool:
            return self._passed(f"to {of.ranks[to]}", tensors, of, of.ranks[at], True)

        return self._answer("send", group, tensors, [], fill, peer=to)

    def _recv(self, tensors: Any, group: Any, sender: int, *_: Any, **__: Any) -> Any:
        def fill(of: Members, at: int) -> bool:
            _constant(tensors)
            return self._passed(f"to {of.ranks[at]}", tensors, of, of.ranks[sender], False)

        return self._answer("recv", group, [], tensors, fill, peer=sender)

    def _passed(self, what: str, tensors: Any, of: Members, sender: int, is_sender: bool) -> bool:
        """Pass small tensors of integers on: scripts decide by them, as pipelines do by their votes.

        Args:
            sender: the global rank that sends.
            is_sender: whether that is this rank.

        Returns:
            Whether the tensors hold now what was sent.
        """
        if any(each.numel() > SMALL or each.dtype.is_floating_point or each.is_meta for each in tensors):
            return False
        key = f"tensor {of.name} {sender} {what}"
        self._passings[key] += 1
        key = f"{key} {self._passings[key]}"
        if is_sender:
            self._mailbox.leave(key, [each.tolist() for each in tensors])
        elif sender not in self._mailbox.ranks:
            return False
        else:
            for each, content in zip(tensors, self._mailbox.fetch(key, sender)):
                each.copy_(torch.tensor(content, dtype=each.dtype))
        return True

    def _recv_any(self, *_: Any, **__: Any) -> Any:
        self._refusal.refuse("recv from any rank", "which rank would send first is unknown")


def _has_small(tensors: Iterable[Any]) -> bool:
    return any(each.numel() <= SMALL for each in tensors)


def _copies(outputs: Any, inputs: Any) -> None:
    """Fill all slots of each output with its input."""
    for slots, given in zip(outputs, inputs):
        for slot in slots:
            _whatever_fits(slot, given)


def _by_column(outputs: Any, inputs: Any) -> None:
    """The same where each list has a slot for every input."""
    for slots in outputs:
        for slot, given in zip(slots, inputs):
            _whatever_fits(slot, given)


def _tiled(output: Any, given: Any, count: int) -> None:
    """Fill an output with copies of an input, this many."""
    if output.numel() == given.numel() * count and output.is_contiguous():
        output.view(count, -1).copy_(given.reshape(1, -1).expand(count, -1))
    else:
        _whatever_fits(output, given)


def _own_part(output: Any, given: Any, at: int, count: int) -> None:
    """Fill an output with this rank's part of an input."""
    if given.numel() == output.numel() * count:
        output.copy_(given.reshape(count, -1)[at].view_as(output))
    else:
        _whatever_fits(output, given)


def _whatever_fits(output: Any, given: Any) -> None:
    """Fill an output with an input, over and over."""
    size = given.numel()
    if output.shape == given.shape:
        output.copy_(given)
    elif size and output.numel():
        times = -(-output.numel() // size)
        output.copy_(given.reshape(-1).repeat(times)[: output.numel()].view_as(output))
    else:
        _constant([output])


def _constant(tensors: Iterable[Any]) -> None:
    for each in tensors:
        each.fill_(FILL if each.dtype.is_floating_point or each.dtype.is_complex else 0)
