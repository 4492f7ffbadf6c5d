"""What names a process for good."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from dpro.collectors.inside import kernel
from dpro.collectors.inside.kernel import is_alive, process_identity


def test_process_lives_until_it_has_ended_whoever_has_its_pid_then():
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    named = process_identity(child.pid)
    assert is_alive(named)
    assert is_alive(named | {"start_ticks": named["start_ticks"] - 1}) is False
    child.communicate()
    assert is_alive(named) is False
    assert is_alive(named | {"start_ticks": -1}) is False


@pytest.mark.parametrize("facts", [{}, {"clock": "another boot"}])
def test_process_of_another_host_cannot_be_seen(facts):
    assert is_alive({"pid": os.getpid(), "start_ticks": 1} | facts) is None


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_process_in_a_container_is_seen_from_its_host_and_not_from_within_another(monkeypatch):
    say = f"import json; from {kernel.__name__} import name_of; print(json.dumps(name_of(1)))"
    inside = f"{sys.executable} -c '{say}'; echo; exec cat"
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", inside],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert container.stdout is not None
    line = container.stdout.readline()
    if not line.strip():
        container.communicate()
        pytest.skip("no namespace of pids can be made here")
    named = json.loads(line)
    if kernel.pid_namespace() == kernel.ALL_PROCESSES:
        assert is_alive(named)
    monkeypatch.setattr(kernel, "ALL_PROCESSES", "another")
    assert is_alive(named) is None
    monkeypatch.undo()
    container.communicate()
    assert not is_alive(named)
