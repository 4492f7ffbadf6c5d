"""`dpro record --topology`: the fabric is kept with the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.topology.file import FILE, read, write
from tests.jobs import PATIENCE_S, wait_for


def test_a_recorded_run_keeps_the_topology_it_was_given(tmp_path: Path) -> None:
    made = fat_tree(FabricSize(4))
    write(made, tmp_path / "fabric.toml")
    job = [sys.executable, "-c", "print('trained')"]
    recorded = [sys.executable, "-m", "dpro", "record", "-o", "run", "--topology", "fabric.toml", "--", *job]
    done = subprocess.run(recorded, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    wait_for(tmp_path / "run" / "manifest.json")
    assert read(tmp_path / "run" / FILE) == made


def test_a_topology_that_is_wrong_is_refused_before_the_job_begins(tmp_path: Path) -> None:
    wrong = 'version = 1\n[[hosts]]\nnames = "n"\n[[switches]]\nnames = "a[1-"\n'
    (tmp_path / "fabric.toml").write_text(wrong)
    job = [sys.executable, "-c", "print('trained')"]
    recorded = [sys.executable, "-m", "dpro", "record", "-o", "run", "--topology", "fabric.toml", "--", *job]
    done = subprocess.run(recorded, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert "switches[0]" in done.stderr
    assert not (tmp_path / "run").exists()
