import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dpro.collectors.inside.environment import LONGEST, MASK, is_secret, kept, mask, masked_command

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
        ["env", f"DB_PASS={SECRET}", f"MYSQL_PWD={SECRET}", f"AWS_CREDS={SECRET}", f"SSHPASS={SECRET}"],
        ["env", f"API_TOKENS={SECRET},x", f"SECRETS={SECRET}", f"api_keys={SECRET}", f"PASSWORDS={SECRET}"],
        ["env", f"DB_PASS=two words {SECRET}", "x"],
        ["--db.password", f"two words {SECRET}"],
        [f"--clientSecret={SECRET}", f"--dbPassword={SECRET}", f"--authToken={SECRET}"],
        [f"AUTHORIZATION={SECRET}"],
        [f"AUTHORIZATION=Bearer {SECRET}"],
        ["curl", "-H", f"authorization: Basic {SECRET}"],
        ["curl", "-H", f"Authorization: token {SECRET}", "-H", f"X-Api-Key: {SECRET}"],
        ["curl", "-H", f"Cookie: a=1; session={SECRET}"],
        ["bash", "-c", f'curl -H "Authorization: Digest a {SECRET}" x'],
        ["bash", "-c", f"PGPASSWORD='a b {SECRET}' psql"],
        ["curl", "-u", f"user:{SECRET}", "x"],
        ["curl", f"-uuser:{SECRET}", f"--user=user:{SECRET}", f"--proxy-user=u:{SECRET}"],
        ["bash", "-c", f"curl -u user:{SECRET} https://x; curl --user 'me:{SECRET}' y"],
        ["--proxy", f"user:{SECRET}@host:3128"],
        [f"--db=user:{SECRET}@host/db"],
        [f"postgres://me:p@{SECRET}@host/db"],
        [f"https://account.blob.core.windows.net/c/f?sv=2022&sig={SECRET}&se=1"],
        [f"https://b.s3.amazonaws.com/k?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}"],
        [f"https://storage.googleapis.com/b/k?X-Goog-Signature={SECRET}"],
        [f"https://x.table.core.windows.net;AccountKey={SECRET};EndpointSuffix=x"],
        [f"https://hooks.slack.com/services/T0000/B0000/{SECRET}"],
        [f"https://discord.com/api/webhooks/123456/{SECRET}"],
        [f"https://discordapp.com/api/v10/webhooks/123456/{SECRET}"],
        [f"https://acme.webhook.office.com/webhookb2/{SECRET}@{SECRET}/IncomingWebhook/x/{SECRET}"],
        [f"https://prod-1.westus.logic.azure.com:443/workflows/{SECRET}/triggers"],
        [f"https://mattermost.acme.org/hooks/{SECRET}"],
        [f"https://open.feishu.cn/open-apis/bot/v2/hook/{SECRET}"],
        [f"https://chat.googleapis.com/v1/spaces/A/messages?key=k&token={SECRET}"],
        ["docker", "login", "-u", "me", "-p", SECRET],
        ["sshpass", "-p", SECRET, "ssh", "host"],
        [f'{{\\"password\\": \\"{SECRET}\\"}}'],
        [f"password : {SECRET}"],
        [f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----"],
        [f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}"],
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
        [
            "python",
            "-u",
            "train.py",
            "--max_tokens=512",
            "--num-tokens",
            "1024",
            "--tokens-per-batch",
            "1024",
        ],
        ["env", "PASS_THROUGH=1", "NCCL_IB_PKEY=3", "MASTER_ADDR=node1", "TOKENIZERS_PARALLELISM=false"],
        ["--pad_token", "[PAD]", "--eos-token=</s>", "--use-auth-token", "true", "--forward-pass", "full"],
        ["--sort-key", "loss", "--primary_key=id", "--num-passes", "3", "--bypass", "x", "--compass=n"][2:],
        ["docker", "run", "-u", "1000:1000", "image:tag", "repo/image:tag@sha256:0a1b", "-p", "8080:80"],
        [
            "scp",
            "me@host:/path",
            "git@github.com:org/repo.git",
            "https://host/a@b",
            "--rdzv-endpoint=h:29500",
        ],
        ["--data", "/home/me/secret-garden/tokens.bin", "s3://bucket/key/hf_cache", "--lr=1e-3", "a:b"],
        [
            "env",
            "PWD=/home/me",
            "LD_PRELOAD=/a.so:/b.so",
            "--commit",
            "0123456789abcdef0123456789abcdef01234567",
        ],
        ["bash", "-c", "python train.py token file pass 3 && echo author key value"],
        ["train.py", "--task-abcdefghijklmnopqrstuvwx", "risk-abcdefghijklmnopqrstuvwx1", "--signal=KILL"],
    ],
)
def test_what_is_no_secret_stays(words):
    assert masked_command(words) == words


def test_masking_is_stable():
    once = mask(f"--token={SECRET} x")
    assert mask(once) == once == "--token=*** x"


# In the shape in which each service documents its keys; none is a real one.
KEYS = [
    "AKIA" + "Q3ZX7PLM2WNB4KDE",
    "ASIA" + "Q3ZX7PLM2WNB4KDE",
    "ghp_" + "a1B2" * 9,
    "gho_" + "a1B2" * 9,
    "github_pat_" + "11ABC_" + "x9Y" * 20,
    "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    "hf_" + "aBcDeFgHiJkLmNoPqR" * 2,
    "npm_" + "a1B2" * 9,
    "nvapi-" + "a1B2_-" * 10,
    "pypi-AgEIcHlwaS5vcmc" + "a1B2" * 9,
    "sk-" + "a1B2" * 12,
    "sk-proj-" + "a1B2_" * 9,
    "sk-ant-api03-" + "a1B2-" * 18,
    "xai-" + "a1B2" * 20,
    "AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
    "ya29." + "a0AfH6SMB-x_y" * 3,
    "GOCSPX-" + "a1B2_-" * 5,
    "dckr_pat_" + "a1B2" * 7,
    "xoxb-" + "123456789012-" * 2 + "a1B2" * 6,
    "xapp-1-" + "A1B2" * 6,
    "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxIn0" + ".a1B2c3-_",
    "sk_live_" + "a1B2" * 6,
    "SG." + "a1B2" * 5 + "xy" + "." + "a1B2" * 10,
    "AC" + "0a1b2c3d" * 4,
    "0a1b2c3d" * 4 + "-us12",
    "123456789:" + "AA" + "a1B2c" * 6 + "xyz",
    "M" + "a1B2" * 5 + "xyz" + ".a1B2c3." + "a1B2" * 7,
    "hvs." + "a1B2" * 6,
    "dapi" + "0a1b2c3d" * 4,
    "gsk_" + "a1B2" * 13,
    "wandb_v1_" + "a1B2" * 13,
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("text", ["{}", "a {} b", "/path/{}/x", "--x={}", '{{"a": "{}"}}', "x,{},y"])
def test_key_of_a_known_service_is_masked_wherever_it_stands(key, text):
    assert mask(text.format(key)) == text.format(MASK)


def test_key_that_only_its_login_command_reveals_is_masked():
    key = "0a1b2c3d4e" * 4
    assert masked_command(["wandb", "login", "--relogin", key]) == ["wandb", "login", "--relogin", MASK]
    assert mask(f"wandb login {key} && python x") == f"wandb login {MASK} && python x"


@pytest.mark.parametrize(
    "name",
    ["DB_PASS", "AWS_CREDS", "API_TOKENS", "client.secret", "X-Api-Key", "dbPassword", "HTTP_AUTHORIZATION"],
)
def test_name_of_a_secret_is_known(name):
    assert is_secret(name)


SETTINGS = """
PASS_THROUGH TOKENIZERS_PARALLELISM tokens-per-batch max_tokens NCCL_IB_PKEY MASTER_ADDR author passage
num_passes NCCL_SOCKET_IFNAME keyboard CUDA_VISIBLE_DEVICES NCCL_NVLS_ENABLE bypass forward_pass
"""


@pytest.mark.parametrize("name", SETTINGS.split())
def test_name_of_a_setting_is_no_secret(name):
    assert not is_secret(name)


def test_secret_at_the_edge_of_what_is_kept_is_masked_before_the_value_is_cut():
    value = kept({"TORCH_HOME": "x" * (LONGEST - 20) + f" https://me:{SECRET * 9}@hub/x"})["TORCH_HOME"]
    assert "s3cr3t" not in value
    assert len(value) <= LONGEST


ADVERSARIAL = [
    "a=", "a,", "a(", "a:,", "token", "secret", "secretsecret=", "-eyJ", "a://", "a:b",
    "https://a/", "x ", " ", "https://hooks/a/", "-u ", "-u a", '"', 'token="', "token='-", "sk-",
    "-----BEGIN PRIVATE KEY-----", "1:", "login --a ", "password: ", "Cookie: ", "Bearer ", "a:a@", "?sig=",
    "eyJ.", "_-", "--token -", "aA1", "http", "M" * 24 + ".", "key\n",
]  # fmt: skip


@pytest.mark.parametrize(
    ("length", "limit_s"), [(1 << 16, 20), pytest.param(1 << 20, 300, marks=pytest.mark.slow)]
)
def test_masking_takes_time_in_proportion_to_the_length(length, limit_s):
    """Of texts that are made to be slow: where one took its square, the processor time would run out."""
    program = "import sys; from dpro.collectors.inside.environment import mask, masked_command\n"
    program += "length = int(sys.argv[1])\n"
    program += "for each in sys.argv[2:]:\n"
    program += "    text = (each * length)[:length]; mask(text); masked_command(['-u', text])"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))

    command = [sys.executable, "-c", program, str(length), *ADVERSARIAL]
    assert subprocess.run(command, cwd=Path(__file__).parents[5], preexec_fn=limit).returncode == 0
