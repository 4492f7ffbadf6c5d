"""A recorder for hooks of inference engines, and the tables of what they said to it."""

from __future__ import annotations

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.served import iterations, requests
from dpro.collectors.inside import records
from dpro.schema import ITERATIONS, REQUESTS, conform
from tests.recorder_output import FlushedWriter


class Recorder:
    """What hooks need of one: records, a folder, and calls that do not raise."""

    def __init__(self, folder):
        self.folder, self.steps, self.ends = folder, 0, []
        self.records = FlushedWriter(folder / "records.bin")

    def listen(self, occasion, action):
        if occasion == "end":
            self.ends.append(action)

    def call(self, action, *arguments):
        action(*arguments)

    guarded = call

    def on_update(self, _signal):
        self.steps += 1

    def write_file(self, name, content):
        (self.folder / name).write_bytes(content)

    def tables(self):
        """End the process; return its iterations and requests."""
        for action in self.ends:
            action()
        process = RecordedProcess(self.folder, {"rank": 0})
        found = records.read_records(self.folder / "records.bin")
        return conform(ITERATIONS, iterations(process, found)), conform(REQUESTS, requests(process))
