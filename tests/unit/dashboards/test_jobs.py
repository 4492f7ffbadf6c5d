"""Names of jobs: what differs between their commands is kept."""

from __future__ import annotations

from dpro.dashboards.jobs import difference_in_words, job_names

RUN = "torchrun --nproc-per-node 2 sample_traces/train.py --steps 60"


def test_what_differs_between_commands_of_a_script_is_kept_however_long_the_rest_is():
    long = f"{RUN} --data {'x' * 100}"
    jobs = [(long, 2), (f"{long} --slow-rank 1", 2), ("python other.py --lr 1", 1), ("", 4)]
    assert list(job_names(jobs).values()) == [
        "train.py, 2 ranks",
        "train.py --slow-rank 1, 2 ranks",
        "other.py --lr 1, 1 rank",
        "traces, 4 ranks",
    ]


def test_what_starts_the_script_is_kept_only_where_nothing_else_differs():
    jobs = [(f"torchrun --master-port {port} a.py --x {x}", 2) for port, x in ((1, 1), (2, 2))]
    assert list(job_names(jobs).values()) == ["a.py --x 1, 2 ranks", "a.py --x 2, 2 ranks"]
    jobs = [(f"{how} a.py", 2) for how in ("python -m torch.distributed.run", "torchrun")]
    assert len(set(job_names(jobs).values())) == 2


def test_jobs_differ_by_ranks_by_arguments_or_by_nothing():
    assert difference_in_words((RUN, 2), (RUN, 2)) == ""
    assert difference_in_words((RUN, 2), (RUN, 8)) == "2 ranks against 8"
    assert difference_in_words((f"{RUN} --slow 1", 2), (RUN, 2)) == "with `--slow 1`"
    assert difference_in_words((RUN, 2), (f"{RUN} --slow 1", 2)) == "without `--slow 1`"
    assert difference_in_words((RUN, 2), ("python b.py", 2)) == "`train.py --steps 60` against `b.py`"
    assert difference_in_words((RUN, 2), ("", 2)) == ""
    assert difference_in_words(("a 'b", 2), ("a 'b", 2)) == ""
