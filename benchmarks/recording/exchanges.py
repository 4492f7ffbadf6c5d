"""Ways to exchange gradients for which DDP has no option: after backward, a step late, or by priority.

In: a model, or a `DistributedDataParallel`. Out: the model, changed to exchange in that way. These are the
jobs that edits `overlap` and `priority` describe, as a script has to write them.
"""

from collections.abc import Callable
from threading import Condition, Event, Thread

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 1e-6


def reduce_after_backward(model: DistributedDataParallel) -> None:
    """Begin to reduce when the last gradient is ready, bucket by bucket as usual."""
    waiting: list[tuple[Tensor, Future[Tensor]]] = []

    def hook(_: object, bucket: GradBucket) -> Future[Tensor]:
        reduced = Future[Tensor]()
        waiting.append((bucket.buffer(), reduced))
        if bucket.is_last():
            for buffer, promised in waiting:
                _average(buffer, promised)
            waiting.clear()
        return reduced

    model.register_comm_hook(None, hook)


def reduce_a_step_late(model: DistributedDataParallel) -> None:
    """Use the gradients of the step before, and reduce this step's meanwhile (Pipe-SGD)."""
    before: dict[tuple[int, int], Future[Tensor]] = {}  # DDP makes its buckets again after the first step

    def hook(_: object, bucket: GradBucket) -> Future[Tensor]:
        place, begun = (bucket.index(), bucket.buffer().numel()), Future[Tensor]()
        _average(bucket.buffer().clone(), begun)
        last = before.get(place, begun)
        before[place] = begun
        return last

    model.register_comm_hook(None, hook)


def _average(buffer: Tensor, promised: Future[Tensor]) -> None:
    def done(_: Future[list[Tensor]]) -> None:
        promised.set_result(buffer.div_(dist.get_world_size()))

    dist.all_reduce(buffer, async_op=True).get_future().then(done)


class ByPriority:
    """Gradients go layer by layer, first those that the next forward pass needs first (ByteScheduler, P3).

    A thread reduces one layer at a time; rank 0 chooses it, so that all ranks reduce the same one. Each layer
    is updated when the next forward pass reaches it.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        """Attach to a model that nothing else makes parallel, for this many steps."""
        self.layers = [layer for layer in model.modules() if list(layer.parameters(recurse=False))]
        self.buffers = [torch.empty(0)] * len(self.layers)
        self.missing = [len(list(layer.parameters(recurse=False))) for layer in self.layers]
        self.reduced = [Event() for _ in self.layers]
        self.ready, self.changed = set[int](), Condition()
        self.steps, self.step = steps, 0
        for at, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._update(at))
            for parameter in layer.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(self._collect(at))
        self.thread = Thread(target=self._reduce, daemon=True)
        self.thread.start()

    def end_of_step(self) -> None:
        """Count a step; after the last one, wait for the remaining reductions."""
        self.step += 1
        if self.step == self.steps:
            self.thread.join()

    def _collect(self, at: int) -> Callable[[Tensor], None]:
        parameters = list(self.layers[at].parameters(recurse=False))

        def collect(_: Tensor) -> None:
            self.missing[at] -= 1
            if self.missing[at]:
                return
            self.missing[at] = len(parameters)
            gradients = [each.grad for each in parameters if each.grad is not None]
            self.buffers[at] = torch.cat([each.flatten() for each in gradients])
            for each in parameters:
                each.grad = None
            self.reduced[at].clear()
            with self.changed:
                self.ready.add(at)
                self.changed.notify_all()

        return collect

    def _update(self, at: int) -> Callable[[nn.Module, object], None]:
        parameters = list(self.layers[at].parameters(recurse=False))

        def update(_: nn.Module, __: object) -> None:
            if not self.buffers[at].numel():
                return
            self.reduced[at].wait()
            parts = self.buffers[at].split([each.numel() for each in parameters])
            with torch.no_grad():
                for each, part in zip(parameters, parts):
                    each.add_(part.view_as(each), alpha=-LEARNING_RATE / dist.get_world_size())
            self.buffers[at] = torch.empty(0)

        return update

    def _reduce(self) -> None:
        turn = torch.zeros(1, dtype=torch.int64)
        for _ in range(self.steps * len(self.layers)):
            if dist.get_rank() == 0:
                with self.changed:
                    self.changed.wait_for(lambda: self.ready)
                    turn[0] = min(self.ready)
            dist.broadcast(turn, 0)
            at = int(turn)
            with self.changed:
                self.changed.wait_for(lambda at=at: at in self.ready)
                self.ready.remove(at)
            dist.all_reduce(self.buffers[at])
            self.reduced[at].set()
