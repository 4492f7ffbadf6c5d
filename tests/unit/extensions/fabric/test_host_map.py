"""Hosts of ranks, put into runs that do not say them."""

from __future__ import annotations

import pytest

from dpro.errors import InputError, UsageError
from dpro.extensions.fabric.host_map import put_hosts, read_host_map
from dpro.schema import WORKERS
from dpro.store import Run, open_run
from tests.builders import TinyRun
from tests.commands import dpro


def run_of(folder, ranks=(0, 1, 2, 3), workers=(0, 1), host="") -> Run:
    """Ranks without a host, of which some have a row in the table of workers."""
    run = TinyRun()
    for rank in ranks:
        run.op("work", 0, 100, rank)
    for rank in workers:
        run.worker(rank, host, gpu_name="H100")
    return run.write(folder)


def table_of(folder, text: str):
    file = folder / "hosts.csv"
    file.write_text(text)
    return read_host_map(file)


def workers_of(run: Run) -> list[tuple[int, str, int, str]]:
    return run.table(WORKERS).select("rank", "host", "local_rank", "gpu_name").rows()


def test_ranks_get_their_hosts_and_keep_what_else_is_known_of_them(tmp_path):
    run = run_of(tmp_path / "run")
    put_hosts(run, table_of(tmp_path, "rank,host\n2,b\n3,b\n0,a\n1,a\n7,c\n"))
    opened = open_run(run.path)
    assert workers_of(opened) == [(0, "a", 0, "H100"), (1, "a", 1, "H100"), (2, "b", 0, ""), (3, "b", 1, "")]
    assert sorted(opened.manifest.hosts) == ["a", "b"]


def test_a_map_may_say_which_gpu_a_rank_has_and_is_corrected_by_another(tmp_path):
    run = run_of(tmp_path / "run", ranks=(0, 1))
    wrong = put_hosts(run, table_of(tmp_path, "rank,host\n0,a\n1,wrong\n"))
    put_hosts(wrong, table_of(tmp_path, " Rank , host,local_rank\n0, a,1\n1,a , 0\n"))
    assert workers_of(open_run(run.path)) == [(0, "a", 1, "H100"), (1, "a", 0, "H100")]


def test_a_run_that_says_where_its_ranks_were_is_left_as_it_is(tmp_path):
    run = run_of(tmp_path / "run", host="n1")
    with pytest.raises(UsageError, match="already has the hosts of its ranks"):
        put_hosts(run, table_of(tmp_path, "rank,host\n0,a\n1,a\n2,b\n3,b\n"))
    assert {host for _, host, _, _ in workers_of(run)} == {"n1"}


def test_ranks_without_a_host_are_named(tmp_path):
    with pytest.raises(UsageError, match="no host of ranks 1, 3"):
        put_hosts(run_of(tmp_path / "run"), table_of(tmp_path, "rank,host\n0,a\n2,b\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank\n0\n", "no column 'host'"),
        ("rank,host\n0,a\n0,b\n", "listed twice"),
        ("rank,host,local_rank\n0,a,1\n1,a,1\n", "listed twice"),
        ("rank,host\n0,a\n1,\n", "lacks a rank or host"),
        ("rank,host\n-1,a\n", "lacks a rank or host"),
        ("rank,host\nx,a\n", "failed in column 'rank'"),
        ("rank,host\n", "names no rank"),
        ("", "empty CSV"),
        ("\0\1\2", "no column"),
    ],
)
def test_a_file_that_is_no_map_is_refused_in_a_line(tmp_path, text, says):
    with pytest.raises(InputError, match=says) as refused:
        table_of(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_an_imported_trace_answers_of_its_fabric(traces, tmp_path):
    run, fabric, hosts = tmp_path / "run", tmp_path / "topology.toml", tmp_path / "hosts.csv"
    assert dpro("import", traces / "multirank" / "nanogpt_h100_8r_rs_ag", "-o", run).returncode == 0
    size = ("--gpus", "4", "--nics", "4", "--switch-ports", "8", "--gbit", "1600")
    assert dpro("topology", "--fat-tree", "2", *size, "-o", fabric).returncode == 0
    hosts.write_text("rank,host\n" + "".join(f"{rank},node{rank // 4}\n" for rank in range(8)))
    dpro("topology", fabric, "--attach", run)
    assert "of which host rank 0 is: `dpro topology FILE --attach RUN --hosts" in dpro("topology", run).stderr
    attached = dpro("topology", fabric, "--attach", run, "--hosts", hosts)
    assert (attached.returncode, attached.stderr) == (0, "")
    assert dpro("whatif", run, "--edit", "spray").returncode == 0
    assert dpro("topology", run, "--plan", tmp_path / "plan.json").returncode == 0
    alone = dpro("topology", fabric, "--hosts", hosts)
    assert "--attach RUN --hosts" in alone.stderr
