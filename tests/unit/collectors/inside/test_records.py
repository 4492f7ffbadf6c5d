import os
import threading
from itertools import count
from pathlib import Path

import pytest

from dpro.collectors.inside import records
from dpro.collectors.inside.records import Record, RecordWriter, read_records


def test_records_are_read_back_in_the_order_written(tmp_path):
    writer = RecordWriter(tmp_path / "records.bin")
    writer.write(records.UPDATE, 1, 2, 3, 4)
    writer.write(records.CLOCK, -5, 2**62)
    assert read_records(tmp_path / "records.bin") == [
        Record(1, 2, 3, 4, records.UPDATE),
        Record(-5, 2**62, 0, 0, records.CLOCK),
    ]


def test_file_grows_when_it_is_full(tmp_path):
    writer = RecordWriter(tmp_path / "records.bin")
    for number in range(60_000):
        writer.write(records.UPDATE, number)
    assert [record.a for record in read_records(tmp_path / "records.bin")] == list(range(60_000))


def test_threads_do_not_overwrite_each_other(tmp_path):
    writer = RecordWriter(tmp_path / "records.bin")

    def write(kind: int) -> None:
        for number in range(40_000):
            writer.write(kind, number)

    threads = [threading.Thread(target=write, args=(kind,)) for kind in (records.UPDATE, records.CLOCK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_records(tmp_path / "records.bin")
    for kind in (records.UPDATE, records.CLOCK):
        assert [record.a for record in found if record.kind == kind] == list(range(40_000))


def test_torn_file_gives_its_whole_records(tmp_path):
    path = tmp_path / "records.bin"
    writer = RecordWriter(path)
    writer.write(records.UPDATE, 1)
    writer.write(records.UPDATE, 2)
    path.write_bytes(path.read_bytes()[:70])
    assert [record.a for record in read_records(path)] == [1]


def test_missing_file_has_no_records(tmp_path):
    assert read_records(tmp_path / "records.bin") == []


def test_memory_does_not_grow_with_the_file(tmp_path):
    writer = RecordWriter(tmp_path / "records.bin")
    mapped = []
    for number in range(200_000):
        writer.write(records.UPDATE, number)
        if number % 50_000 == 49_999:
            mapped.append(Path("/proc/self/maps").read_text().count(str(tmp_path / "records.bin")))
    assert mapped == [2] * 4
    assert len(read_records(tmp_path / "records.bin")) == 200_000


def test_file_under_the_number_of_one_that_the_job_closed_is_left_alone(tmp_path):
    writer = RecordWriter(tmp_path / "records.bin")
    writer.write(records.UPDATE, 0)
    os.close(writer._descriptor)
    with (tmp_path / "of-the-job").open("w+b") as theirs:
        assert theirs.fileno() == writer._descriptor
        theirs.write(b"data")
        theirs.flush()
        for number in range(1, 60_000):
            writer.write(records.UPDATE, number)
        assert theirs.seek(0, os.SEEK_END) == 4
    assert [record.a for record in read_records(tmp_path / "records.bin")] == list(range(60_000))


def test_records_end_where_their_closed_file_is_another_now(tmp_path):
    writer = RecordWriter(tmp_path / "records.bin")
    os.close(writer._descriptor)
    (tmp_path / "records.bin").unlink()
    (tmp_path / "records.bin").write_bytes(b"")
    writer._slots = count(30_000)  # of the next chunk
    with pytest.raises(OSError, match="another file now"):
        writer.write(records.UPDATE)
