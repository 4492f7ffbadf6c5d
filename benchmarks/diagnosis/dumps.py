"""How long `dpro diagnose` takes for a folder of flight recorder dumps, by ranks and by entries of each.

python -m benchmarks.diagnosis.dumps [--ranks 1024] [--entries 20 2000] [--frames 0] [--rounds 3] [--json]

The dumps are those of a made-up job: tensor parallelism in groups of 8, data parallelism across them and over
all ranks; one rank stops calling at the end. Entries can have stack frames, as PyTorch writes them.
The command is measured as a user runs it, from start to verdict: seconds on the clock (best of the rounds)
and of CPU time, children included; next to it the time to unpickle the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TENSOR_PARALLEL = 8
BEGIN_NS = 1_700_000_000_000_000_000


def groups_of(rank: int, num_ranks: int) -> dict[str, list[int]]:
    """Return the members of each group of a rank, by the group's name."""
    block, place = divmod(rank, TENSOR_PARALLEL)
    first = block * TENSOR_PARALLEL
    return {
        "0": list(range(num_ranks)),
        str(1 + block): list(range(first, min(first + TENSOR_PARALLEL, num_ranks))),
        str(1 + num_ranks + place): list(range(place, num_ranks, TENSOR_PARALLEL)),
    }


def dump_of(rank: int, num_ranks: int, num_entries: int, num_frames: int, stuck: int) -> dict[str, Any]:
    """Make a dump: eight calls in the tensor-parallel group, two across, and one of all in every 50."""
    groups = groups_of(rank, num_ranks)
    everybody, inside, across = groups
    count = dict.fromkeys(groups, 0)
    frames = [
        {"name": f"forward_{n}", "filename": f"/job/model_{n}.py", "line": n} for n in range(num_frames)
    ]
    entries = []
    for number in range(num_entries):
        group = (
            everybody if number % 50 == 49 or number == num_entries - 1 else (inside, across)[number % 10 > 7]
        )
        count[group] += 1
        last = number == num_entries - 1
        if last and rank == stuck:
            break
        entries.append(
            {
                "record_id": number,
                "pg_id": int(group),
                "process_group": [group, "default_pg" if group == everybody else "undefined"],
                "collective_seq_id": count[group],
                "p2p_seq_id": 0,
                "op_id": number,
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": BEGIN_NS + number * 1_000_000 + rank,
                "input_sizes": [[1024, 1 + number % 3]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[1024, 1 + number % 3]],
                "output_dtypes": ["BFloat16"],
                "state": "scheduled" if last else "completed",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": not last,
                "timeout_ms": 600000,
                "is_p2p": False,
                "frames": frames,
            }
        )
    config = {
        name: {"name": name, "desc": "undefined", "ranks": str(ranks)} for name, ranks in groups.items()
    }
    config[everybody]["desc"] = "default_pg"
    return {
        "version": "2.9",
        "nccl_version": "2.27.5",
        "pg_config": config,
        "pg_status": {},
        "entries": entries,
    }


def measure(folder: Path, cache: Path) -> tuple[float, float, str]:
    """Run the command; return seconds on the clock, CPU seconds, and the first line of the output."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dpro", "diagnose", str(folder)],
        env=os.environ | {"DPRO_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    took, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, busy, done.stdout.splitlines()[0]


def main() -> None:
    """Write dumps, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--entries", type=int, nargs="+", default=[20, 2000])
    parser.add_argument("--frames", type=int, default=0, help="stack frames of each entry")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stuck = options.ranks // 3
    for num_entries in options.entries:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "dumps"
            folder.mkdir()
            for rank in range(options.ranks):
                dump = dump_of(rank, options.ranks, num_entries, options.frames, stuck)
                (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
            size = sum(path.stat().st_size for path in folder.iterdir())
            begin = time.process_time()
            for path in folder.iterdir():
                pickle.loads(path.read_bytes())
            least = time.process_time() - begin
            rounds = [measure(folder, Path(place) / f"cache{n}") for n in range(options.rounds)]
        took, busy = (min(each[at] for each in rounds) for at in (0, 1))
        right = all(f"rank {stuck}:" in said and said.startswith("hang.host") for *_, said in rounds)
        facts = {
            "ranks": options.ranks, "entries": num_entries, "megabytes": round(size / 1e6, 1),
            "seconds": round(took, 2), "processor_seconds": round(busy, 2),
            "unpickling_seconds": round(least, 2), "right": right,
        }  # fmt: skip
        print(
            json.dumps(facts) if options.json else ", ".join(f"{key} {value}" for key, value in facts.items())
        )


if __name__ == "__main__":
    main()
