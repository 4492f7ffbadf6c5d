"""Host facts of a loop that runs in one thread after another."""

import gc
import sys
import threading
import time

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside import records
from dpro.collectors.inside.steps.host import HostFacts, timed_collections
from tests.recorder_output import FlushedWriter


@pytest.fixture(autouse=True)
def callbacks():
    """None of a test's callbacks outlives it, and it has no others."""
    before = list(gc.callbacks)
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = before


class Recorder:
    """What host facts need of one: records of a process that asks for no gradients."""

    training_thread = num_backward = 0
    data_wait_ns = input_elements = -1

    def __init__(self, folder):
        self.path = folder / "records.bin"
        self.records = FlushedWriter(self.path)

    def works(self, _probe):
        return True


def test_a_thread_with_the_number_of_one_that_has_ended_is_followed_again(tmp_path):
    recorder = Recorder(tmp_path)
    host, failed = HostFacts(recorder), []

    def loop():
        try:
            for step in range(3):
                host.on_sample(step)
        except OSError as error:
            failed.append(error)

    for _ in range(8):  # the numbers of threads come back at once, those of the kernel do not
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    assert not failed
    assert sum(each.kind == records.CPU for each in records.read_records(recorder.path)) == 24


def test_collections_are_timed_without_a_line_of_python():
    gc.collect()  # what other tests left, whose finalisers are Python
    begun_ns, ended_ns = timed_collections()
    called = []
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
    before_ns = time.time_ns()
    gc.collect()
    gc.collect()
    sys.setprofile(None)
    assert [event for event, _ in called if event == "call"] == []
    begun, ended = list(begun_ns)[:2], list(ended_ns)[:2]
    assert before_ns <= begun[0] <= ended[0] <= begun[1] <= ended[1]


def test_long_collections_are_records_and_all_are_added_up(tmp_path):
    recorder = Recorder(tmp_path)
    host = HostFacts(recorder)
    gc.disable()
    try:
        host._begun_ns.extend([90, 10_000_000, 20_000_000])
        host._ended_ns.extend([50, 93, 12_000_000, 20_000_005])  # the start of the first made room
        host.on_step(1)
        recorder.records.flush()
    finally:
        gc.enable()
    noted = records.read_records(recorder.path)
    long = [tuple(record[:2]) for record in noted if record.kind == records.COLLECTED]
    assert long == [(10_000_000, 2_000_000)]
    assert [record.c for record in noted if record.kind == records.WORK] == [3 + 2_000_000 + 5]


def test_thread_that_has_ended_is_an_error_and_no_crash(tmp_path):
    recorder = Recorder(tmp_path)
    host = HostFacts(recorder)
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    recorder.training_thread = thread.ident
    with pytest.raises(OSError, match="has ended"):
        host.on_sample(1)
