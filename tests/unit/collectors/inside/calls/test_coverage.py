"""Which collective calls PyTorch keeps, by what its variables say and by what it knows."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.calls import coverage

OLD, NEW = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"


def _unset(monkeypatch):
    """Unset both variables; what the code under test sets is taken out again after the test."""
    for name in (OLD, NEW):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(params=[True, False], ids=["of all backends", "of NCCL only"])
def knows_all(request, monkeypatch):
    monkeypatch.setattr(coverage, "knows_all", lambda: request.param)
    _unset(monkeypatch)
    return request.param


def test_ring_is_turned_on_by_the_name_that_this_torch_does_not_warn_of(knows_all):
    coverage.turn_on()
    name, other = (NEW, OLD) if knows_all else (OLD, NEW)
    assert os.environ[name] == "2000"
    assert other not in os.environ
    assert coverage.entries() == 2000


@pytest.mark.parametrize("size", ["0", "500", "20000"])
def test_size_that_the_user_has_set_stays(knows_all, monkeypatch, size):
    monkeypatch.setenv(OLD, size)
    coverage.turn_on()
    assert os.environ[OLD] == size
    assert NEW not in os.environ
    assert coverage.entries() == int(size)


def test_name_that_this_torch_does_not_know_changes_nothing(monkeypatch):
    monkeypatch.setattr(coverage, "knows_all", lambda: False)
    _unset(monkeypatch)
    monkeypatch.setenv(NEW, "500")
    coverage.turn_on()
    assert coverage.entries() == 2000


def test_calls_that_are_not_recorded_are_said_once(knows_all):
    assert coverage.lacks({"nccl"}, 2000) == []
    of_gloo = coverage.lacks({"nccl", "gloo"}, 2000)
    assert of_gloo == [] if knows_all else "does not record the calls of gloo" in of_gloo[0]
    assert "does not record the calls of ucc" in coverage.lacks({"ucc"}, 2000)[0]


def test_ring_that_is_turned_off_is_said_to_be(knows_all, monkeypatch):
    monkeypatch.setenv(OLD, "0")
    [line] = coverage.lacks({"nccl"}, coverage.entries())
    assert line.startswith(f"{OLD}=0 turns PyTorch's flight recorder off")
