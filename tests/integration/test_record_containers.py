"""Jobs that see other files than `dpro record` does, as in a container: in real mount namespaces."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from dpro.schema import SPANS, STEPS
from tests.jobs import ROOT, record, script

pytest.importorskip("torch")

STEPPING = """
for _ in range(20):
    train_step()
"""
LONG = """
import time
for _ in range(40):
    train_step()
    time.sleep(0.1)
"""


def within(command: list[str], *hidden: Path) -> list[str]:
    """A command that finds these folders empty."""
    mounts = [f"mount -t tmpfs none {shlex.quote(str(each))}" for each in hidden]
    return ["unshare", "-m", "sh", "-c", " && ".join([*mounts, f"exec {shlex.join(command)}"])]


@pytest.fixture(autouse=True)
def _namespaces(tmp_path):
    (tmp_path / "hidden").mkdir()
    done = subprocess.run(within(["true"], tmp_path / "hidden"), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")


def test_container_that_has_the_run_but_not_dpro_is_recorded(tmp_path):
    command = within(script(tmp_path, STEPPING), ROOT / "collectors", ROOT / "dpro" / "extensions")
    run, done = record(tmp_path, command, "--skip", "5")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert run.table(STEPS)["step"].to_list() == list(range(1, 20))
    assert run.table(SPANS).height
    assert run.manifest.warnings == []  # probes of extensions are loaded, too


@pytest.mark.slow
def test_container_without_the_run_is_said_to_be_one(tmp_path):
    (tmp_path / "run").mkdir()
    command = within(script(tmp_path, LONG), ROOT / "collectors", tmp_path / "run")
    run, done = record(tmp_path, command)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    where = f"without the run folder ({tmp_path / 'run'}): mount that there under the same path"
    assert where in run.manifest.unrecorded


@pytest.mark.slow
def test_no_copy_is_loaded_from_where_others_could_put_another(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chmod(shared, 0o777)
    command = within(script(shared, LONG), ROOT / "collectors")
    run, done = record(shared, command)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert f"without dpro's installation ({ROOT / 'collectors'}): mount that" in run.manifest.unrecorded
