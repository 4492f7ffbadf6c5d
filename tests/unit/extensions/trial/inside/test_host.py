"""Garbage collection, threads and variables of the environment."""

import gc
import sys

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    gc.enable()


def test_garbage_is_collected_every_few_steps_and_within_them(job, monkeypatch):
    job.change("gc:every=3")
    job.steps(1)
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(step))
    for step in range(2, 8):
        job.notify("step", step)
        assert len(collected) == (step - 1) // 3  # not between two steps
        job.notify("work")
    assert collected == [3, 6]
    assert not gc.isenabled()
    assert len(job.places()) == 1


def test_garbage_is_collected_no_more(job, monkeypatch):
    job.change("gc:every=0")
    job.steps(2)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    for step in range(3, 30):
        job.notify("step", step)
        job.notify("work")
    assert not gc.isenabled()


def test_a_script_that_has_no_garbage_collected_itself_is_not_changed(job):
    gc.disable()
    job.change("gc:every=100")
    job.steps(1)
    [said] = job.said()
    assert "itself" in said["refused"][0]


def test_a_script_that_turns_collection_on_again_is_not_changed(job):
    job.change("gc:every=100")
    job.steps(1, 2)
    gc.enable()
    job.steps(3)
    [said] = job.said()
    assert "on again" in said["refused"][0]


def test_threads_are_as_many_as_asked_for_whatever_the_script_says(job):
    torch.set_num_threads(1)
    job.change("threads:n=2")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(5)
    assert torch.get_num_threads() == 2
    first, second = job.places()
    assert first == {"where": "torch", "instead_of": "1", "times": 1}
    assert second["instead_of"] == "5"
    assert second["where"].startswith("torch.set_num_threads at test_host.py:")


def test_as_many_threads_as_there_are_anyway_are_no_change(job):
    torch.set_num_threads(2)
    job.change("threads:n=2")
    torch.set_num_threads(2)
    assert "nothing to change" in job.refused()


def test_a_variable_is_looked_for_where_the_job_trains(job, monkeypatch):
    job.change("env:NCCL_ALGO=Tree")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    job.notify("open")
    assert job.places() == [{"where": "environment", "instead_of": "", "times": 1}]


def test_a_variable_that_the_job_sets_itself_is_refused(job, monkeypatch):
    job.change("env:NCCL_ALGO=Tree")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    job.notify("open")
    assert "sets NCCL_ALGO itself to Ring" in job.refused()


def test_what_cannot_even_be_prepared_is_refused_and_the_rest_goes_on(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "dpro.extensions.trial.inside.arguments", None)
    job.change("bucket:mb=1", "gc:every=5")
    job.steps(1, 2)
    by_edit = {change["edit"]: change for change in job.said()}
    assert "ModuleNotFoundError" in by_edit["bucket:mb=1"]["refused"][0]
    assert by_edit["gc:every=5"]["applied"]


def test_a_forked_child_has_made_no_change(job, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    job.change("env:NCCL_ALGO=Tree")
    job.notify("open")
    job.notify("fork")
    [said] = job.said()
    assert said["applied"] == []
