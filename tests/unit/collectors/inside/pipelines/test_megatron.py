"""Megatron-core's schedules, of stand-ins with the attributes of 0.16; a slow test runs the real ones."""

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.inside.pipelines import megatron  # noqa: E402
from dpro.collectors.inside.pipelines.megatron import SCHEDULES, STATE, MegatronHooks  # noqa: E402


class Recorder:
    """Lets errors pass, and opens no file."""

    folder = records = None

    def listen(self, occasion, action):
        pass

    def call(self, action, *arguments):
        action(*arguments)


class Operations:
    """Keeps what is noted."""

    def __init__(self) -> None:
        """Nothing is yet."""
        self.noted: list[tuple[str, int, int]] = []
        self.described: list[tuple] = []

    def note(self, kind, place, micro_batch, start_ns, end_ns):
        assert 0 < start_ns <= end_ns
        self.noted.append((kind, place, micro_batch))

    def describe(self, source, stage, places, num_places):
        self.described.append((source, stage, dict(places), num_places))


def forward_step(
    function, iterator, model, num_microbatches, given, *, current_microbatch=None, vp_stage=None
):
    return function(), 0


def backward_step(input_tensor, output_tensor, output_tensor_grad, model_type, config):
    return None


@pytest.fixture
def hooks(monkeypatch):
    """Stage 1 of 2; `state` may say otherwise."""
    module = SimpleNamespace(forward_step=forward_step, backward_step=backward_step)
    state = SimpleNamespace(
        get_pipeline_model_parallel_world_size=lambda: 2,
        get_pipeline_model_parallel_rank=lambda: 1,
        get_virtual_pipeline_model_parallel_rank=lambda: None,
        get_virtual_pipeline_model_parallel_world_size=lambda: None,
    )
    monkeypatch.setitem(sys.modules, SCHEDULES, module)
    monkeypatch.setitem(sys.modules, STATE, state)
    made = MegatronHooks(Recorder())
    made._operations = Operations()
    made.look()
    made.look()
    return SimpleNamespace(schedules=module, state=state, seen=made._operations)


def test_each_backward_is_of_the_forward_whose_output_it_gets(hooks):
    step, back = hooks.schedules.forward_step, hooks.schedules.backward_step
    first, second = (
        step(lambda: torch.ones(1), None, None, 2, None, current_microbatch=n)[0] for n in (0, 1)
    )
    first.data = torch.empty(0)  # as Megatron frees what it has sent
    back(None, first, None, None, None)
    back(None, [second], None, None, None)
    assert hooks.seen.noted == [("forward", 1, 0), ("backward", 1, 0), ("forward", 1, 1), ("backward", 1, 1)]
    assert hooks.seen.described == [("Megatron-core 1F1B", 1, {1: 0}, 2)]


def test_chunks_have_their_places_in_the_model(hooks):
    for chunk in (0, 1):
        output, _ = hooks.schedules.forward_step(
            lambda: [torch.ones(1)], None, None, 2, None, current_microbatch=0, vp_stage=chunk
        )
        hooks.schedules.backward_step(None, output, None, None, None)
    assert hooks.seen.noted[::2] == [("forward", 1, 0), ("forward", 3, 0)]
    assert hooks.seen.described[-1] == ("Megatron-core interleaved 1F1B", 1, {1: 0, 3: 1}, 4)


def test_older_versions_say_the_chunk_in_the_state_of_the_process(hooks):
    hooks.state.get_virtual_pipeline_model_parallel_rank = lambda: 1
    hooks.state.get_virtual_pipeline_model_parallel_world_size = lambda: 3
    output, _ = hooks.schedules.forward_step(lambda: torch.ones(1), None, None, 2, None, current_microbatch=4)
    hooks.schedules.backward_step(None, output, None, None, None)
    assert hooks.seen.noted[0] == ("forward", 3, 4)
    assert hooks.seen.described == [("Megatron-core interleaved 1F1B", 1, {3: 1}, 6)]


def test_validations_and_jobs_of_one_stage_are_not_recorded(hooks, monkeypatch):
    monkeypatch.setattr(megatron, "MAX_IN_FLIGHT", 3)
    kept = [
        hooks.schedules.forward_step(lambda: torch.ones(1), None, None, 2, None, current_microbatch=n)
        for n in range(10)
    ]
    assert hooks.seen.noted == []
    hooks.state.get_pipeline_model_parallel_world_size = lambda: 1
    output, _ = hooks.schedules.forward_step(lambda: torch.ones(1), None, None, 2, None, current_microbatch=0)
    hooks.schedules.backward_step(None, output, None, None, None)
    assert hooks.seen.noted == []
    del kept


def test_a_version_without_these_functions_is_left_alone(monkeypatch):
    module = SimpleNamespace(forward_step=forward_step)
    monkeypatch.setitem(sys.modules, SCHEDULES, module)
    MegatronHooks(Recorder()).look()
    assert module.forward_step is forward_step
