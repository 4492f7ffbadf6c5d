"""Which environment variables are recorded: settings of the job, and no secrets.

In: an environment. Out: the variables on a short list. What is not on it is never read into a file; what is
on it and looks like a secret is left out, too. Runs inside the job, where only the standard library may be
assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .masking import MASK, is_secret, mask, masked_command

__all__ = ["LONGEST", "MASK", "kept", "mask", "masked_command"]

LONGEST = 300  # characters of a value that are kept

_KEPT = re.compile(
    r"(CUBLAS|CUDA|CUDNN|FI|GLOO|GOMP|HIP|HSA|KINETO|KMP|MIOPEN|MKL|NCCL|NVIDIA|NVTE|OMP|OPENBLAS|PYTORCH|RCCL"
    r"|ROCR|TORCH|TORCHDYNAMO|TORCHELASTIC|TORCHINDUCTOR|TORCHRUN|TRITON|UCX)_\w+"
    r"|SLURM_(JOB_ID|STEP_ID|STEP_NUM_TASKS|STEP_NUM_NODES|NTASKS|NNODES|RESTART_COUNT)"
    r"|(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|LD_PRELOAD|PYTHONHASHSEED)"
)


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are recorded, in order of their names."""
    return {
        name: mask(value)[:LONGEST]
        for name, value in sorted(environment.items())
        if _KEPT.fullmatch(name) and not is_secret(name)
    }
