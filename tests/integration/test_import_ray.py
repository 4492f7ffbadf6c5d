"""Imports on a Ray cluster, one of whose nodes dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dpro.errors import MissingExtra
from dpro.ingest.importer import import_sources
from dpro.ingest.ray_executor import ray_executor
from tests.integration.test_import_parallel import digests
from tests.traces import write_rank


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"dpro-toolkit\[ray\]"), ray_executor():
        pass


@pytest.mark.slow
def test_the_command_imports_on_ray(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    for rank in range(3):
        write_rank(tmp_path / "in", rank, 3)
    import_sources([tmp_path / "in"], tmp_path / "expected")
    command = [sys.executable, "-m", "dpro", "import", tmp_path / "in", "-o", tmp_path / "run"]
    done = subprocess.run([*command, "--executor", "ray"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "run") == digests(tmp_path / "expected")


@pytest.mark.slow
def test_nothing_is_lost_with_a_node_of_the_cluster(tmp_path, repository, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    ranks = 10
    log = _install_slow_reader(tmp_path / "site")
    for rank in range(ranks):
        write_rank(tmp_path / "in", rank, ranks)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{repository}")  # for the workers alone
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        killer = threading.Thread(target=_kill_the_reader_of_the_third_file, args=(cluster, log))
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


def _install_slow_reader(site: Path) -> Path:
    """Make Kineto's own reader slow for processes that start with this folder on their path.

    Returns:
        The file where they note what they read, who they are, and on which node.
    """
    site.mkdir()
    log = site / "log"
    (site / "sitecustomize.py").write_text(
        "import os, time\n"
        "import dpro.ingest.formats as formats\n"
        "real = formats.Format.read\n"
        "def read(self, path, *, rank=None):\n"
        "    import ray\n"
        "    node = ray.get_runtime_context().get_node_id()\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        file.write(f'{path.name} {os.getpid()} {node}\\n')\n"
        "    time.sleep(1)\n"
        "    return real(self, path, rank=rank)\n"
        "formats.Format.read = read\n",
        encoding="utf-8",
    )
    return log


def _kill_the_reader_of_the_third_file(cluster: object, log: Path) -> None:
    """Kill a node while it reads: the process that does, and what would start another."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not log.exists() or log.read_text().count("\n") < 3):
        time.sleep(0.02)
    _, pid, identifier = log.read_text().splitlines()[2].split()
    os.kill(int(pid), signal.SIGKILL)
    (node,) = [node for node in cluster.worker_nodes if node.node_id == identifier]
    cluster.remove_node(node, allow_graceful=False)
