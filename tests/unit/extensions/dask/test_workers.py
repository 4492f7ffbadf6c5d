"""Workers of a Dask cluster as an executor: what is refused, and how tasks are sent to a made-up cluster."""

from __future__ import annotations

from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpro.errors import DproError, UsageError
from dpro.extensions.dask import workers
from dpro.extensions.dask.workers import VARIABLE, workers_of_cluster
from dpro.processes import named_workers
from tests.commands import dpro, refused
from tests.traces import write_rank

URL = "dask://here:8786"


class Future:
    """What a worker has answered."""

    def __init__(self, result, error=None):
        self._result, self._error = result, error

    def result(self):
        if self._error:
            raise self._error
        return self._result


class Cluster:
    """A client of a cluster that does all at once, and notes what it was sent."""

    def __init__(self, threads, answers=(), error=None):
        self._threads, self._answers, self._error = threads, answers, error
        self.sent: list[list[object]] = []

    def nthreads(self):
        return self._threads

    def get_executor(self, **_):
        return None

    def run_on_scheduler(self, work, *given):
        answer = self._answers[0][1] if self._answers else work(*given)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def run(self, work, *given, on_error):
        assert on_error == "return"
        return dict(self._answers[1:]) or {"tcp://1": work(*given)}

    def map(self, work, *iterables, pure):
        assert not pure
        self.sent = [chunk for _, chunk in zip(*iterables)]
        return [Future(work(*task), self._error) for task in zip(*iterables)]


def test_tasks_are_sent_in_eight_chunks_for_each_thread_and_results_come_in_order():
    cluster = Cluster({"a": 1, "b": 2})
    executor = workers._Workers(cluster, URL)
    assert list(executor.map(pow, range(100), [2] * 100)) == [number**2 for number in range(100)]
    assert [len(chunk) for chunk in cluster.sent] == [5] * 20
    assert list(executor.map(abs, [-1, -2])) == [1, 2]
    assert [len(chunk) for chunk in cluster.sent] == [1, 1]
    assert list(executor.map(abs, range(10), chunksize=6)) == list(range(10))
    assert [len(chunk) for chunk in cluster.sent] == [6, 4]
    assert list(executor.map(abs, [])) == []


def test_a_worker_that_was_lost_is_an_executor_that_is_broken():
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    worker = SimpleNamespace(address="tcp://1")
    lost = distributed.KilledWorker("build-1", worker, 3)
    executor = workers._Workers(Cluster({"a": 1}, error=lost), URL)
    with pytest.raises(BrokenExecutor, match=r"dask://here:8786: .*build-1"):
        list(executor.map(abs, [1]))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            ModuleNotFoundError("No module named 'dpro'"),
            r"cannot run dpro \(No module named 'dpro'\): install",
        ),
        (("0.0.1", []), "has dpro 0.0.1, but this is"),
        ((workers.__version__, ["/data/run"]), "does not see /data/run: .* DPRO_CACHE sets such a folder"),
    ],
)
@pytest.mark.parametrize("who", ["the scheduler", "worker tcp://2"])
def test_who_cannot_do_the_work_is_named_before_any_is_sent(answer, said, who):
    well = workers.__version__, []
    answers = {"the scheduler": well, "tcp://1": well} | {who.removeprefix("worker "): answer}
    with pytest.raises(DproError, match=f"{who} {said}"):
        workers._check_workers(Cluster({}, list(answers.items())), URL, [])


def test_workers_that_can_do_the_work_are_sent_it():
    workers._check_workers(Cluster({}), URL, [])


def test_a_worker_looks_for_each_path(tmp_path):
    assert workers._version_and_missing([str(tmp_path), str(tmp_path / "no")]) == (
        workers.__version__,
        [str(tmp_path / "no")],
    )


@pytest.mark.parametrize("url", ["8786", "tcp://host:8786", "dask://host", "dask://:8786", "dask://host:x"])
def test_what_names_no_scheduler_is_refused(url, tmp_path, monkeypatch):
    said = refused(dpro("report", tmp_path, "--executor", url), 2)
    assert f"{url} is not an executor: give the scheduler of a Dask cluster as dask://HOST:PORT" in said
    monkeypatch.setenv(VARIABLE, url)
    with pytest.raises(UsageError):
        workers_of_cluster([])


def test_no_workers_are_named_unless_the_user_does(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with named_workers([Path("/")]) as executor:
        assert executor is None


def test_a_scheduler_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.setattr(workers, "PATIENCE_S", 0.1)
    write_rank(tmp_path / "in", 0, 1)
    done = dpro("import", tmp_path / "in", "-o", tmp_path / "run", "--executor", "dask://127.0.0.1:9")
    assert "dask://127.0.0.1:9: no Dask scheduler answers there" in refused(done, 1)
    assert not (tmp_path / "run").exists()
    assert workers._URL.get() == ""
