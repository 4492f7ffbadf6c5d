"""What dpro says of jobs that were not recorded, from logs in the forms of launchers, NCCL and schedulers."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.detect.words import describe_all
from dpro.extensions.logs.diagnose import diagnose_paths
from tests.commands import dpro, refused
from tests.job_logs import LAUNCHER, raised, summary, watchdog

LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:26819"


@pytest.fixture
def diagnosed(tmp_path):
    """Write logs, and return what `dpro diagnose` says of them."""

    def diagnose(*texts: str, names: tuple[str, ...] = ("job.log", "dmesg.txt", "more.log")):
        paths = []
        for name, text in zip(names, texts, strict=False):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
            paths.append(path)
        done = dpro("diagnose", *paths, "--json")
        assert done.returncode == 0, done.stderr
        said = dpro("diagnose", *paths)
        assert said.returncode == 0, said.stderr
        return json.loads(done.stdout), said.stdout

    return diagnose


def blamed(document) -> list[tuple[str, list[int]]]:
    return [(finding["class"], finding["ranks"]) for finding in document["findings"]]


def test_the_rank_whose_script_raised_is_first_and_those_that_lost_it_follow(diagnosed):
    text = raised(1, LOST) + raised(2, "KeyError: 'labels'", "data.py", 8) + raised(3, LOST)
    document, said = diagnosed(f"step 1\n{text}{summary([(2, 1, 12), (1, 1, 11), (3, 1, 13)])}")
    assert blamed(document) == [("dead.rank", [2])]
    assert document["end"]["how"] == "failed"
    assert "KeyError: 'labels' (/code/data.py:8 main)" in document["end"]["sentence"]
    assert "start it again? do not" in said


@pytest.mark.parametrize("kept", [0.6, 0.95])
def test_a_compressed_log_that_is_cut_is_read_as_far_as_it_goes_and_said_to_be_cut(tmp_path, kept):
    rng = np.random.default_rng(0)
    noise = "".join(f"step {number} loss {loss:.6f}\n" for number, loss in enumerate(rng.random(20_000)))
    path = tmp_path / "job.log.gz"
    whole = gzip.compress((raised(2, "KeyError: 'labels'", "data.py", 8) + noise).encode())
    path.write_bytes(whole[: int(kept * len(whole))])
    done = dpro("diagnose", path, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert blamed(document) == [("dead.rank", [2])]
    (line,) = [line for line in document["reasons"] if str(path) in line]
    assert "gzip stream cut short, after 1" in line
    assert line.endswith("lines that are read; copy it again")


def error_file(error: str, seconds: int, line: int = 8) -> str:
    """What torchrun keeps of a function with `@record` that raised."""
    wrapper = "/torch/distributed/elastic/multiprocessing/errors/__init__.py"
    frames = [(wrapper, 362, "wrapper"), ("/code/train.py", 30, "main"), ("/code/data.py", line, "load")]
    calls = "".join(f'  File "{path}", line {number}, in {name}\n    …\n' for path, number, name in frames)
    stack = f"Traceback (most recent call last):\n{calls}{error}\n"
    about = {"py_callstack": stack, "timestamp": str(seconds)}
    return json.dumps({"message": {"message": error, "extraInfo": about}})


def test_of_error_files_alone_the_first_says_which_rank_ended_the_job(diagnosed):
    names = tuple(f"logs/none_x/attempt_0/{rank}/error.json" for rank in (0, 2, 3))
    texts = (
        error_file(LOST, 1_700_000_012),
        error_file("KeyError: 'labels'", 1_700_000_010),
        error_file(LOST, 1_700_000_011),
    )
    document, said = diagnosed(*texts, names=names)
    assert blamed(document) == [("dead.rank", [2])]
    assert "KeyError: 'labels' (/code/data.py:8 load)" in document["end"]["sentence"]
    assert "start it again? do not" in said


def test_an_error_file_gives_the_place_of_a_rank_whose_end_a_log_states(diagnosed):
    kept = error_file("mine.data.BadBatch: no labels\nin shard 3\nValueError: no labels", 1_700_000_010)
    names = "job.log", "logs/none_x/attempt_0/1/error.json"
    document, _ = diagnosed(summary([(1, 1, 12)]), kept, names=names)
    assert blamed(document) == [("dead.rank", [1])]
    assert "ValueError: no labels (/code/data.py:8 load)" in document["end"]["sentence"]


def test_error_files_of_the_first_start_count_and_none_where_two_hosts_have_the_same_ranks(diagnosed):
    first, second = error_file("KeyError: 'a'", 10), error_file("KeyError: 'b'", 20)
    names = "x/attempt_1/0/error.json", "x/attempt_0/0/error.json"
    document, _ = diagnosed(second, first, names=names)
    assert "KeyError: 'a'" in document["end"]["sentence"]
    document, _ = diagnosed(first, second, names=("y/attempt_0/0/error.json", "z/attempt_0/0/error.json"))
    assert document["findings"] == []


@pytest.mark.parametrize(
    "text", ['{"message": "x"}', '{"message": {"extraInfo": {"py_callstack": 1}}}', '{"message": {"mess']
)
def test_a_damaged_error_file_is_one_line(text, tmp_path):
    path = tmp_path / "attempt_0" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    said = refused(dpro("diagnose", path), 1)
    assert "error.json: no error file of torchrun, or a damaged one" in said


def test_a_traceback_that_was_caught_is_no_evidence(diagnosed):
    caught = raised(0, "ConnectionError: metrics server", mark="")
    document, said = diagnosed(f"{caught}step 2 loss 1.0\nstep 3 loss 0.9\n")
    assert document["findings"] == []
    assert document["end"]["how"] == "unknown"
    assert not document["healthy"]
    assert "not known: how the job ended" in said


def test_an_exception_after_which_its_rank_went_on_did_not_end_it(diagnosed):
    at = "[rank3]:[W1025 01:{}:14.300386677 TCPStore.cpp:125] [c10d] recvValue failed"
    text = at.format("20") + "\n" + raised(3, "ValueError: empty sample") + at.format("38") + "\n"
    assert diagnosed(text)[0]["findings"] == []
    inner = raised(3, "ValueError: empty sample").replace("in <module>", "in __getitem__")
    assert diagnosed(inner)[0]["findings"] == []
    assert blamed(diagnosed(raised(3, "ValueError: empty sample"))[0]) == [("dead.rank", [3])]


def test_the_exception_of_a_dataloader_worker_is_what_ended_its_rank(diagnosed):
    outer = raised(1, "KeyError: Caught KeyError in DataLoader worker process 1.")
    inner = raised(1, "KeyError: 'schema'", "data.py", 5).replace("Traceback", "Original Traceback")
    document, _ = diagnosed(outer + inner.replace("in <module>", "in _worker_loop"))
    assert "KeyError: 'schema' (/code/data.py:5 main)" in document["end"]["sentence"]


def test_marks_of_pdsh_kubectl_and_ray_hide_no_rank(diagnosed):
    ray = "(TrainWorker pid=77, ip=10.0.0.3) "
    for mark in ("tern-a12: ", "[pod/quail-1/trainer] ", "2026-10-25T01:20:14.123456Z ", ray):
        text = "".join(f"{mark}{line}\n" for line in raised(5, "ValueError: odd").splitlines())
        assert blamed(diagnosed(text)[0]) == [("dead.rank", [5])], mark


def test_the_rank_that_a_monitored_barrier_missed_is_waited_for(diagnosed):
    text = raised(0, "RuntimeError: [Rank 0]: Rank 4 failed to pass monitoredBarrier in 300000 ms")
    reached = "successfully reached monitoredBarrier, but received errors while waiting for send/recv"
    text += raised(2, f"RuntimeError: Rank 2 {reached} from rank 0")
    document, _ = diagnosed(text)
    assert blamed(document) == [("hang.host", [4])]


def test_ranks_that_fell_when_the_job_was_ended_from_outside_are_not_at_fault(diagnosed):
    text = "slurmstepd: error: *** JOB 9 ON lo-06 CANCELLED AT 2026-11-20T10:00:00 DUE TO PREEMPTION ***\n"
    text += raised(1, "RuntimeError: DataLoader worker (pid 81317) is killed by signal: Terminated. ")
    document, said = diagnosed(text)
    assert (document["findings"], document["end"]["how"]) == ([], "ended")
    assert "start it again? yes, from the last checkpoint" in said


def test_the_rank_that_never_timed_out_is_the_one_that_stopped(diagnosed):
    text = "".join(watchdog(rank, 7753, 7755) for rank in (0, 1, 3))
    document, said = diagnosed(text + summary([(0, -6, 10), (1, -6, 11), (3, -6, 13)]))
    assert blamed(document) == [("hang.rank", [2])]
    assert "all_reduce #7753" in said
    assert document["end"]["hung"]


def test_where_all_ranks_timed_out_in_one_call_no_rank_is_blamed_alone(diagnosed):
    document, _ = diagnosed("init nranks 4\n" + "".join(watchdog(rank, 12, 12) for rank in range(4)))
    (finding,) = document["findings"]
    assert (finding["class"], finding["ranks"], finding["confidence"]) == ("hang.comm", [0, 1, 2, 3], 0.5)


def test_a_rank_that_is_calls_behind_is_the_one_that_the_others_wait_for(diagnosed):
    text = "".join(watchdog(rank, 12, 14) for rank in (0, 1, 3)) + watchdog(2, 11, 11, op="BROADCAST")
    document, _ = diagnosed(text)
    assert [2] in [ranks for _, ranks in blamed(document)]


def test_numbers_of_groups_that_each_rank_counts_for_itself_are_not_compared(diagnosed):
    text = watchdog(0, 12, 12, group="PG 3") + watchdog(1, 12, 12, group="PG 3")
    text += watchdog(2, 40, 40, group="PG 3") + watchdog(3, 40, 40, group="PG 3")
    document, _ = diagnosed(text)
    assert document["findings"] == []


def test_a_process_that_the_kernel_killed_for_memory_is_named_by_its_rank(diagnosed):
    agent = "torch.distributed.elastic.multiprocessing.api: [WARNING]"
    text = f"[2026-11-20 10:00:05,123] {agent} Sending process 41 closing signal SIGTERM\n"
    dmesg = (
        "Nov 20 10:00:04 node1 kernel: Memory cgroup out of memory: Killed process 42 (python) total-vm:9kB\n"
    )
    document, said = diagnosed(text + summary([(3, -9, 42), (0, -15, 41)]), dmesg)
    assert blamed(document) == [("dead.rank", [3])]
    assert "node1, rank 3, 10:00:04.000 UTC: the kernel killed the process: host memory ran out" in said
    assert any("host memory ran out" in line for line in document["findings"][0]["evidence"])
    assert "do not restart it unchanged" in said


def test_a_gpu_that_fell_off_the_bus_is_reason_to_start_again_without_its_host(diagnosed):
    xid = "NVRM: Xid (PCI:0000:c1:00): 79, pid=55, name=python, GPU has fallen off the bus."
    dmesg = f"Nov 20 10:00:01 node2 kernel: {xid}\n"
    what = "NCCL error in: X.hpp:317, remote process exited or there was a network error, NCCL version 2.21.5"
    lost = f"torch.distributed.DistBackendError: {what}"
    text = raised(4, "RuntimeError: CUDA error: unspecified launch failure") + raised(0, lost)
    document, said = diagnosed(text + summary([(4, 1, 55), (0, 1, 51)], host="node2"), dmesg)
    assert blamed(document) == [("dead.rank", [4])]
    assert "XID 79" in document["findings"][0]["evidence"][-1]
    assert "drain the host" in document["findings"][0]["remedy"]
    assert "start it again? yes, without node2" in said


@pytest.mark.parametrize(
    ("why", "what", "again"),
    [
        (" DUE TO TIME LIMIT", "Slurm: time limit", "yes, from the last checkpoint"),
        (" DUE TO PREEMPTION", "Slurm: preemption", "yes, from the last checkpoint"),
        (
            " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS",
            "Slurm: node failure",
            "yes, without node7",
        ),
        ("", "Slurm: it was cancelled", "yes, from the last checkpoint"),
    ],
)
def test_a_job_that_its_scheduler_ended_has_no_rank_at_fault(diagnosed, why, what, again):
    text = f"slurmstepd: error: *** JOB 91 ON node7 CANCELLED AT 2026-11-20T10:00:00{why} ***\n"
    agent = "W1120 10:00:00.100000 330 torch/distributed/elastic/agent/server/api.py:719]"
    text += f"{agent} Received 15 death signal, shutting down workers\n"
    document, said = diagnosed(f"loss 0.3\n{text}")
    assert document["findings"] == []
    assert (document["end"]["how"], document["end"]["by"]) == ("ended", what)
    assert f"start it again? {again}" in said


def test_ranks_of_srun_without_a_launcher_are_its_tasks(diagnosed):
    text = "3: loss 0.5\nsrun: error: node1: task 3: Segmentation fault (core dumped)\n"
    text += "srun: error: node1: tasks 0-2: Terminated\n"
    document, said = diagnosed(text)
    assert blamed(document) == [("dead.rank", [3])]
    assert "SIGSEGV" in said
    assert "1970" not in said
    assert "UTC" not in said  # no line has a time


def test_files_of_torchruns_log_folder_are_of_the_ranks_that_they_are_named_by(diagnosed):
    outputs = ["", raised(1, "ValueError: bad shape", mark=""), summary([(1, 1, 7)])]
    names = ("logs/attempt_0/0/stderr.log", "logs/attempt_0/1/stderr.log", "agent.log.gz")
    document, said = diagnosed(*outputs, names=names)
    assert blamed(document) == [("dead.rank", [1])]
    assert "ValueError: bad shape" in said


def test_gpu_memory_that_ran_out_on_one_rank_of_two_nodes_is_the_cause(diagnosed):
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 79 GiB in all."
    first = raised(9, error) + summary([(9, 1, 90)], "node2", "2026-11-20_10:00:01")
    second = raised(0, LOST) + summary([(0, 1, 10)], "node1", "2026-11-20_10:00:09")
    document, said = diagnosed(second, first)
    assert blamed(document) == [("dead.rank", [9])]
    assert "OutOfMemoryError" in said
    assert "once memory is as full" in said


def test_several_paths_that_are_not_all_logs_are_refused(tmp_path, repository):
    (tmp_path / "a.log").write_text("step 1\n")
    done = dpro("diagnose", tmp_path / "a.log", repository / "sample_traces" / "healthy")
    assert done.returncode == 2
    assert "several paths must all be text logs of one job" in done.stderr


def test_a_launchers_own_traceback_is_no_ranks(diagnosed):
    document, _ = diagnosed(LAUNCHER)
    assert document["findings"] == []


SNIPPETS = (
    *raised(2, "KeyError: 'x'").splitlines(), *raised(0, LOST, mark="").splitlines(),
    *watchdog(1, 5, 6).splitlines(), *summary([(1, -9, 7), (0, 1, 8)]).splitlines(),
    "srun: error: n1: tasks 0-2,[4-5]: Killed", "slurmstepd: error: *** STEP 1.0 ON n CANCELLED AT x ***",
    "NVRM: Xid (PCI:0000:01:00): 79, pid='7'", "Out of memory: Killed process 7 (python)", "  rank      : x",
    "  exitcode  : -300 (pid: 1)", "[rank1]: [rank2]: Original Traceback (most recent call last):",
    "2026-99-99 77:00:00 Received 99 death signal, shutting down workers", "world_size=99999999999",
    "[rank99999999]: x", "\x1b[31m", "OOMKilled", "",
)  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=60)), max_size=40))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_lines_whatever_are_a_traceback(tmp_path, lines):
    path = tmp_path / "any.log"
    path.write_text("\n".join(["a log", *lines]), encoding="utf-8", errors="replace")
    diagnosis = diagnose_paths([path])
    if diagnosis is not None:
        assert all(describe_all(diagnosis.findings, diagnosis.workers))
        assert diagnosis.findings or diagnosis.notes or diagnosis.unknown or diagnosis.end.sentence


PARTS = (
    "kernels {:.2f}, alloc 0.30, bootstrap {:.2f}, allgathers 0.01, topo 0.20, graphs 0.01, connections 0.10"
)


def made(rank: int, total: float, kernels: float, bootstrap: float, pid: int = 700, ranks: int = 2) -> str:
    parts = PARTS.format(kernels, bootstrap)
    head = f"node1:{pid + rank}:{pid + rank + 9} [{rank}] NCCL INFO"
    return (
        f"{head} ncclCommInitRankConfig comm 0x55aa rank {rank} nranks {ranks} - Init COMPLETE\n"
        f"{head} Init timings - ncclCommInitRankConfig: rank {rank} nranks {ranks} total {total:.2f} "
        f"({parts}, rest 0.00)\n"
    )


def test_communicators_say_how_long_each_rank_took_and_what_most_of_it_was(diagnosed):
    document, said = diagnosed(made(0, 9.5, 0.5, 8.4) + made(1, 1.0, 0.4, 0.1) + made(1, 0.6, 0.0, 0.01))
    assert document["notes"] == [
        "making NCCL's communicators took 9.5 s on the slowest of 2 ranks, 5.55 s in the median",
        'rank 0 of 2 (node1:700 [0]): 9.5 s for 1 communicator; most of it, 8.4 s, in "bootstrap" '
        "(finding the other ranks, and waiting for the last of them)",
        'rank 1 of 2 (node1:701 [1]): 1.6 s for 2 communicators; the largest part, 600 ms, in "alloc" '
        "(allocating memory)",
    ]
    assert "9.5 s for 1 communicator" in said


def test_communicator_of_nccl_2_22_and_of_a_rank_that_a_launcher_states(diagnosed):
    old = "NCCL INFO Init timings: rank 3 nranks 4 total 0.66 (kernels 0.42, bootstrap 0.07, rest -0.00)"
    document, _ = diagnosed(f"[rank7]: host-a:22:38 [2] {old}\n")
    assert document["notes"] == [
        "making NCCL's communicators took 660 ms",
        'rank 7 (host-a:22 [2]): 660 ms for 1 communicator; most of it, 420 ms, in "kernels" '
        "(loading NCCL's kernels onto the GPU)",
    ]


def test_lines_that_were_written_at_once_lose_their_parts_alone(diagnosed):
    torn = (
        "n:1:1 [0] NCCL INFO Init timings - f: rank 0 nranks 3 total 2.48 (kernels 0.34, alloc "
        "n:2:2 [1] NCCL INFO Init timings - f: rank 1 nranks 3 total 2.50 (kernels 0.30, alloc 1.30)\n"
        "n:3:3 [2] NCCL INFO Init timings - f: rank 2 nranks 3 total 2.n:1:1 [0] NCCL INFO more\n"
    )
    document, _ = diagnosed(torn)
    assert document["notes"][1:] == [
        'rank 1 of 3 (n:2 [1]): 2.5 s for 1 communicator; most of it, 1.3 s, in "alloc" (allocating memory)',
        "rank 0 of 3 (n:1 [0]): 2.48 s for 1 communicator",
    ]


def test_gpus_of_one_process_are_ranks_of_their_own(diagnosed):
    lines = [made(rank, 1.0 + rank, 0.5, 0.4, pid=700 - rank) for rank in range(2)]
    document, _ = diagnosed("".join(lines))
    assert "of 2 ranks, 1.5 s in the median" in document["notes"][0]


def test_nccl_that_does_not_say_how_long_it_took_is_said_to_be_older(diagnosed):
    first, _ = made(0, 9.5, 0.5, 8.4).splitlines()
    document, said = diagnosed(f"{first}\n")
    assert "not known: how long NCCL's communicators took to make: NCCL says it from 2.22 on" in said
    assert "notes" not in document or document["notes"] == []
