"""The file of samples: only changes are written, and what was written is read back whatever became of it."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.collectors.telemetry import samples
from dpro.collectors.telemetry.samples import SampleWriter, TelemetrySample, read_samples, sample_files


def written(folder, *moments: list[TelemetrySample]) -> tuple[str, list[TelemetrySample]]:
    """What a writer wrote in several goes and closed, read back."""
    writer = SampleWriter(folder, "node1")
    for moment in moments:
        writer.append(moment)
    writer.close()
    (path,) = sample_files(folder, whole=True)
    return read_samples(path)


def test_only_what_changed_is_written(tmp_path):
    host, samples = written(
        tmp_path,
        [
            TelemetrySample(10, -1, "gpu", {"power_w": 300.5, "ecc": 0}),
            TelemetrySample(11, 3, "", {"ecc": 0}),
        ],
        [TelemetrySample(20, -1, "gpu", {"power_w": 301, "ecc": 0}), TelemetrySample(21, 3, "", {"ecc": 0})],
        [TelemetrySample(30, -1, "gpu", {"power_w": 301, "ecc": 1})],
    )
    assert host == "node1"
    assert samples == [
        (10, -1, "gpu", {"power_w": 300.5, "ecc": 0}, False),
        (11, 3, "", {"ecc": 0}, False),
        (20, -1, "gpu", {"power_w": 301}, False),
        (30, -1, "gpu", {"ecc": 1}, False),
    ]


def test_events_are_written_each_time(tmp_path):
    events = [TelemetrySample(time, -1, "gpu", {"xid": 31}, is_event=True) for time in (1, 2)]
    assert [sample.time_ns for sample in written(tmp_path, events)[1]] == [1, 2]


def test_what_is_written_can_be_read_before_the_file_is_closed(tmp_path):
    writer = SampleWriter(tmp_path, "node1")
    for time in range(5):
        writer.append([TelemetrySample(time, -1, "", {"load": time})])
        (path,) = sample_files(tmp_path)
        assert [sample.time_ns for sample in read_samples(path)[1]] == list(range(time + 1))
    assert sample_files(tmp_path, whole=True) == []


def test_a_file_that_is_cut_anywhere_gives_what_came_before(tmp_path):
    _, samples = written(
        tmp_path, *[[TelemetrySample(time, -1, "", {"load": time**5})] for time in range(30)]
    )
    (path,) = sample_files(tmp_path)
    content = path.read_bytes()
    lengths = []
    for size in range(len(content)):
        path.write_bytes(content[:size])
        cut = read_samples(path)[1]
        assert cut == samples[: len(cut)]
        lengths.append(len(cut))
    assert lengths == sorted(lengths)
    assert {0, len(samples)} <= set(lengths)


@given(place=st.integers(0, 400), value=st.integers(0, 255))
def test_damage_never_raises(tmp_path_factory, place, value):
    folder = tmp_path_factory.mktemp("damage")
    written(folder, *[[TelemetrySample(time, -1, "", {"load": time**5})] for time in range(30)])
    (path,) = sample_files(folder)
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content)
    _, samples = read_samples(path)
    assert len(samples) <= 30


def test_every_file_begins_with_all_values(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "FILE_BYTES", 1)
    writer = SampleWriter(tmp_path, "node1")
    for time in (1, 2):
        writer.append([TelemetrySample(time, -1, "", {"constant": 7})])
    files = sample_files(tmp_path, whole=True)
    assert [path.name for path in files] == ["telemetry-00000.z", "telemetry-00001.z"]
    assert [read_samples(path)[1][0].values for path in files] == [{"constant": 7}] * 2


def test_a_full_disk_is_an_error_and_what_was_written_before_stays(tmp_path, monkeypatch):
    writer = SampleWriter(tmp_path, "node1")
    writer.append([TelemetrySample(1, -1, "", {"load": 1})])
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real_write(descriptor, content[:3]))
    with pytest.raises(OSError):
        writer.append([TelemetrySample(2, -1, "", {"load": 2})])
    monkeypatch.undo()
    (path,) = sample_files(tmp_path)
    assert [sample.time_ns for sample in read_samples(path)[1]] == [1]


def test_an_unwritable_folder_is_an_error(tmp_path):
    with pytest.raises(OSError) as raised:
        SampleWriter(tmp_path / "absent", "node1").append([TelemetrySample(1, -1, "", {"load": 1})])
    assert raised.value.errno == errno.ENOENT
