"""Losses and norms of gradients that are recorded as they come."""

import math
import operator
import struct
import sys

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.convert.tables import losses as rows_of  # noqa: E402
from dpro.collectors.inside.records import LOSS, UPDATE, Record  # noqa: E402
from dpro.collectors.inside.steps import losses as module  # noqa: E402
from dpro.collectors.inside.steps.losses import NONE_YET, Delivered, Losses, install  # noqa: E402
from dpro.schema import LOSS_KINDS  # noqa: E402


class Recording:
    rank = 0

    def __init__(self, is_open=True, watch=True):
        self.written, self.config, self.awaited = [], {"watch_loss": watch}, {}
        self.records = self if is_open else None

    def write(self, kind, *values):
        self.written.append(Record(*values, *[0] * (4 - len(values)), kind))

    def call(self, action, *arguments):
        action(*arguments)

    def listen(self, *_):
        pass

    def on_import(self, name, action):
        self.awaited[name] = action

    def rows(self):
        return rows_of(self, self.written)

    def losses(self):
        return self.rows()["value"].to_list()


PATCHED = ((torch.autograd, "backward"), (torch.amp.GradScaler, "scale"), (torch.nn.utils, "clip_grad_norm_"),
           (torch.nn.utils.clip_grad, "clip_grad_norm_"), (torch.nn.utils, "get_total_norm"))  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for owner, name in PATCHED:
        monkeypatch.setattr(owner, name, getattr(owner, name))


def weight_with(*gradient):
    weight = torch.ones(len(gradient), requires_grad=True)
    weight.grad = torch.tensor(gradient)
    return weight


def test_each_number_whose_gradients_are_asked_for_is_recorded():
    recording = Recording()
    install(recording)
    weight = torch.ones(2, requires_grad=True)
    for factor in (1.0, 2.5):
        (factor * weight).sum().backward()
    assert recording.losses() == [2.0, 5.0]
    assert [record.kind for record in recording.written] == [LOSS] * 2


def test_what_is_no_loss_is_not_recorded():
    recording = Recording()
    install(recording)
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).backward(torch.ones(2))  # as a stage of a pipeline does
    (weight * 2).sum().backward(torch.tensor(3.0))
    assert recording.written == []


def test_norms_are_those_that_functions_of_torch_return():
    recording = Recording()
    install(recording)
    weight = weight_with(3.0, 4.0)
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0) == 5
    assert torch.nn.utils.clip_grad.clip_grad_norm_ is torch.nn.utils.clip_grad_norm_  # one for `pickle`
    torch.nn.utils.get_total_norm([torch.tensor([6.0, 8.0])])
    rows = recording.rows()
    assert (rows["kind"].to_list(), rows["value"].to_list()) == (["grad_norm"] * 2, [5.0, 10.0])


def test_norm_of_fully_sharded_models_is_recorded_once_their_module_is_there():
    class Sharded:
        def clip_grad_norm_(self, _):
            return torch.tensor(7.0)

    recording = Recording()
    install(recording)
    recording.awaited[module.FSDP](type(sys)("fsdp", None))  # a version without it
    fsdp = type(sys)("fsdp")
    fsdp.FullyShardedDataParallel = Sharded
    recording.awaited[module.FSDP](fsdp)
    Sharded().clip_grad_norm_(1.0)
    assert recording.losses() == [7.0]


def test_nothing_is_patched_or_listened_for_unless_it_is_asked_for():
    before = [getattr(owner, name) for owner, name in PATCHED]
    recording = Recording(watch=False)
    recording.listen = pytest.fail
    install(recording)
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert recording.awaited == {}


def test_losses_before_the_file_is_there_are_written_once_it_is():
    recording = Recording(is_open=False)
    losses = Losses(recording)
    losses.on_backward(torch.tensor(1.0), None)
    recording.records = recording
    losses.on_backward(torch.tensor(2.0), None)
    assert recording.losses() == [1.0, 2.0]


def test_of_a_scaled_loss_the_number_before_is_recorded_and_that_it_is_scaled():
    recording = Recording()
    losses = Losses(recording)
    loss, scaled = torch.tensor(0.5), torch.tensor(32768.0)
    losses.on_scaled(loss, loss)  # a scaler that is switched off
    losses.on_norm(torch.tensor(1.0))
    losses.on_scaled(loss, scaled)
    losses.on_backward(scaled, None)
    losses.on_backward(scaled, None)
    assert recording.losses() == [1.0, 0.5, 32768.0]
    assert recording.rows()["scaled"].to_list() == [False, True, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_back_so(value):
    recording = Recording()
    Losses(recording).on_backward(torch.tensor(value), None)
    assert str(recording.losses()[0]) == str(value)
    assert struct.calcsize("<d") == struct.calcsize("<q")


def test_of_a_tensor_that_is_spread_over_ranks_the_part_here_is_recorded():
    class Spread(torch.Tensor):
        __slots__ = ("_local_tensor",)  # as DTensor has it

        @staticmethod
        def __new__(cls, local):
            spread = torch.Tensor._make_wrapper_subclass(cls, local.size())
            spread._local_tensor = local
            return spread

        @classmethod
        def __torch_dispatch__(cls, *_):
            raise AssertionError("asked for the whole")

    recording = Recording()
    losses = Losses(recording)
    losses.on_norm(Spread(torch.tensor(2.0)))
    losses.on_norm(torch.zeros(2))  # no number
    assert recording.losses() == [2.0]


def test_no_mode_of_the_job_sees_that_a_number_is_read():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, *_):
            raise AssertionError("seen")

    recording, loss = Recording(), torch.tensor(4.0, requires_grad=True)
    with Mode():
        Losses(recording).on_backward(loss, None)
    assert recording.losses() == [4.0]


# Numbers of devices.


class Queue(Delivered):
    """A device whose copies happen when the test says so."""

    @staticmethod
    def _pinned_memory():
        return torch.full((module.SLOTS,), NONE_YET, dtype=torch.int32)  # nothing is pinned without a GPU

    def __init__(self):
        super().__init__()
        self.queued = []

    def copy(self, number, noted):
        taken = self._numbers
        self._numbers = taken.clone()  # what the host sees stays as it is
        before = len(self._waiting)
        super().copy(number, noted)
        if len(self._waiting) > before:
            slot = self._waiting[-1][0]
            value = self._numbers[slot].clone()
            self.queued.append(lambda: taken[slot].copy_(value))
        self._numbers = taken


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(
        module, "_is_cpu", operator.methodcaller("is_complex")
    )  # a function in C that says no
    monkeypatch.setattr(module.captures, "is_capturing_here", lambda: False)
    recording = Recording()
    losses = Losses(recording)
    losses._delivered = Queue()
    return losses, losses._delivered, recording


def test_numbers_of_a_device_are_written_once_they_have_come_and_never_waited_for(device):
    losses, queue, recording = device
    losses.on_backward(torch.tensor(1.5), None)
    losses.on_norm(torch.tensor([2.5], dtype=torch.float64))
    losses.on_end()
    assert recording.written == []
    queue.queued[0]()
    losses.on_backward(torch.tensor(math.nan, dtype=torch.bfloat16), None)
    assert recording.losses() == [1.5]
    for arrive in queue.queued[1:]:
        arrive()
    losses.on_end()
    losses.on_end()
    assert recording.losses()[:2] == [1.5, 2.5]
    assert math.isnan(recording.losses()[2])
    assert recording.rows()["kind"].to_list() == ["loss", "grad_norm", "loss"]


def test_memory_is_used_again_and_of_a_host_far_ahead_some_numbers_are_left_out(device):
    losses, queue, recording = device
    for number in range(module.SLOTS + 5):
        losses.on_norm(torch.tensor(float(number)))
    assert len(queue.queued) == module.SLOTS
    for arrive in queue.queued:
        arrive()
    losses.on_end()
    losses.on_norm(torch.tensor(-1.0))
    queue.queued[-1]()
    losses.on_end()
    assert recording.losses() == [*map(float, range(module.SLOTS)), -1.0]


def test_nothing_is_copied_while_a_graph_is_captured(device, monkeypatch):
    losses, queue, _ = device
    monkeypatch.setattr(module.captures, "is_capturing_here", lambda: True)
    losses.on_norm(torch.tensor(1.0))
    assert queue.queued == []


def test_a_forked_child_keeps_the_memory_of_its_parent_and_does_not_read_it(device):
    losses, queue, recording = device
    losses.on_norm(torch.tensor(1.0))
    losses.on_fork()
    queue.queued[0]()
    losses.on_end()
    assert recording.written == []
    assert queue in losses._left


# Tables.


def test_each_number_is_in_the_step_at_whose_end_it_was_there_already():
    recording = Recording()
    assert module.records.LOSS_KINDS == LOSS_KINDS
    for time_ns, ends in ((10, 0), (20, 0), (30, 1), (40, 0), (50, 2), (60, 0)):
        recording.write(UPDATE if ends else LOSS, *((0, ends, time_ns, time_ns) if ends else (time_ns,)))
    assert recording.rows()["step"].to_list() == [0, 0, 1, 2]
    recording.written = recording.written[:1]  # no step has ended
    assert recording.rows()["step"].to_list() == [-1]


def test_a_step_has_few_calls_of_ours(monkeypatch):
    """What `--watch-loss` costs a step with one loss and one norm: functions in Python, and calls of C."""
    recording = Recording()
    install(recording)
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    ours, folder = [], module.__file__.rpartition("/steps/")[0]

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            ours.append(frame.f_code.co_name)

    loss = weight.sum()
    sys.setprofile(count)
    try:
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    finally:
        sys.setprofile(None)
    assert len(ours) <= 50, ours
