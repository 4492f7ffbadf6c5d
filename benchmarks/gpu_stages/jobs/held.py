"""A training job that does what jobs rarely do to its process, while windows come and go.

python held.py [--steps 120] [--at 30] [--drop-privileges] [--hold-cupti]

It prints one line of JSON if all went well. CUPTI has one subscriber per process: a job that subscribes
represents any profiler that does (PyTorch's own beside Kineto, Nsight, DCGM's).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from pathlib import Path

import torch
from torch import nn

UNPRIVILEGED = 65534


def drop_privileges() -> None:
    """Become a user that may not write to the run."""
    os.setgid(UNPRIVILEGED)
    os.setuid(UNPRIVILEGED)


def hold_cupti() -> object:
    """Subscribe to CUPTI; return the objects that have to stay alive, or None without CUPTI.

    Raises:
        RuntimeError: CUPTI refuses.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    libraries = sorted({line.split()[-1] for line in lines if "libcupti.so" in line})
    if not libraries:
        return None
    cupti = ctypes.CDLL(libraries[0])
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)(
        lambda *_: None
    )
    subscriber = ctypes.c_void_p()
    code = cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None)
    if code:
        raise RuntimeError(f"cuptiSubscribe returned {code}")
    return cupti, callback, subscriber


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--at", type=int, default=30, help="the step before which it happens")
    parser.add_argument("--drop-privileges", action="store_true")
    parser.add_argument("--hold-cupti", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(10))).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 128, device=options.device)
    held = hold_cupti() if options.hold_cupti and options.device == "cuda" else None
    for step in range(options.steps):
        if step == options.at and options.drop_privileges and os.getuid() == 0:
            drop_privileges()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    print(json.dumps({"steps": options.steps, "held": held is not None, "loss": f"{loss.item():.6f}"}))


if __name__ == "__main__":
    main()
