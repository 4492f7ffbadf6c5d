"""The parts of a start: imports as they end, in the order of a job, which sees nothing of it."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import traceback
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.process import start_parts as probe
from dpro.collectors.inside.process.start_parts import ImportWatch, StartParts
from dpro.collectors.inside.recorder import AwaitedModules

NAMES = ("dpro_outer", "dpro_inner", "dpro_bad")


@pytest.fixture
def recorder(tmp_path):
    return SimpleNamespace(folder=tmp_path, joining=None, call=lambda action, *arguments: action(*arguments))


@pytest.fixture
def watch(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        probe, "is_main_thread", lambda: threading.current_thread() is threading.main_thread()
    )
    monkeypatch.setattr(probe, "LONG_NS", 0)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dpro_outer.py").write_text("import dpro_inner\n")
    (tmp_path / "dpro_inner.py").write_text("kind = type(__spec__).__name__\n")
    (tmp_path / "dpro_bad.py").write_text("import dpro_inner\nraise ValueError('its own')\n")
    watch = ImportWatch(recorder, StartParts(recorder))
    watch.install()
    yield watch
    watch.remove()
    for name in NAMES:
        sys.modules.pop(name, None)


def names(recorder):
    path = recorder.folder / "start_parts.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [line["name"] for line in lines if line["name"].startswith("dpro_")]


def test_import_within_another_is_part_of_that(watch, recorder):
    import dpro_outer

    assert names(recorder) == ["dpro_outer"]
    assert type(dpro_outer.__spec__) is ModuleSpec
    assert type(dpro_outer.dpro_inner.__spec__) is ModuleSpec
    assert dpro_outer.dpro_inner.kind == "ModuleSpec"


def test_import_that_fails_has_the_traceback_of_the_job_alone(watch, recorder):
    with pytest.raises(ValueError, match="its own") as raised:
        import dpro_bad  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="dpro_not_there") as missed:
        import dpro_not_there  # noqa: F401
    files = [frame.filename for error in (raised, missed) for frame in traceback.extract_tb(error.tb)]
    assert all(file.endswith(("test_start_parts.py", "dpro_bad.py")) for file in files)
    import dpro_inner  # noqa: F401  # it was imported within the other one

    assert names(recorder) == ["dpro_bad"]


def test_asking_where_a_module_is_imports_nothing_and_gets_a_plain_answer(watch, recorder):
    spec = importlib.util.find_spec("dpro_outer")
    assert type(spec) is ModuleSpec
    assert names(recorder) == []


def test_finder_that_the_job_asks_itself_knows_nothing(watch):
    assert watch.find_spec("dpro_outer") is None


def test_of_a_module_that_another_finder_of_ours_awaits_its_imports_are_seen(watch, recorder):
    met, awaited = [], AwaitedModules()
    awaited.add("dpro_outer", lambda module: met.append(module.__name__))
    try:
        import dpro_outer  # noqa: F401
    finally:
        sys.meta_path.remove(awaited)
    assert met == ["dpro_outer"]
    assert names(recorder) == ["dpro_inner"]


def test_imports_of_other_threads_are_left_out(watch, recorder):
    thread = threading.Thread(target=__import__, args=("dpro_outer",))
    thread.start()
    thread.join()
    assert "dpro_outer" in sys.modules
    assert names(recorder) == []


def test_nothing_is_left_once_a_step_has_ended(watch, recorder):
    assert watch in sys.meta_path
    assert watch.remove() is probe.ENOUGH
    watch.remove()
    assert watch not in sys.meta_path
    import dpro_outer  # noqa: F401

    assert names(recorder) == []


def test_what_is_being_imported_already_counts_from_now_on(watch, recorder, tmp_path, monkeypatch):
    watch.remove()
    later = ImportWatch(recorder, StartParts(recorder))
    monkeypatch.setattr(probe, "later", later, raising=False)
    (tmp_path / "dpro_outer.py").write_text(
        f"import sys; sys.modules[{probe.__name__!r}].later.install()\nimport dpro_inner\n"
    )
    import dpro_outer

    later.remove()
    assert names(recorder) == ["dpro_outer"]
    assert type(dpro_outer.__spec__) is ModuleSpec


def test_parts_wait_until_the_process_records(recorder, tmp_path):
    recorder.folder = None
    parts = StartParts(recorder)
    parts.add("import", "dpro_early", 5)
    recorder.folder = tmp_path
    parts.save()
    assert names(recorder) == ["dpro_early"]


def test_group_has_its_members_and_what_the_job_calls_it(recorder, monkeypatch):
    group = SimpleNamespace(group_desc="tensors")
    monkeypatch.setattr(probe, "group_names", lambda: {})
    parts = StartParts(recorder)
    parts.on_group(-100, probe.time.time_ns())  # of other ranks: no line
    monkeypatch.setattr(probe, "group_ranks", lambda _: {4: 0, 6: 1})
    monkeypatch.setattr(probe, "group_backends", lambda _: "gloo")
    monkeypatch.setattr(probe, "group_names", lambda: NamesOf(group))
    parts.on_group(group, probe.time.time_ns())
    (line,) = (recorder.folder / "start_parts.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["kind"], found["name"], found["purpose"]) == ("process_group", "7", "tensors")
    assert (found["ranks"], found["backend"]) == ([4, 6], "gloo")


class NamesOf:
    """A name for one group, which cannot be hashed."""

    def __init__(self, group):
        self._group = group

    def get(self, group, default):
        return "7" if group is self._group else default
