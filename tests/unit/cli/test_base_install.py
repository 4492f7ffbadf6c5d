"""Commands where only the base of dpro is installed: without numba and scipy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.jobs import ROOT

PROGRAM = """
import importlib.util, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "scipy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *where: None if name in ("numba", "scipy") else find(name, *where)
sys.meta_path.insert(0, Missing())
from dpro.cli import main
main()
"""


def _without_numba(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)


@pytest.mark.parametrize("option", ["--help", "--list"])
def test_edits_are_listed(option):
    done = _without_numba("whatif", option)
    assert (done.returncode, done.stderr) == (0, "")
    assert "heal:rank=" in done.stdout


@pytest.mark.parametrize("command", ["replay", "diagnose"])
def test_what_needs_more_says_what_to_install(command, tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path))
    done = _without_numba(command, str(ROOT / "sample_traces" / "healthy"))
    assert done.returncode == 1
    assert done.stderr.endswith('is not installed: run `pip install "dpro-toolkit[replay]"`\n')
    assert len(done.stderr.splitlines()) == 1
