"""Process groups whose other members are not there.

In: the ranks to pretend, of the configuration, and `RANK`. Out: `init_process_group` and `new_group` make
groups of any size that wait for none, whatever backend they ask for, and checkpoints are not written: they
would hold what a pretended rank made up.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..recorder import Recorder
from ..torch_internals import CHECKPOINT, FAKE, has_fake_backend, is_within_backward
from .answers import PretendedAnswers
from .calls import Calls
from .mailbox import Mailbox
from .objects import Objects
from .received import Received
from .refusal import PretendedRefusal, is_of_script

_EXPLICIT = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "recv", "scatter")


class PretendedGroups:
    """The process groups of a pretended rank."""

    def __init__(self, recorder: Recorder, rank: int, world: int, refusal: PretendedRefusal) -> None:
        """No group is there yet."""
        self._recorder, self._rank, self._world, self._refusal = recorder, rank, world, refusal
        self._asked: dict[str, str] = {}
        self._writes_nothing = False

    def initialise(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `init_process_group` without the others."""

        @functools.wraps(original)
        def init_process_group(
            backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1,
            rank: int = -1, store: Any = None, group_name: str = "", **_: Any,
        ) -> Any:  # fmt: skip
            for name, wanted, given in (("world_size", self._world, world_size), ("rank", self._rank, rank)):
                if given not in (-1, wanted):
                    self._refusal.refuse(
                        f"init_process_group({name}={given})",
                        f"{name} is {wanted}: the script has to take it from RANK and WORLD_SIZE",
                    )
            result = original(FAKE, store=dist.HashStore(), rank=self._rank, world_size=self._world)
            self._note(dist.group.WORLD, backend)
            self.look()
            return result

        return init_process_group

    def another(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `new_group` without the others."""

        @functools.wraps(original)
        def new_group(
            ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            kwargs.pop("device_id", None)
            group = original(ranks, None, FAKE if backend else None, None, *args, **kwargs)
            self._note(group, backend or self._asked.get(""))
            return group

        return new_group

    def asked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `get_backend` as scripts know it: what they asked for. Torch itself gets what there is."""

        @functools.wraps(original)
        def get_backend(group: Any = None) -> Any:
            name = getattr(group or dist.group.WORLD, "group_name", "")
            asked = self._asked.get(name) if is_of_script(sys._getframe(1)) else None
            return asked or original(group)

        return get_backend

    def look(self) -> None:
        """Have the function that writes checkpoints do nothing, where the job has imported it."""
        name, _, function = CHECKPOINT.rpartition(".")
        module = sys.modules.get(name)
        if module is not None and not self._writes_nothing and hasattr(module, function):
            self._writes_nothing = True
            setattr(module, function, functools.wraps(getattr(module, function))(lambda *_, **__: None))

    def _note(self, group: Any, backend: Any) -> None:
        asked = str(backend or ("nccl" if torch.cuda.is_available() else "gloo")).lower()
        self._asked.setdefault("", asked)
        name = getattr(group, "group_name", "")
        if name:
            self._asked[name] = asked


def pretend(recorder: Recorder) -> None:
    """Make this process a rank of a larger job; one that cannot be would wait for the others for ever."""
    wanted = recorder.config["pretend"]
    world, rank = int(wanted["world"]), int(os.environ.get("RANK", "-1"))
    if not dist.is_available() or rank < 0:
        return
    refusal = PretendedRefusal(recorder, rank, world)
    try:
        _install(recorder, rank, world, refusal)
    except Exception as error:
        refusal.refuse("import torch", f"{type(error).__name__}: {error}")


def _install(recorder: Recorder, rank: int, world: int, refusal: PretendedRefusal) -> None:
    if not has_fake_backend():
        refusal.refuse(
            "import torch", "this PyTorch has no process group without the others: use 2.6 or newer"
        )
    from torch.distributed import device_mesh, distributed_c10d

    _share_gpus(int(os.environ["LOCAL_RANK"]))
    mailbox = Mailbox(recorder.launch, rank, recorder.config["pretend"]["ranks"])
    received, calls = Received(refusal.refuse), Calls(recorder)
    recorder.pretending = PretendedAnswers(calls, received, refusal, mailbox), Objects(mailbox, refusal)
    groups = PretendedGroups(recorder, rank, world, refusal)
    for module in (distributed_c10d, dist, device_mesh):
        for name, wrap in (("init_process_group", groups.initialise), ("new_group", groups.another)):
            if hasattr(module, name):
                setattr(module, name, wrap(getattr(module, name)))
    dist.get_backend = groups.asked(dist.get_backend)
    for name in _EXPLICIT:
        setattr(dist, name, _followed(getattr(dist, name), received))
    for name in ("monitored_barrier",):
        for module in (distributed_c10d, dist):
            setattr(module, name, lambda *_, **__: None)
    recorder.listen("open", recorder.store.leave)  # there is no rank to agree with
    recorder.listen("work", groups.look)
    recorder.listen("step", received.on_step)
    recorder.listen("window", calls.on_window)
    recorder.listen("end", calls.save)


def _followed(original: Callable[..., Any], received: Received) -> Callable[..., Any]:
    """A function of the script's whose results are followed."""

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # A mode that begins within a backward would end with it; what torch calls itself decides nothing.
        if not is_within_backward() and is_of_script(sys._getframe(1)):
            received.follow()
        return result

    return followed


def _share_gpus(local_rank: int) -> None:
    """Have a script that takes the GPU of its local rank take one that there is."""
    count = torch.cuda.device_count()
    if count:
        os.environ["LOCAL_RANK"] = str(local_rank % count)
