"""Which environment variables and words are recorded: settings of the job, and no secrets.

In: an environment, or words of a command. Out: the variables on a short list, and text with secrets masked.
What is not on the list is never read into a file; what is on it and looks like a secret is left out, too.
Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"
LONGEST = 300  # characters of a value that are kept

_KEPT = re.compile(
    r"(CUBLAS|CUDA|CUDNN|FI|GLOO|GOMP|HIP|HSA|KINETO|KMP|MIOPEN|MKL|NCCL|NVIDIA|NVTE|OMP|OPENBLAS|PYTORCH|RCCL"
    r"|ROCR|TORCH|TORCHDYNAMO|TORCHELASTIC|TORCHINDUCTOR|TORCHRUN|TRITON|UCX)_\w+"
    r"|SLURM_(JOB_ID|STEP_ID|STEP_NUM_TASKS|STEP_NUM_NODES|NTASKS|NNODES|RESTART_COUNT)"
    r"|(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|LD_PRELOAD|PYTHONHASHSEED)"
)
_SECRET_NAME = (
    r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|pwd|credentials?|cookie|auth|bearer|key)"
    r"|[\w.-]*(?:secret|passw(?:or)?d|credential|(?:api|access|private|auth)[-_]?(?:key|token))[\w-]*"
)
_IS_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?<![\w.-])((?:{_SECRET_NAME})[\"']?(?:\s*[=:]\s*|\s+))([\"']?)[^\s\"'&]+", re.IGNORECASE
)
_IN_URL = re.compile(r"(\w://)[^\s/@]+@")
_BY_SHAPE = re.compile(
    r"\b(?:(?:hf|ghp|gho|ghs|github_pat|glpat|sk|xox[a-z])[-_][\w-]{16,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w.-]+)"
)


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are recorded, in order of their names."""
    return {
        name: mask(value[:LONGEST])
        for name, value in sorted(environment.items())
        if _KEPT.fullmatch(name) and not _IS_SECRET.fullmatch(name)
    }


def mask(text: str) -> str:
    """A text without what looks like a secret: after a telling name, in a URL, or by its shape."""
    text = _IN_URL.sub(rf"\1{MASK}@", text)
    text = _ASSIGNED.sub(rf"\1\2{MASK}", text)
    return _BY_SHAPE.sub(MASK, text)


def masked_command(words: Iterable[str]) -> list[str]:
    """The words of a command, masked: `--api-key X`, `--token=X`, `env HF_TOKEN=X`, URLs with passwords."""
    masked: list[str] = []
    after_secret = False
    for word in words:
        masked.append(MASK if after_secret and not word.startswith("-") else mask(word))
        after_secret = word.startswith("-") and _IS_SECRET.fullmatch(word.lstrip("-")) is not None
    return masked
