"""Process groups whose other members do not exist.

Reads the ranks to pretend, from the configuration, and `RANK`. Makes `init_process_group` and `new_group`
return groups of any size that wait for no member, whatever backend they ask for. Checkpoints are not written:
they would contain what a pretended rank made up.
"""

from __future__ import annotations

import fcntl
import functools
import os
import pickle
import sys
import sysconfig
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist
from _dpro_inside_the_job.files import MAIL, WAITS, write_whole
from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import (
    CHECKPOINT,
    FAKE,
    group_ranks,
    has_fake_backend,
    is_within_backward,
)

from .calls import Calls, Members
from .received import SMALL, Received, unmark

_EXPLICIT = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "recv", "scatter")


class PretendedGroups:
    """The process groups of a pretended rank."""

    def __init__(self, recorder: Recorder, rank: int, world: int, refusal: PretendedRefusal) -> None:
        self._recorder, self._rank, self._world, self._refusal = recorder, rank, world, refusal
        self._asked: dict[str, str] = {}
        self._writes_nothing = False

    def initialise(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `init_process_group` that waits for no other rank."""

        @functools.wraps(original)
        def init_process_group(
            backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1,
            rank: int = -1, store: Any = None, group_name: str = "", **_: Any,
        ) -> Any:  # fmt: skip
            for name, wanted, given in (("world_size", self._world, world_size), ("rank", self._rank, rank)):
                if given not in (-1, wanted):
                    self._refusal.refuse(
                        f"init_process_group({name}={given})",
                        f"{name} is {wanted}: the script must take it from RANK and WORLD_SIZE",
                    )
            result = original(FAKE, store=dist.HashStore(), rank=self._rank, world_size=self._world)
            self._note(dist.group.WORLD, backend)
            self.look()
            return result

        return init_process_group

    def another(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `new_group` that waits for no other rank."""

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
        """Return a `get_backend` that gives scripts the requested backend, and torch the actual one."""

        @functools.wraps(original)
        def get_backend(group: Any = None) -> Any:
            name = getattr(group or dist.group.WORLD, "group_name", "")
            asked = self._asked.get(name) if is_of_script(sys._getframe(1)) else None
            return asked or original(group)

        return get_backend

    def look(self) -> None:
        """Make the function that writes checkpoints do nothing, once the job has imported it."""
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
    """Make this process a rank of a larger job, or end it: it would wait for the other ranks forever."""
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
            "import torch",
            "this PyTorch cannot make process groups without the other ranks: use 2.6 or newer",
        )
    from torch.distributed import device_mesh, distributed_c10d

    # A script that uses the GPU of its local rank gets one that exists.
    if count := torch.cuda.device_count():
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % count)
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
        setattr(dist, name, _follow_results(getattr(dist, name), received))
    for name in ("monitored_barrier",):
        for module in (distributed_c10d, dist):
            setattr(module, name, lambda *_, **__: None)
    recorder.listen("open", recorder.store.leave)  # no other rank exists
    recorder.listen("work", groups.look)
    recorder.listen("step", received.on_step)
    recorder.listen("window", calls.on_window)
    recorder.listen("end", calls.save)


def _follow_results(original: Callable[..., Any], received: Received) -> Callable[..., Any]:
    """Return a function of the script's whose results are followed."""

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # A mode that begins within a backward would end with it; what torch calls itself decides nothing.
        if not is_within_backward() and is_of_script(sys._getframe(1)):
            received.follow()
        return result

    return followed


# Collectives of objects: what a pretended rank receives of what others would have sent.


class Objects:
    """The objects that one process sends and receives."""

    def __init__(self, mailbox: Mailbox, refusal: PretendedRefusal) -> None:
        """Replace torch's functions by ours."""
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
        for index in range(dist.get_world_size(group)):
            object_list[index] = _copy(obj)

    def _gather(
        self, obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None,
        group_dst: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        self.gathered = True
        if object_gather_list is not None and dist.get_rank() == _global_rank(dst, group_dst, group):
            for index in range(dist.get_world_size(group)):
                object_gather_list[index] = _copy(obj)

    def _broadcast(
        self, object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None,
        **_: Any,
    ) -> None:  # fmt: skip
        root = _global_rank(src, group_src, group)
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
        root = _global_rank(src, group_src, group)
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
        to = _global_rank(dst, group_dst, group)
        self._mailbox.leave(self._key("message", group, dist.get_rank(), to), list(object_list))

    def _recv(
        self, object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None,
        **_: Any,
    ) -> int:  # fmt: skip
        if src is None and group_src is None:
            self._refusal.refuse("recv_object_list from any rank", "which rank would send first is unknown")
        sender = _global_rank(src, group_src, group)
        key = self._key("message", group, sender, dist.get_rank())
        object_list[:] = self._fetch(f"recv_object_list from rank {sender}", key, sender)
        return sender

    def _key(self, what: str, group: Any, *ends: int) -> str:
        """Return the name of the next object between two ranks, equal at both ends."""
        name = (group or dist.group.WORLD).group_name
        key = " ".join([what, name, *map(str, ends)])
        self._counts[key] += 1
        return f"{key} {self._counts[key]}"

    def _fetch(self, call: str, key: str, sender: int) -> Any:
        if sender not in self._mailbox.ranks:
            why = f"what rank {sender} sends is unknown: pretend it as well (--pretend-ranks {sender},…)"
            self._refusal.refuse(call, why)
        return self._mailbox.fetch(key, sender)


def _global_rank(rank: Any, in_group: Any, group: Any) -> int:
    """Return a global rank, given as such or by its place in a group; 0 where neither is given."""
    if in_group is None:
        return int(rank or 0)
    places = group_ranks(group or dist.group.WORLD)
    return next(member for member, place in places.items() if place == in_group)


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


# The results of each collective call of a pretended rank, and the work that its caller waits for.

KEPT = 4096  # latest works, which a caller may still ask; earlier ones were asked, or never will be
FILL = 0.01  # value of weights and activations that only others have: neither zero nor denormal


class Answered(dist.Work):  # type: ignore[misc] # of torch, untyped
    """The finished work of one call."""

    def __init__(self, call: dict[str, Any], tensors: Sequence[Any], source: int = -1) -> None:
        """Start as finished.

        Args:
            source: the sender's rank in the group, for a message; else -1.
        """
        super().__init__()
        self._call, self._tensors, self._source = call, tensors, source

    def wait(self, timeout: Any = None) -> bool:
        """Return at once, and record when the caller asked."""
        if self._call["asked_ns"] < 0:
            self._call["asked_ns"] = time.time_ns()
        return True

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True: the work is finished."""
        return True

    def is_success(self) -> bool:
        """Return True: no call fails."""
        return True

    def exception(self) -> None:
        """Return None: no call fails."""

    def result(self) -> Any:
        """Return the tensors of the call."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """Return the sender's rank in the group; -1 for none."""
        return self._source

    def get_future(self) -> Any:
        """Return a finished future; whether its owner waits is not seen."""
        self._call["future"] = True
        unmark(self._tensors)  # DDP takes futures: scripts do not decide by its gradients
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class PretendedAnswers:
    """The kernels that answer the collective calls of one process."""

    def __init__(self, calls: Calls, received: Received, refusal: PretendedRefusal, mailbox: Mailbox) -> None:
        """Replace torch's kernels by ours."""
        self._calls, self._received, self._refusal = calls, received, refusal
        self._mailbox, self._passings = mailbox, Counter[str]()
        self._works: deque[Any] = deque(maxlen=KEPT)  # torch does not keep our works alive
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
                self._answer_unchanged("all_reduce", group, tensors),
            ),
            "allreduce_coalesced_": lambda tensors, group, *_, **__: self._answer_unchanged(
                "all_reduce", group, tensors
            ),
            "broadcast_": self._broadcast,
            "reduce_": lambda tensors, group, *_, **__: self._answer_unchanged("reduce", group, tensors),
            "barrier": lambda tensor, group, *_, **__: self._answer_unchanged("barrier", group, []),
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
            fill: fills the tensors that the call returns, given the group and this rank's place in it.
                Returns whether it knew what the others sent.
            peer: for a message, the other's place in the group; else -1.
        """
        group = dist.ProcessGroup.unbox(boxed)
        of, index = self._calls.members(group), group.rank()
        call = self._calls.begin(op, of, given, got, of.ranks[peer] if peer >= 0 else -1)
        with torch.no_grad():
            is_sent = fill(of, index)
        if len(of.ranks) > 1 and op != "send" and not is_sent:
            self._received.mark(got, f"{op} of {len(of.ranks)} ranks at {place()}" if _has_small(got) else "")
        work = Answered(call, got, peer)
        self._works.append(work)
        call["ended_ns"] = time.time_ns()
        return work.boxed()

    def _answer_unchanged(self, op: str, group: Any, tensors: Sequence[Any]) -> Any:
        return self._answer(op, group, tensors, tensors)

    def _broadcast(self, tensors: Any, group: Any, root: int, *_: Any, **__: Any) -> Any:
        def fill(of: Members, index: int) -> bool:
            return self._pass_integers("broadcast", tensors, of, of.ranks[root], index == root)

        return tensors, self._answer("broadcast", group, tensors, tensors, fill)

    def _all_gather(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        flat = [tensor for slots in outputs for tensor in slots]
        return outputs, self._answer("all_gather", group, inputs, flat, lambda *_: _copies(outputs, inputs))

    def _all_gather_coalesced(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        flat = [tensor for slots in outputs for tensor in slots]
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
        def fill(_: Members, index: int) -> None:
            for output, parts in zip(outputs, inputs):
                output.copy_(parts[index])

        flat = [tensor for parts in inputs for tensor in parts]
        return outputs, self._answer("reduce_scatter", group, flat, outputs, fill)

    def _reduce_scatter_base(self, output: Any, given: Any, group: Any, *_: Any, **__: Any) -> Any:
        fill = lambda of, index: _own_part(output, given, index, len(of.ranks))  # noqa: E731
        return output, self._answer("reduce_scatter", group, [given], [output], fill)

    def _reduce_scatter_tensors(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(of: Members, index: int) -> None:
            for output, given in zip(outputs, inputs):
                _own_part(output, given, index, len(of.ranks))

        return self._answer("reduce_scatter", group, inputs, outputs, fill)

    def _gather(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        flat = [tensor for slots in outputs for tensor in slots]
        return self._answer("gather", group, inputs, flat, lambda *_: _copies(outputs, inputs))

    def _scatter(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(_: Members, index: int) -> None:
            for output, parts in zip(outputs, inputs):
                output.copy_(parts[index])
            if not inputs:
                _constant(outputs)

        flat = [tensor for parts in inputs for tensor in parts]
        return outputs, self._answer("scatter", group, flat, outputs, fill)

    def _all_to_all(self, outputs: Any, inputs: Any, group: Any, *_: Any, **__: Any) -> Any:
        def fill(*_: Any) -> None:
            for output, given in zip(outputs, inputs):
                _whatever_fits(output, given)

        return outputs, self._answer("all_to_all", group, inputs, outputs, fill)

    def _all_to_all_base(self, output: Any, given: Any, group: Any, *_: Any, **__: Any) -> Any:
        return self._answer("all_to_all", group, [given], [output], lambda *_: _whatever_fits(output, given))

    def _send(self, tensors: Any, group: Any, to: int, *_: Any, **__: Any) -> Any:
        def fill(of: Members, index: int) -> bool:
            return self._pass_integers(f"to {of.ranks[to]}", tensors, of, of.ranks[index], True)

        return self._answer("send", group, tensors, [], fill, peer=to)

    def _recv(self, tensors: Any, group: Any, sender: int, *_: Any, **__: Any) -> Any:
        def fill(of: Members, index: int) -> bool:
            _constant(tensors)
            return self._pass_integers(f"to {of.ranks[index]}", tensors, of, of.ranks[sender], False)

        return self._answer("recv", group, [], tensors, fill, peer=sender)

    def _pass_integers(self, what: str, tensors: Any, of: Members, sender: int, is_sender: bool) -> bool:
        """Pass on small tensors of integers, by which scripts decide, as pipelines do by their votes.

        Args:
            sender: the global rank that sends.

        Returns:
            Whether the tensors contain now what was sent.
        """
        if any(
            tensor.numel() > SMALL or tensor.dtype.is_floating_point or tensor.is_meta for tensor in tensors
        ):
            return False
        key = f"tensor {of.name} {sender} {what}"
        self._passings[key] += 1
        key = f"{key} {self._passings[key]}"
        if is_sender:
            self._mailbox.leave(key, [tensor.tolist() for tensor in tensors])
        elif sender not in self._mailbox.ranks:
            return False
        else:
            for tensor, content in zip(tensors, self._mailbox.fetch(key, sender)):
                tensor.copy_(torch.tensor(content, dtype=tensor.dtype))
        return True

    def _recv_any(self, *_: Any, **__: Any) -> Any:
        self._refusal.refuse("recv from any rank", "which rank would send first is unknown")


def _has_small(tensors: Iterable[Any]) -> bool:
    return any(tensor.numel() <= SMALL for tensor in tensors)


def _copies(outputs: Any, inputs: Any) -> None:
    """Fill all slots of each output with its input."""
    for slots, given in zip(outputs, inputs):
        for slot in slots:
            _whatever_fits(slot, given)


def _by_column(outputs: Any, inputs: Any) -> None:
    """Fill the slots of each output, one for every input, with the inputs."""
    for slots in outputs:
        for slot, given in zip(slots, inputs):
            _whatever_fits(slot, given)


def _tiled(output: Any, given: Any, count: int) -> None:
    """Fill an output with `count` copies of an input."""
    if output.numel() == given.numel() * count and output.is_contiguous():
        output.view(count, -1).copy_(given.reshape(1, -1).expand(count, -1))
    else:
        _whatever_fits(output, given)


def _own_part(output: Any, given: Any, index: int, count: int) -> None:
    """Fill an output with this rank's part of an input."""
    if given.numel() == output.numel() * count:
        output.copy_(given.reshape(count, -1)[index].view_as(output))
    else:
        _whatever_fits(output, given)


def _whatever_fits(output: Any, given: Any) -> None:
    """Fill an output with an input, repeated or cut to its size."""
    size = given.numel()
    if output.shape == given.shape:
        output.copy_(given)
    elif size and output.numel():
        times = -(-output.numel() // size)
        output.copy_(given.reshape(-1).repeat(times)[: output.numel()].view_as(output))
    else:
        _constant([output])


def _constant(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        tensor.fill_(FILL if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0)


# Mail between pretended ranks, and their turns: one process computes at a time. A rank that has to wait gives
# up its turn and names the rank that it waits for, so that the launcher starts that one. Files are in the
# launcher's folder, which only this user may enter.

LOOK_S = 0.01


class Mailbox:
    """The mail of one rank, which has its turn from the beginning."""

    def __init__(self, launch: Path, rank: int, ranks: list[int]) -> None:
        """Wait for this rank's turn."""
        self._folder, self._rank, self.ranks = launch / MAIL, rank, frozenset(ranks)
        self._folder.mkdir(0o700, exist_ok=True)
        self._turn = (self._folder / "turn").open("ab")
        fcntl.flock(self._turn, fcntl.LOCK_EX)

    def leave(self, key: str, content: Any) -> None:
        """Leave an object under a key."""
        write_whole(self._path(key), pickle.dumps(content))

    def fetch(self, key: str, sender: int) -> Any:
        """Wait for the object that a rank leaves under a key; other ranks compute meanwhile."""
        path = self._path(key)
        if not path.exists():
            waits = self._folder / f"{WAITS}{self._rank}"
            write_whole(waits, str(sender).encode())
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            while not path.exists():
                time.sleep(LOOK_S)
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            waits.unlink()
        return pickle.loads(path.read_bytes())  # written by a process of this job

    def _path(self, key: str) -> Path:
        return self._folder / quote(f"mail {key}", safe="")


# The end of a process that cannot be pretended: one line that names the call and its place in the script.

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_PYTHON = sysconfig.get_paths()["stdlib"]
CODE = 3  # exit code of a process that cannot be pretended


class NotPretended(SystemExit):
    """The exit of a process that cannot be pretended; not an `Exception`, which scripts catch."""


def is_of_script(frame: Any) -> bool:
    """Return whether a frame runs code of the job: neither torch's, nor Python's, nor ours."""
    return not frame.f_code.co_filename.startswith((_OURS, _TORCH, _PYTHON, "<"))


def place() -> str:
    """Return the script's line that makes the present call, as `train.py:12`; else torch's innermost line."""
    frame, innermost = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, "<")):
            here = f"{os.path.basename(name)}:{frame.f_lineno}"
            if is_of_script(frame):
                return here
            innermost = innermost or here
        frame = frame.f_back  # type: ignore[assignment]
    return innermost


class PretendedRefusal:
    """The refusal to pretend this process's rank."""

    def __init__(self, recorder: Recorder, rank: int, world: int) -> None:
        self._recorder = recorder
        self._who = f"rank {rank} of {world} cannot be pretended"

    def refuse(self, call: str, why: str) -> None:
        """End the process with one line in the log and on stderr.

        Raises:
            NotPretended: always.
        """
        line = f"{self._who}: {call} at {place()}: {why}"
        with suppress(OSError), (self._recorder.launch / "log.txt").open("a") as log:
            log.write(f"{line}\n")
        with suppress(OSError, ValueError):
            print(f"dpro: {line}", file=sys.stderr, flush=True)
        raise NotPretended(CODE)
