"""The node and its processes, from made-up files and from the real ones."""

import os
import time
from pathlib import Path

import pytest

from dpro.collectors.telemetry.node import find_cgroup, read_node, read_node_rarely, read_process
from tests.unit.collectors.telemetry.test_nic import tree

TICKS = os.sysconf("SC_CLK_TCK")


def test_values_of_a_node_have_the_units_of_their_names(tmp_path):
    proc = tree(
        tmp_path,
        {
            "stat": f"cpu  {5 * TICKS} 0 {2 * TICKS} {90 * TICKS} 7 0 0 {3 * TICKS} 0 0\ncpu0 1 2 3",
            "loadavg": "1.50 0.18 0.12 6/80 11206",
            "meminfo": "MemTotal: 100 kB\nMemAvailable: 40 kB\nSwapTotal: 8 kB\nSwapFree: 5 kB",
            "pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000",
            "pressure/memory": "some avg10=0.00 total=1\nfull avg10=0.00 total=500000",
        },
    )
    values = read_node(proc)
    expected = {
        "cpu_user_s": 5,
        "cpu_system_s": 2,
        "cpu_idle_s": 90,
        "cpu_steal_s": 3,
        "load_1m": 1.5,
        "runnable_threads": 6,
        "memory_available_bytes": 40 << 10,
        "memory_total_bytes": 100 << 10,
        "swap_used_bytes": 3 << 10,
        "pressure_cpu_some_s": 2.5,
        "pressure_memory_full_s": 0.5,
    }
    assert {name: values[name] for name in expected} == expected


def test_a_kernel_without_pressure_or_memory_files_leaves_them_out(tmp_path):
    values = read_node(tree(tmp_path, {"stat": "cpu 1 2 3 4"}))
    assert set(values) == {"cpu_user_s", "cpu_nice_s", "cpu_system_s", "cpu_idle_s"}


def test_retransmissions_are_found_by_their_head(tmp_path):
    snmp = "Ip: Forwarding A\nIp: 1 2\nTcp: A RetransSegs B\nTcp: 5 42 6"
    values = read_node_rarely(tmp_path, tree(tmp_path, {"net/snmp": snmp, "vmstat": "oom_kill 3\npswpin 4"}))
    assert (values["tcp_retransmitted_segments"], values["oom_kills"]) == (42, 3)
    assert values["swapped_in_pages"] == 4
    assert values["disk_free_bytes"] > 0


def cgroup_tree(root: Path, own: str, files: dict[str, object]) -> tuple[Path, Path]:
    tree(root, {"proc/self/cgroup": own} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    return root / "sys", root / "proc"


def test_cgroup_v2_limits_are_those_of_the_innermost_one_that_has_any(tmp_path):
    files = {
        "cpu.stat": "usage_usec 9",
        "pod/cpu.stat": "usage_usec 12500000\nnr_throttled 4\nthrottled_usec 2500000",
        "pod/cpu.max": "150000 100000",
        "pod/job/cpu.stat": "nr_throttled 0\nthrottled_usec 0",
        "pod/job/cpu.max": "max 100000",
        "pod/job/memory.current": 77,
        "pod/job/memory.max": "max",
    }
    cgroup = find_cgroup(*cgroup_tree(tmp_path, "0::/pod/job", files))
    assert cgroup.read() == {
        "cgroup_cpu_s": 12.5,
        "cgroup_throttled_periods": 4,
        "cgroup_throttled_s": 2.5,
        "cgroup_cpu_limit_cores": 1.5,
        "cgroup_memory_bytes": 77,
    }


def test_cgroup_v1_is_read_where_a_container_sees_it(tmp_path):
    files = {
        "cpu,cpuacct/cpu.stat": "nr_throttled 3\nthrottled_time 1500000000",
        "cpu,cpuacct/cpuacct.usage": 8_500_000_000,
        "cpu,cpuacct/cpu.cfs_quota_us": 400000,
        "cpu,cpuacct/cpu.cfs_period_us": 100000,
        "memory/memory.usage_in_bytes": 5,
        "memory/memory.limit_in_bytes": 9,
    }
    own = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/"  # a path of the host's
    cgroup = find_cgroup(*cgroup_tree(tmp_path, own, files))
    assert cgroup.read() == {
        "cgroup_cpu_s": 8.5,
        "cgroup_throttled_periods": 3,
        "cgroup_throttled_s": 1.5,
        "cgroup_cpu_limit_cores": 4,
        "cgroup_memory_bytes": 5,
        "cgroup_memory_limit_bytes": 9,
    }


def test_no_limit_is_no_counter(tmp_path):
    files = {"memory/memory.usage_in_bytes": 5, "memory/memory.limit_in_bytes": (1 << 63) - 4096}
    cgroup = find_cgroup(*cgroup_tree(tmp_path, "4:memory:/", files))
    assert cgroup.read() == {"cgroup_memory_bytes": 5}
    assert find_cgroup(tmp_path / "none", tmp_path / "none").read() == {}


def test_this_process_is_seen_to_work_and_to_hold_memory():
    before = read_process(os.getpid())
    begun = time.process_time()
    while time.process_time() - begun < 3 / TICKS:
        pass
    after = read_process(os.getpid())
    assert after["cpu_user_s"] + after["cpu_system_s"] > before["cpu_user_s"] + before["cpu_system_s"]
    assert after["memory_bytes"] > 1 << 20
    assert after["threads"] >= 1


def test_the_main_thread_has_counters_of_its_own(tmp_path):
    stat = "7 (a b) c) R 1 1 1 0 -1 0 10 0 2 0 {user} {system} 0 0 20 0 12 0 555 999 100 0"
    stat = stat.format(user=6 * TICKS, system=TICKS)
    status = "Name:\tx\nThreads:\t12\nvoluntary_ctxt_switches:\t8\nnonvoluntary_ctxt_switches:\t9"
    proc = tree(tmp_path, {"7/stat": stat, "7/schedstat": "1500000000 250000000 3", "7/status": status})
    values = read_process(7, proc)
    expected = {
        "cpu_user_s": 6,
        "cpu_system_s": 1,
        "major_faults": 2,
        "threads": 12,
        "main_thread_cpu_s": 1.5,
        "main_thread_runqueue_s": 0.25,
        "main_thread_switches_voluntary": 8,
        "main_thread_switches_nonvoluntary": 9,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert values["memory_bytes"] == 100 * os.sysconf("SC_PAGESIZE")


def test_a_process_that_is_gone_or_waits_to_be_reaped_has_no_values(tmp_path):
    assert read_process(7, tmp_path) == {}
    zombie = "7 (x) Z " + " ".join("0" * 30)
    assert read_process(7, tree(tmp_path, {"7/stat": zombie})) == {}
