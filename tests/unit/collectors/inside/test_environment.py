import pytest

from dpro.collectors.inside.environment import LONGEST, kept, mask, masked_command

SECRET = "s3cr3t-Vqx8"


def test_settings_of_the_job_are_kept_and_nothing_else():
    environment = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "4",
        "SLURM_JOB_ID": "77",
        "HOME": "/home/me",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "DATABASE_URL": SECRET,
        "SLURM_JWT": SECRET,
    }
    assert list(kept(environment)) == [
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "SLURM_JOB_ID",
    ]


@pytest.mark.parametrize("name", ["TORCH_HUB_TOKEN", "NCCL_API_KEY", "CUDA_PASSWORD", "TORCH_SECRET_VALUE"])
def test_variable_on_the_list_that_is_named_like_a_secret_is_left_out(name):
    assert kept({name: SECRET}) == {}


def test_password_in_the_value_of_a_kept_variable_is_masked():
    assert kept({"TORCH_HOME": f"https://me:{SECRET}@hub/x"}) == {"TORCH_HOME": "https://***@hub/x"}


def test_long_values_are_cut():
    assert len(kept({"TORCH_LOGS": "x" * 10_000})["TORCH_LOGS"]) == LONGEST


@pytest.mark.parametrize(
    "words",
    [
        ["--token", SECRET],
        ["--api-key", SECRET],
        [f"--api_key={SECRET}"],
        [f"--wandb-key='{SECRET}'"],
        ["env", f"HF_TOKEN={SECRET}", "python"],
        ["bash", "-c", f"export AWS_SECRET_ACCESS_KEY={SECRET}; python train.py"],
        ["bash", "-c", f"python train.py --password {SECRET} --lr 1"],
        [f"s3://key:{SECRET}@bucket/path"],
        [f"https://{SECRET}@host/x"],
        ["curl", "-H", f"Authorization: Bearer {SECRET}"],
        [f'{{"password": "{SECRET}"}}'],
        [f"hf_{SECRET.replace('-', '')}abcdefgh"],
    ],
)
def test_secret_in_a_command_is_masked(words):
    assert not any("3cr3t" in word for word in masked_command(words))


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1e-3"],
        ["train.py", "--tokenizer", "bert-base", "--max-tokens", "512", "--tokens-per-batch=4"],
        ["train.py", "--keys-file=x", "--data", "s3://bucket/path", "--author", "me"],
        ["python", "-m", "pkg.module", "model.hidden=4", "--monkeypatch", "on"],
    ],
)
def test_what_is_no_secret_stays(words):
    assert masked_command(words) == words


def test_masking_is_stable():
    once = mask(f"--token={SECRET} x")
    assert mask(once) == once == "--token=*** x"
