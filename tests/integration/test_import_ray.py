"""Imports on a Ray cluster, one of whose nodes dies."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dpro.errors import DproError, MissingExtra
from dpro.ingest.importer import import_sources, ray_executor
from tests.integration.test_import_parallel import digests
from tests.slow_reader import install_slow_reader, kill_the_reader_of_the_third_file
from tests.traces import write_rank


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"dpro-toolkit\[ray\]"), ray_executor():
        pass


def test_a_ray_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    # As where amdsmi is installed without AMD's driver: Ray raises its KeyError.
    (tmp_path / "ray.py").write_text("{}['libamd_smi.so']", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DproError, match=r"cannot be imported \(KeyError: 'libamd_smi.so'\)"), ray_executor():
        pass


@pytest.mark.slow
def test_the_command_imports_on_ray(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed", exc_type=Exception)
    for rank in range(3):
        write_rank(tmp_path / "in", rank, 3)
    import_sources([tmp_path / "in"], tmp_path / "expected")
    command = [sys.executable, "-m", "dpro", "import", tmp_path / "in", "-o", tmp_path / "run"]
    done = subprocess.run([*command, "--executor", "ray"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "run") == digests(tmp_path / "expected")


@pytest.mark.slow
def test_nothing_is_lost_with_a_node_of_the_cluster(tmp_path, repository, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed", exc_type=Exception)
    from ray.cluster_utils import Cluster

    ranks = 10
    log = install_slow_reader(tmp_path / "site", "ray.get_runtime_context().get_node_id()", "ray")
    for rank in range(ranks):
        write_rank(tmp_path / "in", rank, ranks)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{repository}")  # for the workers alone
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        victim = (cluster, log)
        killer = threading.Thread(target=_kill_the_node_that_reads_the_third_file, args=victim, daemon=True)
        killer.start()
        with ray_executor() as executor:
            manifest = import_sources([tmp_path / "in"], tmp_path / "run", executor=executor)
        killer.join()
        left = len(cluster.worker_nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()
    import_sources([tmp_path / "in"], tmp_path / "expected")
    assert left == 1
    assert manifest.warnings == []
    assert manifest.ranks == list(range(ranks))
    assert digests(tmp_path / "run") == digests(tmp_path / "expected")
    started = [line.split()[0] for line in log.read_text().splitlines()]
    assert set(started) == {f"rank{rank}.json.gz" for rank in range(ranks)}
    assert started.count(started[2]) == 2  # what the node was reading when it died was read again


def _kill_the_node_that_reads_the_third_file(cluster: object, log: Path) -> None:
    """Kill a node while it reads: the process that does, and what would start another."""
    identifier = kill_the_reader_of_the_third_file(log)
    (node,) = [node for node in cluster.worker_nodes if node.node_id == identifier]
    cluster.remove_node(node, allow_graceful=False)
