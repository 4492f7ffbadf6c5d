"""The whole check: what workers that are made up, or not there, make of hosts."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Any

import msgspec
import pytest

from dpro.documents import plain
from dpro.errors import UsageError
from dpro.extensions.check import workers as started
from dpro.extensions.check.answer import CheckDocument, CheckState, RunBandwidth, check_document, slow_units
from dpro.extensions.check.search import Exchanged, Fault, NetworkChecked, Reduced
from dpro.extensions.check.workers import HostToCheck, Unit, launcher_words, take_turns
from tests.commands import dpro, refused

NAMES = ["n0", "n1", "n2", "n3"]
COMPARABLE = RunBandwidth(20.0, 1, 4, frozenset(NAMES), 100, 0.01)


def hosts(model: str = "NVIDIA H100", devices: int = 1) -> dict[int, HostToCheck]:
    return {number: HostToCheck(name, name, devices, model) for number, name in enumerate(NAMES)}


def test_a_slow_gpu_a_silent_host_and_a_slow_port_each_have_their_verdict_and_evidence() -> None:
    figures = {Unit(host, device): 700.0 for host in range(3) for device in range(2)} | {Unit(1, 1): 500.0}
    exchanged = {(0, 1): Exchanged(20.0), (0, 2): Exchanged(10.0), (1, 2): Exchanged(10.0)}
    network = NetworkChecked(exchanged, [Reduced((0, 1, 2), 10.0, 1 << 20)], {2: Fault(2.0)}, num_rounds=3)
    seen = CheckState(
        NAMES, frozenset({"n2"}), hosts(devices=2), {3: "does not answer"}, {"matmul": figures}, network
    )
    answer = check_document(seen, 12.34)
    assert [each.verdict for each in answer.hosts] == ["PASS", "SLOW", "SLOW", "FAIL"]
    assert [each.suspect for each in answer.hosts] == [False, False, True, False]
    assert answer.hosts[1].evidence == [
        "matmul of GPU 1: 500 Tflop/s, elsewhere 700: others are 1.40 times as fast"
    ]
    assert answer.hosts[2].evidence == ["network: 10 GB/s, elsewhere 20: others are 2.00 times as fast"]
    assert answer.hosts[3].evidence == ["does not answer"]
    assert (answer.passed, answer.rounds, answer.seconds) == (False, 3, 12.3)
    assert answer.all_reduce is not None
    assert answer.all_reduce.busbw_gbps == 10
    assert slow_units(seen, {"matmul"}) == [Unit(1, 1)]


def test_a_link_is_at_fault_and_its_hosts_are_not() -> None:
    exchanged = {(0, 1): Exchanged(20.0), (0, 2): Exchanged(5.0), (1, 2): Exchanged(0.0, error="Timeout: x")}
    links = {(0, 2): Fault(4.0), (1, 2): Fault(error="Timeout: x")}
    answer = check_document(
        CheckState(NAMES[:3], hosts=hosts(), network=NetworkChecked(exchanged, links=links)), 1.0
    )
    assert [each.verdict for each in answer.hosts] == ["PASS"] * 3
    assert [(each.hosts, each.verdict) for each in answer.links] == [
        (["n0", "n2"], "SLOW"),
        (["n1", "n2"], "FAIL"),
    ]
    assert not answer.passed


def test_an_all_reduce_is_compared_with_the_run_and_with_groups_as_large() -> None:
    fast, slow = (Reduced(group, gbps, 1) for group, gbps in (((0, 1), 20.0), ((2, 3), 10.0)))
    network = NetworkChecked(reduced=[fast, slow, Reduced((0, 1, 2, 3), 10.0, 1)])
    of_run = COMPARABLE._replace(num_ranks=9)
    answer = check_document(CheckState(NAMES, hosts=hosts(), network=network, of_run=of_run), 1.0)
    assert answer.passed
    assert answer.notes == [
        "an all-reduce of 2 hosts from n2 to n3 is slow: others as large are 2.00 times as fast",
        "an all-reduce over all hosts is slower than the run's: 10 GB/s bus bandwidth here, 20 in the run; "
        "the run's was of 9 ranks, this one of 4 devices",
    ]


def against(of_run: RunBandwidth, gbps: float) -> CheckDocument:
    """The answer where all hosts together reach a bus bandwidth.

    Args:
        of_run: what the run says.
        gbps: that they reach.
    """
    network = NetworkChecked(reduced=[Reduced((0, 1, 2, 3), gbps, 1)])
    return check_document(CheckState(NAMES, hosts=hosts(), network=network, of_run=of_run), 1.0)


def test_all_hosts_together_are_slow_where_the_run_was_faster_for_certain() -> None:
    """Half of what the run reached with the same devices: no host is to blame, the check does not pass."""
    answer = against(COMPARABLE, 10.0)
    assert answer.all_reduce is not None
    assert (answer.passed, answer.all_reduce.verdict, answer.notes) == (False, "SLOW", [])
    assert answer.all_reduce.evidence == [
        "an all-reduce over all hosts is slower than the run's: 10 GB/s bus bandwidth here, 20 in the run"
    ]
    assert {each.verdict for each in answer.hosts} == {"PASS"}
    assert against(COMPARABLE, 15.0).passed


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hosts": frozenset({"other"})}, "between other hosts"),
        ({"num_bytes": 2}, "moved more bytes"),
        ({"num_samples": 19}, "curve is uncertain: 19 all-reduces"),
        ({"misfit": 0.2}, "which are 20% off it"),
    ],
)
def test_what_the_run_cannot_say_for_certain_is_a_note(changed: dict[str, Any], why: str) -> None:
    answer = against(COMPARABLE._replace(**changed), 10.0)
    assert answer.passed
    assert why in answer.notes[0]


def test_processors_have_to_be_far_slower_than_gpus() -> None:
    figures = {Unit(host, 0): 10.0 for host in range(3)} | {Unit(3, 0): 8.0}
    for model, verdict in (("CPU", "PASS"), ("NVIDIA H100", "SLOW")):
        seen = CheckState(NAMES, hosts=hosts(model), figures={"matmul": figures})
        assert check_document(seen, 1.0).hosts[3].verdict == verdict


def test_hosts_that_share_a_machine_take_turns() -> None:
    shared = {0: HostToCheck("a", "x", 1, "CPU"), 1: HostToCheck("b", "y", 1, "CPU")}
    shared[2] = HostToCheck("c", "x", 1, "CPU")
    assert list(take_turns(shared)) == [[0, 1], [2]]


def test_a_launcher_has_the_host_in_it() -> None:
    assert launcher_words("ip netns exec {host}") == ["ip", "netns", "exec", "{host}"]
    assert launcher_words("ssh")[-1] == "{host}"
    with pytest.raises(UsageError, match="give ssh, srun, local, or a command"):
        launcher_words("ssh host")


def test_hosts_that_are_not_there_fail_and_nothing_waits_for_them(monkeypatch) -> None:
    monkeypatch.setattr(started, "START_S", 1.0)
    program = "import sys, time; print('no route'); time.sleep(0 if sys.argv[1] == 'a' else 60)"
    launcher = shlex.join([sys.executable, "-c", program, "{host}"])
    done = dpro("check", "--hosts", "a,b", "--launcher", launcher, "--json")
    assert done.returncode == 3
    answer = msgspec.convert(json.loads(done.stdout), CheckDocument)
    assert plain(answer) == json.loads(done.stdout)
    assert [each.verdict for each in answer.hosts] == ["FAIL", "FAIL"]
    assert answer.hosts[0].evidence == ["its worker ended: no route"]
    assert answer.hosts[1].evidence == ["does not answer"]


def test_hosts_are_named_once_and_suspects_are_among_them(tmp_path) -> None:
    assert "name hosts by one of" in refused(dpro("check"), 2)
    assert "name hosts by one of" in refused(dpro("check", "--hosts", "a", "--finding", __file__), 2)
    assert "not among the hosts" in refused(dpro("check", "--hosts", "a", "--suspect", "b"), 2)
    assert "name a folder" in refused(dpro("check", "--hosts", "a", "--only", "disk"), 2)
    assert "no finding" in refused(dpro("check", "--finding", __file__), 1)
    assert "nan is not a number" in refused(dpro("check", "--hosts", "a", "--timeout", "nan"), 2)


@pytest.mark.parametrize(
    ("content", "code", "says"), [(b"", 2, "no host to check"), (b"\xff\xfe\n", 1, "is not text")]
)
def test_a_hostfile_that_names_no_host_is_refused(tmp_path, content, code, says):
    path = tmp_path / "hosts"
    path.write_bytes(content)
    assert says in refused(dpro("check", "--hostfile", path), code)


@pytest.mark.slow
def test_three_workers_on_this_machine_compute_exchange_and_leave_nothing(tmp_path) -> None:
    pytest.importorskip("torch")
    finding = tmp_path / "finding.json"
    finding.write_text(json.dumps({"host": "b", "hosts": ["a", "b", "c"]}))
    done = dpro("check", "--finding", finding, "--launcher", "local", "--disk", tmp_path, "--json")
    answer = msgspec.convert(json.loads(done.stdout), CheckDocument)
    assert [(each.host, each.suspect) for each in answer.hosts] == [("a", False), ("b", True), ("c", False)]
    for host in answer.hosts:
        measured = {each.what: each.value for each in host.measured}
        assert measured.keys() == {"matmul", "memory", "disk write", "disk read", "network"}
        assert min(measured.values()) > 0
        assert host.verdict in ("PASS", "SLOW")  # the machine may be busy with other work
    assert answer.all_reduce is not None
    assert answer.all_reduce.hosts == 3
    assert answer.rounds >= 2
    assert os.listdir(tmp_path) == ["finding.json"]
