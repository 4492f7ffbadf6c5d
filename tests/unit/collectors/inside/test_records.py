import os
import threading

import pytest

from dpro.collectors.inside import records
from dpro.collectors.inside.records import Record, RecordWriter, read_records


def read_back(writer, path):
    writer.flush()
    return read_records(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.bin"


def test_records_are_read_back_in_the_order_written(path):
    writer = RecordWriter(path)
    writer.write(records.UPDATE, 1, 2, 3, 4)
    writer.write(records.CLOCK, -5, 2**62)
    assert read_records(path) == []
    assert read_back(writer, path) == [
        Record(1, 2, 3, 4, records.UPDATE),
        Record(-5, 2**62, 0, 0, records.CLOCK),
    ]


def test_records_that_no_step_flushes_do_not_pile_up(path):
    writer = RecordWriter(path)
    for number in range(60_000):
        writer.write(records.UPDATE, number)
        assert len(writer._waiting) <= records.MAX_WAITING
    assert [record.a for record in read_back(writer, path)] == list(range(60_000))


def test_records_of_several_threads_are_all_there_each_in_order(path):
    writer = RecordWriter(path)

    def write(kind: int) -> None:
        for number in range(40_000):
            writer.write(kind, number)
            if number % 10 == 0:
                writer.flush()

    threads = [threading.Thread(target=write, args=(kind,)) for kind in (records.UPDATE, records.CLOCK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_back(writer, path)
    for kind in (records.UPDATE, records.CLOCK):
        assert [record.a for record in found if record.kind == kind] == list(range(40_000))


def test_a_flush_within_a_flush_waits_for_nothing_and_loses_nothing(path, monkeypatch):
    """A handler of a signal may end the process, or its step, while the main thread writes records."""
    writer = RecordWriter(path)
    plain = os.pwrite

    def interrupted(*args):
        monkeypatch.setattr(os, "pwrite", plain)
        writer.write(records.ENDING, 7)
        writer.flush()
        return plain(*args)

    monkeypatch.setattr(os, "pwrite", interrupted)
    writer.write(records.UPDATE, 1)
    assert [record.kind for record in read_back(writer, path)] == [records.UPDATE, records.ENDING]


def test_what_a_handler_interrupts_is_written_by_the_next_flush(path, monkeypatch):
    writer = RecordWriter(path)
    plain = os.pwrite

    def interrupted(*args):
        monkeypatch.setattr(os, "pwrite", plain)
        plain(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    writer.write(records.UPDATE, 1)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    writer.write(records.UPDATE, 2)
    assert [record.a for record in read_back(writer, path)] == [1, 2]


def test_torn_file_gives_its_whole_records(path):
    writer = RecordWriter(path)
    writer.write(records.UPDATE, 1)
    writer.write(records.UPDATE, 2)
    writer.flush()
    path.write_bytes(path.read_bytes()[:70])
    assert [record.a for record in read_records(path)] == [1]


def test_missing_file_has_no_records(path):
    assert read_records(path) == []


def test_a_file_that_a_user_truncates_is_not_mapped_into_memory_and_grows_again(path):
    writer = RecordWriter(path)
    writer.write(records.UPDATE, 1)
    writer.flush()
    os.truncate(path, 0)
    writer.write(records.UPDATE, 2)
    assert read_back(writer, path)[-1].a == 2
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


def test_file_under_the_number_of_one_that_the_job_closed_is_left_alone(path, tmp_path):
    writer = RecordWriter(path)
    writer.write(records.UPDATE, 0)
    writer.flush()
    number = writer._file.number
    with (tmp_path / "of-the-job").open("w+b", buffering=0) as theirs:
        os.dup2(theirs.fileno(), number)
        theirs.write(b"data")
        writer.write(records.UPDATE, 1)
        assert [record.a for record in read_back(writer, path)] == [0, 1]
        assert theirs.seek(0, os.SEEK_END) == 4
        writer = None  # nor is it closed when the writer goes
        os.close(number)


def test_records_end_where_their_closed_file_is_another_now(path):
    writer = RecordWriter(path)
    path.rename(path.with_name("moved"))  # whose inode no other file gets
    os.close(writer._file.number)
    path.write_bytes(b"")
    writer.write(records.UPDATE)
    with pytest.raises(OSError, match="another file now"):
        writer.flush()


def test_a_job_that_limits_the_size_of_its_files_gets_no_signal(path):
    import resource
    import signal

    came = []
    before = signal.signal(signal.SIGXFSZ, lambda *_: came.append(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = RecordWriter(path)
    writer.write(records.UPDATE, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(OSError, match="at most 16 bytes"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not came
