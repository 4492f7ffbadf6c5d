"""Saves and loads of checkpoints, as the recorder's probe notes them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.inside import records  # noqa: E402
from dpro.collectors.inside.steps import checkpoints as probe  # noqa: E402
from dpro.collectors.inside.steps.checkpoints import Checkpoints, Stopwatch  # noqa: E402


class Recorder:
    """A recorder of which the probe needs no more than this."""

    def __init__(self, folder):
        self.folder = folder
        self.written = []
        self.records = SimpleNamespace(write=lambda *record: self.written.append(record))
        self.training_thread = threading.get_ident()

    def call(self, action, *arguments):
        action(*arguments)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by 10 ms at each reading."""
    now = [10**18]

    def tick():
        now[0] += 10_000_000
        return now[0]

    monkeypatch.setattr(probe.time, "time_ns", tick)
    return now


@pytest.fixture
def saving(tmp_path):
    """A recorder whose folder is there, its checkpoints, and a module that saves and loads as torch does."""
    (tmp_path / "raw").mkdir()
    recorder = Recorder(tmp_path / "raw")
    checkpoints = Checkpoints(recorder)
    module = SimpleNamespace(save=torch.save, load=torch.load)
    checkpoints.watch(module, "save", "save")
    checkpoints.watch(module, "load", "load")
    return recorder, checkpoints, module


def lines(recorder):
    path = recorder.folder / "checkpoints.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_what_is_within_itself_is_counted_once(clock):
    watch = Stopwatch()
    watch.start()
    watch.start()
    assert watch.stop() == -1
    assert watch.stop() == 10_000_000
    assert watch.total_ns(clock[0]) == 10_000_000


def test_what_still_goes_on_counts_so_far_and_what_began_before_anybody_looked_does_not(clock):
    watch = Stopwatch()
    assert watch.stop() == -1
    watch.start()
    assert watch.total_ns(clock[0] + 5) == 5


def test_save_is_noted_with_the_file_that_it_wrote(tmp_path, saving):
    recorder, checkpoints, module = saving
    module.save([1, 2, 3], tmp_path / "file.pt")
    (line,) = lines(recorder)
    status = (tmp_path / "file.pt").stat()
    assert (line["kind"], line["path"]) == ("save", str(tmp_path / "file.pt"))
    assert (line["bytes"], line["inode"], line["modified_ns"]) == (
        status.st_size,
        status.st_ino,
        status.st_mtime_ns,
    )
    assert 0 < line["stall_ns"] == line["duration_ns"]
    assert checkpoints.held_up.total_ns(0) > 0


def test_renamed_file_is_loaded_as_the_one_that_was_saved(tmp_path, saving):
    recorder, _, module = saving
    module.save([1, 2, 3], tmp_path / "file.tmp")
    (tmp_path / "file.tmp").rename(tmp_path / "file.pt")
    assert module.load(tmp_path / "file.pt") == [1, 2, 3]
    saved, loaded = lines(recorder)
    assert loaded["kind"] == "load"
    assert [saved[name] for name in ("inode", "modified_ns")] == [
        loaded[name] for name in ("inode", "modified_ns")
    ]


def test_open_file_has_its_path_and_a_buffer_none(tmp_path, saving):
    import io

    recorder, _, module = saving
    with (tmp_path / "file.pt").open("wb") as file:
        module.save([1], file)
    module.save([1], io.BytesIO())
    assert [line["path"] for line in lines(recorder)] == [str(tmp_path / "file.pt")]


class Unruly:
    """State that has a name, and raises when it is asked for anything else than torch asks."""

    @property
    def name(self):
        raise RuntimeError("not now")


@pytest.mark.parametrize("state", ["a text", Unruly(), SimpleNamespace(name="llama")])
def test_file_is_the_argument_that_names_it_and_never_the_state(tmp_path, saving, state):
    recorder, _, module = saving
    module.save(state, tmp_path / "file.pt")
    module.save(obj=state, f=tmp_path / "other.pt")
    assert [line["path"] for line in lines(recorder)] == [
        str(tmp_path / "file.pt"),
        str(tmp_path / "other.pt"),
    ]


def test_failed_save_raises_and_counts_as_time_in_which_training_stood(tmp_path, saving, clock):
    recorder, checkpoints, module = saving
    with pytest.raises(RuntimeError):
        module.save([1], tmp_path / "nowhere" / "file.pt")
    assert lines(recorder) == []
    assert checkpoints.held_up.total_ns(0) == 10_000_000
    assert [record[0] for record in recorder.written] == [records.SAVED]


def test_save_of_another_thread_stalls_nothing(tmp_path, saving):
    recorder, checkpoints, module = saving
    thread = threading.Thread(target=module.save, args=([1], tmp_path / "file.pt"))
    thread.start()
    thread.join()
    (line,) = lines(recorder)
    assert line["stall_ns"] == 0 < line["duration_ns"]
    assert checkpoints.held_up.total_ns(0) == 0


def test_save_in_the_background_has_its_duration_once_it_is_written(tmp_path, saving, monkeypatch):
    recorder, checkpoints, _ = saving
    upload = Future()
    module = ModuleType("torch.distributed.checkpoint")
    module.async_save = lambda state, *, checkpoint_id: upload
    module.save = lambda state, *, checkpoint_id: None
    monkeypatch.setitem(probe.sys.modules, module.__name__, module)
    checkpoints.look()
    folder = tmp_path / "step_10"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"x" * 300)
    (folder / "__1_0.distcp").write_bytes(b"x" * 50)
    monkeypatch.setattr(probe, "identity", lambda: (0, 2))
    module.async_save({}, checkpoint_id=folder)
    worker = threading.Thread(target=module.save, args=({},), kwargs={"checkpoint_id": folder})
    worker.start()
    worker.join()
    assert [line["duration_ns"] for line in lines(recorder)] == [-1]
    upload.set_result(None)
    _, whole = lines(recorder)
    assert whole["duration_ns"] >= whole["stall_ns"] > 0
    assert (whole["bytes"], whole["source"].rpartition(".")[2]) == (300, "async_save")


def test_functions_are_found_once_the_job_has_imported_them(saving, monkeypatch):
    recorder, checkpoints, _ = saving
    module = ModuleType("safetensors.torch")
    monkeypatch.setitem(probe.sys.modules, module.__name__, module)
    checkpoints.look()  # still being imported
    module.save_file = lambda tensors, path: path
    checkpoints.look()
    checkpoints.look()
    assert module.save_file({}, "nowhere") == "nowhere"
    assert len(lines(recorder)) == 1


def test_nothing_is_written_before_the_process_trains(tmp_path, saving):
    recorder, _, module = saving
    recorder.folder = None
    module.save([1], tmp_path / "file.pt")
