"""Large runs on a real Dask cluster: the same answers as one machine gives, and one line where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpro.analysis import graphs
from dpro.analysis.graphs import condensed_of
from dpro.extensions.dask.workers import VARIABLE
from dpro.store import open_run
from tests.commands import dpro, refused
from tests.integration.test_import_parallel import digests
from tests.traces import write_rank

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
distributed = pytest.importorskip("distributed", reason="Dask is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The scheduler of three workers."""
    folder = str(tmp_path_factory.mktemp("dask"))
    with distributed.LocalCluster(
        n_workers=3, threads_per_worker=1, dashboard_address="127.0.0.1:0", local_directory=folder
    ) as cluster:
        yield cluster.scheduler_address.replace("tcp:", "dask:")


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 0)


@pytest.fixture(scope="module")
def caches(make_cache, tmp_path_factory):
    """One for processes of this machine, one for workers of the cluster."""
    return [make_cache(tmp_path_factory.mktemp("cache")) for _ in range(2)]


COMMANDS = ("replay",), ("diagnose",), ("whatif", "--edit", "heal:rank=1")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_answer_as_on_one_machine(command, url, large, caches, monkeypatch):
    monkeypatch.chdir(SAMPLES)
    name, *more = command
    answers = []
    for cache, executor in zip(caches, ((), ("--executor", url))):
        done = dpro(name, "slow_rank", *more, *executor, "--json", cache=cache)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1]
    kept = [next(cache.glob("graphs/*-ranks.npz")) for cache in caches]
    assert kept[0].read_bytes() == kept[1].read_bytes()
    assert not any([*cache.rglob("shares-*")] for cache in caches)


def test_a_relative_path_is_seen_by_workers_that_start_elsewhere(url, large, caches, monkeypatch):
    monkeypatch.chdir(SAMPLES)
    run = open_run(Path("slow_rank"))
    with distributed.Client(url.replace("dask:", "tcp:")) as client:
        before = client.run(os.getcwd)
        client.run(os.chdir, "/")
        monkeypatch.setenv("DPRO_CACHE", str(caches[1]))
        monkeypatch.setenv(VARIABLE, url)
        for file in caches[1].glob("graphs/*-ranks.npz"):
            file.unlink()
        assert condensed_of(run).trust.answerable
        for worker, folder in before.items():
            client.run(os.chdir, folder, workers=[worker])


def test_traces_are_imported_by_the_workers(url, tmp_path):
    for rank in range(4):
        write_rank(tmp_path / "in", rank, 4)
    for name, more in (("here", ()), ("there", ("--executor", url))):
        assert dpro("import", tmp_path / "in", "-o", tmp_path / name, *more).returncode == 0
    assert digests(tmp_path / "here") == digests(tmp_path / "there")


def test_workers_without_dpro_are_one_line(large, make_cache, tmp_path):
    (tmp_path / "dpro").mkdir()
    (tmp_path / "dpro" / "__init__.py").write_text("raise ImportError('not here')", encoding="utf-8")
    script = (
        "import sys, distributed\n"
        "if __name__ == '__main__':\n"
        "    with distributed.LocalCluster(n_workers=1, dashboard_address='127.0.0.1:0') as cluster:\n"
        "        print(cluster.scheduler_address, flush=True)\n"
        "        sys.stdin.read()\n"
    )
    (tmp_path / "cluster.py").write_text(script, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "cluster.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as cluster:  # fmt: skip
        assert cluster.stdout
        assert cluster.stdin
        url = cluster.stdout.readline().strip().replace("tcp:", "dask:")
        done = dpro("replay", SAMPLES / "slow_rank", "--executor", url, cache=make_cache(tmp_path / "cache"))
        cluster.stdin.close()
    assert "cannot run dpro" in refused(done, 1)
