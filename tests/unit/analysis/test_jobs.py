"""Names of jobs: what differs between their commands is kept."""

from __future__ import annotations

from dpro.analysis.jobs import difference_in_words, job_names

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


def test_commands_differ_by_script_by_arguments_or_by_nothing():
    assert difference_in_words(RUN, RUN) == ""
    assert difference_in_words(RUN, f"{RUN} --slow 1") == "B also has `--slow 1`"
    assert difference_in_words(f"{RUN} --slow 1", RUN) == "A also has `--slow 1`"
    assert difference_in_words(RUN, f"{RUN[:-2]}80") == "A has `--steps 60`, B has `--steps 80`"
    assert difference_in_words(RUN, "python b.py") == "A has `train.py --steps 60`, B has `b.py`"
    assert difference_in_words(RUN, f"OMP=1 {RUN}") == difference_in_words(RUN, "") == ""
    assert difference_in_words("a 'b", "a 'b") == ""
