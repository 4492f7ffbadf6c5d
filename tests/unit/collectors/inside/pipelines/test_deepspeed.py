"""DeepSpeed's PipelineEngine, of a stand-in with the attributes of 0.19; a slow test runs the real one."""

import sys
from types import MethodType, SimpleNamespace

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.pipelines.deepspeed import ENGINE, DeepSpeedHooks
from tests.unit.collectors.inside.pipelines.test_megatron import Operations, Recorder


class TrainSchedule(list):
    """Instructions with their buffers."""


class InferenceSchedule(list):
    """The same, without backward."""


def engine_class():
    """A class of its own for each test: hooks change it."""

    class PipelineEngine:
        stage_id, num_stages = 1, 2

        def _exec_forward_pass(self, buffer_id):
            pass

        def _exec_backward_pass(self, buffer_id):
            pass

        _INSTRUCTION_MAP = {"forward": _exec_forward_pass, "backward": _exec_backward_pass}  # noqa: RUF012

        def _exec_schedule(self, schedule):
            for name, buffer in schedule:
                MethodType(self._INSTRUCTION_MAP[name], self)(buffer_id=buffer)

    return PipelineEngine


@pytest.fixture
def hooked(monkeypatch):
    """The class, hooked, and what is noted."""
    engine = engine_class()
    monkeypatch.setitem(sys.modules, ENGINE, SimpleNamespace(PipelineEngine=engine))
    hooks = DeepSpeedHooks(Recorder())
    hooks._operations = Operations()
    hooks.look()
    hooks.look()
    return engine, hooks._operations


BATCH = TrainSchedule(
    [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 0), ("backward", 1), ("backward", 0)]
)


def test_a_backward_is_of_the_micro_batch_that_is_in_its_buffer(hooked):
    engine, seen = hooked
    engine()._exec_schedule(BATCH)
    assert [each for each in seen.noted if each[0] == "backward"] == [("backward", 1, n) for n in (0, 1, 2)]
    assert [each for each in seen.noted if each[0] == "forward"] == [("forward", 1, n) for n in (0, 1, 2)]
    assert seen.described == [("DeepSpeed TrainSchedule", 1, {1: 0}, 2)]


def test_micro_batches_are_counted_again_in_each_batch_and_not_in_a_validation(hooked):
    engine, seen = hooked
    engine()._exec_schedule(BATCH)
    engine()._exec_schedule(InferenceSchedule([("forward", 0), ("forward", 1)]))
    engine()._exec_schedule(BATCH)
    assert [micro_batch for kind, _, micro_batch in seen.noted if kind == "forward"] == [0, 1, 2] * 2
    assert {source for source, *_ in seen.described} == {"DeepSpeed TrainSchedule"}


def test_an_engine_of_one_stage_pipelines_nothing(hooked):
    engine, seen = hooked
    engine.num_stages = 1
    engine()._exec_schedule(BATCH)
    assert seen.noted == seen.described == []


def test_a_version_without_these_methods_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, ENGINE, SimpleNamespace(PipelineEngine=type("PipelineEngine", (), {})))
    DeepSpeedHooks(Recorder()).look()
