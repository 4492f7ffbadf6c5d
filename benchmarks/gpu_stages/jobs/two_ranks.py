"""A data-parallel job of two ranks that share one GPU; on request, one of them misbehaves.

torchrun --nproc-per-node 2 two_ranks.py [--fault slow-host|slow-gpu|stop|spin] [--backend nccl] …

NCCL refuses two ranks of one host on one GPU; ranks that name different hosts, and talk over loopback
sockets, succeed with versions that allow it. Processes take turns on the GPU: this job is for semantics, not
for times.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time

RANK = int(os.environ.get("RANK", "0"))
os.environ.setdefault("NCCL_HOSTID", f"rank{RANK}")
for name, value in {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
}.items():  # fmt: skip
    os.environ.setdefault(name, value)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

SPIN_S = 30.0


def spin(device: str, seconds: float) -> None:
    """Queue a kernel that spins; on the CPU, sleep."""
    if device == "cpu":
        time.sleep(seconds)
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if not hasattr(spin, "rate"):
        torch.cuda.synchronize()
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize()
        spin.rate = 20_000_000 / (begin.elapsed_time(end) / 1e3)  # type: ignore[attr-defined]
    torch.cuda._sleep(int(seconds * spin.rate))  # type: ignore[attr-defined]


def end_all(pids: list[int], after_s: float) -> None:
    """Kill all ranks after some time, even if they hang."""
    words = " ".join(map(str, pids))
    subprocess.Popen(["sh", "-c", f"sleep {after_s}; kill -9 {words}"], start_new_session=True)


def train(options: argparse.Namespace) -> None:
    """Train, and misbehave as requested."""
    device, faulty = options.device, options.rank == RANK
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = 64 if options.tiny else 2048
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6))).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    batch = torch.randn(64, width, device=device)
    pids: list[int | None] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    spin(device, 0.001)
    begun = time.perf_counter()
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = parallel(batch).square().mean()
        if options.fault == "slow-host" and faulty:
            time.sleep(options.ms / 1e3)
        if options.fault == "slow-gpu" and faulty:
            spin(device, options.ms / 1e3)
        if options.fault in ("stop", "spin") and step == options.at:
            if RANK == 0:
                end_all([pid for pid in pids if pid], options.end_after_s)
            if faulty and options.fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if faulty and options.fault == "spin":
                spin(device, SPIN_S)
        loss.backward()
        optimizer.step()
        if step % options.item_every == 0 or step == options.steps - 1:
            loss.item()
    if RANK == 0:
        took_ms = 1e3 * (time.perf_counter() - begun) / options.steps
        print(json.dumps({"step_ms": took_ms, "backend": dist.get_backend()}), flush=True)


def main() -> None:
    """Join the other rank, train and leave."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--fault", default="none", choices=("none", "slow-host", "slow-gpu", "stop", "spin"))
    parser.add_argument("--rank", type=int, default=1, help="that is at fault")
    parser.add_argument("--ms", type=float, default=20, help="per step, of a slow rank")
    parser.add_argument("--at", type=int, default=30, help="step of a hang")
    parser.add_argument("--item-every", type=int, default=5, help="steps from one .item() to the next")
    parser.add_argument("--end-after-s", type=float, default=14, help="after which a hang is ended")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(options.backend)
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
