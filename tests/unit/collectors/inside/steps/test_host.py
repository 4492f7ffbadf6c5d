"""Host facts of a loop that runs in one thread after another."""

import threading

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside import records
from dpro.collectors.inside.steps.host import HostFacts


class Recorder:
    """What host facts need of one: records of a process that asks for no gradients."""

    training_thread = num_backward = 0
    data_wait_ns = input_elements = -1

    def __init__(self, folder):
        self.path = folder / "records.bin"
        self.records = records.RecordWriter(self.path)

    def works(self, _probe):
        return True


def test_a_thread_with_the_number_of_one_that_has_ended_is_followed_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("dpro.collectors.inside.steps.host.SHORT_NS", 0)
    recorder = Recorder(tmp_path)
    host, failed = HostFacts(recorder), []

    def loop():
        try:
            for step in range(3):
                host.on_step(step)
        except OSError as error:
            failed.append(error)

    for _ in range(8):  # the numbers of threads come back at once, those of the kernel do not
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    assert not failed
    assert sum(each.kind == records.CPU for each in records.read_records(recorder.path)) == 24
