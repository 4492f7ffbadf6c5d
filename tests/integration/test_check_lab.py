"""`dpro check` on hosts that are network namespaces, with ports and links that are really slow or broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.fabric_lab.lab import Lab, lab, run
from tests.jobs import PATIENCE_S

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root, ip and tc"),
]
PORT_MBIT, SPINE_MBIT = 100, 200  # ports of hosts are what is full


def checked(made: Lab) -> tuple[int, dict[str, Any]]:
    """The exit code and the answer of a check of the network."""
    names = ",".join(map(made.host, range(made.hosts)))
    command = ["check", "--hosts", names, "--launcher", "ip netns exec {host}", "--only", "network", "--json"]
    limits = ["--timeout", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "dpro", *command, *limits], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.returncode, json.loads(done.stdout)


def verdicts(answer: dict[str, Any]) -> list[str]:
    return [host["verdict"] for host in answer["hosts"]]


def test_a_port_at_half_rate_is_slow_a_dead_host_and_a_broken_link_fail_and_others_pass():
    with lab(4, 2, 2, PORT_MBIT, SPINE_MBIT) as made:
        code, answer = checked(made)
        assert (code, verdicts(answer), answer["links"]) == (0, ["PASS"] * 4, [])

        made.slow_port(2, PORT_MBIT // 2)
        code, answer = checked(made)
        assert (code, verdicts(answer), answer["links"]) == (3, ["PASS", "PASS", "SLOW", "PASS"], [])
        (line,) = answer["hosts"][2]["evidence"]
        assert line.startswith("network: ")
        assert 1.5 < answer["hosts"][2]["measured"][0]["times"] < 4  # the machine may be busy with other work
        made.slow_port(2, PORT_MBIT)

        # The leaf drops what one host sends to another.
        rule = ["pref", "50", "from", made.address(0), "to", made.address(3), "blackhole"]
        run(["ip", "-n", made.leaf(0), "rule", "add", *rule])
        code, answer = checked(made)
        assert (code, verdicts(answer)) == (3, ["PASS"] * 4)
        (link,) = answer["links"]
        assert (link["hosts"], link["verdict"]) == ([made.host(0), made.host(3)], "FAIL")
        run(["ip", "-n", made.leaf(0), "rule", "del", *rule])

        run(["ip", "-n", made.host(1), "link", "set", "eth0", "down"])
        code, answer = checked(made)
        assert (code, verdicts(answer), answer["links"]) == (3, ["PASS", "FAIL", "PASS", "PASS"], [])
