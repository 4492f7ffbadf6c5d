"""Losses that are recorded as gradients are asked for."""

import math
import struct

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.convert.tables import host_counters  # noqa: E402
from dpro.collectors.inside.records import LOSS, Record  # noqa: E402
from dpro.collectors.inside.steps.losses import MAX_LOSSES, Losses, install  # noqa: E402


class Recording:
    def __init__(self, is_open=True, losses=True):
        self.written, self.config = [], {"losses": losses}
        self.records = self if is_open else None

    def write(self, kind, *values):
        self.written.append(Record(*values, *[0] * (4 - len(values)), kind))

    def call(self, action, *arguments):
        action(*arguments)

    def listen(self, *_):
        pass

    def losses(self):
        return host_counters(self.written, {})["value"].to_list()


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", torch.amp.GradScaler.scale)


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


def test_nothing_is_patched_unless_it_is_asked_for():
    before = torch.autograd.backward
    install(Recording(losses=False))
    assert torch.autograd.backward is before


def test_losses_before_the_file_is_there_are_written_once_it_is():
    recording = Recording(is_open=False)
    losses = Losses(recording)
    losses.on_backward(torch.tensor(1.0), None)
    recording.records = recording
    losses.on_backward(torch.tensor(2.0), None)
    assert recording.losses() == [1.0, 2.0]


def test_of_a_scaled_loss_the_number_before_is_recorded():
    recording = Recording()
    losses = Losses(recording)
    loss, scaled = torch.tensor(0.5), torch.tensor(32768.0)
    losses.on_scaled(loss, scaled)
    losses.on_backward(scaled, None)
    losses.on_backward(scaled, None)
    assert recording.losses() == [0.5, 32768.0]


def test_what_is_not_finite_comes_back_so():
    recording = Recording()
    Losses(recording).on_backward(torch.tensor(math.nan), None)
    assert math.isnan(recording.losses()[0])
    assert struct.calcsize("<d") == struct.calcsize("<q")


def test_losses_on_a_device_are_read_at_the_end_only():
    recording = Recording()
    losses = Losses(recording)
    losses._copy(torch.tensor(1.5))
    losses._copy(torch.tensor([2.5]))
    assert recording.written == []
    losses.on_end()
    losses.on_end()
    assert recording.losses() == [1.5, 2.5]


def test_only_the_first_losses_are_kept():
    recording = Recording()
    losses = Losses(recording)
    for _ in range(MAX_LOSSES + 3):
        losses.on_backward(torch.tensor(1.0), None)
    assert len(recording.written) == MAX_LOSSES
