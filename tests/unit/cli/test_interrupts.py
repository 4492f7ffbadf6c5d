"""Ctrl-C that comes where nothing can be raised."""

from __future__ import annotations

import subprocess
import sys
import textwrap

LOST = """
class Dropped:
    def __del__(self):
        raise KeyboardInterrupt

"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    head = "import time\nfrom dpro.cli import keep_interrupts\nkeep_interrupts()\n"
    code = head + LOST + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_a_lost_ctrl_c_is_raised_again():
    done = run("""
        try:
            Dropped()
            time.sleep(50)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


def test_what_cleans_up_after_a_ctrl_c_is_not_disturbed():
    done = run("""
        def remove():
            try:
                raise FileNotFoundError
            except FileNotFoundError:
                Dropped()
                time.sleep(0.1)
            print("removed")

        try:
            try:
                raise KeyboardInterrupt
            finally:
                remove()
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert (done.stdout, done.stderr, done.returncode) == ("removed\ninterrupted\n", "", 0)


def test_other_errors_of_destructors_are_reported():
    done = run("""
        class Broken:
            def __del__(self):
                raise ValueError("reported")
        Broken()
    """)
    assert "ValueError: reported" in done.stderr
    assert done.returncode == 0


def test_polars_finds_numpy_loaded_where_it_would_panic_at_a_ctrl_c():
    code = "import sys, dpro.schema; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"
