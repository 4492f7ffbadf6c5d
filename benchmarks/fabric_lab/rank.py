"""A rank of a job in the lab: timed steps that compute for a while and then reduce.

In: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and arguments: ms of computing, bytes, reductions per step,
steps. Out: one line of JSON: seconds of each step but the first.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Run the steps and print their times."""
    compute_ms, num_bytes, reductions, steps = (int(each) for each in sys.argv[1:5])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    data = torch.zeros(num_bytes // 4)
    dist.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    took = []
    for _ in range(steps + 1):
        dist.barrier()
        begin = time.monotonic()
        if compute_ms:
            time.sleep(compute_ms / 1e3)
        for _ in range(reductions):
            dist.all_reduce(data)
        took.append(time.monotonic() - begin)
    print(json.dumps(took[1:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
