"""Launchers that share a run are of one job."""

import pytest

from dpro.collectors.launch.start import job_difference, launcher_identity

WORDS = ["--nnodes", "2", "--master-addr", "n0", "train.py"]
MEETING = {"MASTER_ADDR": "n0", "MASTER_PORT": "1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def of(command: list[str], host: str = "n0", **environment: str) -> dict[str, object]:
    return launcher_identity(command, environment) | {"host": host}


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (of(["torchrun", "--node-rank", "0", *WORDS]), of(["torchrun", "--node-rank=1", *WORDS])),
        (of(["bash", "train.sh"]), of(["bash", "train.sh"], "n1")),
        (of(["train"], **STEP, SLURM_PROCID="0"), of(["train"], **STEP, SLURM_PROCID="1")),
        (of(["actor"], **STEP, SLURM_PROCID="0"), of(["learner"], **STEP, SLURM_PROCID="1")),
        (of(["train"], **MEETING, RANK="0"), of(["train"], "n1", **MEETING, RANK="1")),
        (of(["torchrun", "--rdzv-id=5", "train.py"]), of(["torchrun", "--rdzv-id=5", "train.py"])),
    ],
)
def test_launchers_of_one_job_may_share_a_run(mine, theirs):
    assert job_difference(mine, theirs) == job_difference(theirs, mine) == ""


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (of(["python", "a.py"]), of(["python", "b.py"]), "its command is python b.py"),
        (of(["train", "--seed", "1"]), of(["train", "--seed", "2"], "n1"), "its command is train --seed 2"),
        (of(["train"]), of(["train"]), "the same command on the same host"),
        (
            of(["train"], **STEP),
            of(["train"], **STEP | {"SLURM_STEP_ID": "1"}),
            "its SLURM_STEP_ID is 1, and",
        ),
        (of(["train"], SLURM_JOB_ID="7"), of(["train", "2"], SLURM_JOB_ID="7"), "its command is train 2"),
        (of(["train"], **MEETING, RANK="0"), of(["train"], "n1", **MEETING, RANK="0"), "the same RANK 0"),
        (
            of(["train"], MASTER_PORT="1"),
            of(["train"], "n1", MASTER_PORT="2"),
            "is 2, and here it is 1",
        ),
        (of(["t", "--node-rank", "0"]), of(["t", "--node-rank", "0"], "n1"), "the same --node-rank 0"),
    ],
)
def test_launchers_of_two_jobs_differ_in_a_word(mine, theirs, why):
    assert why in job_difference(mine, theirs)
