"""Captures of CUDA graphs are seen from begin to end, and wait a moment for what must not meet them."""

import threading
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch

from dpro.collectors.inside import captures


class Recorder:
    """Calls probes as the recorder does."""

    def __init__(self) -> None:
        self.forked: list[Any] = []

    def listen(self, _occasion: str, action: Any) -> None:
        self.forked.append(action)

    def call(self, action: Any, *arguments: Any) -> None:
        action(*arguments)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CUDA graph class whose captures are seen, and which may fail."""

    class Graph:
        fails: ClassVar[str] = ""

        def capture_begin(self, mode: str = "global") -> str:
            if self.fails == "begin":
                raise RuntimeError("out of memory")
            return mode

        def capture_end(self) -> None:
            if self.fails == "end":
                raise RuntimeError("capture was invalidated")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(captures, "captured", captures.RunningCaptures())
    recorder: Any = Recorder()
    captures.install(recorder)
    Graph.forked = recorder.forked  # type: ignore[attr-defined]
    return Graph


def test_capture_runs_from_begin_to_end(graphs: Any) -> None:
    graph, other = graphs(), graphs()
    assert graph.capture_begin(mode="relaxed") == "relaxed"
    other.capture_begin()
    graph.capture_end()
    assert captures.is_capturing()
    other.capture_end()
    assert not captures.is_capturing()


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_capture_that_failed_is_over(graphs: Any, fails: str) -> None:
    graph = graphs()
    graph.fails = fails
    with suppress(RuntimeError):
        graph.capture_begin()
        assert captures.is_capturing()
        graph.capture_end()
    assert not captures.is_capturing()


def test_graph_that_was_deleted_captures_no_more(graphs: Any) -> None:
    graph = graphs()
    graph.capture_begin()
    del graph
    assert not captures.is_capturing()


def test_guard_says_no_during_a_capture(graphs: Any) -> None:
    graph = graphs()
    graph.capture_begin()
    with captures.guard() as free:
        assert not free
    graph.capture_end()
    with captures.guard() as free:
        assert free


def test_capture_waits_for_a_guard_that_ends(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "WAIT_S", 60.0)
    graph = graphs()
    thread = threading.Thread(target=graph.capture_begin)
    with captures.guard():
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert not captures.is_capturing()
    thread.join()
    assert captures.is_capturing()


def test_capture_begins_though_a_guard_never_ends(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "WAIT_S", 0.01)
    graph = graphs()
    with captures.guard():
        graph.capture_begin()
        assert captures.is_capturing()


def test_forked_child_captures_nothing_and_waits_for_no_thread(graphs: Any) -> None:
    graph = graphs()
    captures.captured.guards += 1
    captures.captured.changed.__enter__()
    graphs.forked[0]()
    graph.capture_begin()
    graph.capture_end()
    assert not captures.is_capturing()


def test_current_stream_is_asked_only_where_cuda_is_in_use(
    graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not captures.is_capturing_here()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert captures.is_capturing_here()
