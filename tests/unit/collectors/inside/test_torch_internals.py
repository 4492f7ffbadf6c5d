"""Private attributes of PyTorch, and what is done without each; `make test-torch` runs the real versions."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from dpro.collectors.inside import torch_internals
from dpro.collectors.inside.torch_internals import DEFAULT_FIRST_BUCKET_BYTES, INTERNALS, Internal, internal


def binding(*names: str) -> Any:
    def config(**wanted: bool) -> dict[str, bool]:
        if set(wanted) - set(names):
            raise TypeError("__init__(): incompatible constructor arguments")
        return wanted

    return config


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("enable_cuda_sync_events", "trace_only"), {"enable_cuda_sync_events": True, "trace_only": True}),
        (("enable_cuda_sync_events",), {"enable_cuda_sync_events": True}),
        ((), {}),
    ],
)
def test_kineto_is_configured_with_what_its_binding_takes(monkeypatch, names, taken):
    monkeypatch.setattr(torch.autograd.profiler, "_ExperimentalConfig", binding(*names))
    assert torch_internals.experimental_config(enable_cuda_sync_events=True, trace_only=True) == taken


def test_code_that_is_kept_from_the_compiler_is_not_compiled():
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    def ours(value: Any) -> Any:
        return value + 1

    def theirs(value: Any) -> Any:
        return value + 2

    skip = torch_internals.code_skipper()
    assert skip is not None
    skip(ours.__code__)
    torch.compile(ours, backend=backend)(torch.ones(1))
    assert compiled == []
    torch.compile(theirs, backend=backend)(torch.ones(1))
    assert len(compiled) == 1


INSIDE = Path(torch_internals.__file__).parent
VERSION = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def is_expected(attribute: Internal) -> bool:
    """Whether this version of PyTorch should have an attribute."""
    came = not attribute.since or version_of(attribute.since) <= VERSION
    return came and (not attribute.until or version_of(attribute.until) > VERSION)


@pytest.mark.parametrize("attribute", INTERNALS, ids=lambda each: each.path)
def test_attribute_is_there_in_the_versions_that_are_said_to_have_it(attribute):
    import torch.distributed.pipelining  # only jobs that pipeline load it

    there = internal(attribute.path) is not None or attribute.path.endswith("_is_profiler_enabled")
    if attribute.build == "cuda" and torch.version.cuda is None:
        assert not there
    elif attribute.path.endswith("_compiled_call_impl"):  # None until a module is compiled
        assert hasattr(torch.nn.Module, "_compiled_call_impl")
    else:
        assert there == is_expected(attribute)


@pytest.fixture
def without(monkeypatch):
    """Have PyTorch lack some attributes, for the recorder alone."""

    def lack(*paths: str) -> None:
        listed = {each.path for each in INTERNALS}
        assert listed.issuperset(paths)
        monkeypatch.setattr(
            torch_internals, "internal", lambda path: None if path in paths else internal(path)
        )

    return lack


C10D = "torch._C._distributed_c10d"
FRAMES = "torch._C._dynamo.eval_frame"
TRACES = "torch._C._profiler"


@pytest.mark.parametrize(
    ("path", "call", "answer"),
    [
        ("torch.autograd._get_sequence_nr", lambda: torch_internals.sequence_number(), 0),
        ("torch._C._current_graph_task_id", lambda: torch_internals.is_within_backward(), False),
        (
            "torch.distributed.distributed_c10d._get_default_store",
            lambda: torch_internals.default_store(),
            None,
        ),
        ("torch.distributed.distributed_c10d._world", lambda: torch_internals.group_names(), {}),
        ("torch.distributed.distributed_c10d._world", lambda: torch_internals.group_ranks(None), {}),
        ("torch.distributed.distributed_c10d._world", lambda: torch_internals.backend_configs(), []),
        (f"{C10D}._dump_fr_trace", lambda: torch_internals.dump_of("fr"), None),
        (f"{C10D}._dump_nccl_trace", lambda: torch_internals.dump_of("nccl"), None),
        (f"{C10D}._get_handler_names", lambda: torch_internals.handler_of("fr_trace_json"), None),
        (f"{C10D}._get_handler", lambda: torch_internals.handler_of("fr_trace_json"), None),
        (f"{C10D}._Request", lambda: torch_internals.handler_of("fr_trace_json"), None),
        (f"{C10D}._Response", lambda: torch_internals.handler_of("fr_trace_json"), None),
        (
            "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES",
            lambda: torch_internals.first_bucket_bytes(),
            1 << 20,
        ),
        (
            "torch.distributed._compute_bucket_assignment_by_size",
            lambda: torch_internals.assign_buckets([torch.ones(2)], [4]),
            [],
        ),
        ("torch._C._cuda_hasPrimaryContext", lambda: torch_internals.has_context(0), None),
        (f"{TRACES}._add_execution_trace_observer", lambda: torch_internals.observe_execution("/x"), None),
        (f"{TRACES}._enable_execution_trace_observer", lambda: torch_internals.observe_execution("/x"), None),
        (
            f"{TRACES}._disable_execution_trace_observer",
            lambda: torch_internals.observe_execution("/x"),
            None,
        ),
        (f"{TRACES}._remove_execution_trace_observer", lambda: torch_internals.observe_execution("/x"), None),
        ("torch._C._autograd._profiler_type", lambda: torch_internals.is_profiling(), False),
        (f"{TRACES}.ActiveProfilerType", lambda: torch_internals.is_profiling(), False),
        ("torch.autograd.profiler._is_profiler_enabled", lambda: torch_internals.has_profiler(), False),
        (
            "torch.autograd.profiler._ExperimentalConfig",
            lambda: torch_internals.experimental_config(trace_only=True),
            None,
        ),
        (
            f"{torch_internals.PROFILE}._prepare_trace",
            lambda: torch_internals.profiler_hooks(),
            ("__enter__", "__enter__"),
        ),
        (
            f"{torch_internals.PROFILE}._start_trace",
            lambda: torch_internals.profiler_hooks(),
            ("__enter__", "__enter__"),
        ),
        (
            "torch.ops.profiler._record_function_exit._RecordFunction",
            lambda: torch_internals.end_range(None),
            False,
        ),
        (
            "torch.nn.Module._wrapped_call_impl",
            lambda: torch_internals.module_calls(),
            (torch.nn.Module._call_impl.__code__,),
        ),
        ("torch.nn.Module._call_impl", lambda: torch_internals.module_calls(), ()),
        ("torch.utils.data.dataloader._BaseDataLoaderIter", lambda: torch_internals.loader_iterator(), None),
        (f"{FRAMES}.set_eval_frame", lambda: torch_internals.frame_watch()(None), None),
    ],
)
def test_without_an_attribute_something_is_given_up_and_nothing_raised(without, path, call, answer):
    without(path)
    assert call() == answer


def test_profiler_is_seen_by_its_flag_where_its_type_cannot_be_asked(without):
    without("torch._C._autograd._profiler_type")
    with torch.autograd.profiler.profile(use_kineto=True):
        assert torch_internals.is_profiling()
    assert not torch_internals.is_profiling()


def test_profiler_is_started_by_its_own_method_where_it_has_no_lower_half(without):
    without(f"{torch_internals.PROFILE}._prepare_trace")
    profiler = torch.autograd.profiler.profile(use_kineto=True)
    torch_internals.prepare_profiler(profiler)  # does nothing
    torch_internals.start_profiler(profiler)
    torch.ones(2) + 1
    profiler.__exit__(None, None, None)
    assert any(each.name == "aten::add" for each in profiler.function_events)


def test_code_is_kept_from_the_compiler_by_the_older_function_or_not_at_all(without, monkeypatch):
    skipped: list[Any] = []
    frames = SimpleNamespace(skip_code=skipped.append)
    monkeypatch.setattr(torch._C._dynamo, "eval_frame", frames)
    skip = torch_internals.code_skipper()
    assert skip is not None
    skip(test_first_bucket_has_the_size_that_pytorch_has.__code__)
    assert len(skipped) == 1
    without(f"{FRAMES}.skip_code")
    assert torch_internals.code_skipper() is None


def test_first_bucket_has_the_size_that_pytorch_has():
    assert torch_internals.first_bucket_bytes() == DEFAULT_FIRST_BUCKET_BYTES


def test_module_without_a_name_of_its_compiled_call_is_compiled_by_its_own_method():
    compiled: list[str] = []
    torch_internals.compile_call(SimpleNamespace(compile=lambda mode: compiled.append(mode)), mode="default")
    assert compiled == ["default"]


def test_fsdp_without_what_it_prefetches_is_not_known_to_prefetch_and_goes_on_waiting():
    assert not torch_internals.fsdp_prefetches(SimpleNamespace())
    assert not torch_internals.fsdp_prefetches(SimpleNamespace(_states_to_forward_prefetch=[]))
    assert torch_internals.fsdp_prefetches(SimpleNamespace(_states_to_backward_prefetch=[1]))
    torch_internals.gather_asynchronously(SimpleNamespace())
    asked: list[bool] = []
    torch_internals.gather_asynchronously(SimpleNamespace(_set_unshard_async_op=asked.append))
    assert asked == [True]


def test_no_other_module_reads_a_private_attribute_of_pytorch():
    private = re.compile(r"\b(?:torch|dist|world|Module|module|backend|group)(?:\.\w+)*?\._[a-z]\w*")
    # What `internal` has found is replaced by its name; a change that cannot be imported is refused.
    written = {"torch.autograd._disable_profiler", "torch.utils._pytree"}
    for path in INSIDE.rglob("*.py"):
        if path.name != "torch_internals.py":
            code = re.sub(r'"[^"\n]*"|#.*', "", path.read_text())
            assert set(private.findall(code)) <= written, path


def test_every_attribute_that_is_looked_up_is_listed():
    listed = {each.path for each in INTERNALS}
    for path in INSIDE.rglob("*.py"):
        asked = re.findall(r'internal\("(torch[^"{]*)"\)', path.read_text())
        assert listed.issuperset(asked)
