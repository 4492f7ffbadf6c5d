"""Freed memory is kept: arrays that are made again touch no new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from dpro.freed_memory import keep_freed_memory

if "kept" in sys.argv:
    keep_freed_memory()

def make_and_free():
    [np.ones(2_000_000, np.int8) for arrays in range(20)].clear()

make_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
make_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str) -> int:
    """Page faults while 40 MB of arrays are made that were made and freed before."""
    done = subprocess.run([sys.executable, "-c", FAULTS, *words], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator has the setting")
def test_freed_memory_is_used_again() -> None:
    assert faults("kept") < 100 < faults()
