"""Ranges that outlive a recording are not left within another one."""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.profiler import profile, record_function  # noqa: E402

from dpro.collectors.inside.windows import Ranges  # noqa: E402


@pytest.fixture
def ranges(monkeypatch):
    """Ranges as they are seen in a job, and what PyTorch is asked to end of them."""
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(record_function, name, getattr(record_function, name))
    made = Ranges()
    made.install()
    return made


def recording():
    return profile(use_kineto=True)


def names(profiler):
    return {event.name for event in profiler.function_events}


def test_range_that_began_in_one_recording_ends_before_the_next(ranges, monkeypatch):
    ended: list[int] = []
    exit_ops = torch.ops.profiler._record_function_exit
    original = exit_ops._RecordFunction

    def end(record):
        ended.append(id(record))
        original(record)

    monkeypatch.setattr(exit_ops, "_RecordFunction", end, raising=False)
    with recording() as first:
        outer = record_function("outer")
        outer.__enter__()
        with record_function("inner"):
            pass
    ranges.finish()
    assert ended[1:] == [id(outer.record)]
    with recording() as second, record_function("another"):
        outer.__exit__(None, None, None)
    assert ended.count(id(outer.record)) == 1
    assert "inner" in names(first)
    assert "another" in names(second)


def test_range_used_as_a_decorator_is_entered_again(ranges):
    @record_function("decorated")
    def call(inside=None):
        if inside:
            inside()

    first = recording()
    first.__enter__()
    call(lambda: (first.__exit__(None, None, None), ranges.finish()))
    with recording() as second:
        call()
    assert "decorated" in names(second)


def test_ranges_outside_recordings_are_left_alone(ranges):
    with record_function("plain"):
        ranges.finish()
        assert not ranges._open
        assert not ranges._finished
